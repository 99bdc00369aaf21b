// The forward pass: every array on the way of the chosen token

const WHAT = {
  token_embedding: "the token's row of the embedding table",
  position_embedding: "the position's row of a table",
  attention_norm: "the residual stream, normalised for attention",
  query: "what the token looks for",
  key: "what each token offers to be found by",
  value: "what a token passes on where it is attended to",
  split_heads: "the features, split among the heads",
  apply_rotary: "turned by an angle that grows with the position",
  attention_weights: "softmax of query · key, scaled, over this token and those before it",
  attend: "the values, averaged with the weights",
  merge_heads: "the heads side by side",
  attention: "projected: what attention adds to the residual stream",
  feed_forward: "what the feed-forward network adds to the residual stream",
  "feed_forward_norm(x)": "the residual stream with attention added",
  feed_forward_norm: "normalised for the feed-forward network",
  expansion: "the hidden layer of the feed-forward network",
  final_norm: "the residual stream after all blocks, normalised",
  logits: "a score for each token of the vocabulary; softmax makes them probabilities",
};
let parts = [];  // a row of the page for each array
function buildForward() {
  const isOpen = details => details.open;
  const opened = [...$("arrays").querySelectorAll("details")].filter(isOpen).map(each => each.id);
  const groups = new Map();
  parts = data.arrays.map(array => {
    const block = array.path.match(/^\w+\.\d+/)?.[0];
    const group = block ?? (groups.size > 1 ? "after the blocks" : "before the blocks");
    if (!groups.has(group)) {
      const summary = element("summary", { textContent: group.replace(".", " ") });
      const open = parts.length ? opened.includes(group) : groups.size < 2;
      const details = element("details", { id: group, open }, summary);
      details.addEventListener("toggle", drawForward);
      groups.set(group, details);
    }
    const part = layOutPart(array, groups.get(group));
    groups.get(group).append(part.row);
    return part;
  });
  $("arrays").replaceChildren(...groups.values());
  const missing = data.arrays.length < 2
    ? "No module or function of this model is typed: only its logits are known."
    : "The numbers are too many for a page: a shorter text shows them.";
  const isWhole = data.arrays.length > 1 && data.arrays[0].values;
  $("without-arrays").textContent = isWhole ? "" : missing;
}
function layOutPart(array, details) {
  const sizes = array.dimensions.map((name, axis) =>
    name ? `${name}=${array.sizes[axis]}` : array.sizes[axis]);
  const button = element("button", { textContent: array.name, disabled: !array.values });
  button.setAttribute("aria-expanded", "false");
  const canvas = element("canvas", { hidden: !array.values });
  const numbers = element("pre", { hidden: true, tabIndex: 0 });
  numbers.setAttribute("aria-label", `Numbers of ${array.name}`);
  const what = element("span", { className: "what", textContent: WHAT[array.name] ?? "" });
  const shape = element("span", { className: "shape", textContent: sizes.join(" ") });
  const row = element("div", { className: "array" }, button, shape, canvas, what, numbers);
  row.style.marginLeft = `${12 * Math.max(0, array.path.split(".").length - 3)}px`;
  const part = { array, details, row, canvas, numbers, values: [] };
  button.addEventListener("click", () => {
    numbers.hidden = !numbers.hidden;
    button.setAttribute("aria-expanded", String(!numbers.hidden));
    drawPart(part);
  });
  canvas.addEventListener("pointermove", event => {
    const { rows, columns, values } = part;
    const box = canvas.getBoundingClientRect();
    const place = (x, size, count) => clamp(Math.floor(x / size * count), 0, count - 1);
    const column = place(event.clientX - box.left, box.width, columns);
    const line = place(event.clientY - box.top, box.height, rows);
    const indices = rows > 1 ? `${line}, ${column}` : column;
    const value = values[line * columns + column].toFixed(4);
    tip(event.clientX, event.clientY, `${array.name}[${indices}]\n${value}`);
  });
  canvas.addEventListener("pointerleave", hideTip);
  return part;
}
/** The entries of an array at the chosen token, as rows and columns; of keys, those up to it. */
function slice(array) {
  array.unpacked ??= unpack(array.values);
  const shape = array.sizes;
  const [own, ...others] = array.time;
  const strides = shape.map((_, axis) => shape.slice(axis + 1).reduce((a, b) => a * b, 1));
  const isShown = axis => axis !== own && (shape[axis] > 1 || axis === shape.length - 1);
  const axes = [...shape.keys()].filter(isShown);
  const sizes = axes.map(axis => others.includes(axis) ? chosen.query + 1 : shape[axis]);
  const columns = sizes.at(-1) ?? 1;
  const rows = sizes.slice(0, -1).reduce((a, b) => a * b, 1);
  const values = Array.from({ length: rows * columns }, (_, i) => {
    let at = chosen.query * strides[own];
    for (let axis = axes.length - 1, rest = i; axis >= 0; axis--) {
      at += rest % sizes[axis] * strides[axes[axis]];
      rest = Math.floor(rest / sizes[axis]);
    }
    return array.unpacked.at(at);
  });
  return { rows, columns, values };
}
function drawPart(part) {
  if (!part.details.open || !part.array.values) return;
  Object.assign(part, slice(part.array));
  const { rows, columns, values, canvas, numbers } = part;
  const largest = Math.max(...values.map(Math.abs)) || 1;
  canvas.style.height = `${rows > 1 ? Math.min(8 * rows, 96) : 14}px`;
  const [plus, minus] = [colours.blue, colours.amber].map(pixelOf);
  paintPixels(canvas, columns, rows, pixels => values.forEach((x, i) => {
    pixels[i] = (x < 0 ? minus : plus) | 255 * opacity(Math.abs(x) / largest) << 24;
  }));
  if (numbers.hidden) return;
  const lines = Array.from({ length: rows }, (_, row) => {
    const line = values.slice(row * columns, (row + 1) * columns).map(x => x.toFixed(4));
    return (rows > 1 ? `${row}: ` : "") + line.join("  ");
  });
  numbers.textContent = lines.join("\n");
}
const drawForward = () => parts.forEach(drawPart);
