// Prints the best result of each question as JSON, as the site's search page finds it:
// node site_search.js SITE QUESTION...
const fs = require("fs");
const vm = require("vm");

const [site, ...questions] = process.argv.slice(2);
const page = {
  document: {
    documentElement: { dataset: {} },
    addEventListener() {},
    getElementById: () => ({}),
  },
  localStorage: { setItem() {} },
  DOCUMENTATION_OPTIONS: {},
  SPHINX_HIGHLIGHT_ENABLED: false,
  _ready() {},
  questions,
};
page.window = page;
vm.createContext(page);
for (const script of ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"]) {
  const code = fs.readFileSync(`${site}/${script}`, "utf8");
  vm.runInContext(code.replace(/^const Search =/m, "var Search ="), page);
}
const found = vm.runInContext(
  `questions.map((question) => {
    const [query, terms, excluded, highlighted, objects] = Search._parseQuery(question);
    return Search._performSearch(query, terms, excluded, highlighted, objects).pop();
  })`,
  page,
);
console.log(JSON.stringify(found.map(([name, title, anchor]) => [name, anchor])));
