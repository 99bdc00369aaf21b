// The page's worker: it computes, so that the page itself never stops. Its script is interpreter.js,
// model.js, weights.js and this file, one after the other.
//
// Messages to the worker, each with an `id` that its answers repeat, larger than those before it:
//   {id, load: {description, weights}}   comes first: what model.py and weights.py of jgpt/page
//                                        make, the description as packed JSON
//   {id, compute: {tokens, prompt, changes, gradient, hidden}}   a record: see model.js
//   {id, write: {tokens, count, changes, seed, temperature, top_k, top_p, min_p}}
//                                        the tokens that follow a text; filters may be missing
//   {stop: id}                           no more tokens are wanted of the question with this id
// Answers:
//   {id, done}    `done` is true, the record, or the list of tokens
//   {id, token}   each token of `write`, as soon as it is drawn
//   {id, error}   why there is none, in one line
"use strict";

// The worker hears nothing while it computes. A turn of its event loop takes some 4 ms, so it
// listens now and then.
const LISTENING_PAUSE = 50;

let workerModel = null;
let lastStopped = -1;

async function answer({id, load, compute, write}) {
  if (load) {
    const weights = await unpackWeights(load.weights, interpreter);
    const description = await unpackJson(load.description);
    workerModel = createModel(description, weights, interpreter);
    return true;
  }
  if (compute) return workerModel.compute(compute);
  return writeOn(id, write);
}

async function writeOn(id, request) {
  const written = [];
  let listened = performance.now();
  for (const token of workerModel.writing(request)) {
    written.push(token);
    postMessage({id, token});
    if (performance.now() - listened < LISTENING_PAUSE) continue;
    await new Promise((done) => { setTimeout(done); });
    if (lastStopped >= id) break;
    listened = performance.now();
  }
  return written;
}

// The buffers of a record, which go to the page instead of being copied.
function buffersOf({arrays = [], attention, products}) {
  const all = [attention, products?.query, products?.key];
  for (const {values, gradient} of arrays) all.push(values, gradient);
  return all.filter((x) => x).map(({numbers}) => numbers.buffer);
}

async function reply(question) {
  try {
    const done = await answer(question);
    postMessage({id: question.id, done}, buffersOf(done));
  } catch (error) {
    postMessage({id: question.id, error: error.message});
  }
}

// One after the other: weights are unpacked in steps, which later messages would overtake.
let turn = Promise.resolve();
onmessage = ({data}) => {
  if (data.stop !== undefined) lastStopped = data.stop;
  else turn = turn.then(() => reply(data));
};
