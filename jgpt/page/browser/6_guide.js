// Five questions to begin with: each goes to a part of the page, chooses there, and answers

/** What a token is called: most readers know letters, which the tokens of characters are. */
const unit = () => first.vocabulary.kind === "characters" ? "letter" : "token";

/** The questions that the model has an answer to, each with the function that goes there. */
function questions() {
  const hasHeads = data.attention && time > 1;
  const canSwitch = data.layers[chosen.layer] && time > 1;
  return [
    [hasHeads, `Which earlier ${unit()}s made this prediction?`, showEarlier],
    [hasHeads && data.products, "How is that weight computed?", showArithmetic],
    [hasHeads && canSwitch, "What happens without that head?", switchHeadOff],
    [time > 1, `Where does the gradient of this ${unit()}’s loss go?`, showGradient],
    [first.code, "Which line of code made this array?", showLine],
  ].filter(([isThere]) => isThere);
}
function buildGuide() {
  $("unit").textContent = unit();
  $("piece").textContent = unit() === "letter" ? "a letter, a space or a sign"
    : "a word or a part of one";
  if (changed($("answer"), ...tokens)) $("answer").hidden = true;  // it is one of another text
  const buttons = questions().map(([, textContent, answer]) => {
    const button = element("button", { textContent });
    button.onclick = () => {
      lastQuestion = textContent;
      return answer();
    };
    return button;
  });
  if (changed($("questions"), ...buttons.map(button => button.textContent))) {
    $("questions").replaceChildren(...buttons);
  }
}
let lastQuestion = null;  // the question that was last answered
/** Put an answer in front of an element, scroll there, and go on from there with the keyboard. */
function answerAt(place, sentence, ...buttons) {
  const back = element("button", { textContent: "Back to the questions" });
  back.onclick = () => {
    $("guide").scrollIntoView();
    const buttons = [...$("questions").children];
    (buttons.find(button => button.textContent === lastQuestion) ?? buttons[0]).focus();
  };
  $("answer").replaceChildren(element("p", {}, sentence), ...buttons, back);
  place.before($("answer"));
  $("answer").hidden = false;
  $("answer").scrollIntoView({ block: "start" });
  $("answer").focus({ preventScroll: true });
}

/** The layer, head and earlier token with the largest weight of a query. */
function strongest(query) {
  let best = { weight: -1 };
  for (let layer = 0; layer < layers; layer++) {
    for (let head = 0; head < heads; head++) {
      for (let key = 0; key < query; key++) {
        const found = weight(layer, head, query, key);
        if (found > best.weight) best = { layer, head, key, weight: found };
      }
    }
  }
  return best;
}
const share = part => `${(100 * part).toFixed(0)}%`;

function showEarlier() {
  const query = Math.max(1, chosen.query);
  const { layer, head, key, weight: largest } = strongest(query);
  choose({ query, key, layer, head, depth: Infinity });
  const [best] = predictions(depths, query);
  answerAt($("map-title"), `After ${at(query)} the model predicts ${quoted(best.token)}, with the `
    + `probability ${number(best.probability)}. A head of attention takes from earlier ${unit()}s `
    + `what the prediction may need. The largest weight is in head ${head} of layer ${layer}: it `
    + `takes ${share(largest)} from ${at(key)}. That is the framed cell; its row is ${at(query)}. `
    + "The other cells of the row, and the arcs further below, show where this head takes the "
    + "rest from. A large weight doesn't prove that the prediction needs this head.");
}
function showArithmetic() {
  const { query, key, layer, head } = chosen;
  const w = weight(layer, head, query, key);
  answerAt($("why"), `In head ${head} of layer ${layer}, ${at(query)} has a query and ${at(key)} `
    + "has a key. Both are vectors: lists of numbers, called features, which learned matrices make "
    + `of what the layer knows of the two ${unit()}s. They are multiplied feature by feature, and `
    + "the products are added and scaled: that is the score. The exponential of the score, divided "
    + `by the sum of those of all ${unit()}s that ${at(query)} attends to, is the weight `
    + `${number(w)}. The table has all products, the largest first: scroll it.`);
}
async function switchHeadOff() {
  const { query, layer, head } = chosen;
  const name = `${layer}.${head}`;
  const [was] = predictions(depths, query);
  await change({ heads: { ...state.heads, [name]: 0 } });
  choose({ query });
  const i = data.candidates[depths][query].indexOf(was.token);
  const probability = i < 0 ? 0 : Math.exp(data.log_probabilities[depths][query][i]);
  const now = i < 0 ? "is no longer among the likeliest" : `has ${number(probability)}`;
  const on = element("button", { textContent: "Switch it on again" });
  on.onclick = async () => {
    await change({ heads: { ...state.heads, [name]: 1 } });
    answerAt($("effect"), `Head ${head} of layer ${layer} is on again.`);
  };
  answerAt($("effect"), `Head ${head} of layer ${layer} is off and adds nothing. `
    + `${quoted(was.token)} after ${at(query)} had the probability ${number(was.probability)}, `
    + `and now ${now}. ${verdict(was.probability, probability)} The loss on the whole text stands `
    + "below: without a head that matters it is larger.", on);
}
/** What a probability with a head, and then without it, says about the head. */
function verdict(before, after) {
  if (Math.abs(after - before) < .05) {
    return "That is hardly a change: this prediction doesn't need the head.";
  }
  return after < before ? "So the head helps this prediction."
    : "So the head holds this prediction down.";
}
async function showGradient() {
  const position = chosen.query || time - 1;
  await change({ gradient: position });
  if (data.gradientOf !== position) return;
  choose(goTo(position));
  const sizes = flowRows()[0].sizes;
  const order = [...sizes.keys()].sort((a, b) => sizes[b] - sizes[a]);
  const off = element("button", { textContent: "Show the forward pass again" });
  off.onclick = async () => {
    await change({ gradient: false });
    off.remove();
    $("answer").focus();
  };
  answerAt($("flow"), `The loss of ${at(position)} is ${data.loss.toFixed(2)} nats: minus the `
    + "logarithm of the probability that the model gave it. Its gradient flows back through the "
    + `layers to the ${unit()}s before it. At the embeddings it is largest for ${at(order[0])}`
    + `${sizes[order[1]] > 0 ? ` and ${at(order[1])}` : ""}: what they are changes this loss most. `
    + `It is zero from ${at(position)} on, since a prediction sees only what comes before.`, off);
}
async function showLine() {
  const part = parts.find(({ array: { path, name } }) => name === "attention_weights"
    && path.startsWith(first.paths.blocks[chosen.layer])) ?? parts.find(lineOf);
  part.group.open = true;
  part.row.open = true;
  // The forward pass's numbers of the whole group: what comes later would push the answer away.
  if (data.gradientOf || !part.array.values) await change({ gradient: false });
  const { file, name, number: line, text } = lineOf(part);
  answerAt(part.row, `The array ${part.array.name} was made by line ${line} of ${file}, in ${name}: `
    + `“${text.trim()}”. Below, this line is marked in its function, with the shape of what each `
    + "line makes. Every other array has its line, too: open one.");
}
