// A page that holds its model: a worker computes the numbers that a server would send

let tokenizer, worker;
const asked = new Map();  // what waits for the worker's answer, by number

/** The worker's answer to a question; it throws an Error with the reason if there is none. */
function askWorker(question) {
  return new Promise((done, fail) => {
    const id = asked.size ? Math.max(...asked.keys()) + 1 : 0;
    asked.set(id, { done, fail });
    worker.postMessage({ id, ...question });
  });
}
function hearWorker({ data: { id, done, error, token } }) {
  if (token !== undefined) return;  // while it writes: the whole text comes at the end
  const { done: resolve, fail } = asked.get(id);
  asked.delete(id);
  if (error === undefined) resolve(done);
  else fail(new Error(error));
}

/** A switch between the numbers of the forward pass and the gradient of the loss for each. */
function startGradient() {
  $("gradient-part").hidden = false;
  $("gradient").onchange = () => change({ gradient: $("gradient").checked });
}

/** Start the worker with the model of the page, and show the text that the page begins with. */
async function startWorker({ worker: source, description, weights, vocabulary }) {
  say("unpacking the model");
  startGradient();
  tokenizer = makeTokenizer(vocabulary);
  worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  worker.onmessage = hearWorker;
  await askWorker({ load: { description, weights } });
  await change({});
  sayHowClose();
}

/** The numbers of a state, or why there are none: what a server answers to `look`. */
async function computed(state) {
  try {
    const { prompt, gradient } = state;
    const tokens = tokenizer.encode(prompt);
    const changes = changesOf(state);
    const record = await askWorker({ compute: { tokens, changes, gradient } });
    if (gradient) for (const array of record.arrays) array.values = array.gradient;
    const code = codeOf(state, first.paths);
    return { ...record, texts: textsOf(record), other: null, live: true, text: prompt, code };
  } catch (error) {
    return { error: error.message };
  }
}
/** The changes of a state as the worker takes them. */
function changesOf({ heads, blocks, patch }) {
  const changes = {
    heads: Object.entries(heads).map(([name, factor]) => [...name.split(".").map(Number), factor]),
    blocks: Object.entries(blocks).map(([layer, factor]) => [Number(layer), factor]),
  };
  if (patch) {
    const { block: layer, position, prompt } = patch;
    changes.patch = { layer, position, tokens: tokenizer.encode(prompt) };
  }
  return changes;
}
/** The text of each token in a record. */
function textsOf({ tokens, candidates, last }) {
  const all = new Set([...tokens, ...candidates.flat(2), ...last[0]]);
  return Object.fromEntries([...all].map(token => [token, tokenizer.textOf(token)]));
}

/** Python code that computes the changed logits with `jgpt.edit`, as Changes.as_code writes it. */
function codeOf({ prompt, heads, blocks, patch }, paths) {
  const edits = new Map();
  for (const [name, factor] of Object.entries(heads).sort()) {
    if (factor === 1) continue;
    const [layer, head] = name.split(".");
    const path = paths.heads[layer];
    edits.set(path, `${edits.get(path) ?? "x"}.at[:, ${head}].multiply(${factor})`);
  }
  for (const [layer, factor] of Object.entries(blocks)) {
    if (factor === 1) continue;
    for (const path of paths.branches[layer]) edits.set(path, `${factor} * x`);
  }
  const tokensOf = text => `jnp.asarray(tokenizer.encode(${JSON.stringify(text)}))[None]`;
  const lines = [`tokens = ${tokensOf(prompt)}`];
  if (patch) {
    const path = paths.blocks[patch.block];
    lines.push(`other = ${tokensOf(patch.prompt)}`);
    lines.push(`patch = jgpt.capture(model, "${path}")(other)["${path}"][:, ${patch.position}]`);
    edits.set(path, `x.at[:, ${patch.position}].set(patch)`);
  }
  if (!edits.size) return "logits = model(tokens)";
  const rows = [...edits].map(([path, expression]) => `    "${path}": lambda x: ${expression},`);
  return [...lines, "edits = {", ...rows, "}", "logits = jgpt.edit(model, edits)(tokens)"].join("\n");
}

/** Say what the page is, and how far its first numbers are from JAX's, unless a link changes them. */
function sayHowClose() {
  const { expected, precision } = first;
  const sentences = [`This file holds the model, with weights in ${precision}, and computes every `
    + "number here."];
  if (data && state.prompt === first.text && !data.before) {
    const found = data.log_probabilities[depths].flat();
    const largest = Math.max(...expected.map(Math.abs));
    const apart = Math.max(...expected.map((x, i) => Math.abs(x - found[i]))) / largest;
    sentences.push("On the first text its log probabilities are within "
      + `${apart.toExponential(0)} of JAX's.`);
  }
  $("closeness").textContent = sentences.join(" ");
}
