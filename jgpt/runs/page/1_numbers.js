"use strict";

// The numbers of a page, what they say, and what is chosen of them

const $ = id => document.getElementById(id);
let data, tokens, time, layers, heads, depths, shown, products, most, widest, columnWidth, label;

/** An array that was sent in one or two bytes an entry: `at` gives the value of an entry. */
function unpack({ shape, low, high, bytes, data }) {
  const text = atob(data);
  const raw = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) raw[i] = text.charCodeAt(i);
  const steps = bytes === 2 ? new Uint16Array(raw.buffer) : raw;
  const step = (high - low) / (256 ** bytes - 1);
  return { shape, at: i => low + step * steps[i] };
}
/** Numbers with their attention weights unpacked. */
const viewOf = found => ({
  data: found,
  time: found.tokens.length,
  layers: found.layers.length,
  heads: found.heads,
  attention: found.attention && unpack(found.attention),
});
/** The attention weight of a query on a key, which isn't after it: rows of a triangle, joined. */
function weight(layer, head, query, key, { attention, time, heads } = shown) {
  const triangle = time * (time + 1) / 2;
  return attention.at((layer * heads + head) * triangle + query * (query + 1) / 2 + key);
}

/** The most likely next tokens at a position, read after so many blocks. */
const predictions = (depth, position, of = data) => of.candidates[depth][position].map(
  (token, i) => ({ token, probability: Math.exp(of.log_probabilities[depth][position][i]) }));

/** What was predicted of the token that follows a position; null after the last one. */
function following(depth, position, of = data) {
  if (position === time - 1) return null;
  const log = of.next_log_probabilities[depth][position];
  const rank = of.next_ranks[depth][position];
  return { token: tokens[position + 1], probability: Math.exp(log), bits: -log / Math.LN2, rank };
}
/** What the model gave the token at a position; null for the first one. */
const surprise = position => position ? following(depths, position - 1) : null;
/** The loss on the text, in nats per token; undefined for a single token. */
function lossOf(logs) {
  return logs.length ? -logs.reduce((a, b) => a + b, 0) / logs.length : undefined;
}

const MARKS = { "\n": "⏎", " ": "␣", "\t": "⇥" };
const visible = token => (data.texts[token] ?? data.other.texts[token])
  .replace(/[\n \t]/g, c => MARKS[c])
  .replace(/[\x00-\x1f]/g, c => String.fromCharCode(0x2400 + c.charCodeAt(0))) || "∅";
/** A name that fits a column. */
const cut = token => visible(token).slice(0, 9);
const quoted = token => `“${visible(token)}”`;
const at = position => `${quoted(tokens[position])} (${position})`;
const number = p => p >= 1e-4 || p === 0 ? p.toFixed(4) : p.toExponential(1);
const depthName = depth => depth === 0 ? "embeddings" : `layer ${depth - 1}`;

/** Take new numbers, and show them. */
function show(found) {
  data = found;
  document.body.className = "";
  ({ tokens, heads } = data);
  time = tokens.length;
  layers = data.layers.length;
  depths = data.candidates.length - 1;
  shown = viewOf(data);
  products = data.products && {
    scale: data.products.scale,
    query: unpack(data.products.query),
    key: unpack(data.products.key),
  };
  most = Math.log2(data.vocab_size);
  const seen = [tokens, data.candidates, data.other?.candidates ?? []].flat(3);
  widest = Math.max(...seen.map(token => visible(token).length));
  columnWidth = widest <= 2 ? 20 : Math.min(84, 12 + 8 * widest);
  label = Math.min(9, widest) * 8 + 8;  // pixels that a token's name takes
  for (const build of [buildText, buildLens, buildHeads, buildForward, buildTitle, buildTwins]) {
    build();
  }
  measure();
  choose({});
}

const chosen = { query: 0, key: 0, layer: 0, head: 0, depth: Infinity };
const clamp = (x, low, high) => Math.max(low, Math.min(high, x));
function choose(changes) {
  Object.assign(chosen, changes);
  chosen.query = clamp(chosen.query, 0, time - 1);
  chosen.key = clamp(chosen.key, 0, chosen.query);
  chosen.layer = clamp(chosen.layer, 0, Math.max(0, layers - 1));
  chosen.head = clamp(chosen.head, 0, Math.max(0, heads - 1));
  chosen.depth = clamp(chosen.depth, 0, depths);
  draw();
}

// Small things

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}
/** Colours of the style sheet, and widths for pictures: read at once, not between writes. */
let colours, rooms;
function measure() {
  const style = getComputedStyle(document.documentElement);
  const colourOf = name => [name, style.getPropertyValue(`--${name}`).trim()];
  colours = Object.fromEntries(["blue", "amber", "ink", "soft", "line", "mono"].map(colourOf));
  const roomOf = id => $(id).parentElement.clientWidth;
  const lensNames = $("lens").querySelector(".name")?.offsetWidth ?? 0;
  rooms = { map: roomOf("map"), arcs: roomOf("arcs"), curve: roomOf("curve") - 40, lensNames };
}
/** Small weights are visible: opacity is the square root of a weight. */
const opacity = w => Math.sqrt(w);
/** A pixel of a colour such as "29 78 216", transparent, as an integer. */
function pixelOf(colour) {
  const [red, green, blue] = colour.split(" ").map(Number);
  return blue << 16 | green << 8 | red;
}
/** Paint a canvas of a pixel for each entry: what `paint` does with an array of integers. */
function paintPixels(canvas, width, height, paint) {
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  paint(new Uint32Array(image.data.buffer));
  context.putImageData(image, 0, 0);
}

function tip(x, y, text, above = 14) {
  const box = $("tip");
  box.textContent = text;
  const { width, height } = box.getBoundingClientRect();
  const left = clamp(x + 12, 4, innerWidth - width - 4);
  const top = y - height - above < 4 ? y + 20 : y - height - above;
  box.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}
function hideTip() {
  $("tip").textContent = "";
}

/** Hover, touch and keys of a picture: `find` what an event is on, `say` it, `pick` it. */
function explore(picture, { find, say, pick, keys, place }) {
  const show = event => {
    const found = find(event);
    const above = event.pointerType === "touch" ? 36 : 14;
    if (found) tip(event.clientX, event.clientY, say(found), above);
    else hideTip();
  };
  picture.addEventListener("pointermove", show);
  picture.addEventListener("pointerdown", show);
  picture.addEventListener("pointerleave", event => {
    if (event.pointerType !== "touch") hideTip();
  });
  picture.addEventListener("pointercancel", hideTip);
  picture.addEventListener("blur", hideTip);
  picture.addEventListener("click", event => {
    const found = find(event);
    if (found) choose(pick(found));
  });
  picture.addEventListener("keydown", event => {
    const modified = event.ctrlKey || event.metaKey || event.altKey;
    const changes = modified ? null : keys[event.key]?.();
    if (!changes) return;
    event.preventDefault();
    event.stopPropagation();
    choose(changes);
    const { x, y, text } = place();
    tip(x, y, text);
  });
}
const goTo = position => ({ query: position, key: position });
const positionKeys = {
  ArrowLeft: () => goTo(chosen.query - 1),
  ArrowRight: () => goTo(chosen.query + 1),
  Home: () => goTo(0),
  End: () => goTo(time - 1),
};

/** A canvas of a size in CSS pixels, sharp on any screen, empty. */
function prepare(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  const sizes = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== sizes[0] || canvas.height !== sizes[1]) {
    [canvas.width, canvas.height] = sizes;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
/** Scroll a wide picture so that a column is in sight, and nothing else. */
function reveal(scroller, left, width, margin = 0) {
  const end = left + width - scroller.clientWidth;
  if (scroller.scrollLeft > left - margin) scroller.scrollLeft = left - margin - width;
  else if (scroller.scrollLeft < end) scroller.scrollLeft = end + width;
}
