// A run in training: the loss curve, samples and attention grow with its checkpoints. The file is
// written again after each evaluation, and the page reloads itself

let training;
function startTraining(found) {
  training = found;
  const { step, steps, each, seconds } = training;
  const more = seconds === null ? "" : ". After each evaluation this file is written again, and the "
    + "page reloads itself while nothing is touched";
  const means = each > 1 ? `, mean of ${each} steps` : "";
  $("training").hidden = false;
  $("progress").textContent = `Step ${step} of ${steps}${more}.`;
  $("curve-legend").textContent = `line: training loss${means}, in nats per token; `
    + "dots: validation; circles: validation, estimated";
  drawCurve();
  reloadLater();
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
/** A row for each checkpoint, the newest first: its loss, a head's map, a sample. */
function drawGrowth() {
  const { layer, head } = chosen;
  const losses = new Map(training.validation_loss);
  $("growth").replaceChildren(...training.snapshots.toReversed().flatMap(snapshot => {
    const { checkpoint, sample, attention } = snapshot;
    const loss = losses.get(checkpoint);
    const canvas = element("canvas", { title: `layer ${layer}, head ${head}` });
    if (attention) paintHead(layer, head, snapshot, canvas);
    return [
      element("span", {}, `step ${checkpoint}${loss ? `: ${loss.toFixed(4)}` : ""}`),
      canvas,
      element("pre", { tabIndex: 0, ariaLabel: `Sample of step ${checkpoint}` }, sample),
    ];
  }));
}

// Reloading: what was chosen is kept with the page's entry in the history

const LEAST_SECONDS = 2;  // between two reloads
const QUIET_SECONDS = 10;  // since anything was touched
const DAY = 86400;
const KEPT = ["temperature", "top-k", "top-p", "min-p", "patch-block", "patch-prompt"];
let touched = -Infinity;
for (const kind of ["pointermove", "pointerdown", "touchmove", "wheel", "keydown", "input"]) {
  addEventListener(kind, () => { touched = performance.now(); }, { passive: true, capture: true });
}

/** Reload when the next page is due; ever more rarely if none comes, as after a killed run. */
function reloadLater() {
  const { written, seconds } = training;
  const age = Date.now() / 1000 - written;
  if (seconds === null || age > DAY) return;
  const wait = Math.max(LEAST_SECONDS, seconds - age + 1, age / 4);
  setTimeout(reloadWhenQuiet, 1000 * Math.min(wait, DAY));
}
function reloadWhenQuiet() {
  const isTouched = performance.now() - touched < 1000 * QUIET_SECONDS;
  const isRead = !$("answer").hidden;  // which no reload brings back
  const isWrong = $("said").classList.contains("wrong");  // the page would be empty
  if (isTouched || isRead || isWrong || document.hidden || asking || writing) {
    setTimeout(reloadWhenQuiet, 1000);
    return;
  }
  keepPlace();
  location.reload();
}
function keepPlace() {
  const sections = [...document.querySelectorAll("section")];
  const above = sections.filter(each => each.offsetHeight && each.getBoundingClientRect().top < 0);
  const section = above.at(-1);
  const place = {
    chosen,
    values: KEPT.map(id => $(id).value),
    open: [...document.querySelectorAll("details")].map(each => each.open),
    focus: document.activeElement.id,
    section: section?.id,
    offset: section && -section.getBoundingClientRect().top,
  };
  history.scrollRestoration = "manual";  // the page has its height only when it has computed
  history.replaceState(place, "");
}
function restorePlace() {
  const place = history.state;
  if (!place || !data) return;
  KEPT.forEach((id, i) => {
    $(id).value = place.values[i];
    const shown = $(id).nextElementSibling;
    if (shown?.tagName === "OUTPUT") shown.textContent = place.values[i];
  });
  const details = [...document.querySelectorAll("details")];
  if (details.length === place.open.length) {
    details.forEach((each, i) => { each.open = place.open[i]; });
  }
  choose(place.chosen);
  if (place.focus) $(place.focus)?.focus({ preventScroll: true });
  if (!place.section) return;
  $(place.section).scrollIntoView();
  scrollBy(0, place.offset);
}
