// Attention: all heads small, one large as a map and as arcs

const images = [];
/** A head's weights, a pixel each. */
function paintHead(layer, head, of, canvas) {
  const { time } = of;
  const blue = pixelOf(colours.blue);
  paintPixels(canvas, time, time, pixels => {
    for (let query = 0; query < time; query++) {
      for (let key = 0; key <= query; key++) {
        const shade = 255 * opacity(weight(layer, head, query, key, of));
        pixels[query * time + key] = blue | shade << 24;
      }
    }
  });
}
function paintHeads() {
  for (let layer = 0; layer < layers; layer++) {
    for (let head = 0; head < heads; head++) paintHead(layer, head, shown, images[layer][head]);
  }
}
let headButtons = [];
function buildHeads() {
  $("attention").hidden = !data.attention;
  if (!data.attention) return;
  if (headButtons.length !== layers * heads) layOutHeads();
  paintHeads();
  map.drawn = arcs.drawn = null;
}
function layOutHeads() {
  const name = textContent => element("span", { className: "name", textContent });
  const all = (length, make) => Array.from({ length }, (_, i) => make(i));
  images.length = 0;
  images.push(...all(layers, () => all(heads, () => element("canvas"))));
  const rows = images.map((row, layer) => row.map((image, head) => {
    const button = element("div", {}, image);
    button.setAttribute("role", "radio");
    button.setAttribute("aria-label", `layer ${layer}, head ${head}`);
    button.addEventListener("click", () => choose({ layer, head }));
    return button;
  }));
  headButtons = rows.flat();
  $("heads").style.gridTemplateColumns = `max-content repeat(${heads}, minmax(24px, 120px))`;
  $("heads").replaceChildren(
    element("span"),
    ...all(heads, head => name(heads > 6 ? head : `head ${head}`)),
    ...rows.flatMap((row, layer) => [name(layers > 8 ? layer : `layer ${layer}`), ...row]));
}
const HEAD_MOVES = {
  ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
};
$("heads").addEventListener("keydown", event => {
  const [down, right] = HEAD_MOVES[event.key] ?? [];
  if (down === undefined) return;
  event.preventDefault();
  choose({ layer: chosen.layer + down, head: chosen.head + right });
  headButtons[chosen.layer * heads + chosen.head].focus();
});
function describeWeight(query, key, of = shown) {
  if (key > query) return `${at(key)} comes after ${at(query)}:\nit can't be attended to`;
  const w = weight(chosen.layer, chosen.head, query, key, of);
  return `${at(query)} → ${at(key)}\nweight ${number(w)}`;
}
function drawAttention() {
  if (!data.attention) return;
  const { query, layer, head } = chosen;
  headButtons.forEach((button, i) => {
    const on = i === layer * heads + head;
    button.setAttribute("aria-checked", on);
    button.tabIndex = on ? 0 : -1;
  });
  $("map-title").textContent = `Layer ${layer}, head ${head}`;
  $("arcs-title").textContent = `Layer ${layer}, head ${head}: what ${at(query)} attends to`;
  drawMap($("map"), map, images[layer][head]);
  drawArcs();
  drawWhy();
}

// The map. It is painted when its numbers change; what is chosen is framed on top of it

const map = { cell: 0, left: 0, top: 0, drawn: null };
function drawMap(canvas, map, image) {
  const named = time <= 128;  // then a cell has 10 pixels, and the map may be wider than its place
  map.left = map.top = named ? label : 0;
  const room = Math.min(rooms.map, 680) - map.left;
  map.cell = Math.max(named ? 10 : 1, Math.min(28, room / time));
  if (map.cell >= 4) map.cell = Math.floor(map.cell * 2) / 2;
  if (map.drawn !== image) paintMap(canvas, map, image, named);
  map.drawn = image;
  const { query, key } = chosen;
  const [row, cell] = canvas.parentElement.querySelectorAll("i");
  const place = (frame, x, y, columns) => {
    frame.style.width = `${columns * map.cell}px`;
    frame.style.height = `${map.cell}px`;
    frame.style.transform = `translate(${map.left + x * map.cell}px, ${map.top + y * map.cell}px)`;
  };
  place(row, 0, query, query + 1);
  place(cell, key, query, 1);
}
function paintMap(canvas, { cell, left, top }, image, named) {
  const side = cell * time;
  const context = prepare(canvas, left + side, top + side);
  context.imageSmoothingEnabled = false;
  context.strokeStyle = colours.line;
  context.strokeRect(left + .5, top + .5, side - 1, side - 1);
  context.drawImage(image, left, top, side, side);
  if (!named) return;
  context.font = `${Math.min(13, cell + 1)}px ${colours.mono}`;
  context.textBaseline = "middle";
  context.fillStyle = colours.soft;
  tokens.forEach((token, i) => {
    const middle = (i + .5) * cell;
    context.textAlign = "right";
    context.fillText(cut(token), left - 5, top + middle);
    nameColumn(context, token, left + middle, top);
  });
}
/** The name of a column, whose lower end is at y: upright if it is long. */
function nameColumn(context, token, x, y) {
  const long = widest > 2;
  context.save();
  context.translate(x, y - (long ? 5 : 8));
  context.textAlign = long ? "left" : "center";
  if (long) context.rotate(-Math.PI / 2);
  context.fillText(cut(token), 0, 0);
  context.restore();
}
const inside = i => i >= 0 && i < time;
const findCell = (canvas, map) => event => {
  const box = canvas.getBoundingClientRect();
  const key = Math.floor((event.clientX - box.left - map.left) / map.cell);
  const query = Math.floor((event.clientY - box.top - map.top) / map.cell);
  return inside(key) && inside(query) ? { query, key } : null;
};
explore($("map"), {
  find: findCell($("map"), map),
  say: ({ query, key }) => describeWeight(query, key),
  pick: cell => cell,
  keys: {
    ArrowLeft: () => ({ key: chosen.key - 1 }),
    ArrowRight: () => ({ key: chosen.key + 1 }),
    ArrowUp: () => ({ query: chosen.query - 1 }),
    ArrowDown: () => ({ query: chosen.query + 1 }),
    Home: () => ({ key: 0 }),
    End: () => ({ key: chosen.query }),
  },
  place: () => {
    const box = $("map").getBoundingClientRect();
    const { query, key } = chosen;
    const x = box.left + map.left + (key + 1) * map.cell;
    return { x, y: box.top + map.top + query * map.cell, text: describeWeight(query, key) };
  },
});

// The arcs. Those of all queries and the names lie on a canvas below, painted once for a head

const arcs = { cell: 0, top: 150, row: 24, bars: 48, farthest: 1, drawn: null };
const arcMiddle = position => (position + .5) * arcs.cell;
function drawArc(context, from, to, w, strength) {
  context.strokeStyle = `rgb(${colours.blue} / ${strength * opacity(w)})`;
  context.beginPath();
  if (from === to) context.arc(arcMiddle(from), arcs.top - 7, 4.5, 0, 2 * Math.PI);
  else {
    const height = (arcs.top - 8) * Math.min(1, Math.sqrt((from - to) / arcs.farthest));
    const middle = (arcMiddle(from) + arcMiddle(to)) / 2;
    context.ellipse(middle, arcs.top, arcMiddle(from) - middle, height, 0, Math.PI, 2 * Math.PI);
  }
  context.stroke();
}
function drawArcs() {
  const { query, key, layer, head } = chosen;
  arcs.row = widest > 2 ? label : 24;
  arcs.cell = Math.max(13, Math.min(28, rooms.arcs / time));
  const baseline = arcs.top + arcs.row;
  const sizes = [Math.floor(arcs.cell * time), baseline + arcs.bars];
  if (arcs.drawn !== images[layer][head]) paintArcs(prepare($("all-arcs"), ...sizes));
  arcs.drawn = images[layer][head];
  const context = prepare($("arcs"), ...sizes);
  const weights = Array.from({ length: query + 1 }, (_, to) => weight(layer, head, query, to));
  const largest = Math.max(...weights);
  context.fillStyle = `rgb(${colours.amber} / .3)`;
  context.fillRect(query * arcs.cell, arcs.top, arcs.cell, arcs.row);
  weights.forEach((w, to) => {
    context.lineWidth = 1 + 3 * w;
    if (w > .0005) drawArc(context, query, to, w, 1);
    context.fillStyle = `rgb(${colours.blue} / ${to === key ? 1 : .55})`;
    const height = Math.max(.5, w / largest * (arcs.bars - 2));
    context.fillRect(to * arcs.cell + 1, baseline + 1, arcs.cell - 2, height);
  });
  $("largest").textContent = number(largest);
}
function paintArcs(context) {
  const { layer, head } = chosen;
  const strong = [];
  for (let from = 0; from < time; from++) {
    for (let to = 0; to <= from; to++) {
      const w = weight(layer, head, from, to);
      if (w > .02) strong.push([from, to, w]);
    }
  }
  arcs.farthest = strong.reduce((far, [from, to]) => Math.max(far, from - to), 1);
  for (const [from, to, w] of strong) drawArc(context, from, to, w, .22);
  context.font = `14px ${colours.mono}`;
  context.textBaseline = "middle";
  context.fillStyle = colours.ink;
  tokens.forEach((token, i) => nameColumn(context, token, arcMiddle(i), arcs.top + arcs.row - 3));
}
explore($("arcs"), {
  find: event => {
    const left = event.clientX - $("arcs").getBoundingClientRect().left;
    const key = Math.floor(left / arcs.cell);
    return inside(key) ? { key } : null;
  },
  say: ({ key }) => describeWeight(chosen.query, key),
  pick: ({ key }) => goTo(key),
  keys: {
    ...positionKeys,
    ArrowUp: () => ({ key: chosen.key - 1 }),
    ArrowDown: () => ({ key: chosen.key + 1 }),
  },
  place: () => {
    const box = $("arcs").getBoundingClientRect();
    const { query, key } = chosen;
    const x = box.left + (key + 1) * arcs.cell;
    return { x, y: box.top + arcs.top, text: describeWeight(query, key) };
  },
});

// One weight, as the arithmetic that gives it

function drawWhy() {
  const { layer, head, query, key } = chosen;
  if (!products) {
    $("why").replaceChildren();
    return;
  }
  const { scale } = products;
  const size = products.query.shape.at(-1);
  const vector = (array, position) => {
    const start = ((layer * heads + head) * time + position) * size;
    return Array.from({ length: size }, (_, i) => array.at(start + i));
  };
  const q = vector(products.query, query);
  const k = vector(products.key, key);
  const dot = other => q.reduce((sum, x, i) => sum + x * other[i], 0);
  const first = data.window ? Math.max(0, query + 1 - data.window) : 0;
  let total = 0;
  for (let other = first; other <= query; other++) {
    total += Math.exp(scale * dot(vector(products.key, other)));
  }
  const score = scale * dot(k);
  const fixed = x => x.toFixed(3);
  const outcome = key < first ? `outside the window of ${data.window}: masked, so the weight is 0`
    : `exp ${fixed(Math.exp(score))}, divided by ${fixed(total)}, `
      + `the sum over ${query - first + 1} keys: ${number(Math.exp(score) / total)}`;
  const w = number(weight(layer, head, query, key));
  const title = `Why ${at(query)} gives ${at(key)} the weight ${w}`;
  const arithmetic =
    `query · key = ${fixed(dot(k))}; scaled by ${number(scale)}: ${fixed(score)}; ${outcome}`;
  const order = [...q.keys()].sort((a, b) => Math.abs(q[b] * k[b]) - Math.abs(q[a] * k[a]));
  const row = (tag, texts) =>
    element("tr", {}, ...texts.map(textContent => element(tag, { textContent })));
  const table = element("table", { className: "product" },
    row("th", ["feature", "query", "key", "product"]),
    ...order.map(i => row("td", [i, fixed(q[i]), fixed(k[i]), fixed(q[i] * k[i])])));
  const numbers = element("div", { className: "numbers", tabIndex: 0 }, table);
  numbers.setAttribute("role", "region");
  numbers.setAttribute("aria-label", "Products of query and key");
  $("why").replaceChildren(
    element("h3", { textContent: title }),
    element("p", { className: "soft", id: "arithmetic", textContent: arithmetic }),
    numbers);
}
