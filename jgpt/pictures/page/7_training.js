// A run in training: the loss curve, samples and attention grow with its checkpoints

let training;
let snapshots = new Map();
/** Ask how training goes, again and again; the longer an answer takes, the less often. */
async function watchTraining() {
  const began = performance.now();
  const hidden = document.hidden && training;
  const found = hidden ? { unchanged: true } : await ask("training", { since: training?.at });
  const pause = Math.max(2000, 20 * (performance.now() - began));
  await follow(found);
  setTimeout(watchTraining, pause);
}
async function follow(found) {
  if (found.error) $("progress").textContent = found.error;
  if (found.error || found.unchanged) return;
  if (found.step < training?.step) snapshots = new Map();  // the run began again
  training = found;
  drawTraining();
  const wanted = found.named[state.checkpoint] ?? state.checkpoint;
  if (found.checkpoints.length && data?.checkpoint !== wanted) await change({});
  for (const step of found.checkpoints.filter(step => !snapshots.has(step))) {
    const snapshot = await ask("checkpoint", { checkpoint: step });
    if (snapshot.error) training.at = null;  // asked again, even if no file changes
    else snapshots.set(step, snapshot);
    drawGrowth();
  }
}
function drawTraining() {
  if (!training) return;
  const { step, steps, each, checkpoints } = training;
  const waiting = checkpoints.length ? ""
    : ". The first checkpoint comes with the first evaluations";
  $("progress").textContent = `Step ${step} of ${steps}${waiting}`;
  const means = each > 1 ? `, mean of ${each} steps` : "";
  $("curve-legend").textContent = `line: training loss${means}, in nats per token; `
    + "dots: validation; circles: validation, estimated";
  drawChoices(state);
  drawCurve();
}
function drawChoices({ checkpoint, other }) {
  if (!training) return;
  const options = [
    ...training.checkpoints.map(step => [step, `step ${step}`]),
    ...Object.entries(training.named).map(([name, step]) => [name, `the ${name}, step ${step}`]),
  ];
  drawChoice($("checkpoint"), options, checkpoint);
  drawChoice($("other"), [[null, "none"], ...options], other);
}
function drawChoice(choice, options, chosen) {
  const isThere = options.some(([value]) => value === chosen);
  if (!isThere) options = [...options, [chosen, chosen]];  // one that training has deleted
  if (changed(choice, String(options))) {  // a list that is open stays as it is
    choice.replaceChildren(...options.map(([value, textContent]) =>
      element("option", { value: JSON.stringify(value), textContent })));
  }
  choice.value = JSON.stringify(chosen);
}
function drawCurve() {
  const { steps, loss, validation_loss, validation_estimate } = training;
  const losses = [...loss, ...validation_loss, ...validation_estimate].map(([, loss]) => loss);
  if (!losses.length) return;
  const [low, high] = [Math.min(...losses), Math.max(...losses)];
  const place = ([step, loss]) => `${step / steps},${(high - loss) / (high - low || 1)}`;
  const dots = points => points.map(point => `M${place(point)}h0`).join(" ");
  $("curve-line").setAttribute("points", loss.map(place).join(" "));
  $("curve-dots").setAttribute("d", dots([...validation_loss, ...validation_estimate]));
  $("curve-holes").setAttribute("d", dots(validation_estimate));
  $("highest").textContent = high.toFixed(2);
  $("lowest").textContent = low.toFixed(2);
  $("last-step").textContent = `step ${steps}`;
}
/** A row for each checkpoint that was seen, the newest first: its loss, a head's map, a sample. */
function drawGrowth() {
  const { layer, head } = chosen;
  const losses = new Map(training?.validation_loss);
  const newest = [...snapshots.values()].sort((a, b) => b.checkpoint - a.checkpoint).slice(0, 12);
  $("growth").replaceChildren(...newest.flatMap(snapshot => {
    const { checkpoint, sample } = snapshot;
    const loss = losses.get(checkpoint);
    const title = `layer ${layer}, head ${head} over ${JSON.stringify(first.text)}`;
    const canvas = element("canvas", { title });
    if (snapshot.attention) paintHead(layer, head, snapshot, canvas);
    return [
      element("span", {}, `step ${checkpoint}${loss ? `: ${loss.toFixed(4)}` : ""}`),
      canvas,
      element("pre", { tabIndex: 0, ariaLabel: `Sample of step ${checkpoint}` }, sample),
    ];
  }));
}

// Two checkpoints, side by side

const twins = [0, 1].map(() => {
  const [title, told] = [element("h3"), element("p", { className: "soft" })];
  const places = [0, 1].map(() => element("div", { className: "scroll" }));
  $("twins-places").append(element("div", {}, title, told, ...places));
  return { title, told, lens: lensIn(places[0]), map: mapIn(places[1]) };
});
function drawTwins() {
  $("twins").hidden = !data.other;
  if (!data.other) return;
  const { query, key, depth, layer, head } = chosen;
  twins.forEach(({ title, told, lens, map }, side) => {
    const of = side ? data.other : data;
    const best = predictions(depth, query, of).slice(0, 3).map(likely).join(", ");
    title.textContent = `Step ${of.checkpoint}`;
    told.textContent = `${describeLoss(of)} After ${at(query)}, ${depthName(depth)}: ${best}.`;
    drawLens(lens, of);
    map.place.hidden = !of.attention;
    if (!of.attention) return;
    told.textContent += ` Layer ${layer}, head ${head}: ${at(query)} gives ${at(key)} the weight `
      + `${number(weight(layer, head, query, key, of))}.`;
    drawMap(map, of);
  });
}
