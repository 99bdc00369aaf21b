// Attention: all heads small, one large as a map and as arcs

/** A head's weights, a pixel each. */
function paintHead(layer, head, canvas) {
  paintPixels(canvas, time, time, pixels => {
    for (let query = 0; query < time; query++) {
      for (let key = 0; key <= query; key++) {
        pixels[query * time + key] = pixel(weight(layer, head, query, key));
      }
    }
  });
}
let headButtons = [];
function buildHeads() {
  $("attention").hidden = !data.attention;
  if (!data.attention) return;
  if (changed($("heads"), layers, heads)) layOutHeads();
  paintInSight($("heads"), () => {
    for (const button of headButtons) {
      const { layer, head } = button.chooses;
      paintHead(layer, head, button.previousSibling);
    }
  });
}
/** Make a button for each head. */
function layOutHeads() {
  const grid = $("heads");
  const name = textContent => grid.append(element("span", { className: "name", textContent }));
  grid.replaceChildren();
  grid.style.gridTemplateColumns = `max-content repeat(${heads}, minmax(24px, 120px))`;
  headButtons = [];
  name("");
  for (let head = 0; head < heads; head++) name(heads > 6 ? head : `head ${head}`);
  for (let layer = 0; layer < layers; layer++) {
    name(layers > 8 ? layer : `layer ${layer}`);
    for (let head = 0; head < heads; head++) {
      const button = element("input", { type: "radio", name: "head", chooses: { layer, head } });
      button.ariaLabel = `layer ${layer}, head ${head}`;
      headButtons.push(button);
      grid.append(element("div", {}, element("canvas"), button));
    }
  }
}
pictures.set($("heads"), {
  say: () => "",  // each has its name beside it
  mark: () => headButtons[chosen.layer * heads + chosen.head],
  across: step("head"),
  down: step("layer"),
});
function describeWeight(query, key) {
  if (key > query) return `${at(key)} comes after ${at(query)}:\nit can't be attended to`;
  const w = weight(chosen.layer, chosen.head, query, key);
  return `${at(query)} → ${at(key)}\nweight ${number(w)}`;
}
function drawAttention() {
  if (!data.attention) return;
  const { query, layer, head } = chosen;
  headButtons[layer * heads + head].checked = true;
  $("map-title").textContent = `Layer ${layer}, head ${head}`;
  $("arcs-title").textContent = `Layer ${layer}, head ${head}: what ${at(query)} attends to`;
  drawMap();
  drawArcs();
  drawWhy();
}

// The map. It is painted when its numbers change; what is chosen is framed on top of it

const map = {
  canvas: $("map-canvas"),
  cells: $("map-canvas").parentElement,
  columns: $("map-columns"),
  square: $("map-square"),
};
pictures.set(map.canvas, {
  find: event => {
    const [key, query] = cellAt(event, time, time);
    return { query, key };
  },
  say: ({ query, key }) => describeWeight(query, key),
  mark: () => map.square,
  across: step("key"),
  down: step("query"),
});
function drawMap() {
  const { query, key, layer, head } = chosen;
  const { canvas, cells, columns, square } = map;
  if (changed(canvas, data, layer, head)) {
    paintInSight(cells, () => paintHead(layer, head, canvas));
  }
  cells.style = `--query: ${query}; --key: ${key}`;
  mark(columns, columns.children[key], square);
}

// The arcs. Those of all queries lie on a canvas below, painted once for a head

const COLUMN = 26;  // pixels of a token's width
/** A canvas without what was drawn on it, with a column for each token. */
function emptied(canvas) {
  canvas.width = COLUMN * time;
  return canvas.getContext("2d");
}
const middleOf = position => (position + .5) * COLUMN;
/** Draw the arcs from a query to the keys whose weights are larger than `least`. */
function drawArcsOf(context, query, least, strength) {
  const bottom = context.canvas.height;
  for (let key = 0; key <= query; key++) {
    const w = weight(chosen.layer, chosen.head, query, key);
    if (w <= least) continue;
    context.strokeStyle = `rgba(${BLUE}, ${strength * opacity(w)})`;
    context.lineWidth = 2 + 6 * w * strength;
    context.beginPath();
    if (key === query) {
      context.arc(middleOf(query), bottom - 14, 9, 0, 2 * Math.PI);
    } else {
      const middle = middleOf((query + key) / 2);
      const height = (bottom - 16) * Math.sqrt((query - key) / time);
      context.ellipse(middle, bottom, middleOf(query) - middle, height, 0, Math.PI, 2 * Math.PI);
    }
    context.stroke();
  }
}
function drawArcs() {
  const { query, key, layer, head } = chosen;
  const weights = Array.from({ length: query + 1 }, (_, to) => weight(layer, head, query, to));
  const largest = Math.max(...weights);
  mark($("arc-names"), $("arc-names").children[query]);
  $("largest").textContent = number(largest);
  paintInSight($("arcs"), () => paintArcs(weights, largest));
}
function paintArcs(weights, largest) {
  const { query, key, layer, head } = chosen;
  if (changed($("arcs"), data, layer, head)) {
    const all = emptied($("all-arcs"));
    for (let each = 0; each < time; each++) drawArcsOf(all, each, .02, .22);
  }
  drawArcsOf(emptied($("own-arcs")), query, .0005, 1);
  const bars = emptied($("arc-bars"));
  weights.forEach((w, to) => {
    bars.fillStyle = `rgba(${BLUE}, ${to === key ? 1 : .55})`;
    bars.fillRect(to * COLUMN + 2, 2, COLUMN - 4, Math.max(1, w / largest * 92));
  });
}
pictures.set($("arcs"), {
  find: event => goTo(cellAt(event, time, 1)[0]),
  say: ({ key }) => describeWeight(chosen.query, key),
  mark: () => $("arc-names").children[chosen.key],
  across: stepPosition,
  down: step("key"),
});

// One weight, as the arithmetic that gives it

function drawWhy() {
  const { layer, head, query, key } = chosen;
  $("why").hidden = !data.products;
  if (!data.products) return;
  const { scale } = data.products;
  const vector = (name, position) => {
    const array = data.products[name];
    const size = array.shape.at(-1);
    const start = ((layer * heads + head) * time + position) * size;
    return Array.from(array.numbers.subarray(start, start + size));
  };
  const q = vector("query", query);
  const productsWith = k => q.map((x, i) => x * k[i]);
  const first = data.window ? Math.max(0, query + 1 - data.window) : 0;
  let total = 0;
  for (let other = first; other <= query; other++) {
    total += Math.exp(scale * sum(productsWith(vector("key", other))));
  }
  const k = vector("key", key);
  const products = productsWith(k);
  const score = scale * sum(products);
  const fixed = x => x.toFixed(3);
  const outcome = key < first ? `outside the window of ${data.window}: masked, so the weight is 0`
    : `exp ${fixed(Math.exp(score))}, divided by ${fixed(total)}, `
      + `the sum over ${query - first + 1} keys: ${number(Math.exp(score) / total)}`;
  const w = number(weight(layer, head, query, key));
  $("why-title").textContent = `Why ${at(query)} gives ${at(key)} the weight ${w}`;
  $("arithmetic").textContent = `query · key = ${fixed(sum(products))}; `
    + `scaled by ${number(scale)}: ${fixed(score)}; ${outcome}`;
  const order = [...q.keys()].sort((a, b) => Math.abs(products[b]) - Math.abs(products[a]));
  const row = i => [i, fixed(q[i]), fixed(k[i]), fixed(products[i])];
  $("products").replaceChildren(...order.map(i =>
    element("tr", {}, ...row(i).map(textContent => element("td", { textContent })))));
}
