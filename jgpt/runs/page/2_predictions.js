// The text, coloured by surprise

let textSpans = [];
function buildText() {
  textSpans = tokens.map((token, position) => {
    const raw = data.texts[token];
    const known = surprise(position);
    const text = raw === " " ? " " : visible(token).replaceAll("␣", " ");
    const span = element("span", { id: `t${position}`, textContent: text, className: "letter" });
    span.classList.toggle("prompt", position < data.prompt);
    span.classList.toggle("blank", /^\s*$/.test(raw));
    span.setAttribute("role", "option");
    span.setAttribute("aria-label", visible(token));
    if (known) {
      const strength = Math.min(1, known.bits / most).toFixed(3);
      span.style.background = `rgb(var(--amber) / ${strength})`;
    }
    return span;
  });
  const breakAfter = token => data.texts[token].endsWith("\n") ? "\n" : "";
  $("text").replaceChildren(...tokens.flatMap((token, i) => [textSpans[i], breakAfter(token)]));
}
function drawText() {
  const { query } = chosen;
  const known = surprise(query);
  for (const on of $("text").querySelectorAll(".on")) {
    on.classList.remove("on");
    on.removeAttribute("aria-selected");
  }
  textSpans[query].classList.add("on");
  textSpans[query].setAttribute("aria-selected", "true");
  $("text").setAttribute("aria-activedescendant", `t${query}`);
  const told = known
    ? `${known.bits.toFixed(2)} bits, probability ${number(known.probability)}, `
      + `rank ${known.rank} of ${data.vocab_size}.`
    : "nothing comes before it, so nothing predicts it.";
  $("picked").replaceChildren(
    element("b", { textContent: visible(tokens[query]) }),
    ` at position ${query}, ${query < data.prompt ? "of the prompt" : "sampled"}: ${told}`);
}
function describeSurprise(position) {
  const known = surprise(position);
  if (!known) return `${at(position)}: the first token, which nothing predicts`;
  return `${at(position)}: ${known.bits.toFixed(2)} bits\n`
    + `probability ${number(known.probability)}, rank ${known.rank} of ${data.vocab_size}`;
}
explore($("text"), {
  find: event => {
    const position = textSpans.indexOf(event.target);
    return position < 0 ? null : { position };
  },
  say: ({ position }) => describeSurprise(position),
  pick: ({ position }) => goTo(position),
  keys: positionKeys,
  place: () => {
    const box = textSpans[chosen.query].getBoundingClientRect();
    return { x: box.right, y: box.top, text: describeSurprise(chosen.query) };
  },
});

// The logit lens

let lensCells = [];
const buildLens = () => {
  $("lens-part").hidden = depths === 0;
  lensCells = fillLens($("lens"), data, lensCells);
};
/** Fill a lens with the predictions of some numbers; return its cells by depth and position. */
function fillLens(lens, of, cells = []) {
  const drawn = String([depths, columnWidth, ...tokens]);
  if (lens.dataset.of !== drawn) {
    lens.dataset.of = drawn;
    cells = layOutLens(lens);
  }
  cells.forEach((row, depth) => row.forEach((cell, position) => {
    const [best] = predictions(depth, position, of);
    const right = following(depth, position, of)?.rank === 1;
    const shade = best.probability.toFixed(3);
    const drawn = [cut(best.token), shade, right].join();
    if (cell.drawn === drawn) return;
    cell.drawn = drawn;
    cell.textContent = cut(best.token);
    cell.style.background = `rgb(var(--green) / ${shade})`;
    cell.classList.toggle("right", right);
  }));
  return cells;
}
/** Make the cells of a lens: a row of names, one for each depth, and one of what came next. */
function layOutLens(lens) {
  lens.replaceChildren();
  lens.style.gridTemplateColumns = `max-content repeat(${time}, ${columnWidth}px)`;
  const row = (name, className, text) => {
    const cells = tokens.map((_, position) => {
      const cell = element("span", { className, textContent: text(position) });
      cell.dataset.position = position;
      return cell;
    });
    lens.append(element("span", { className: "name", textContent: name }), ...cells);
    return cells;
  };
  row("after", "head", position => cut(tokens[position]));
  const cells = Array.from({ length: depths + 1 }, (_, depth) =>
    row(depthName(depth), "", () => ""));
  cells.forEach((row, depth) => row.forEach(cell => { cell.dataset.depth = depth; }));
  row("next", "head", position => position + 1 < time ? cut(tokens[position + 1]) : "");
  return cells;
}
function drawLens() {
  const { depth, query } = chosen;
  $("lens").querySelector(".on")?.classList.remove("on");
  lensCells[depth][query].classList.add("on");
}
function describeLens(depth, position, of = data) {
  const next = following(depth, position, of);
  const best = predictions(depth, position, of).slice(0, 3);
  const lines = best.map(each => `${quoted(each.token)} ${number(each.probability)}`);
  if (next) {
    lines.push(`next was ${quoted(next.token)} ${number(next.probability)}, rank ${next.rank}`);
  }
  return [`${depthName(depth)}, after ${at(position)}`, ...lines].join("\n");
}
/** The cell of a lens that an event is on; names of tokens stand for the model's own prediction. */
function findInLens({ target: { dataset: { position, depth = depths } } }) {
  return position === undefined ? null : { position: Number(position), depth: Number(depth) };
}
const pickInLens = ({ position, depth }) => ({ ...goTo(position), depth });
explore($("lens"), {
  find: findInLens,
  say: ({ position, depth }) => describeLens(depth, position),
  pick: pickInLens,
  keys: {
    ...positionKeys,
    ArrowUp: () => ({ depth: chosen.depth - 1 }),
    ArrowDown: () => ({ depth: chosen.depth + 1 }),
  },
  place: () => {
    const box = lensCells[chosen.depth][chosen.query].getBoundingClientRect();
    return { x: box.right, y: box.top, text: describeLens(chosen.depth, chosen.query) };
  },
});

// The next token

/** What comes next, the most likely first; after the last token, as it is sampled. */
function distribution(depth, position) {
  if (position < time - 1 || depth < depths || !data.live) return predictions(depth, position);
  const [candidates, logs] = data.last;
  return filtered(candidates.map((token, i) => ({ token, log: logs[i] })), dials);
}
function drawBars() {
  const { depth, query } = chosen;
  const next = following(depth, query);
  const rows = distribution(depth, query).slice(0, 10);
  if (next && !rows.some(each => each.token === next.token)) rows.push(next);
  const largest = Math.max(...rows.map(each => each.probability));
  const was = probabilitiesBefore(depth, query);
  const writes = data.live && query === time - 1;
  $("bars-title").textContent =
    `After ${at(query)}${depth < depths ? `, read at: ${depthName(depth)}` : ""}`;
  $("bars-legend").textContent = next ? "framed: the token that came next"
    : writes ? "choose a token to write it" : "";
  $("bars").replaceChildren(...rows.flatMap(({ token, probability }) => {
    const before = was?.has(token) ? ` (was ${number(was.get(token))})` : "";
    const parts = [
      element("span", { className: "token", textContent: visible(token), title: visible(token) }),
      element("span", { className: "bar", style: `width: ${100 * probability / largest}%` }),
      element("span", {
        className: `number${token === next?.token ? " came" : ""}`,
        textContent: number(probability) + before,
      }),
    ];
    if (!writes) return parts;
    const title = `write ${quoted(token)}`;
    const button = element("button", { className: "choice", title }, ...parts);
    button.addEventListener("click", () => write(token));
    return [button];
  }));
}
/** The probabilities of next tokens before the model was changed. */
function probabilitiesBefore(depth, position) {
  if (!data.before || depth < depths) return null;
  const logs = data.before.log_probabilities[position];
  return new Map(data.before.candidates[position].map((token, i) => [token, Math.exp(logs[i])]));
}
