// The order of the search's results: a heading that contains the question comes first, and lessons
// come last. Sphinx gives such a heading no more points than a page with the words in any heading.
var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    if (page.startsWith("notebooks/")) return score - 20;
    return kind === "title" ? score + 15 : score;
  },
  // The other points are Sphinx's own.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
