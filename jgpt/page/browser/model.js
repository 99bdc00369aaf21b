// The numbers of the page, computed in the page, by the programs of jgpt/page/numbers.py.
//
//   const model = createModel(description, weights, interpreter);
//   const data = model.compute({tokens: [5, 2, 9], prompt: 3, changes: {heads: [[0, 2, 0]]}});
//
// `description` is what jgpt/page/model.py makes, and `weights` are arrays by name. A request has
//   tokens    the text, of at least one token
//   prompt    the number of its tokens that are the prompt
//   changes   {heads: [[layer, head, factor]], blocks: [[layer, factor]],
//             patch: {layer, position, tokens}}, each of which may be missing. A patch takes what a
//             block returns at a position for other tokens, of which those after it don't matter
//   gradient  whether each array gets `gradient` beside `values`: that of the text's loss for it; or
//             of the loss of one token, for a position after the first
//   hidden    the paths of arrays whose `values` are null
//
// The record has what the page draws of a text. Its arrays are {shape, numbers}. With `gradient` it
// also has `loss`.
"use strict";

function createModel(description, weights, interpreter) {

const {heads, width, blocks, layers} = description;
const machines = new Map();
let last = {};  // the unchanged pass over the last text, which a changed one is compared with

function machineFor(length, kind) {
  const {programs} = description;
  const program = programs.find((each) => each.length >= length) ?? programs[programs.length - 1];
  const key = `${program.length} ${kind}`;
  if (!machines.has(key)) machines.set(key, interpreter.load(program[kind], weights));
  return {machine: machines.get(key), program};
}

// --- inputs --------------------------------------------------------------------------------------

function requireFits(tokens) {
  if (tokens.length === 0) throw new Error("the prompt is empty: give at least one character");
  if (tokens.length > description.block_size) {
    throw new Error(
      `the prompt has ${tokens.length} tokens, more than the block of ${description.block_size}`);
  }
  if (tokens.length > description.most_tokens) {
    throw new Error(`${tokens.length} tokens are too many for a page of this model`);
  }
  for (const token of tokens) {
    if (!(Number.isInteger(token) && token >= 0 && token < description.vocab_size)) {
      throw new Error(`token ${token} is not in the vocabulary of ${description.vocab_size}`);
    }
  }
}

// The inputs for a text, padded at the end: causal attention ignores what follows.
function inputsFor(tokens, length, changes, streams) {
  const padded = new Int32Array(length);
  padded.set(tokens);
  const headFactors = new Float32Array(layers.length * heads).fill(1);
  for (const [layer, head, factor] of changes.heads ?? []) headFactors[layer * heads + head] = factor;
  const blockFactors = new Float32Array(blocks.length).fill(1);
  for (const [layer, factor] of changes.blocks ?? []) blockFactors[layer] = factor;
  const replaced = new Uint8Array(blocks.length * length);
  if (changes.patch) replaced[changes.patch.layer * length + changes.patch.position] = 1;
  const shape = [blocks.length, length, width];
  return {
    "1/tokens": interpreter.array("int32", [1, length], padded),
    "1/heads": interpreter.array("float32", [layers.length, heads], headFactors),
    "1/blocks": interpreter.array("float32", [blocks.length], blockFactors),
    "1/replaced": interpreter.array("bool", [blocks.length, length], replaced),
    "1/streams": streams ?? interpreter.array(
      "float32", shape, new Float32Array(blocks.length * length * width)),
  };
}

// Runs the program for `time` tokens, which may be longer than a text needs.
function run(tokens, changes, streams, names, time = tokens.length) {
  const {machine, program} = machineFor(time, "forward");
  const given = inputsFor(tokens, program.length, changes, streams);
  return {outputs: machine.run(given, names), program};
}

const PREDICTIONS = ["candidates", "log_probabilities", "next_log_probabilities"];

// Heads and blocks of factor 1 are no changes.
function isChange({heads = [], blocks = [], patch}) {
  return Boolean(patch) || heads.some((each) => each[2] !== 1) || blocks.some((each) => each[1] !== 1);
}

// What a patch takes from: the residual streams of its tokens, for a text of `time` tokens.
function streamsFor({patch}, time) {
  if (!patch) return undefined;
  const {position, tokens} = patch;
  if (position >= time) throw new Error(`the text has no token at position ${position}`);
  if (position >= tokens.length) {
    const count = `${tokens.length} token${tokens.length === 1 ? "" : "s"}`;
    throw new Error(`the other prompt has ${count}: a patch at position ${position} needs ` +
      `at least ${position + 1}`);
  }
  const read = tokens.slice(0, position + 1);
  requireFits(read);
  const {outputs: {streams}} = run(read, {}, undefined, ["streams"], time);
  // The interpreter keeps 16-bit floats as float32, so a stream is an input as it is.
  return interpreter.array(
    streams.dtype, streams.shape, Float32Array.from(interpreter.numbersOf(streams)));
}

function compute(request) {
  const {tokens, prompt = tokens.length, changes = {}, gradient = false} = request;
  requireFits(tokens);
  let before = null;
  if (isChange(changes)) {
    const text = tokens.join();
    if (last.text !== text) {
      last = {text, before: predictionsOf(run(tokens, {}, undefined, PREDICTIONS).outputs, tokens)};
    }
    before = last.before;
  }
  const streams = streamsFor(changes, tokens.length);
  const {outputs, program} = run(tokens, changes, streams);
  const arrays = arraysOf(outputs, program.rows, tokens.length, request.hidden ?? []);
  const data = dataOf(tokens, prompt, outputs, arrays, before);
  if (gradient) addGradients(data, gradient, arrays, changes, streams);
  return data;
}

// --- the record ----------------------------------------------------------------------------------

// Nested lists of the numbers of an array, without padding: `sizes` cut its axes.
function nested(x, sizes) {
  const numbers = interpreter.numbersOf(x);
  const fill = (axis, start) => {
    if (axis === x.shape.length) return numbers[start];
    const step = interpreter.sizeOf(x.shape.slice(axis + 1));
    const list = [];
    for (let i = 0; i < sizes[axis]; i++) list.push(fill(axis + 1, start + i * step));
    return list;
  };
  return fill(0, 0);
}

function dataOf(tokens, prompt, outputs, arrays, before) {
  const time = tokens.length;
  const {candidates, log_probabilities: best} = outputs;
  const [depths, , most] = candidates.shape;
  const count = Math.min(most, time === 1 ? description.most_candidates : description.candidates);
  const data = {
    name: description.name,
    vocab_size: description.vocab_size,
    block_size: description.block_size,
    window: description.window,
    prompt,
    tokens,
    candidates: nested(candidates, [depths, time, count]),
    log_probabilities: nested(best, [depths, time, count]),
    next_ranks: nested(outputs.next_ranks, [depths, time - 1]),
    next_log_probabilities: nested(outputs.next_log_probabilities, [depths, time - 1]),
    last: lastOf(candidates, best, depths - 1, time - 1),
    blocks,
    layers,
    heads,
    attention: null,
    products: null,
    before,
  };
  data.arrays = arrays.map(({row, part, isHidden}) => ({
    name: row.name,
    path: row.path,
    dimensions: row.dimensions,
    sizes: row.sizes,
    values: isHidden ? null : valuesOf(part),
  }));
  const maps = layers.map((_, layer) => outputs[`attention/${layer}`]);
  if (maps.length) data.attention = triangles(maps, time);
  const factors = (which) => layers.map((_, layer) => outputs[`products/${layer}/${which}`]);
  if (maps.length && factors(0)[0]) {
    data.products = {
      scale: interpreter.numbersOf(factors(2)[0])[0],
      query: stacked(factors(0), time),
      key: stacked(factors(1), time),
    };
  }
  return data;
}

// All candidates of the last token, from which the sampling parameters choose.
function lastOf(candidates, best, depth, position) {
  const [, length, most] = candidates.shape;
  const start = (depth * length + position) * most;
  const part = (x) => Array.from(interpreter.numbersOf(x).subarray(start, start + most));
  return [part(candidates), part(best)];
}

// The predictions of the unchanged model.
function predictionsOf(outputs, tokens) {
  const time = tokens.length;
  const [depths, , most] = outputs.candidates.shape;
  const atTheEnd = (x, ...sizes) => nested(x, [depths, ...sizes])[depths - 1];
  return {
    log_probabilities: atTheEnd(outputs.log_probabilities, time, most),
    next_log_probabilities: atTheEnd(outputs.next_log_probabilities, time - 1),
    candidates: atTheEnd(outputs.candidates, time, most),
  };
}

function requireFinite(x) {
  if (!interpreter.isFinite(x)) {
    throw new Error("the forward pass is not finite: the model has diverged");
  }
}

// The attention weights up to the diagonal, row by row; those above it are 0.
function triangles(maps, time) {
  const size = time * (time + 1) / 2;
  const weights = new Float32Array(maps.length * heads * size);
  let place = 0;
  for (const map of maps) {
    const numbers = interpreter.numbersOf(map);
    const [, rows, columns] = map.shape;
    for (let head = 0; head < heads; head++) {
      for (let query = 0; query < time; query++) {
        const start = (head * rows + query) * columns;
        weights.set(numbers.subarray(start, start + query + 1), place);
        place += query + 1;
      }
    }
  }
  const shape = [maps.length, heads, size];
  requireFinite(interpreter.array("float32", shape, weights));
  return {shape, numbers: weights};
}

// One array of all layers, without padding along the second axis of each.
function stacked(arrays, time) {
  const [rows, length, features] = arrays[0].shape;
  const numbers = new Float32Array(arrays.length * rows * time * features);
  let place = 0;
  for (const x of arrays) {
    const from = interpreter.numbersOf(x);
    for (let row = 0; row < rows; row++) {
      const start = row * length * features;
      numbers.set(from.subarray(start, start + time * features), place);
      place += time * features;
    }
  }
  return {shape: [arrays.length, rows, time, features], numbers};
}

// An array without padding, with the first axis that grows with the tokens in front.
function byToken(x, tokenAxes, time) {
  const [first] = tokenAxes;
  const order = [first, ...x.shape.map((_, axis) => axis).filter((axis) => axis !== first)];
  const shape = order.map((axis) => tokenAxes.includes(axis) ? time : x.shape[axis]);
  return {...x, shape, strides: order.map((axis) => x.strides[axis])};
}

function valuesOf(x) {
  const numbers = interpreter.copyOf(x);
  const isFloat = numbers instanceof Float32Array;
  return {shape: x.shape, numbers: isFloat ? numbers : Float32Array.from(numbers)};
}

const depthOf = (path) => path.split(".").length;

// Each array that grows with the tokens once: one that a module returns unchanged is shown as the
// result of the outermost such module.
function arraysOf(outputs, rows, time, hidden) {
  let arrays = [];
  rows.forEach((row, index) => {
    const {path, token_axes: tokenAxes} = row;
    if (!tokenAxes.length) return;
    const x = outputs[`arrays/${index}`];
    const sizes = x.shape.map((size, axis) => tokenAxes.includes(axis) ? time : size);
    const part = byToken(x, tokenAxes, time);
    const same = arrays.find((other) =>
      other.row.sizes.join() === sizes.join() && interpreter.isSame(other.part, part));
    if (same) {
      if (depthOf(same.row.path) <= depthOf(path)) return;
      arrays = arrays.filter((other) => other !== same);  // to get the outermost module's place
    }
    arrays.push({row: {...row, sizes, index}, part, isHidden: hidden.includes(path)});
  });
  for (const {part} of arrays) requireFinite(part);
  return arrays;
}

function addGradients(data, of, arrays, changes, streams) {
  const {tokens} = data;
  const predictions = tokens.length - 1;
  if (predictions === 0) throw new Error("a gradient needs a second token: the loss is its");
  const {machine, program} = machineFor(tokens.length, "gradient");
  // The share of each prediction in the loss; a token is predicted at the one before it.
  const shares = new Float32Array(program.length - 1);
  if (of === true) shares.fill(1 / predictions, 0, predictions);
  else shares[of - 1] = 1;
  const given = inputsFor(tokens, program.length, changes, streams);
  given["2"] = interpreter.array("float32", [program.length - 1], shares);
  const outputs = machine.run(given);
  data.loss = interpreter.numbersOf(outputs.loss)[0];
  arrays.forEach(({row}, place) => {
    const x = outputs[`arrays/${row.index}`];
    data.arrays[place].gradient = valuesOf(byToken(x, row.token_axes, tokens.length));
  });
}

// --- writing on ----------------------------------------------------------------------------------

// Reads tokens after those in the cache; returns the logits after the last, and the new cache.
function readOn(cache, tokens) {
  const {programs} = description.decoding;
  const key = `${tokens.length} decoding`;
  if (!machines.has(key)) {
    machines.set(key, interpreter.load(programs[tokens.length], weights));
  }
  const given = {...cache, "2": interpreter.array("int32", [1, tokens.length], tokens)};
  const outputs = machines.get(key).run(given);
  const updated = {};
  for (const name of Object.keys(cache)) updated[name] = outputs[name.replace("1/", "cache/")];
  return {logits: Float32Array.from(interpreter.numbersOf(outputs.logits)), cache: updated};
}

function emptyCache() {
  const {programs, fill} = description.decoding;
  const [program] = Object.values(programs);
  const cache = {};
  for (const [name, value] of Object.entries(fill)) {
    const [dtype, shape] = program.types[program.inputs[name]];
    const numbers = new Array(interpreter.sizeOf(shape)).fill(value[0]);
    cache[name] = interpreter.array(dtype, shape, numbers);
  }
  return cache;
}

// A text that is written on: `logits` are those after its last token, and `append` reads another.
// The programs of the cache know no changes.
function begin(tokens, changes = {}) {
  requireFits(tokens);
  if (!description.decoding || isChange(changes)) return beginWithoutCache(tokens, changes);
  const chunk = Math.max(...Object.keys(description.decoding.programs).map(Number));
  const text = {logits: null, cache: emptyCache()};
  const read = (some) => Object.assign(text, readOn(text.cache, some));
  text.append = (token) => read([token]);
  // First what doesn't fill a chunk, since the cache takes no padding.
  let done = tokens.length % chunk;
  for (const token of tokens.slice(0, done)) read([token]);
  for (; done < tokens.length; done += chunk) read(tokens.slice(done, done + chunk));
  return text;
}

// Reads the whole text for each token.
function beginWithoutCache(tokens, changes) {
  const text = {logits: null};
  let read = [];
  text.append = (token) => {
    read = [...read, token];
    requireFits(read);
    const {rows} = description.programs[0];
    const name = `arrays/${rows.length - 1}`;  // the logits are the last array
    const streams = streamsFor(changes, read.length);
    const x = run(read, changes, streams, [name]).outputs[name];
    const start = (read.length - 1) * description.vocab_size;
    text.logits = Float32Array.from(
      interpreter.numbersOf(x).subarray(start, start + description.vocab_size));
  };
  read = tokens.slice(0, -1);
  text.append(tokens[tokens.length - 1]);
  return text;
}

// Draws token `number` after a prompt, the one that `jgpt.generate` draws with this seed.
function sample(logits, {temperature, seed, number}) {
  if (!machines.has("sampling")) {
    machines.set("sampling", interpreter.load(description.sampling));
  }
  const outputs = machines.get("sampling").run({
    0: interpreter.array("float32", [logits.length], logits),
    1: interpreter.array("uint32", [2], [0, seed]),
    2: interpreter.array("int32", [], [number]),
    3: interpreter.array("float32", [], [temperature]),
  });
  const [token] = Object.values(outputs);
  return interpreter.numbersOf(token)[0];
}

// Logits in which the tokens that top-k, top-p and min-p leave out are -inf, so that none of them is
// drawn. As in jgpt/generation/sampling.py, each filter sees what the one before it keeps.
function filtered(logits, {temperature, top_k: most, top_p: nucleus, min_p: least}) {
  if (temperature === 0 || !(most || nucleus < 1 || least > 0)) return logits;
  let kept = [...logits.keys()].sort((a, b) => logits[b] - logits[a] || a - b);
  if (most) kept = kept.slice(0, most);
  const highest = logits[kept[0]];
  const weightOf = (token) => Math.exp((logits[token] - highest) / temperature);
  if (nucleus < 1) {
    const total = kept.reduce((sum, token) => sum + weightOf(token), 0);
    let before = 0;
    kept = kept.filter((token) => {
      const isIn = before / total < nucleus;
      before += weightOf(token);
      return isIn;
    });
  }
  const result = new Float32Array(logits.length).fill(-Infinity);
  for (const token of kept) {
    if (!(weightOf(token) < least)) result[token] = logits[token];
  }
  return result;
}

// Continues a text by up to `count` tokens, within what a page can show; it yields each as it is
// drawn.
function* writing({tokens, count, changes, seed, ...sampling}) {
  const text = begin(tokens, changes);
  const room = Math.min(count, description.most_tokens - tokens.length);
  for (let number = 0; number < room; number++) {
    const logits = filtered(text.logits, sampling);
    const token = sample(logits, {temperature: sampling.temperature, seed, number});
    yield token;
    if (number + 1 < room) text.append(token);
  }
}

return {compute, begin, sample, writing};
}

if (typeof module !== "undefined") module.exports = createModel;
