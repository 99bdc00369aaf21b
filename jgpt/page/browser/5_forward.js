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
  const { arrays } = data;
  if (changed($("arrays"), ...arrays.map(({ path, name }) => `${path} ${name}`))) layOutParts();
  parts.forEach((part, i) => {
    const { dimensions, sizes } = arrays[i];
    const shape = dimensions.map((name, axis) => name ? `${name}=${sizes[axis]}` : sizes[axis]);
    part.array = arrays[i];
    part.shape.textContent = shape.join(" ");
  });
}
/** The paths of the arrays whose numbers nobody sees: those of the groups that are closed. */
function hiddenPaths() {
  const closed = parts.filter(({ group }) => !group.open);
  return closed.map(({ array }) => array.path);
}
/** Draw what a group has that was opened; numbers that the page lacks are asked for. */
function drawGroup(group) {
  const isMissing = parts.some(part => part.group === group && !part.array.values);
  if (group.open && isMissing) change({});
  else drawForward();
}
function layOutParts() {
  const groups = new Map();
  parts = data.arrays.map(({ path, name }) => {
    const block = path.match(/^\w+\.\d+/)?.[0];
    const id = block ?? (groups.size > 1 ? "after the blocks" : "before the blocks");
    if (!groups.has(id)) {
      const isOpen = $(id)?.open ?? !groups.size;
      const summary = element("summary", { textContent: id.replace(".", " ") });
      const group = element("details", { id, open: isOpen }, summary);
      group.ontoggle = () => drawGroup(group);
      groups.set(id, group);
    }
    return layOutPart(path, name, groups.get(id));
  });
  // An answer may stand among the rows that go.
  if ($("arrays").contains($("answer"))) {
    $("answer").hidden = true;
    $("arrays").before($("answer"));
  }
  $("arrays").replaceChildren(...groups.values());
}
/** An array in a group: a line with its picture, which opens to its numbers. */
function layOutPart(path, name, group) {
  const shape = element("span", { className: "shape" });
  const canvas = element("canvas");
  const line = element("summary", {},
    element("span", { className: "name", textContent: name }),
    shape,
    canvas,
    element("span", { className: "what", textContent: WHAT[name] ?? "" }));
  const numbers = element("pre", { tabIndex: 0, ariaLabel: `Numbers of ${name}` });
  const code = element("div");
  const row = element("details", { className: "array" }, line, numbers, code);
  row.style.marginLeft = `${12 * Math.max(0, path.split(".").length - 3)}px`;
  group.append(row);
  const part = { group, row, shape, canvas, numbers, code };
  row.ontoggle = () => drawPart(part);
  pictures.set(canvas, {
    find: event => cellAt(event, part.columns, part.rows),
    say: ([column, row]) => {
      const value = part.values[row * part.columns + column].toFixed(4);
      return `${name}[${part.rows > 1 ? `${row}, ` : ""}${column}]\n${value}`;
    },
  });
  return part;
}
/** Draw the entries of an array at the chosen token, as rows and columns. */
function drawPart(part) {
  const { array, canvas, group, numbers } = part;
  if (!group.open || !array.values) return;
  const [, ...sizes] = array.values.shape;
  const columns = sizes.pop() ?? 1;
  const rows = sizes.reduce((a, b) => a * b, 1);
  const size = rows * columns;
  const start = chosen.query * size;
  const values = Array.from(array.values.numbers.subarray(start, start + size));
  Object.assign(part, { rows, columns, values });
  const largest = Math.max(...values.map(Math.abs)) || 1;
  canvas.style.height = `${rows > 1 ? Math.min(8 * rows, 96) : 14}px`;
  paintPixels(canvas, columns, rows, pixels => values.forEach((x, i) => {
    pixels[i] = pixel(x / largest);
  }));
  if (!part.row.open) return;
  const lines = Array.from({ length: rows }, (_, row) => {
    const line = values.slice(row * columns, (row + 1) * columns).map(x => x.toFixed(4));
    return (rows > 1 ? `${row}: ` : "") + line.join("  ");
  });
  numbers.textContent = lines.join("\n");
  if (part.code.hasChildNodes()) return;
  drawCode(part);
  const marked = part.code.querySelector(".text.marked");
  if (!marked) return;
  const box = marked.closest("pre");
  box.scrollTop = marked.offsetTop - box.offsetTop - box.clientHeight / 2;
}
function drawForward() {
  parts.forEach(drawPart);
}

// The source of an array: the function that makes it, and the one that calls that

/** Where the source has the array of a part: its line, and the lines that lead there. */
function lineOf({ array: { path, name } }) {
  const found = first.code?.arrays.find(([itsPath, itsName]) => itsPath === path && itsName === name);
  return found ? { ...sourceLine(found[2]), callers: found[3].map(sourceLine) } : null;
}
function sourceLine([index, number]) {
  const source = first.code.functions[index];
  const [, text] = source.lines.find(([lineNumber]) => lineNumber === number);
  return { ...source, number, text };
}
function drawCode(part) {
  const made = lineOf(part);
  if (!made) return;
  const callers = made.callers.map(({ file, name, number, text }) =>
    element("li", {}, `${file}, ${name}, line ${number}: `, element("code", {}, text.trim())));
  part.code.append(
    element("p", { className: "soft" }, `Made by the marked line of ${made.name}, in ${made.file}:`),
    sourceOf(made));
  if (!callers.length) return;
  part.code.append(element("p", { className: "soft" }, "which is called from"),
    element("ol", { className: "soft" }, ...callers));
}
/** The source of a line's function, with the shapes of what each line sets beside it. */
function sourceOf({ name, lines, number: marked }) {
  const spans = lines.flatMap(([number, text, shapes, isReached]) => {
    const how = number === marked ? " marked" : isReached || !text.trim() ? "" : " unreached";
    return [
      element("span", { className: `number${how}`, textContent: number }),
      element("span", { className: `text${how}`, textContent: text || " " }),
      element("span", { className: `shapes${how}`, textContent: shapes }),
    ];
  });
  return element("pre", { tabIndex: 0, ariaLabel: `Source of ${name}` },
    element("div", { className: "source" }, ...spans));
}

// The backward pass: how much of the loss's gradient is at each token, from layer to layer

/** The lengths of the gradients of the residual stream at each token: embeddings, then blocks. */
function flowRows() {
  const blocks = first.paths.blocks.map(path =>
    data.arrays.find(array => array.path === path && !array.name.includes("(")));
  return [data.arrays[0], ...blocks].filter(Boolean).map(array => {
    const { numbers, shape } = array.values;
    const size = numbers.length / shape[0];
    const sizes = Array.from({ length: time }, (_, position) =>
      Math.hypot(...numbers.subarray(position * size, (position + 1) * size)));
    return { name: array === data.arrays[0] ? "embeddings" : depthName(1 + blocks.indexOf(array)), sizes };
  });
}
let flowCells = [];
function drawFlow() {
  const of = data.gradientOf;
  $("flow").hidden = !of;
  const position = Math.max(1, chosen.query);
  $("gradient-of").hidden = time < 2;
  $("gradient-of").textContent = `Gradient of the loss of ${time < 2 ? "" : at(position)} alone`;
  if (!of) return;
  if (changed($("flow"), data)) buildFlow();
  const firstWithout = of === true ? time - 1 : of;
  $("no-gradient").textContent = chosen.query < firstWithout ? "" : `Every gradient at `
    + `${at(chosen.query)} is zero, since this loss doesn't depend on what the model computes there. `
    + "Choose an earlier token to see its gradients below.";
  mark($("flow-grid"), flowCells[chosen.query]);
}
function buildFlow() {
  const of = data.gradientOf;
  $("flow-title").textContent = of === true
    ? `The gradient of the text's loss, ${data.loss.toFixed(3)} nats per token`
    : `The gradient of the loss of ${at(of)}, ${data.loss.toFixed(3)} nats`;
  const grid = $("flow-grid");
  grid.style.gridTemplateColumns = `max-content repeat(${time}, ${columnWidth()}px)`;
  const name = text => element("span", { className: "name" }, text);
  flowCells = tokens.map((token, position) => element("span", { chooses: goTo(position) }, cut(token)));
  const rows = flowRows().map(({ name: of, sizes }) => {
    const largest = Math.max(...sizes) || 1;
    return [name(of), ...sizes.map((size, position) => {
      const cell = element("span", { chooses: { ...goTo(position), size } });
      cell.style.background = tint("blue", opacity(size / largest).toFixed(3));
      return cell;
    })];
  });
  grid.replaceChildren(name("token"), ...flowCells, ...rows.flat());
}
pictures.set($("flow-grid"), {
  say: ({ query, size }) => `${at(query)}${size === undefined ? "" : `\n${size.toExponential(2)}`}`,
  mark: () => flowCells[chosen.query],
  across: stepPosition,
});
