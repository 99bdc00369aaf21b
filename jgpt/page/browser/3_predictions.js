// The text, coloured by surprise

let textSpans = [];
function buildText() {
  const most = Math.log2(data.vocab_size);
  textSpans = tokens.map((token, position) => {
    const span = element("span", {
      id: `t${position}`,
      role: "option",
      ariaLabel: visible(token),
      textContent: visible(token).replaceAll("␣", " "),
      chooses: goTo(position),
    });
    span.classList.toggle("prompt", position < data.prompt);
    span.classList.toggle("blank", /^\s*$/.test(data.texts[token]));
    span.style.background = tint("amber", Math.min(1, (surprise(position)?.bits ?? 0) / most));
    return span;
  });
  const breakAfter = token => data.texts[token].endsWith("\n") ? "\n" : "";
  $("text").replaceChildren(...tokens.flatMap((token, i) => [textSpans[i], breakAfter(token)]));
}
function drawText() {
  const { query } = chosen;
  const span = textSpans[query];
  $("text").querySelector(".on")?.removeAttribute("aria-selected");
  mark($("text"), span);
  span.ariaSelected = "true";
  $("text").setAttribute("aria-activedescendant", span.id);
  const origin = query < data.prompt ? "of the prompt" : "sampled";
  $("picked").replaceChildren(
    element("b", { textContent: visible(tokens[query]) }),
    ` at position ${query}, ${origin}: ${describeSurprise(query)}.`);
}
function describeSurprise(position) {
  const known = surprise(position);
  if (!known) return "nothing comes before it, so nothing predicts it";
  return `${known.bits.toFixed(2)} bits, probability ${number(known.probability)}, `
    + `rank ${known.rank} of ${data.vocab_size}`;
}
pictures.set($("text"), {
  say: ({ query }) => `${at(query)}: ${describeSurprise(query)}`,
  mark: () => textSpans[chosen.query],
  across: stepPosition,
});

// The logit lens: a row of predictions for each depth

const lens = {
  place: $("lens"),
  grid: $("lens-grid"),
  rows: [],
  cells: [],  // of each depth
  named: [],  // the cells of the tokens above and below
  left: 0,
  width: Infinity,
  filled: new Set(),  // columns
};
lens.place.addEventListener("scroll", () => {
  lens.left = lens.place.scrollLeft;
  fillInSight();
}, { passive: true });
new ResizeObserver(() => {
  lens.width = lens.place.clientWidth;
  fillInSight();
}).observe(lens.place);
pictures.set(lens.grid, {
  say: ({ query, depth }) => describeLens(depth, query),
  mark: () => lens.cells[chosen.depth][chosen.query],
  across: stepPosition,
  down: step("depth"),
});
function buildLens() {
  if (changed(lens, depths)) layOutLens();
  if (changed(lens.grid, widest, time)) resizeLens();
  lens.filled.clear();
  fillInSight();
}
function drawLens() {
  mark(lens.grid, lens.cells[chosen.depth][chosen.query]);
}
/** Fill the columns of the lens that are in sight, or near. A letter at the beginning of a text
 *  changes them all, and the layout of those that nobody sees took as long as a tenth of the
 *  keystroke. */
function fillInSight() {
  if (!data) return;
  const column = columnWidth() + 1;  // with the gap
  const first = Math.max(0, Math.floor((lens.left - NEAR) / column));
  const end = Math.min(time, Math.ceil((lens.left + lens.width + NEAR) / column));
  for (let position = first; position < end; position++) {
    if (lens.filled.has(position)) continue;
    lens.filled.add(position);
    fillColumn(position);
  }
}
function fillColumn(position) {
  const [after, next] = lens.named;
  nameCell(after[position], cut(tokens[position]));
  nameCell(next[position], position < time - 1 ? cut(tokens[position + 1]) : "");
  lens.cells.forEach((row, depth) => {
    const cell = row[position];
    const best = data.candidates[depth][position][0];
    const shade = Math.exp(data.log_probabilities[depth][position][0]).toFixed(3);
    const right = position < time - 1 && data.next_ranks[depth][position] === 1;
    if (!changed(cell, best, shade, right)) return;
    cell.textContent = cut(best);
    cell.style.background = tint("green", shade);
    cell.classList.toggle("right", right);
  });
}
function nameCell(cell, name) {
  if (cell.textContent !== name) cell.textContent = name;
}
/** Make the rows of the lens: one of names, one for each depth, and one of what came next. */
function layOutLens() {
  const row = (name, depth) => ({
    name: element("span", { className: "name" }, name),
    depth,
    cells: [],
  });
  const ofDepths = Array.from({ length: depths + 1 }, (_, depth) => row(depthName(depth), depth));
  lens.rows = [row("after", depths), ...ofDepths, row("next", depths)];
  lens.cells = ofDepths.map(({ cells }) => cells);
  lens.named = [lens.rows[0].cells, lens.rows.at(-1).cells];
  lens.grid.replaceChildren(...lens.rows.map(({ name }) => name));
  lens.grid.drawnOf = null;
}
const columnWidth = () => widest <= 2 ? 20 : 8 * widest + 12;
/** Give each row of the lens a cell for each token; those that are there are used again. */
function resizeLens() {
  lens.grid.style.gridTemplateColumns = `max-content repeat(${time}, ${columnWidth()}px)`;
  for (const { name, depth, cells } of lens.rows) {
    while (cells.length > time) cells.pop().remove();
    const more = Array.from({ length: time - cells.length }, (_, i) =>
      element("span", { chooses: { ...goTo(cells.length + i), depth } }));
    (cells.at(-1) ?? name).after(...more);
    cells.push(...more);
  }
}
function describeLens(depth, position) {
  const next = following(depth, position);
  const lines = predictions(depth, position).slice(0, 3).map(likely);
  if (next) lines.push(`next was ${likely(next)}, rank ${next.rank}`);
  return [`${depthName(depth)}, after ${at(position)}`, ...lines].join("\n");
}

// The next token

/** What comes next, the most likely first; after the last token, as it is sampled. */
function distribution(depth, position) {
  if (position < time - 1 || depth < depths) return predictions(depth, position);
  const [candidates, logs] = data.last;
  return filtered(candidates.map((token, i) => ({ token, log: logs[i] })));
}
function drawBars() {
  const { depth, query } = chosen;
  const next = following(depth, query);
  const rows = distribution(depth, query).slice(0, 10);
  if (next && !rows.some(each => each.token === next.token)) rows.push(next);
  const largest = Math.max(...rows.map(each => each.probability));
  const before = depth === depths ? data.before : null;
  const writes = query === time - 1;
  const readAt = depth < depths ? `, read at: ${depthName(depth)}` : "";
  $("bars-title").textContent = `After ${at(query)}${readAt}`;
  $("bars-legend").textContent = next ? "framed: the token that came next"
    : writes ? "choose a token to write it" : "";
  const focused = [...$("bars").children].indexOf(document.activeElement);
  $("bars").replaceChildren(...rows.map(({ token, probability }) => {
    const i = before ? before.candidates[query].indexOf(token) : -1;
    const was = i < 0 ? "" : ` (was ${number(Math.exp(before.log_probabilities[query][i]))})`;
    const came = token === next?.token ? "came" : "";
    const chooses = { title: `write ${quoted(token)}`, onclick: () => write(token) };
    return element(writes ? "button" : "div", writes ? chooses : {},
      element("span", { className: "token", title: visible(token) }, visible(token)),
      element("span", { className: "bar", style: `width: ${100 * probability / largest}%` }),
      element("span", { className: came }, number(probability) + was));
  }));
  $("bars").children[focused]?.focus({ preventScroll: true });  // who writes by key goes on there
}
