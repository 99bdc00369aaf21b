// Draw what is chosen

/** Sections that are out of sight: what is in them is drawn when they come back. */
const asleep = new Set();
const DRAWN = {
  surprise: drawText,
  next: () => { drawBars(); drawLens(); },
  changes: drawChanges,
  attention: drawAttention,
  forward: drawForward,
  twins: drawTwins,
};
for (const [id, drawn] of Object.entries(DRAWN)) {
  $(id).addEventListener("contentvisibilityautostatechange", ({ skipped }) => {
    if (skipped) asleep.add(id);
    else if (asleep.delete(id) && data) drawn();
  });
}
/** Scroll wide pictures to what is chosen: first of all, since reading after writing is slow. */
function revealChosen() {
  const { query, key } = chosen;
  const { lensNames } = rooms;
  for (const lens of document.querySelectorAll(".lens")) {
    const left = lensNames + query * (columnWidth + 1);
    reveal(lens.parentElement, left, columnWidth, lensNames);
  }
  reveal($("map").closest(".scroll"), map.left + key * map.cell, map.cell, map.left);
  reveal($("arcs").parentElement, query * arcs.cell, arcs.cell);
}
let grown;
function draw() {
  if (!data) return;
  revealChosen();
  for (const [id, drawn] of Object.entries(DRAWN)) {
    if (!asleep.has(id)) drawn();
  }
  const looked = `${chosen.layer} ${chosen.head}`;
  if (data.live && grown !== looked) drawGrowth();
  grown = looked;
}
function redraw() {
  measure();
  if (!data) return;
  map.drawn = arcs.drawn = null;
  for (const twin of twins) twin.drawn = null;
  paintHeads();
  draw();
  drawTraining();
  drawGrowth();
}

function ramp(name, from, to, power = 1) {
  const stops = [0, .25, .5, .75, 1].map(x => `rgb(var(${name}) / ${x ** power}) ${100 * x}%`);
  const bar = element("i", { style: `background: linear-gradient(90deg, ${stops})` });
  return element("span", { className: "ramp" }, from, bar, to);
}
function buildTitle() {
  const sampled = lossOf(data.next_log_probabilities[depths].slice(data.prompt - 1));
  document.title = $("title").textContent = `Inside ${data.name}`;
  const size = layers ? `${layers} layers of ${heads} heads`
    : "No module of this model has a method weights, so no attention is drawn. "
      + (depths ? `${depths} blocks` : "No numbered blocks, so there is no logit lens");
  const more = time > data.prompt ? ` and ${time - data.prompt} sampled` : "";
  $("summary").textContent =
    `${size}, a vocabulary of ${data.vocab_size}; ${data.prompt} tokens of a prompt${more}`;
  $("text-legend").replaceChildren(
    ramp("--amber", "0 bits", `${most.toFixed(1)} bits: a blind guess`),
    element("span", {}, element("u", { textContent: "underlined" }), ": the prompt"),
    more ? `mean of what was sampled: ${(sampled / Math.LN2).toFixed(2)} bits` : "");
  $("lens-legend").replaceChildren(
    ramp("--green", "probability 0", "1"), "underlined: the token that came next");
  const windowed = data.window
    ? `each token attends to the last ${data.window} tokens: further ones have no weight` : "";
  $("map-legend").replaceChildren(
    ramp("--blue", "weight 0", "1", .5),
    "row: query; column: key",
    element("b", { textContent: windowed }));
}

document.addEventListener("keydown", event => {
  if (event.key === "Escape") hideTip();
});
document.addEventListener("wheel", hideTip, { passive: true });
document.addEventListener("pointerdown", event => {
  if (!event.target.closest("#text, .lens, .map, #arcs")) hideTip();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", redraw);
measure();
const sent = JSON.parse($("data").textContent);
if (sent.live) startLive(sent);
else {
  Object.assign(chosen, goTo(Math.floor((sent.tokens.length - 1) / 2)));
  show(sent);
}
