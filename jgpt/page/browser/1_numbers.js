"use strict";

// The numbers of a page, what they say, and what is chosen of them

const $ = id => document.getElementById(id);
let data, tokens, time, layers, heads, depths, widest;

/** The attention weight of a query on a key, which isn't after it: rows of a triangle, joined. */
function weight(layer, head, query, key) {
  const triangle = time * (time + 1) / 2;
  const row = (layer * heads + head) * triangle + query * (query + 1) / 2;
  return data.attention.numbers[row + key];
}

/** The most likely next tokens at a position, read after so many blocks. */
const predictions = (depth, position) => data.candidates[depth][position].map(
  (token, i) => ({ token, probability: Math.exp(data.log_probabilities[depth][position][i]) }));

/** What was predicted of the token that follows a position; null after the last one. */
function following(depth, position) {
  if (position === time - 1) return null;
  const log = data.next_log_probabilities[depth][position];
  const rank = data.next_ranks[depth][position];
  return { token: tokens[position + 1], probability: Math.exp(log), bits: -log / Math.LN2, rank };
}
/** What the model gave the token at a position; null for the first one. */
const surprise = position => position ? following(depths, position - 1) : null;
const sum = list => list.reduce((a, b) => a + b, 0);
/** The loss on a text, in nats per token. */
const lossOf = logs => -sum(logs) / logs.length;

const MARKS = { "\n": "⏎", " ": "␣", "\t": "⇥" };
const visible = token => data.texts[token]
  .replace(/[\x00-\x20]/g, c => MARKS[c] ?? String.fromCharCode(0x2400 + c.charCodeAt(0))) || "∅";
/** A name that fits a column. */
const cut = token => visible(token).slice(0, 9);
const quoted = token => `“${visible(token)}”`;
const at = position => `${quoted(tokens[position])} (${position})`;
const number = p => p >= 1e-4 || p === 0 ? p.toFixed(4) : p.toExponential(1);
const likely = each => `${quoted(each.token)} ${number(each.probability)}`;
const depthName = depth => depth === 0 ? "embeddings" : `layer ${depth - 1}`;

/** Take new numbers, and show them. */
function show(found) {
  data = found;
  ({ tokens, heads } = data);
  time = tokens.length;
  layers = data.layers.length;
  depths = data.candidates.length - 1;
  const texts = Object.keys(data.texts);
  widest = Math.min(9, Math.max(...texts.map(token => visible(token).length)));
  buildTitle();
  buildText();
  buildLens();
  buildNames();
  buildHeads();
  buildForward();
  buildSwitches();
  choose({});
  buildGuide();
}

const chosen = { query: 0, key: 0, layer: 0, head: 0, depth: Infinity };
const clamp = (x, low, high) => Math.max(low, Math.min(high, x));
function choose(changes) {
  Object.assign(chosen, changes);
  chosen.query = clamp(chosen.query, 0, time - 1);
  chosen.key = clamp(chosen.key, 0, chosen.query);
  chosen.layer = clamp(chosen.layer, 0, layers - 1);
  chosen.head = clamp(chosen.head, 0, heads - 1);
  chosen.depth = clamp(chosen.depth, 0, depths);
  draw();
  putInAddressSoon();
}
const goTo = position => ({ query: position, key: position });
