// The page's worker: it computes, so that the page itself never stops. Its script is interpreter.js,
// model.js, weights.js and this file, one after the other.
//
// Messages to the worker, each with an `id` that its answers repeat:
//   {id, load: {description, weights}}   comes first: what model.py and weights.py of jgpt/pictures
//                                        make, the description as packed JSON
//   {id, compute: {tokens, prompt, changes, gradient}}             a record of a text: see model.js
//   {id, write: {tokens, count, temperature, seed}}                the tokens that follow a text
// Answers:
//   {id, done}    `done` is true, the record, or the list of tokens
//   {id, token}   each token of `write`, as soon as it is drawn
//   {id, error}   why there is none, in one line
"use strict";

let workerModel = null;

async function answer({id, load, compute, write}) {
  if (load) {
    const weights = await unpackWeights(load.weights, interpreter);
    const description = await unpackJson(load.description);
    workerModel = createModel(description, weights, interpreter);
    return true;
  }
  if (compute) return workerModel.compute(compute);
  return workerModel.write(write, (token) => postMessage({id, token}));
}

async function reply(question) {
  try {
    postMessage({id: question.id, done: await answer(question)});
  } catch (error) {
    postMessage({id: question.id, error: error.message});
  }
}

// One after the other: weights are unpacked in steps, which later messages would overtake.
let turn = Promise.resolve();
onmessage = ({data}) => {
  turn = turn.then(() => reply(data));
};
