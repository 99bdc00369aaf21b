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
  $("guide").hidden = Boolean(data.difference);  // an answer is one model's
  $("unit").textContent = unit();
  const buttons = questions().map(([, textContent, onclick]) =>
    element("button", { textContent, onclick }));
  if (changed($("questions"), ...buttons.map(button => button.textContent))) {
    $("questions").replaceChildren(...buttons);
  }
}
/** Put an answer in front of an element, and scroll there. */
function answerAt(place, sentence, ...buttons) {
  const back = element("button", { textContent: "Back to the questions" });
  back.onclick = () => {
    $("guide").scrollIntoView();
    $("questions").querySelector("button").focus();
  };
  $("answer").replaceChildren(element("p", {}, sentence), ...buttons, back);
  place.before($("answer"));
  $("answer").hidden = false;
  $("answer").scrollIntoView({ block: "start" });
}

/** The token whose successor is predicted best, but not at the beginning, which says little. */
function bestPredicted() {
  const logs = data.next_log_probabilities[depths];
  const places = logs.map((_, position) => position).filter(position => position >= time / 4);
  return places.reduce((best, each) => logs[each] > logs[best] ? each : best, places.at(-1) ?? 0);
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
  const query = Math.max(1, bestPredicted());
  const { layer, head, key, weight: largest } = strongest(query);
  choose({ query, key, layer, head, depth: Infinity });
  const [best] = predictions(depths, query);
  answerAt($("map-title"), `After ${at(query)} the model predicts ${quoted(best.token)}, with the `
    + `probability ${number(best.probability)}. A head of attention takes from earlier ${unit()}s `
    + `what the prediction needs. The strongest one here is head ${head} of layer ${layer}: it `
    + `takes ${share(largest)} from ${at(key)}. That is the framed cell; its row is ${at(query)}.`);
}
function showArithmetic() {
  const { query, key, layer, head } = chosen;
  const w = weight(layer, head, query, key);
  answerAt($("why"), `In head ${head} of layer ${layer}, ${at(query)} has a query and ${at(key)} `
    + "has a key, both vectors. They are multiplied feature by feature, and the products are "
    + "added and scaled: that is the score. The exponential of the score, divided by the sum of "
    + `those of all ${unit()}s up to ${at(query)}, is the weight ${number(w)}.`);
}
async function switchHeadOff() {
  const { query, layer, head } = chosen;
  const name = `${layer}.${head}`;
  const [was] = predictions(depths, query);
  await change({ heads: { ...state.heads, [name]: 0 } });
  choose({ query });
  const i = data.candidates[depths][query].indexOf(was.token);
  const now = i < 0 ? "is no longer among the likeliest"
    : `has ${number(Math.exp(data.log_probabilities[depths][query][i]))}`;
  const on = element("button", { textContent: "Switch it on again" });
  on.onclick = async () => {
    await change({ heads: { ...state.heads, [name]: 1 } });
    on.remove();
  };
  answerAt($("effect"), `Head ${head} of layer ${layer} is off and adds nothing. `
    + `${quoted(was.token)} after ${at(query)} had the probability ${number(was.probability)}, `
    + `and now ${now}. The loss on the whole text stands below: a head that matters raises it.`, on);
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
  if (!part.array.values) await change({});
  drawPart(part);
  const { file, name, number: line, text } = lineOf(part);
  answerAt(part.row, `The array ${part.array.name} was made by line ${line} of ${file}, in ${name}: `
    + `“${text.trim()}”. Below, this line is marked in its function, with the shape of what each `
    + "line makes. Every other array has its line, too: open one.");
}
