// The page holds its model: a worker computes its numbers

let tokenizer, worker;
const asked = new Map();  // what waits for the worker's answer, by number
let nextQuestion = 0;

/** The worker's answer to a question; it throws an Error with the reason if there is none. `heard`
 *  gets each token that is written. */
function askWorker(question, heard) {
  return new Promise((done, fail) => {
    const id = nextQuestion++;
    asked.set(id, { done, fail, heard });
    worker.postMessage({ id, ...question });
  });
}
function hearWorker({ data: { id, done, error, token } }) {
  const { done: resolve, fail, heard } = asked.get(id);
  if (token !== undefined) {
    heard?.(token);
    return;
  }
  asked.delete(id);
  if (error === undefined) resolve(done);
  else fail(new Error(error));
}

/** A switch between the numbers of the forward pass and the gradient of the loss for each. */
function startGradient() {
  $("gradient").onchange = () => change({ gradient: $("gradient").checked });
  $("gradient-of").onclick = () => {
    $("gradient").checked = true;
    change({ gradient: Math.max(1, chosen.query) });
  };
}

/** Start the worker with the model of the page. */
async function startWorker({ worker: source, description, weights, vocabulary }) {
  say("unpacking the model");
  startGradient();
  startPatch();
  $("write").onclick = writeOnInWorker;
  tokenizer = makeTokenizer(vocabulary);
  worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  worker.onmessage = hearWorker;
  worker.onerror = ({ message }) => {
    for (const { fail } of asked.values()) fail(new Error(message ?? FORBIDDEN));
    asked.clear();
  };
  await askWorker({ load: { description, weights } });
}
/** Why a worker doesn't start, of which the browser says nothing. */
const FORBIDDEN = "the browser doesn't let the page's worker start. On a web server, the header "
  + "Content-Security-Policy must have “worker-src blob:”. A copy on your disk needs no header";
/** Say why nothing can be computed, and take no text. */
function giveUp({ message }) {
  for (const id of ["prompt", "sample", "write", "reset"]) $(id).disabled = true;
  say(`This page can't compute: ${message}.`, true);
}

/** Show the text that the page begins with, or that a link has. */
async function showFirst() {
  const began = performance.now();
  await change({});
  sayHowClose((performance.now() - began) / 1000);
}

/** The numbers of a state, or why there are none. */
async function computed(state) {
  stopWriting();
  try {
    const { prompt } = state;
    const tokens = tokensOf(prompt);
    const gradient = gradientOf(state, tokens.length);
    const { patch, problem } = patchOf(state, tokens.length);
    const changes = { ...changesOf(state), patch };
    const count = clamp(givenTokens.get(prompt) ?? tokens.length, 1, tokens.length);
    const hidden = gradient ? [] : hiddenPaths();
    const compute = { tokens, prompt: count, changes, gradient, hidden };
    const record = await askWorker({ compute });
    record.texts = textsOf(record);
    if (gradient) for (const array of record.arrays) array.values = array.gradient;
    const code = codeOf(problem ? { ...state, patch: null } : state, first.paths);
    drawPatch(state, problem);
    $("gradient").checked = Boolean(gradient);
    $("gradient").disabled = tokens.length < 2;
    return { ...record, text: prompt, code, gradientOf: gradient };
  } catch (error) {
    return { error: error.message };
  }
}
/** What of a text of `time` tokens the gradient is of: the loss of all (true), or that of a token. A
 *  single token has no loss. */
function gradientOf({ gradient }, time) {
  if (time < 2) return false;
  if (typeof gradient !== "number") return gradient;
  return clamp(gradient, 1, time - 1);
}
/** The changes of a state as the worker takes them, without its patch. */
function changesOf({ heads, blocks }) {
  return {
    heads: Object.entries(heads).map(([name, factor]) => [...name.split(".").map(Number), factor]),
    blocks: Object.entries(blocks).map(([layer, factor]) => [Number(layer), factor]),
  };
}

// Patches: one that doesn't fit a text waits beside its controls, and the text is shown without it

/** The patch of a state as the worker takes it, or the reason why a text of `time` tokens has none. */
function patchOf({ patch }, time) {
  if (!patch) return {};
  const { block: layer, position, prompt } = patch;
  if (position >= time) {
    return { problem: `The patch waits: the text has no token at position ${position}.` };
  }
  try {
    const tokens = tokenizer.encode(prompt);
    if (position < tokens.length) return { patch: { layer, position, tokens } };
    return { problem: `The patch is left out: ${quotedText(prompt)} has no token at position `
      + `${position}, but ${tokens.length} in all.` };
  } catch (error) {
    return { problem: `The patch is left out: ${error.message}.` };
  }
}
const quotedText = text => `“${text.length > 40 ? `${text.slice(0, 40)}…` : text}”`;
function startPatch() {
  const enable = () => { $("patch").disabled = !$("patch-prompt").value; };
  $("patch-prompt").oninput = enable;
  $("unpatch").onclick = () => {
    $("patch-prompt").value = "";
    $("patch-prompt").focus();  // the button goes
    enable();
    change({ patch: null });
  };
}
/** Say what the patch is, or why there is none. */
function drawPatch({ patch }, problem) {
  $("patch").disabled = !$("patch-prompt").value;
  $("unpatch").hidden = !patch;
  $("patch-said").classList.toggle("wrong", Boolean(problem));
  $("patch-said").textContent = problem ?? (patch
    ? `Block ${patch.block} returns at position ${patch.position} what it returns there for `
      + `${quotedText(patch.prompt)}.`
    : "");
}

// Writing on: the worker reads one token after the other into its cache

/** The text that is written, or was last: its tokens, and what the text box shows of it. */
let written;

/** The tokens of a text. One that was written keeps those that were drawn, since a tokenizer may
 *  make other ones of it. */
function tokensOf(text) {
  return written?.text === text ? written.tokens : tokenizer.encode(text);
}
function stopWriting() {
  if (!writing) return;
  written.isStopped = true;
  worker.postMessage({ stop: written.id });
}
/** What the dials say of sampling. */
function dials() {
  const value = id => Number($(id).value);
  return {
    temperature: value("temperature"),
    top_k: value("top-k"),
    top_p: value("top-p"),
    min_p: value("min-p"),
  };
}
async function writeOnInWorker() {
  if (writing) {
    stopWriting();
    return;
  }
  await asking;
  if (data?.text !== state.prompt) return;  // what is wrong with the text is said beside it
  const before = data.tokens.length;
  const seed = crypto.getRandomValues(new Uint32Array(1))[0];
  const { patch } = patchOf(state, before);
  const changes = { ...changesOf(state), patch };
  const write = { tokens: data.tokens, count: data.block_size, changes, seed, ...dials() };
  writing = true;
  written = {
    id: nextQuestion,
    before,
    tokens: [...data.tokens],
    text: data.text,
    shown: $("prompt").value,
  };
  $("write").textContent = "Stop";
  const began = performance.now();
  try {
    await askWorker({ write }, hearToken);
  } catch (error) {
    say(error.message, true);
  }
  const seconds = (performance.now() - began) / 1000;
  writing = false;
  $("write").textContent = "Write on";
  if ($("prompt").value !== written.shown) return;  // something else was typed
  const count = written.tokens.length - before;
  if (count === 0) {
    say(`the text has ${before} tokens, as many as a page shows`, true);
    return;
  }
  showWritten();
  givenTokens.set(written.text, data.prompt);
  await change({ prompt: written.text });
  const end = written.isStopped ? "" : ". The text is now as long as a page shows";
  say(`${count} tokens, ${Math.round(count / seconds)} a second, with seed ${seed}${end}`);
}
function hearToken(token) {
  written.tokens.push(token);
  written.drawing ??= requestAnimationFrame(() => {
    written.drawing = null;
    if (writing && $("prompt").value === written.shown) showWritten();
  });
}
/** Show the text that is written so far, a new part as soon as its characters are whole. */
function showWritten() {
  const { tokens, before } = written;
  written.text = data.text + tokenizer.decode(tokens.slice(before));
  $("prompt").value = written.text;
  written.shown = $("prompt").value;  // in which line ends are one character
  $("prompt").scrollTop = $("prompt").scrollHeight;
}

/** The text of each token in a record. */
function textsOf({ tokens, candidates, last }) {
  const all = new Set([...tokens, ...candidates.flat(2), ...last[0]]);
  return Object.fromEntries([...all].map(token => [token, tokenizer.textOf(token)]));
}

/** Python code that computes the changed logits with `jgpt.edit`. */
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

/** Say what the page is, that it is slow if its first numbers took many seconds, and how far they are
 *  from JAX's, unless a link changes them. */
function sayHowClose(seconds) {
  const { text, precision } = first;
  const contents = [...document.querySelectorAll("script, style")];
  const megabytes = sum(contents.map(each => each.textContent.length)) / 1e6;
  const sentences = [`This file of ${megabytes.toFixed(1)} MB holds the model, with weights in `
    + `${precision}, and computes every number here.`];
  if (data && state.prompt === text && !data.before) {
    sentences.push(`On the first text its log probabilities are within ${distance()}.`);
  }
  if (seconds > 2) {
    sentences.push(`Its numbers took ${seconds.toFixed(0)} s: a model of this size is slow in a `
      + "browser, and slower for longer texts.");
  }
  $("closeness").textContent = sentences.join(" ");
}
/** How far the numbers of the first text are from those that JAX computes, in words. */
function distance() {
  const { expected, expected_unpacked: expectedUnpacked } = first;
  if (!expectedUnpacked) return `${farthest(expected)} of JAX's`;
  return `${farthest(expectedUnpacked)} of those that JAX computes with these weights, and `
    + `within ${farthest(expected)} of those with the model's own weights`;
}
/** The largest difference between the log probabilities and others, relative to the largest of
 *  those. */
function farthest(others) {
  const found = data.log_probabilities[depths].flat();
  const largest = Math.max(...others.map(Math.abs));
  const apart = Math.max(...others.map((x, i) => Math.abs(x - found[i]))) / largest;
  return apart.toExponential(0);
}
