// Live: what is changed goes to the server, and its numbers come back. The address has all of it

const START = { prompt: "", heads: {}, blocks: {}, patch: null, checkpoint: null, other: null };
const DIALS = {  // start, least, most, step
  temperature: [1, 0, 2, .05],
  "top-k": [0, 0, 50, 1],
  "top-p": [1, .05, 1, .05],
  "min-p": [0, 0, .5, .01],
};
const dials = {};
let state = { ...START };
let first, asking, again, writing;

/** The candidates that remain after temperature, top-k, top-p and min-p, with probabilities. */
function filtered(candidates, { temperature, "top-k": most, "top-p": nucleus, "min-p": least }) {
  if (temperature === 0) return [{ ...candidates[0], probability: 1 }];
  const sum = list => list.reduce((total, each) => total + each.probability, 0);
  const likely = ({ log }) => Math.exp((log - candidates[0].log) / temperature);
  const scaled = candidates.map(each => ({ ...each, probability: likely(each) }));
  const top = scaled.slice(0, most || undefined);
  const whole = sum(top);
  let before = 0;
  const kept = top.filter(({ probability }) => {
    const keep = before / whole < nucleus && probability >= least;
    before += probability;
    return keep;
  });
  const total = sum(kept);
  return kept.map(each => ({ ...each, probability: each.probability / total }));
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
/** What the server answers, or why it doesn't. */
async function ask(what, asked) {
  try {
    const headers = { "Content-Type": "application/json" };
    const answer = await fetch(what, { method: "POST", headers, body: JSON.stringify(asked) });
    return await answer.json();
  } catch {
    return { error: "the server doesn't answer: jgpt look RUN --live opens the page again" };
  }
}
/** Change the state and ask for its numbers; while a request is out, the newest state waits. */
async function change(changes, { follow = false } = {}) {
  state = { ...state, ...changes };
  const hash = `#${encodeURIComponent(JSON.stringify(state))}`;
  if (location.hash !== hash) history.replaceState(null, "", hash);
  again = true;
  asking ??= askAgain(follow).finally(() => { asking = null; });
  return asking;
}
async function askAgain(follow) {
  const slow = setTimeout(say, 1000, "the model computes: beside training it has to wait its turn");
  while (again) {
    again = false;
    const found = await ask("look", state);
    clearTimeout(slow);
    say(found.error ?? "", Boolean(found.error));
    if (found.error) continue;
    if (follow) Object.assign(chosen, goTo(found.tokens.length - 1));
    buildSwitches(found);
    show(found);
  }
}
/** Append a token; whether there was room for it. */
async function write(token) {
  if (time >= data.block_size) {
    say(`the text fills the block of ${data.block_size} tokens`, true);
    return false;
  }
  const prompt = data.text + data.texts[token];
  $("prompt").value = prompt;
  await change({ prompt }, { follow: true });
  return !$("said").classList.contains("wrong");
}
async function writeOn() {
  writing = !writing;
  $("write").textContent = writing ? "Stop" : "Write on";
  while (writing && await write(drawToken())) await new Promise(requestAnimationFrame);
  writing = false;
  $("write").textContent = "Write on";
}

// Heads, blocks and patches

/** A switch for each head, a factor for each block, where the model has them. */
function buildSwitches(found) {
  const drawn = JSON.stringify([found.layers, found.heads, found.blocks]);
  if ($("switches").dataset.of === drawn) return;
  $("switches").dataset.of = drawn;
  const set = (name, place, factor) => {
    const { [place]: _, ...others } = state[name];
    change({ [name]: factor === 1 ? others : { ...others, [place]: factor } });
  };
  const factorOf = block => {
    const factor = element("input", { type: "range", min: 0, max: 2, step: .1 });
    factor.dataset.block = block;
    factor.setAttribute("aria-label", `factor of block ${block}`);
    factor.addEventListener("input", () => set("blocks", block, Number(factor.value)));
    return element("label", {}, `block ${block}`, factor, element("output"));
  };
  const switchOf = (layer, head) => {
    const on = element("input", { type: "checkbox", checked: true });
    on.dataset.head = `${layer}.${head}`;
    on.setAttribute("aria-label", `head ${head} of layer ${layer}`);
    on.addEventListener("change", () => set("heads", `${layer}.${head}`, on.checked ? 1 : 0));
    return element("label", {}, on, `head ${head}`);
  };
  const length = Math.max(found.layers.length, found.blocks.length);
  const rows = Array.from({ length }, (_, i) => {
    const heads = [...Array(found.layers[i] ? found.heads : 0).keys()];
    const factor = found.blocks[i] ? [factorOf(i)] : [];
    return element("div", {}, ...factor, ...heads.map(head => switchOf(i, head)));
  });
  $("switches").replaceChildren(...rows);
  $("patching").hidden = !found.blocks.length;
  $("patch-block").replaceChildren(...found.blocks.map((_, block) =>
    element("option", { value: block, textContent: `block ${block}` })));
  const lacking = [
    found.blocks.some(Boolean) ? "" : "no blocks that add to a stream: none can be scaled",
    found.layers.some(Boolean) ? "" : "no heads that can be switched off",
  ].filter(Boolean);
  $("lacking").textContent = lacking.length ? `This model has ${lacking.join("; and ")}.` : "";
}
function drawChanges() {
  if (!data.live) return;
  for (const input of $("switches").querySelectorAll("input")) {
    const { head, block } = input.dataset;
    if (head) input.checked = (state.heads[head] ?? 1) !== 0;
    else {
      input.value = state.blocks[block] ?? 1;
      input.nextElementSibling.textContent = `× ${Number(input.value).toFixed(1)}`;
    }
  }
  const { before } = data;
  const { query } = chosen;
  const is = lossOf(data.next_log_probabilities[depths]);
  const effects = [];
  if (before && time > 1) {
    const was = lossOf(before.next_log_probabilities);
    const difference = `${is >= was ? "+" : ""}${(is - was).toFixed(3)}`;
    effects.push(`Loss on the text: ${was.toFixed(3)} nats per token before, `
      + `${is.toFixed(3)} now (${difference}).`);
  } else if (time > 1) effects.push(`Loss on the text: ${is.toFixed(3)} nats per token`);
  if (before) {
    const was = `${quoted(before.candidates[query][0])} `
      + number(Math.exp(before.log_probabilities[query][0]));
    const [now] = predictions(depths, query);
    effects.push(`After ${at(query)}: ${was} before, ${quoted(now.token)} `
      + `${number(now.probability)} now.`);
  }
  $("effect").textContent = effects.join(" ");
  $("code").textContent = data.code;
}

// The controls

function startLive(found) {
  first = found;
  START.checkpoint = found.checkpoint;
  document.body.className = "empty";
  document.title = $("title").textContent = `Inside ${found.name}`;
  for (const id of ["live", "training", "changes", "dials"]) $(id).hidden = false;
  measure();
  for (const name of Object.keys(DIALS)) $("dials").append(dialOf(name));
  for (const id of ["checkpoint", "other"]) {
    $(id).addEventListener("change", () => {
      const { value } = $(id);
      change({ [id]: /^\d+$/.test(value) ? Number(value) : value || null });
    });
  }
  $("prompt").addEventListener("input", () =>
    change({ prompt: $("prompt").value }, { follow: true }));
  $("patch").addEventListener("click", () => {
    const prompt = $("patch-prompt").value;
    const block = Number($("patch-block").value);
    change({ patch: prompt ? { block, position: chosen.query, prompt } : null });
  });
  $("sample").addEventListener("click", () => write(drawToken()));
  $("write").addEventListener("click", writeOn);
  $("reset").addEventListener("click", () => {
    change(restored({}));
    drawTraining();
  });
  const inAddress = () => {
    try {
      return JSON.parse(decodeURIComponent(location.hash.slice(1)));
    } catch {
      return {};  // an address without a state
    }
  };
  addEventListener("hashchange", () => change(restored(inAddress())));
  state = restored(inAddress());
  chosen.query = chosen.key = Infinity;
  watchTraining();
}
/** The state that an address has, in the controls too. */
function restored(given) {
  const found = { ...START, prompt: first.text, ...given };
  $("prompt").value = found.prompt;
  $("patch-prompt").value = found.patch?.prompt ?? "";
  return found;
}
function dialOf(name) {
  const [value, min, max, step] = DIALS[name];
  const dial = element("input", { type: "range", id: `dial-${name}`, min, max, step, value });
  const told = element("output");
  const turn = () => {
    dials[name] = Number(dial.value);
    const digits = name === "top-k" ? 0 : 2;
    told.textContent = name === "top-k" && !dials[name] ? "all" : dials[name].toFixed(digits);
  };
  dial.addEventListener("input", () => {
    turn();
    if (chosen.query === time - 1) drawBars();
    else choose(goTo(time - 1));
  });
  turn();
  return element("label", { className: "dial" }, name, dial, told);
}
