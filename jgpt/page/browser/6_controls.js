// The controls: what is changed goes to the worker, and its numbers come back. The address has all
// of it, and what is chosen

let first, state, asking, again, writing, addressing;
/** For each text that the model has written a part of: how many of its first tokens were given. */
const givenTokens = new Map();

/** What the dials leave of the candidates, with probabilities. */
function filtered(candidates) {
  const ids = ["temperature", "top-k", "top-p", "min-p"];
  const [temperature, most, nucleus, least] = ids.map(id => Number($(id).value));
  if (temperature === 0) return [{ ...candidates[0], probability: 1 }];
  const total = list => sum(list.map(each => each.probability));
  const scaled = candidates.slice(0, most || undefined).map(({ token, log }) =>
    ({ token, probability: Math.exp((log - candidates[0].log) / temperature) }));
  const whole = total(scaled);
  let before = 0;
  const kept = scaled.filter(({ probability }) => {
    const keep = before / whole < nucleus && probability >= least;
    before += probability;
    return keep;
  });
  return kept.map(({ token, probability }) => ({ token, probability: probability / total(kept) }));
}
function drawToken() {
  let left = Math.random();
  const kept = distribution(depths, time - 1);
  return (kept.find(each => (left -= each.probability) < 0) ?? kept.at(-1)).token;
}
function say(text, wrong = false) {
  $("said").textContent = text;
  $("said").classList.toggle("wrong", wrong);
}
/** Change the state and ask for its numbers; while a request is out, the newest state waits. */
async function change(changes) {
  state = { ...state, ...changes };
  putInAddressSoon();
  again = true;
  asking ??= askAgain().finally(() => { asking = null; });
  return asking;
}
/** Put the state into the address when nothing has changed for a moment: Safari refuses more than a
 *  hundred addresses in half a minute, and typing is faster. */
function putInAddressSoon() {
  clearTimeout(addressing);
  addressing = setTimeout(putInAddress, 300);
}
/** Put the state and what is chosen into the address, if there is one: a frame in a notebook has
 *  none. */
function putInAddress() {
  if (location.protocol === "about:") return;
  const link = JSON.stringify({ ...state, given: givenTokens.get(state.prompt), chosen });
  history.replaceState(null, "", `#${encodeURIComponent(link)}`);
}
async function askAgain() {
  const slow = setTimeout(say, 1000, "the model computes");
  while (again) {
    again = false;
    const found = await computed(state);
    clearTimeout(slow);
    const isFormer = Boolean(found.error && data) && data.text !== state.prompt;
    setAside(isFormer);
    const former = isFormer ? `. Below is still the text before: ${quotedText(data.text)}` : "";
    say(found.error ? found.error + former : "", Boolean(found.error));
    if (found.error) continue;
    if (found.text !== data?.text) Object.assign(chosen, goTo(found.tokens.length - 1));
    show(found);
  }
}
/** Dim what is of another text than the prompt's, and take it out of reach of keys and screen readers:
 *  what is wrong with the prompt is said beside it. */
function setAside(isFormer) {
  const places = "#questions, section:not(#guide, #writing)";
  for (const place of document.querySelectorAll(places)) place.inert = isFormer;
}
/** Append a token. */
async function write(token) {
  if (data.text !== state.prompt) return;  // another text was typed, or is wrong
  if (time >= data.block_size) {
    say(`the text fills the block of ${data.block_size} tokens`, true);
    return;
  }
  const prompt = data.text + data.texts[token];
  givenTokens.set(prompt, data.prompt);
  $("prompt").value = prompt;
  await change({ prompt });
}
async function sampleToken() {
  await asking;
  if (data) await write(drawToken());
}

// Heads, blocks and patches

/** A factor for each block and a switch for each head, where the model has them. */
function buildSwitches() {
  const { blocks } = data;
  if (!changed($("switches"), heads, String(data.layers), String(blocks))) return;
  const inputOf = (type, kind, name, ariaLabel) => {
    const input = element("input", { type, kind, name, ariaLabel, min: 0, max: 2, step: .1 });
    input.oninput = () => {
      const factor = Number(type === "range" ? input.value : input.checked);
      const { [name]: _, ...others } = state[kind];
      change({ [kind]: factor === 1 ? others : { ...others, [name]: factor } });
    };
    return input;
  };
  $("switches").replaceChildren();
  for (let layer = 0; layer < Math.max(layers, blocks.length); layer++) {
    const row = element("div");
    if (blocks[layer]) {
      const factor = inputOf("range", "blocks", layer, `factor of block ${layer}`);
      row.append(element("label", {}, `block ${layer}`, factor, element("output")));
    }
    for (let head = 0; data.layers[layer] && head < heads; head++) {
      const name = `${layer}.${head}`;
      const on = inputOf("checkbox", "heads", name, `head ${head} of layer ${layer}`);
      row.append(element("label", {}, on, `head ${head}`));
    }
    $("switches").append(row);
  }
  $("patching").hidden = !blocks.length;
  $("patch-block").max = blocks.length - 1;
}
function drawChanges() {
  for (const input of $("switches").querySelectorAll("input")) {
    const factor = state[input.kind][input.name] ?? 1;
    input.checked = factor !== 0;
    input.value = factor;
    input.nextElementSibling?.replaceChildren(`× ${factor.toFixed(1)}`);
  }
  const { before } = data;
  const { query } = chosen;
  let effect = describeLoss();
  if (before) {
    const [token] = before.candidates[query];
    const was = likely({ token, probability: Math.exp(before.log_probabilities[query][0]) });
    const now = likely(predictions(depths, query)[0]);
    effect += ` After ${at(query)}: ${was} before, ${now} now.`;
  }
  $("effect").textContent = effect;
  $("code").textContent = data.code;
}
/** The loss on the text, of which a single token has none, and what a change did to it. */
function describeLoss() {
  if (time === 1) return "";
  const { before } = data;
  const is = lossOf(data.next_log_probabilities[depths]);
  const loss = "Loss on the text:";
  if (!before) return `${loss} ${is.toFixed(3)} nats per token.`;
  const was = lossOf(before.next_log_probabilities);
  const difference = `${is >= was ? "+" : ""}${(is - was).toFixed(3)}`;
  return `${loss} ${was.toFixed(3)} nats per token before, ${is.toFixed(3)} now (${difference}).`;
}

// The controls

function start(found) {
  first = found;
  givenTokens.set(first.text, first.prompt);
  document.title = $("title").textContent = `Inside ${found.name}`;
  for (const dial of $("dials").querySelectorAll("input")) {
    dial.after(element("output", {}, dial.value));
    dial.oninput = () => {
      dial.nextElementSibling.textContent = dial.value;
      choose({ query: time - 1 });
    };
  }
  $("prompt").oninput = () => change({ prompt: $("prompt").value });
  $("patch").onclick = () => {
    const prompt = $("patch-prompt").value;
    const block = Number($("patch-block").value);
    change({ patch: prompt ? { block, position: chosen.query, prompt } : null });
  };
  $("sample").onclick = sampleToken;
  $("reset").onclick = () => change(restored({}));
  addEventListener("hashchange", openLink);
  const link = inAddress();
  state = restored(link);
  startWorker(found).then(async () => {
    await showFirst();
    choose(placeIn(link));
  }, giveUp);
}
/** Show what another link to this page holds. */
async function openLink() {
  const link = inAddress();
  await change(restored(link));
  choose(placeIn(link));
}
function inAddress() {
  try {
    return JSON.parse(decodeURIComponent(location.hash.slice(1))) ?? {};
  } catch {
    return {};  // an address without a state
  }
}
/** What a link chooses: whole numbers, whatever else was written into it. */
function placeIn({ chosen: place }) {
  const isPlace = ([name, value]) => Object.hasOwn(chosen, name) && Number.isInteger(value);
  return Object.fromEntries(Object.entries(place ?? {}).filter(isPlace));
}
/** What a link changes in this model, whatever else was written into it: it may be another model's. */
function changesIn({ heads, blocks, patch, gradient }) {
  const { paths } = first;
  const isIndex = (x, count) => Number.isInteger(x) && x >= 0 && x < count;
  const isHead = name => {
    const [layer, head] = name.split(".").map(Number);
    return name === `${layer}.${head}` && isIndex(head, first.heads) && paths.heads[layer];
  };
  const isBlock = name => isIndex(Number(name), paths.blocks.length) && paths.branches[name]?.length;
  const isFactor = factor => typeof factor === "number" && factor >= 0 && factor <= 2;
  const factorsOf = (given, isPart) => Object.fromEntries(
    Object.entries(given ?? {}).filter(([name, factor]) => isPart(name) && isFactor(factor)));
  const isPatch = isIndex(patch?.block, paths.blocks.length) && isIndex(patch.position, Infinity)
    && typeof patch.prompt === "string";
  return {
    heads: factorsOf(heads, isHead),
    blocks: factorsOf(blocks, isBlock),
    patch: isPatch ? patch : null,
    gradient: gradient === true || (Number.isInteger(gradient) && gradient),
  };
}
/** A state that lacks nothing, in the controls too. */
function restored(link) {
  const { prompt, given } = link;
  const found = { prompt: typeof prompt === "string" ? prompt : first.text, ...changesIn(link) };
  if (Number.isInteger(given)) givenTokens.set(found.prompt, given);
  $("prompt").value = found.prompt;
  $("patch-prompt").value = found.patch?.prompt ?? "";
  $("gradient").checked = found.gradient;
  return found;
}
