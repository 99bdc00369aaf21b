// What pictures share: elements, canvases, and what the pointer and keys do on them

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}
/** Whether a picture was last drawn of anything else; from now on, it is of this. */
function changed(picture, ...of) {
  const before = picture.drawnOf;
  picture.drawnOf = of;
  return before?.length !== of.length || of.some((each, i) => each !== before[i]);
}
/** Mark what is chosen in a picture, and scroll its place to it, or to what else is to be seen. */
function mark(picture, element, seen = element) {
  picture.marked?.classList.remove("on");
  picture.marked = element;
  element.classList.add("on");
  const place = picture.closest(".scroll");
  if (!place) return;
  toScroll.set(place, seen);
  scrolling ??= requestAnimationFrame(scrollToMarks);
}
// Where an element is takes a layout, which is done once for all, and not for what is out of sight.
const toScroll = new Map();
let scrolling = null;
function scrollToMarks() {
  scrolling = null;
  const seen = [...toScroll].filter(([place]) =>
    place.checkVisibility({ contentVisibilityAuto: true }));
  const places = seen.map(([place, element]) => [place, scrolledTo(place, element)]);
  for (const [place, { left, top }] of places) {
    place.scrollLeft = left;
    place.scrollTop = top;
    toScroll.delete(place);
  }
}
const NAMES = 100;  // pixels at the left and at the top, where names stay when a place scrolls
/** How far a place has to be scrolled for an element to be in sight, with what is around it: a quarter
 *  of the place on each side, where there is as much. */
function scrolledTo(place, element) {
  const window = place.getBoundingClientRect();
  const box = element.getBoundingClientRect();
  const left = place.scrollLeft + box.left - window.left;
  const top = place.scrollTop + box.top - window.top;
  const { clientWidth, clientHeight } = place;
  return {
    left: clamp(place.scrollLeft, left + box.width - .75 * clientWidth, left - NAMES - clientWidth / 4),
    top: clamp(place.scrollTop, top + box.height - .75 * clientHeight, top - NAMES - clientHeight / 4),
  };
}
document.addEventListener("contentvisibilityautostatechange", ({ skipped }) => {
  if (!skipped && toScroll.size) scrolling ??= requestAnimationFrame(scrollToMarks);
}, { capture: true });
/** Give a place so many elements, each with a text; those that are there are used again. */
function setTexts(place, texts) {
  while (place.childElementCount > texts.length) place.lastChild.remove();
  while (place.childElementCount < texts.length) place.append(element("span"));
  texts.forEach((text, i) => {
    if (place.children[i].textContent !== text) place.children[i].textContent = text;
  });
}
/** Name rows and columns by their tokens; the style sheet hides those of a map of many. */
function buildNames() {
  document.body.className = time > 128 ? "many" : "";
  // Not of the body, whose every part would follow.
  $("attention").style = `--time: ${time}; --widest: ${widest}`;
  const texts = tokens.map(cut);
  for (const names of document.querySelectorAll(".names")) {
    if (!changed(names, ...texts)) continue;
    names.classList.toggle("long", widest > 2);
    setTexts(names, texts);
  }
}

/** A colour of the style sheet, more or less transparent. */
const tint = (name, alpha) => `color-mix(in srgb, var(--${name}) ${100 * alpha}%, transparent)`;
const BLUE = [59, 130, 246];
const AMBER = [245, 158, 11];
/** Small weights are visible: opacity is the square root of a weight. */
const opacity = w => Math.sqrt(w);
/** A pixel of a number between -1 and 1, as an integer. */
function pixel(x) {
  const [red, green, blue] = x < 0 ? AMBER : BLUE;
  return red | green << 8 | blue << 16 | 255 * opacity(Math.abs(x)) << 24;
}
/** Paint a canvas of a pixel for each entry: what `paint` does with an array of integers. */
function paintPixels(canvas, width, height, paint) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  paint(new Uint32Array(image.data.buffer));
  context.putImageData(image, 0, 0);
}

// Canvases are painted while they are in sight, or near: the arcs alone take as long as the model
const NEAR = 300;  // pixels
const inSight = new Set();
const toPaint = new Map();  // what paints a place that comes into sight
const sight = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) inSight.add(target);
    else inSight.delete(target);
    if (isIntersecting) paintNow(target);
  }
}, { rootMargin: `${NEAR}px` });
function paintInSight(place, paint) {
  toPaint.set(place, paint);
  if (inSight.has(place)) paintNow(place);
  else sight.observe(place);
}
function paintNow(place) {
  const paint = toPaint.get(place);
  toPaint.delete(place);
  paint?.();
}

function tip(x, y, text) {
  const box = $("tip");
  box.textContent = text;
  const { width, height } = box.getBoundingClientRect();
  const left = clamp(x + 12, 4, innerWidth - width - 4);
  const above = y - height - 14;
  const top = above < 4 ? y + 20 : above;
  box.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}
function hideTip() {
  $("tip").textContent = "";
}

/** Elements that can be explored, by the pointer, a finger and keys. Of each:
 *
 *  find: what an event is on; by default, what its target says with `chooses`.
 *  say: what the tip tells of that, or of what is chosen.
 *  mark: the element of what is chosen. Without it, a click chooses nothing.
 *  across, down: what the arrow keys choose, from the number of steps. */
const pictures = new WeakMap();
function pictureOf(event) {
  return pictures.get(event.composedPath().find(each => pictures.has(each)));
}
/** The column and the row of a picture that an event is on. */
function cellAt({ target, offsetX, offsetY }, columns, rows) {
  const part = (offset, size, count) => clamp(Math.floor(offset / size * count), 0, count - 1);
  return [part(offsetX, target.clientWidth, columns), part(offsetY, target.clientHeight, rows)];
}
const step = name => by => ({ [name]: chosen[name] + by });
const stepPosition = by => goTo(chosen.query + by);
const ACROSS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
const DOWN = { ArrowUp: -1, ArrowDown: 1 };

function explore(event) {
  const picture = pictureOf(event);
  const found = picture?.find ? picture.find(event) : event.target.chooses;
  if (!found) hideTip();
  else if (event.type !== "click") tip(event.clientX, event.clientY, picture.say(found));
  else if (picture.mark) choose(found);
}
for (const kind of ["pointermove", "pointerdown", "click"]) {
  document.addEventListener(kind, explore);
}
for (const kind of ["pointercancel", "mouseleave", "focusout", "wheel"]) {
  document.addEventListener(kind, hideTip, { passive: true });
}
document.addEventListener("keydown", event => {
  if (event.key === "Escape") hideTip();
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const picture = pictureOf(event);
  const by = ACROSS[event.key] ?? DOWN[event.key];
  const move = event.key in DOWN ? picture?.down : picture?.across;
  if (!by || !move) return;
  event.preventDefault();
  choose(move(by));
  const marked = picture.mark();
  marked.focus();  // which only a head can have
  const { right, top } = marked.getBoundingClientRect();
  tip(right, top, picture.say(chosen));
});
