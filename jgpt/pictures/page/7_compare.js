// Two models on one page, such as checkpoints of a run: side by side, and their difference, which is
// the second model's numbers minus the first one's

const MOST_BARS = 8;
let modelNames = [];
let sides = [];  // what the page has of each of two models

/** Build what a page of two models has more than one of a single model. */
function startComparing(models) {
  modelNames = models.map(({ name }) => name);
  if (models.length < 2) return;
  const [one, other] = modelNames;
  const choices = [one, other, nameOfDifference()].map((name, i) => {
    const input = element("input", { type: "radio", name: "shown", value: SHOWN[i] });
    input.onchange = () => {
      $("answer").hidden = true;  // it has the numbers of what was shown
      change({ shown: SHOWN[i] });
    };
    return element("label", {}, input, name);
  });
  $("shown").append(...choices);
  $("shown").hidden = false;
  // What is scrolled to isn't behind the bar, which has more lines in a narrow window.
  new ResizeObserver(() => {
    document.documentElement.style.scrollPaddingTop = `${$("shown").offsetHeight + 8}px`;
  }).observe($("shown"));
  for (const each of document.querySelectorAll(".first-name")) each.textContent = one;
  for (const each of document.querySelectorAll(".second-name")) each.textContent = other;
  sides = modelNames.map(sideOf);
}
/** What a state's `shown` may be: a model's number, or both. */
const SHOWN = [0, 1, "difference"];
const nameOfDifference = () => `${modelNames[1]} minus ${modelNames[0]}`;
const signed = (x, digits) => `${x >= 0 ? "+" : ""}${x.toFixed(digits)}`;
const signedColour = x => x < 0 ? "amber" : "blue";

/** The record that a page shows, of those of its models. */
function shownOf(records, shown) {
  if (records.length === 1) return records[0];
  const texts = Object.assign({}, ...records.map(({ texts }) => texts));
  const pair = records.map(record => ({ ...record, texts }));
  return { ...(shown === "difference" ? differenceOf(pair) : pair[shown]), pair };
}
/** A record with differences in place of the weights of attention and of the arrays' numbers. The
 *  predictions in it are those of the second model. */
function differenceOf([one, other]) {
  const arrays = other.arrays.map(array => {
    // A model may have an array less, where a function returns its argument as it is.
    const its = one.arrays.find(({ index }) => index === array.index);
    return its && { ...array, values: array.values && minus(array.values, its.values) };
  });
  return {
    ...other,
    difference: true,
    attention: other.attention && minus(other.attention, one.attention),
    products: null,
    before: null,
    loss: other.loss - one.loss,
    arrays: arrays.filter(Boolean),
  };
}
function minus(x, y) {
  return { ...x, steps: x.steps.map((value, i) => value - y.steps[i]) };
}

// What is said of both

function describeLosses() {
  if (time === 1) return "";
  const [one, other] = data.pair.map(of => lossOf(of.next_log_probabilities[depths]));
  return `Loss on the text, in nats per token: ${one.toFixed(3)} for ${modelNames[0]}, `
    + `${other.toFixed(3)} for ${modelNames[1]} (${signed(other - one, 3)}).`;
}
/** How many bits more a token surprises the second model. */
function bitsApart(position) {
  if (position === 0) return 0;
  const [one, other] = data.pair.map(of => surprise(position, of).bits);
  return other - one;
}
function describeSurpriseOfBoth(position) {
  if (position === 0) return describeSurprise(position, data.pair[0]);
  const [one, other] = data.pair.map(of => surprise(position, of).bits.toFixed(2));
  return `${one} bits for ${modelNames[0]}, ${other} for ${modelNames[1]} `
    + `(${signed(bitsApart(position), 2)})`;
}
function describeLensOfBoth(depth, position) {
  const lines = data.pair.map((of, i) => {
    const best = likely(predictions(depth, position, of)[0]);
    const next = following(depth, position, of);
    return `${modelNames[i]}: ${best}${next ? `; next was ${likely(next)}` : ""}`;
  });
  return [`${depthName(depth)}, after ${at(position)}`, ...lines].join("\n");
}
function describeWeightOfBoth(query, key) {
  const { layer, head } = chosen;
  const [one, other] = data.pair.map(of => weight(layer, head, query, key, of));
  return `weight ${number(one)} in ${modelNames[0]}, ${number(other)} in ${modelNames[1]} `
    + `(${signed(other - one, 4)})`;
}

// The next token of both

/** The probability of a token in a model's predictions; null if it is not among its candidates. */
function probabilityOf(token, depth, position, of) {
  const next = following(depth, position, of);
  if (token === next?.token) return next.probability;
  const { most, tokens, logs } = of.ranked;
  const start = (depth * time + position) * most;
  const i = tokens.subarray(start, start + most).indexOf(token);
  return i < 0 ? null : Math.exp(logs[start + i]);
}
/** The likeliest tokens of both models, and the next one, each with its two probabilities. */
function likeliestOfBoth(depth, position) {
  const likeliest = new Set(data.pair.flatMap(of =>
    predictions(depth, position, of).map(({ token }) => token)));
  const next = following(depth, position);
  if (next) likeliest.add(next.token);
  return [...likeliest].map(token => {
    const found = data.pair.map(of => probabilityOf(token, depth, position, of));
    return { token, found, came: token === next?.token, apart: found[1] - found[0] };
  });
}
const shownProbability = p => p === null ? "not among the candidates" : number(p);
function drawBarsOfDifference() {
  const { depth, query } = chosen;
  const rows = likeliestOfBoth(depth, query)
    .sort((x, y) => Math.abs(y.apart) - Math.abs(x.apart)).slice(0, 10);
  const largest = Math.max(...rows.map(({ apart }) => Math.abs(apart)));
  const readAt = depth < depths ? `, read at: ${depthName(depth)}` : "";
  $("bars-title").textContent = `After ${at(query)}${readAt}: ${nameOfDifference()}`;
  $("bars-legend").textContent = rows.some(({ came }) => came) ? "framed: the token that came next"
    : "";
  $("bars").replaceChildren(...rows.map(({ token, found, came, apart }) => {
    const width = 50 * Math.abs(apart) / largest || 0;
    const style = `width: ${width}%; margin-left: ${apart < 0 ? 50 - width : 50}%; `
      + `background: var(--${signedColour(apart)})`;
    const [one, other] = found.map(shownProbability);
    return element("div", {},
      element("span", { className: "token", title: visible(token) }, visible(token)),
      element("span", { className: "bar", style }),
      element("span", { className: came ? "came" : "" },
        `${signed(apart, 4)} (${one} → ${other})`));
  }));
}

// The lens of both

/** Fill a cell with how much likelier the next token is to the second model, and with what the
 *  second model predicts, where it differs. */
function fillCellOfDifference(cell, depth, position) {
  const [one, other] = data.pair.map(of => predictions(depth, position, of)[0].token);
  const [was, is] = data.pair.map(of => following(depth, position, of)?.probability ?? 0);
  const text = one === other ? "" : cut(other);
  if (!changed(cell, text, is - was)) return;
  cell.textContent = text;
  cell.style.background = tint(signedColour(is - was), opacity(Math.abs(is - was)).toFixed(3));
  cell.classList.remove("right");
}

// Side by side

/** The part of the page that is one model's. */
function sideOf(name) {
  const captioned = className => {
    const caption = element("p", { className: "soft" });
    const place = element("div", { className });
    const part = element("div", {}, caption, place);
    return { caption, place, part };
  };
  const parts = ["mono strip", "bars", "scroll", "scroll", "scroll"].map(captioned);
  const [text, bars, lens, heads, map] = parts;
  const told = element("p", { className: "soft" });
  $("compared").append(element("div", { role: "group", ariaLabel: name },
    element("h3", {}, name), told, ...parts.map(({ part }) => part)));
  text.caption.textContent = "Surprisal of each token";
  lens.caption.textContent = "Most likely next token after each layer";
  heads.caption.textContent = "All heads";
  const grid = element("div", { className: "heads", role: "radiogroup" });
  grid.ariaLabel = `Layer and head of ${name}`;
  heads.place.append(grid);
  const side = {
    told,
    text,
    bars,
    heads,
    grid,
    lens: Object.assign(lensIn(lens.place), { part: lens.part }),
    map: Object.assign(mapIn(map.place), { part: map.part, caption: map.caption }),
    spans: [],
    buttons: [],
  };
  exploreHeads(grid, () => side.buttons);
  Object.assign(text.place, { role: "application", tabIndex: 0 });
  text.place.ariaLabel = `Surprisal in ${name}: left and right choose a position`;
  pictures.set(text.place, {
    say: ({ query }) => `${at(query)}: ${describeSurprise(query, side.of)}`,
    mark: () => side.spans[chosen.query],
    across: stepPosition,
  });
  return side;
}
/** Take new numbers. */
function buildCompared() {
  $("compare").hidden = !data.pair;
  for (const each of document.querySelectorAll(".of-one")) each.hidden = data.difference;
  for (const each of document.querySelectorAll(".of-difference")) each.hidden = !data.difference;
  if (!data.pair) return;
  $("sample").disabled = $("write").disabled = Boolean(data.difference);
  $("dials").hidden = Boolean(data.difference);
  for (const input of $("shown").querySelectorAll("input")) {
    input.checked = input.value === String(state.shown);
  }
  $("losses").textContent = describeLosses();
  sides.forEach((side, i) => buildSide(side, data.pair[i], i));
}
function buildSide(side, of, i) {
  side.of = of;
  side.told.textContent = of.before ? describeLoss(of) : "";  // the loss itself stands above both
  side.told.hidden = !of.before;
  const most = Math.log2(of.vocab_size);
  side.spans = tokens.map((token, position) => {
    const span = element("span", { textContent: visible(token), chooses: goTo(position) });
    span.style.background = tint("amber", Math.min(1, (surprise(position, of)?.bits ?? 0) / most));
    return span;
  });
  side.text.place.replaceChildren(...side.spans);
  side.lens.part.hidden = depths === 0;
  side.heads.part.hidden = side.map.part.hidden = !of.attention;
  if (!of.attention) return;
  if (changed(side.grid, layers, heads)) side.buttons = layOutHeads(side.grid, `head-${i}`);
  paintHeads(side.grid, side.buttons, of);
}
function drawCompared() {
  if (!data.pair) return;
  const { depth, query } = chosen;
  const rows = likeliestOfBoth(depth, query)
    .sort((x, y) => Math.max(...y.found) - Math.max(...x.found)).slice(0, MOST_BARS);
  const largest = Math.max(...rows.flatMap(({ found }) => found));
  sides.forEach((side, i) => {
    drawSide(side);
    const readAt = depth < depths ? `, read at: ${depthName(depth)}` : "";
    side.bars.caption.textContent = `The next token after ${at(query)}${readAt}`;
    side.bars.place.replaceChildren(...rows.map(({ token, found, came }) =>
      element("div", {},
        element("span", { className: "token", title: visible(token) }, visible(token)),
        element("span", { className: "bar", style: `width: ${100 * found[i] / largest}%` }),
        element("span", { className: came ? "came" : "" }, shownProbability(found[i])))));
  });
}
function drawSide(side) {
  const { query, key, layer, head } = chosen;
  mark(side.text.place, side.spans[query]);
  drawLens(side.lens, side.of);
  if (!side.of.attention) return;
  side.buttons[layer * heads + head].checked = true;
  const w = number(weight(layer, head, query, key, side.of));
  side.map.caption.textContent
    = `Layer ${layer}, head ${head}: ${at(query)} gives ${at(key)} the weight ${w}`;
  drawMap(side.map, side.of);
}
