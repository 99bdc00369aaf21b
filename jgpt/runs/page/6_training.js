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
    else snapshots.set(step, { ...snapshot, ...viewOf(snapshot) });
    drawGrowth();
  }
}
function drawTraining() {
  if (!training) return;
  const { step, steps, each, checkpoints, named } = training;
  const waiting = checkpoints.length ? ""
    : ". The first checkpoint comes with the first evaluations";
  $("progress").textContent = `Step ${step} of ${steps}${waiting}`;
  const names = [
    ...checkpoints.map(step => [step, `step ${step}`]),
    ...Object.entries(named).map(([name, step]) => [name, `the ${name}, step ${step}`]),
  ];
  fillChoice($("checkpoint"), names, state.checkpoint);
  fillChoice($("other"), [["", "none"], ...names], state.other);
  const means = each > 1 ? `, mean of ${each} steps` : "";
  $("curve-legend").textContent = `line: training loss${means}, in nats per token; `
    + "dots: validation; circles: validation, estimated";
  drawCurve();
}
function fillChoice(choice, options, value) {
  const wanted = String(value ?? "");
  const isThere = options.some(([name]) => String(name) === wanted);
  if (!isThere) options = [...options, [wanted, wanted]];  // one that training has deleted
  const told = JSON.stringify(options);
  if (choice.dataset.told !== told) {  // a list that is open stays as it is
    choice.dataset.told = told;
    choice.replaceChildren(...options.map(([value, text]) =>
      element("option", { value, textContent: text })));
  }
  choice.value = wanted;
}
function drawCurve() {
  const [width, height, left, bottom] = [rooms.curve, 200, 44, 24];
  const { steps, loss, validation_loss, validation_estimate } = training;
  const context = prepare($("curve"), width, height);
  const values = [loss, validation_loss, validation_estimate].flat().map(([, loss]) => loss);
  if (!values.length) return;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = step => left + (width - left - 8) * step / steps;
  const y = loss => 8 + (height - bottom - 16) * (high - loss) / (high - low || 1);
  context.font = `12px ${colours.mono}`;
  context.fillStyle = colours.soft;
  for (const loss of new Set([low, high])) context.fillText(loss.toFixed(2), 0, y(loss) + 4);
  context.fillText("0", left, height - 4);
  context.textAlign = "right";
  context.fillText(`step ${steps}`, width - 8, height - 4);
  context.strokeStyle = `rgb(${colours.blue})`;
  context.lineWidth = 1.5;
  context.beginPath();
  for (const [step, each] of loss) context.lineTo(x(step), y(each));
  context.stroke();
  context.strokeStyle = context.fillStyle = `rgb(${colours.amber})`;
  const dot = finish => ([step, loss]) => {
    context.beginPath();
    context.arc(x(step), y(loss), 4, 0, 2 * Math.PI);
    context[finish]();
  };
  validation_loss.forEach(dot("fill"));
  validation_estimate.forEach(dot("stroke"));
}
/** A row for each checkpoint that was seen, the newest first: its loss, a head's map, a sample. */
function drawGrowth() {
  const { layer, head } = chosen;
  const losses = new Map(training?.validation_loss);
  const newest = [...snapshots.values()].sort((a, b) => b.checkpoint - a.checkpoint).slice(0, 12);
  $("growth").replaceChildren(...newest.flatMap(each => {
    const loss = losses.get(each.checkpoint);
    const textContent = `step ${each.checkpoint}${loss ? `: ${loss.toFixed(4)}` : ""}`;
    const canvas = element("canvas");
    canvas.title = `layer ${layer}, head ${head} over ${JSON.stringify(first.text)}`;
    const [i, j] = [Math.min(layer, each.layers - 1), Math.min(head, each.heads - 1)];
    if (each.attention) paintHead(i, j, each, canvas);
    const sample = element("pre", { textContent: each.sample, tabIndex: 0 });
    sample.setAttribute("aria-label", `Sample of step ${each.checkpoint}`);
    return [element("span", { textContent }), canvas, sample];
  }));
}

// Two checkpoints, side by side

const twins = [...document.querySelectorAll("#twins .twins > div")].map(root => {
  const [title, told, lens, canvas] = ["h3", "p", ".lens", "canvas"].map(name =>
    root.querySelector(name));
  const twin = { root, title, told, lens, canvas, map: {}, image: element("canvas") };
  explore(canvas, {
    find: findCell(canvas, twin.map),
    say: ({ query, key }) => describeWeight(query, key, twin.of),
    pick: cell => cell,
    keys: {},
  });
  explore(lens, {
    find: findInLens,
    say: ({ position, depth }) => describeLens(depth, position, twin.of.data),
    pick: pickInLens,
    keys: {},
  });
  return twin;
});
function buildTwins() {
  $("twins").hidden = !data.other;
  if (!data.other) return;
  [shown, viewOf(data.other)].forEach((of, side) => {
    const twin = twins[side];
    twin.of = of;
    twin.title.textContent = `Step ${of.data.checkpoint}`;
    twin.cells = fillLens(twin.lens, of.data, twin.cells);
    twin.root.querySelector(".map").hidden = !of.attention;
  });
}
function drawTwins() {
  if (!data.other) return;
  const { query, key, depth, layer, head } = chosen;
  for (const twin of twins) {
    const { of, told, lens, cells, canvas, map, image } = twin;
    const loss = lossOf(of.data.next_log_probabilities[depths]);
    const best = predictions(depth, query, of.data).slice(0, 3);
    const likely = best.map(each => `${quoted(each.token)} ${number(each.probability)}`).join(", ");
    const sentences = [
      loss === undefined ? "" : `Loss on the text: ${loss.toFixed(3)} nats per token.`,
      `After ${at(query)}, ${depthName(depth)}: ${likely}.`,
      of.attention ? `Layer ${layer}, head ${head}: ${at(query)} gives ${at(key)} the weight `
        + `${number(weight(layer, head, query, key, of))}.` : "",
    ];
    told.textContent = sentences.join(" ");
    lens.querySelector(".on")?.classList.remove("on");
    cells[depth][query].classList.add("on");
    if (!of.attention) continue;
    const drawn = [layer, head, of.attention, colours];
    if (drawn.some((each, i) => each !== twin.drawn?.[i])) {
      paintHead(layer, head, of, image);
      map.drawn = null;
    }
    twin.drawn = drawn;
    drawMap(canvas, map, image);
  }
}
