// Runs the programs of jgpt/page/program.py: primitives of JAX on arrays of numbers.
//
//   const machine = interpreter.load(program, weights);
//   const {logits} = machine.run({tokens: interpreter.array("int32", [1, 3], [5, 2, 9])});
//
// An array is {dtype, shape, data, offset, strides}: a part of a typed array, in steps. Moving
// operations (transpose, slice, broadcast) only make new steps; the others write a dense result.
"use strict";

const interpreter = (() => {

// --- arrays --------------------------------------------------------------------------------------

// 16-bit floats are kept as float32 and rounded after each operation.
const KINDS = {
  float32: Float32Array, bfloat16: Float32Array, float16: Float32Array,
  int32: Int32Array, uint32: Uint32Array, int16: Int16Array, uint16: Uint16Array,
  int8: Int8Array, uint8: Uint8Array, bool: Uint8Array,
};
const FLOATS = ["float32", "bfloat16", "float16"];
const BITS = {int32: 32, uint32: 32, int16: 16, uint16: 16, int8: 8, uint8: 8};

const isFloat = (dtype) => FLOATS.includes(dtype);
const sizeOf = (shape) => shape.reduce((product, size) => product * size, 1);

function denseStrides(shape) {
  const strides = new Array(shape.length);
  let step = 1;
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    strides[axis] = step;
    step *= shape[axis];
  }
  return strides;
}

function isDense(x) {
  let step = 1;
  for (let axis = x.shape.length - 1; axis >= 0; axis--) {
    if (x.shape[axis] !== 1 && x.strides[axis] !== step) return false;
    step *= x.shape[axis];
  }
  return true;
}

// Buffers are used again: a new large one costs more than a small operation, since it is cleared.
// `uses` counts the values of a run that share a buffer; constants and weights have infinitely many.
const pool = new Map();
let madeNow = null;  // what the operation that runs has made

function make(dtype, shape) {
  const length = sizeOf(shape);
  const Kind = KINDS[dtype];
  const free = pool.get(Kind)?.get(length);
  const store = free?.length ? free.pop() : {data: new Kind(length), uses: 0};
  madeNow?.push(store);
  return {dtype, shape, data: store.data, store, offset: 0, strides: denseStrides(shape)};
}

function release(store) {
  const Kind = store.data.constructor;
  if (!pool.has(Kind)) pool.set(Kind, new Map());
  const byLength = pool.get(Kind);
  if (!byLength.has(store.data.length)) byLength.set(store.data.length, []);
  byLength.get(store.data.length).push(store);
}

// An array of numbers that a caller gives.
function array(dtype, shape, numbers) {
  const Kind = KINDS[dtype];
  const data = numbers instanceof Kind ? numbers : Kind.from(numbers);
  if (data.length !== sizeOf(shape)) throw new Error(`${data.length} numbers for ${shape}`);
  return {dtype, shape, data, store: {data, uses: 1}, offset: 0, strides: denseStrides(shape)};
}

const view = (x, shape, strides, offset = x.offset) => ({...x, shape, strides, offset});

// --- loops ---------------------------------------------------------------------------------------

// Loops over a shape for arrays in steps. Axes that all arrays pass evenly are merged, so that most
// operations are one loop. `sizes` and `steps` have the innermost axis first.
function loopsOver(shape, arrays) {
  const sizes = [];
  const steps = arrays.map(() => []);
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    if (shape[axis] === 1) continue;
    const last = sizes.length - 1;
    const merges = last >= 0 && arrays.every(
      (x, k) => x.strides[axis] === steps[k][last] * sizes[last]);
    if (merges) {
      sizes[last] *= shape[axis];
      continue;
    }
    sizes.push(shape[axis]);
    arrays.forEach((x, k) => steps[k].push(x.strides[axis]));
  }
  if (!sizes.length) {
    sizes.push(1);
    steps.forEach((step) => step.push(0));
  }
  const starts = arrays.map((x) => x.offset);
  return {sizes, steps, starts, indices: sizes.map(() => 0)};
}

// Goes to the next run of the innermost loop.
function advance({sizes, steps, starts, indices}) {
  for (let level = 1; level < sizes.length; level++) {
    indices[level]++;
    const ends = indices[level] === sizes[level];
    const count = ends ? 1 - sizes[level] : 1;
    for (let k = 0; k < starts.length; k++) starts[k] += steps[k][level] * count;
    if (!ends) return;
    indices[level] = 0;
  }
}

// An operand of an operation element by element: axes of size 1 are repeated.
function broadcast(x, shape) {
  if (x.shape.length === shape.length && x.shape.every((size, axis) => size === shape[axis])) {
    return x;
  }
  const strides = shape.map((size, axis) => {
    if (x.shape.length === 0 || x.shape[axis] !== size) return 0;
    return x.strides[axis];
  });
  return view(x, shape, strides);
}

// Copies an array into a part of another of the same shape.
function copyInto(target, x) {
  const total = sizeOf(x.shape);
  if (total === 0) return;
  const loops = loopsOver(x.shape, [target, x]);
  const n = loops.sizes[0];
  const [to, from] = [loops.steps[0][0], loops.steps[1][0]];
  const runs = total / n;
  for (let run = 0; run < runs; run++) {
    let [p, i] = loops.starts;
    if (to === 1 && from === 1 && n > 16) {
      target.data.set(x.data.subarray(i, i + n), p);
    } else {
      copyRun(target.data, p, to, x.data, i, from, n);
    }
    advance(loops);
  }
}

function copyRun(o, p, to, a, i, from, n) {
  for (let k = 0; k < n; k++, p += to, i += from) o[p] = a[i];
}

function dense(x) {
  if (isDense(x)) return x;
  const result = make(x.dtype, x.shape);
  copyInto(result, x);
  return result;
}

// The numbers of an array in order, as a typed array of its own.
function copyOf(x) {
  const data = new KINDS[x.dtype](sizeOf(x.shape));
  copyInto({data, offset: 0, strides: denseStrides(x.shape)}, x);
  return data;
}

// Whether two arrays of one shape have the same numbers, of which a NaN equals itself and 0 isn't -0.
function isSame(x, y) {
  const isOne = x.data === y.data && x.offset === y.offset;
  if (isOne && x.strides.join() === y.strides.join()) return true;
  return eachRun([x, y], (n, [i, j], [s, t]) => {
    for (let k = 0; k < n; k++, i += s, j += t) {
      if (!Object.is(x.data[i], y.data[j])) return false;
    }
    return true;
  });
}

function isFinite(x) {
  return eachRun([x], (n, [i], [s]) => isFiniteRun(x.data, i, n, s));
}

// 0 times a number is NaN if it isn't finite. Two sums don't wait for each other.
function isFiniteRun(a, i, n, s) {
  let sum = 0;
  let other = 0;
  let k = 0;
  for (; k + 1 < n; k += 2, i += 2 * s) {
    sum += 0 * a[i];
    other += 0 * a[i + s];
  }
  if (k < n) sum += 0 * a[i];
  return sum + other === 0;
}

// Whether `holds` is true for each run of the innermost loop over arrays of one shape.
function eachRun(arrays, holds) {
  const {shape} = arrays[0];
  const loops = loopsOver(shape, arrays);
  const n = loops.sizes[0];
  const steps = loops.steps.map((step) => step[0]);
  for (let left = sizeOf(shape); left > 0; left -= n) {
    if (!holds(n, loops.starts, steps)) return false;
    advance(loops);
  }
  return true;
}

// The numbers of an array in order, as a typed array.
function numbersOf(x) {
  const whole = dense(x);
  return whole.data.subarray(whole.offset, whole.offset + sizeOf(whole.shape));
}

// --- element by element --------------------------------------------------------------------------

// A kernel is one loop: it writes n results from p on, from elements at i, i + s, ... The loops are
// written out for what is called most: a call for each element takes several times as long.
const unary = (f) => (o, p, n, a, i, s) => {
  for (const end = p + n; p < end; p++, i += s) o[p] = f(a[i]);
};
const binary = (f) => (o, p, n, a, i, s, b, j, t) => {
  for (const end = p + n; p < end; p++, i += s, j += t) o[p] = f(a[i], b[j]);
};

const KERNELS = {
  neg(o, p, n, a, i, s) { for (const end = p + n; p < end; p++, i += s) o[p] = -a[i]; },
  square(o, p, n, a, i, s) { for (const end = p + n; p < end; p++, i += s) o[p] = a[i] * a[i]; },
  exp(o, p, n, a, i, s) { for (const end = p + n; p < end; p++, i += s) o[p] = Math.exp(a[i]); },
  rsqrt(o, p, n, a, i, s) { for (const end = p + n; p < end; p++, i += s) o[p] = 1 / Math.sqrt(a[i]); },
  tanh(o, p, n, a, i, s) { for (const end = p + n; p < end; p++, i += s) o[p] = Math.tanh(a[i]); },
  logistic(o, p, n, a, i, s) { for (const end = p + n; p < end; p++, i += s) o[p] = 1 / (1 + Math.exp(-a[i])); },
  add(o, p, n, a, i, s, b, j, t) { for (const end = p + n; p < end; p++, i += s, j += t) o[p] = a[i] + b[j]; },
  sub(o, p, n, a, i, s, b, j, t) { for (const end = p + n; p < end; p++, i += s, j += t) o[p] = a[i] - b[j]; },
  mul(o, p, n, a, i, s, b, j, t) { for (const end = p + n; p < end; p++, i += s, j += t) o[p] = a[i] * b[j]; },
  div(o, p, n, a, i, s, b, j, t) { for (const end = p + n; p < end; p++, i += s, j += t) o[p] = a[i] / b[j]; },
  max(o, p, n, a, i, s, b, j, t) { for (const end = p + n; p < end; p++, i += s, j += t) o[p] = Math.max(a[i], b[j]); },
  min(o, p, n, a, i, s, b, j, t) { for (const end = p + n; p < end; p++, i += s, j += t) o[p] = Math.min(a[i], b[j]); },
  eq(o, p, n, a, i, s, b, j, t) { for (const end = p + n; p < end; p++, i += s, j += t) o[p] = a[i] === b[j] ? 1 : 0; },
  ne(o, p, n, a, i, s, b, j, t) { for (const end = p + n; p < end; p++, i += s, j += t) o[p] = a[i] !== b[j] ? 1 : 0; },
  lt(o, p, n, a, i, s, b, j, t) { for (const end = p + n; p < end; p++, i += s, j += t) o[p] = a[i] < b[j] ? 1 : 0; },
  le(o, p, n, a, i, s, b, j, t) { for (const end = p + n; p < end; p++, i += s, j += t) o[p] = a[i] <= b[j] ? 1 : 0; },
  gt(o, p, n, a, i, s, b, j, t) { for (const end = p + n; p < end; p++, i += s, j += t) o[p] = a[i] > b[j] ? 1 : 0; },
  ge(o, p, n, a, i, s, b, j, t) { for (const end = p + n; p < end; p++, i += s, j += t) o[p] = a[i] >= b[j] ? 1 : 0; },
  select(o, p, n, w, h, r, a, i, s, b, j, t) {
    for (const end = p + n; p < end; p++, h += r, i += s, j += t) o[p] = w[h] ? b[j] : a[i];
  },
};

function map1(kernel, type, a) {
  const out = make(type.dtype, type.shape);
  const total = out.data.length;
  const loops = loopsOver(type.shape, [broadcast(a, type.shape)]);
  const n = loops.sizes[0];
  for (let p = 0; p < total; p += n) {
    kernel(out.data, p, n, a.data, loops.starts[0], loops.steps[0][0]);
    advance(loops);
  }
  return out;
}

function map2(kernel, type, a, b) {
  const out = make(type.dtype, type.shape);
  const total = out.data.length;
  const loops = loopsOver(type.shape, [broadcast(a, type.shape), broadcast(b, type.shape)]);
  const n = loops.sizes[0];
  const s = loops.steps[0][0];
  const t = loops.steps[1][0];
  for (let p = 0; p < total; p += n) {
    kernel(out.data, p, n, a.data, loops.starts[0], s, b.data, loops.starts[1], t);
    advance(loops);
  }
  return out;
}

function map3(kernel, type, a, b, c) {
  const out = make(type.dtype, type.shape);
  const total = out.data.length;
  const loops = loopsOver(type.shape, [a, b, c].map((x) => broadcast(x, type.shape)));
  const n = loops.sizes[0];
  const [s, t, u] = loops.steps.map((step) => step[0]);
  for (let p = 0; p < total; p += n) {
    const [i, j, k] = loops.starts;
    kernel(out.data, p, n, a.data, i, s, b.data, j, t, c.data, k, u);
    advance(loops);
  }
  return out;
}

const each1 = (kernel) => ([a], parameters, [type]) => map1(kernel, type, a);
const each2 = (kernel) => ([a, b], parameters, [type]) => map2(kernel, type, a, b);

// An operation that differs for integers, which wrap around. A typed array keeps the low bits of
// what is written to it, so only products need care: beyond 2**53 a number has lost them.
const either1 = (float, integer) => ([a], parameters, [type]) =>
  map1(isFloat(a.dtype) ? float : integer(a.dtype), type, a);
const either2 = (float, integer) => ([a, b], parameters, [type]) =>
  map2(isFloat(a.dtype) ? float : integer(a.dtype), type, a, b);
const always = (kernel) => () => kernel;

const multiplyIntegers = always(binary(Math.imul));

// XLA's quotient by 0 has all bits set, and its remainder is the dividend.
const divideIntegers = always(binary((a, b) => b === 0 ? -1 : Math.trunc(a / b)));
const remainderOfIntegers = always(binary((a, b) => b === 0 ? a : a % b));

function powerOfIntegers(base, exponent) {
  let result = 1;
  for (let k = 0; k < exponent; k++) result = Math.imul(result, base);
  return result;
}

// C's pow(1, x) is 1 for any x, and pow(-1, +-inf), too; JavaScript's is NaN.
function power(a, b) {
  if (a === 1 || (a === -1 && Math.abs(b) === Infinity)) return 1;
  return Math.pow(a, b);
}

const isShiftable = (count, bits) => count >= 0 && count < bits;
const shiftLeft = (dtype) =>
  binary((a, b) => isShiftable(b, BITS[dtype]) ? a << b : 0);
const shiftRightArithmetic = (dtype) =>
  binary((a, b) => {
    if (dtype.startsWith("u")) {  // the sign bit of an unsigned number is its highest
      const unused = 32 - BITS[dtype];
      return ((a << unused) >> unused) >> (isShiftable(b, BITS[dtype]) ? b : 31);
    }
    return a >> (isShiftable(b, BITS[dtype]) ? b : 31);
  });
const shiftRightLogical = (dtype) => {
  const mask = BITS[dtype] === 32 ? 0xffffffff : (1 << BITS[dtype]) - 1;
  return binary((a, b) => isShiftable(b, BITS[dtype]) ? ((a & mask) >>> 0) >>> b : 0);
};

function roundToEven(x) {
  const low = Math.floor(x);
  const rest = x - low;
  if (rest < 0.5) return low === 0 && x < 0 ? -0 : keepSign(low, x);
  if (rest > 0.5) return keepSign(low + 1, x);
  return keepSign(low % 2 === 0 ? low : low + 1, x);
}
const roundAway = (x) => keepSign(Math.floor(Math.abs(x) + 0.5) * (x < 0 ? -1 : 1), x);
const keepSign = (rounded, x) => rounded === 0 && (x < 0 || Object.is(x, -0)) ? -0 : rounded;

// XLA clamps numbers that an integer can't hold, and NaN becomes 0.
const RANGES = {
  int32: [-(2 ** 31), 2 ** 31 - 1], uint32: [0, 2 ** 32 - 1], int16: [-(2 ** 15), 2 ** 15 - 1],
  uint16: [0, 2 ** 16 - 1], int8: [-128, 127], uint8: [0, 255],
};
function conversion(from, to) {
  if (to === "bool") return unary((x) => x === 0 ? 0 : 1);
  if (!isFloat(from) || isFloat(to)) return unary((x) => x);
  const [least, most] = RANGES[to];
  return unary((x) => Number.isNaN(x) ? 0 : Math.trunc(Math.min(Math.max(x, least), most)));
}

// --- functions that JavaScript lacks -------------------------------------------------------------

// erfc(x) for x >= 0: Taylor's series of order 5 around the nearest of many points, whose values are
// computed once, from a series for small x and a continued fraction for large x.
const ERFC_STEP = 1 / 64;
const ERFC_END = 11;  // erfc(11) is 0 in float32
const ERF_POINTS = new Float64Array(ERFC_END / ERFC_STEP + 2);
const ERFC_POINTS = new Float64Array(ERF_POINTS.length);
for (let k = 0; k < ERF_POINTS.length; k++) {
  const x = k * ERFC_STEP;
  if (x < 2) {
    let term = x;
    let sum = x;
    for (let n = 1; n < 60; n++) {
      term *= -x * x / n;
      sum += term / (2 * n + 1);
    }
    ERF_POINTS[k] = 2 / Math.sqrt(Math.PI) * sum;
    ERFC_POINTS[k] = 1 - ERF_POINTS[k];
  } else {
    let fraction = 0;
    for (let n = 80; n > 0; n--) fraction = n / 2 / (x + fraction);
    ERFC_POINTS[k] = Math.exp(-x * x) / Math.sqrt(Math.PI) / (x + fraction);
    ERF_POINTS[k] = 1 - ERFC_POINTS[k];
  }
}

// The integral of 2 / sqrt(pi) exp(-x**2) from the nearest point to x.
function erfRest(point, h) {
  const x = point * ERFC_STEP;
  const x2 = x * x;
  const series = h * (1 + h * (-x + h * ((2 * x2 - 1) / 3
    + h * (-(2 * x2 - 3) * x / 6 + h * ((4 * x2 - 12) * x2 + 3) / 30))));
  return 2 / Math.sqrt(Math.PI) * Math.exp(-x2) * series;
}

function erf(x) {
  const positive = Math.abs(x);
  if (!(positive < ERFC_END)) return Math.sign(x);
  const point = Math.round(positive / ERFC_STEP);
  const result = ERF_POINTS[point] + erfRest(point, positive - point * ERFC_STEP);
  return x < 0 || Object.is(x, -0) ? -result : result;
}

function erfc(x) {
  if (x < 0) return 1 - erf(x);
  if (!(x < ERFC_END)) return Number.isNaN(x) ? x : 0;
  const point = Math.round(x / ERFC_STEP);
  return ERFC_POINTS[point] - erfRest(point, x - point * ERFC_STEP);
}

// Newton's method with the second derivative (Halley), from Winitzki's approximation.
function erfInverse(y) {
  if (y === 0 || Number.isNaN(y)) return y;
  if (Math.abs(y) >= 1) return Math.abs(y) === 1 ? y * Infinity : NaN;
  const rest = 1 - Math.abs(y);
  const logarithm = Math.log(rest * (1 + Math.abs(y)));
  const half = 2 / (Math.PI * 0.147) + logarithm / 2;
  let x = Math.sqrt(Math.sqrt(half * half - logarithm / 0.147) - half);
  for (let k = 0; k < 3; k++) {
    const slope = 2 / Math.sqrt(Math.PI) * Math.exp(-x * x);
    const error = x < 1 ? erf(x) - Math.abs(y) : rest - erfc(x);
    const step = error / slope;
    x -= step / (1 + x * step);
  }
  return y < 0 ? -x : x;
}

function integerPower(x, y) {
  let result = 1;
  for (let k = 0; k < Math.abs(y); k++) result = Math.fround(result * x);
  return y < 0 ? 1 / result : result;
}

// 20 rounds of Threefry-2x32 (Salmon et al. 2011), which changes its two counters in place.
const ROTATIONS = [[13, 15, 26, 6], [17, 29, 16, 24]];
function threefry(key0, key1, x) {
  const keys = [key0, key1, key0 ^ key1 ^ 0x1bd11bda];
  let a = (x[0] + key0) | 0;
  let b = (x[1] + key1) | 0;
  for (let group = 0; group < 5; group++) {
    for (const turn of ROTATIONS[group % 2]) {
      a = (a + b) | 0;
      b = a ^ ((b << turn) | (b >>> (32 - turn)));
    }
    a = (a + keys[(group + 1) % 3]) | 0;
    b = (b + keys[(group + 2) % 3] + group + 1) | 0;
  }
  x[0] = a;
  x[1] = b;
}

// Rounding to 16 bits, to the nearest and on ties to the even one.
const oneFloat = new Float32Array(1);
const itsBits = new Uint32Array(oneFloat.buffer);
function toBfloat16(x) {
  oneFloat[0] = x;
  if (Number.isNaN(x)) return x;
  const bits = itsBits[0];
  itsBits[0] = (bits + 0x7fff + ((bits >>> 16) & 1)) & 0xffff0000;
  return oneFloat[0];
}
function toFloat16(x) {
  const size = Math.abs(x);
  if (!(size > 0 && size < Infinity)) return x;
  const exponent = Math.max(Math.floor(Math.log2(size)), -14);
  const unit = 2 ** (exponent - 10);
  const rounded = roundToEven(size / unit) * unit;
  return Math.sign(x) * (rounded > 65504 ? Infinity : rounded);
}
const ROUNDINGS = {float32: Math.fround, bfloat16: toBfloat16, float16: toFloat16};

// --- reductions ----------------------------------------------------------------------------------

// A reduction over n elements from i on, in steps of s. Sums of floats have 53 bits here.
const REDUCTIONS = {
  sum(a, i, n, s) { let r = 0; for (let k = 0; k < n; k++, i += s) r += a[i]; return r; },
  max(a, i, n, s) { let r = -Infinity; for (let k = 0; k < n; k++, i += s) r = Math.max(r, a[i]); return r; },
  min(a, i, n, s) { let r = Infinity; for (let k = 0; k < n; k++, i += s) r = Math.min(r, a[i]); return r; },
  prod(a, i, n, s) { let r = 1; for (let k = 0; k < n; k++, i += s) r = Math.fround(r * a[i]); return r; },
  and(a, i, n, s) { let r = -1; for (let k = 0; k < n; k++, i += s) r &= a[i]; return r; },
  or(a, i, n, s) { let r = 0; for (let k = 0; k < n; k++, i += s) r |= a[i]; return r; },
  xor(a, i, n, s) { let r = 0; for (let k = 0; k < n; k++, i += s) r ^= a[i]; return r; },
  sumOfIntegers(a, i, n, s) { let r = 0; for (let k = 0; k < n; k++, i += s) r = (r + a[i]) | 0; return r; },
  prodOfIntegers(a, i, n, s) { let r = 1; for (let k = 0; k < n; k++, i += s) r = Math.imul(r, a[i]); return r; },
};

// The axes that are kept, then those that are reduced, which become one.
function reducedLast(x, axes) {
  const kept = otherAxes(x, axes);
  const order = [...kept, ...axes];
  let moved = view(x, order.map((axis) => x.shape[axis]), order.map((axis) => x.strides[axis]));
  const count = sizeOf(axes.map((axis) => x.shape[axis]));
  if (axes.length !== 1) moved = dense(moved);
  const keptShape = moved.shape.slice(0, kept.length);
  const step = axes.length === 1 ? moved.strides[kept.length] : 1;
  return {kept: view(moved, keptShape, moved.strides.slice(0, kept.length)), data: moved.data, count, step};
}

function reduceAlong(x, axes, type, reduction) {
  const out = make(type.dtype, type.shape);
  const {kept, data, count, step} = reducedLast(x, axes);
  const loops = loopsOver(kept.shape, [kept]);
  const n = loops.sizes[0];
  for (let p = 0; p < out.data.length; p += n) {
    let i = loops.starts[0];
    for (let q = p; q < p + n; q++, i += loops.steps[0][0]) {
      out.data[q] = reduction(data, i, count, step);
    }
    advance(loops);
  }
  return out;
}

// The least and the most number of a dtype, for a reduction over nothing.
function limitOf(dtype, reduction) {
  if (isFloat(dtype)) return reduction === "max" ? -Infinity : Infinity;
  if (dtype === "bool") return reduction === "max" ? 0 : 1;
  return RANGES[dtype][reduction === "max" ? 0 : 1];
}

const reduces = (name, ofIntegers = name) => ([x], {axes}, [type]) => {
  if ((name === "max" || name === "min") && sizeOf(x.shape) === 0) {
    const out = make(type.dtype, type.shape);
    out.data.fill(limitOf(type.dtype, name));
    return out;
  }
  return reduceAlong(x, axes, type, REDUCTIONS[isFloat(x.dtype) ? name : ofIntegers]);
};

// The first of the largest; NaN counts as larger than any number.
function argmax(a, i, n, s) {
  let best = 0;
  for (let k = 0; k < n; k++, i += s) {
    const x = a[i];
    if (Number.isNaN(x)) return k;
    if (x > a[i - (k - best) * s]) best = k;
  }
  return best;
}
function argmin(a, i, n, s) {
  let best = 0;
  for (let k = 0; k < n; k++, i += s) {
    const x = a[i];
    if (Number.isNaN(x)) return k;
    if (x < a[i - (k - best) * s]) best = k;
  }
  return best;
}

const CUMULATIONS = {
  sum: (total, x) => total + x,
  sumOfIntegers: (total, x) => (total + x) | 0,
  prod: (total, x) => Math.fround(total * x),
  prodOfIntegers: Math.imul,
  max: Math.max,
  min: Math.min,
};
const cumulates = (name, ofIntegers = name) => ([x], {axis, reverse}, [type]) => {
  const out = make(type.dtype, type.shape);
  const f = CUMULATIONS[isFloat(x.dtype) ? name : ofIntegers];
  const count = x.shape[axis];
  eachRow([x, out], axis, ([i, p]) => {
    let step = x.strides[axis];
    let outStep = out.strides[axis];
    if (reverse) {
      i += (count - 1) * step;
      p += (count - 1) * outStep;
      step = -step;
      outStep = -outStep;
    }
    let total = x.data[i];
    for (let k = 0; k < count; k++, i += step, p += outStep) {
      if (k > 0) total = f(total, x.data[i]);
      out.data[p] = total;
    }
  });
  return out;
};

// Calls `visit` with the places of the first elements of each row along an axis, and its number.
function eachRow(arrays, axis, visit) {
  const without = (list) => list.filter((_, other) => other !== axis);
  const shape = without(arrays[0].shape);
  if (sizeOf(arrays[0].shape) === 0) return;
  const starts = arrays.map((x) => view(x, shape, without(x.strides)));
  const loops = loopsOver(shape, starts);
  const n = loops.sizes[0];
  const rows = sizeOf(shape);
  for (let row = 0; row < rows; row += n) {
    for (let k = 0; k < n; k++) {
      visit(loops.starts.map((start, which) => start + k * loops.steps[which][0]), row + k);
    }
    advance(loops);
  }
}

// Ascending, with NaN at the end, as JAX sorts.
function ascending(a, b) {
  if (Number.isNaN(a)) return Number.isNaN(b) ? 0 : 1;
  if (Number.isNaN(b)) return -1;
  return a - b || 0;
}

function sort(operands, {dimension}, types) {
  const outs = types.map((type) => make(type.dtype, type.shape));
  const [keys] = operands;
  const count = keys.shape[dimension];
  eachRow([...operands, ...outs], dimension, (starts) => {
    const step = keys.strides[dimension];
    const order = Array.from({length: count}, (_, k) => k);
    const key = (k) => keys.data[starts[0] + k * step];
    order.sort((k, l) => key(k) < key(l) ? -1 : key(k) > key(l) ? 1 : ascending(key(k), key(l)));
    operands.forEach((x, which) => {
      const p = starts[operands.length + which];
      for (let k = 0; k < count; k++) {
        const from = starts[which] + order[k] * x.strides[dimension];
        outs[which].data[p + k * outs[which].strides[dimension]] = x.data[from];
      }
    });
  });
  return outs;
}

// Where a float32 stands among all of them, from the largest: NaN, infinity, ..., 0, -0, ...
function rankOfFloat(x) {
  if (Number.isNaN(x)) return 0;  // whatever its sign
  oneFloat[0] = x;
  const bits = itsBits[0];
  return bits < 2 ** 31 ? 2 ** 31 - 1 - bits : bits;
}
const rankOfInteger = (x) => 2 ** 32 - x;

// The k largest of each row, and their places; of equal ones the first. Rank and place are one number
// below 2**53, so that the largest come first in the order of numbers.
const MOST_PLACES = 2 ** 20;
function topK([x], {k}, types) {
  const [values, places] = types.map((type) => make(type.dtype, type.shape));
  const axis = x.shape.length - 1;
  const count = x.shape[axis];
  const rankOf = isFloat(x.dtype) ? rankOfFloat : rankOfInteger;
  const step = x.strides[axis];
  const keys = new Float64Array(count);
  eachRow([x], axis, ([start], row) => {
    for (let i = 0; i < count; i++) keys[i] = rankOf(x.data[start + i * step]) * MOST_PLACES + i;
    const best = 4 * k < count ? smallestOf(keys, k) : keys.sort();
    for (let i = 0; i < k; i++) {
      const place = best[i] % MOST_PLACES;
      values.data[row * k + i] = x.data[start + place * step];
      places.data[row * k + i] = place;
    }
  });
  return [values, places];
}

// The k smallest of many keys, in order: a part of some is sorted whenever it is full.
function smallestOf(keys, k) {
  const part = new Float64Array(4 * k);
  let size = 0;
  let limit = Infinity;
  for (let i = 0; i < keys.length; i++) {
    if (keys[i] >= limit) continue;
    part[size++] = keys[i];
    if (size < part.length) continue;
    part.sort();
    size = k;
    limit = part[k - 1];
  }
  return part.subarray(0, size).sort();
}

// --- products of matrices ------------------------------------------------------------------------

const TILE = 4;
const roundUp = (size) => TILE * Math.ceil(size / TILE);

// Products of floats in WebAssembly, at 25 GFLOP/s where the loops below reach 6 (measured in Node, one
// core). The loops are for integers, and for a page whose host doesn't let WebAssembly run. Both give
// the same bits: sums have 53 bits and are rounded once. PRODUCT are the bytes of product.wasm as text,
// which the page defines before this script.
function startProduct() {
  try {
    const bytes = Uint8Array.from(atob(PRODUCT), (character) => character.charCodeAt(0));
    return new WebAssembly.Instance(new WebAssembly.Module(bytes)).exports;
  } catch {
    return null;
  }
}
const product = startProduct();

// Its memory: the panels of weights, which stay, and one workspace for all else. Places are counted in
// numbers from the beginning, since a memory that grows leaves its old typed arrays without numbers.
let reserved = 0;
let workspace = {at: 0, count: 0};

function reserve(count) {
  const end = reserved + roundUp(count);
  const missing = 4 * end - product.memory.buffer.byteLength;
  if (missing > 0) product.memory.grow(Math.ceil(missing / 2 ** 16));
  const at = reserved;
  reserved = end;
  return at;
}

// What was the workspace before stays unused. Each is at least twice as large, so there are few.
function workspaceFor(count) {
  if (workspace.count < count) {
    const larger = Math.max(count, 2 * workspace.count);
    workspace = {at: reserve(larger), count: larger};
  }
  return workspace.at;
}

// Writes a right factor from p on in panels of four columns, row after row, so that a tile reads it in
// order. The columns that the last panel lacks are 0.
function pack(target, p, x) {
  const [rows, columns] = x.shape;
  const [rowStep, step] = x.strides;
  for (let first = 0; first < columns; first += TILE) {
    const width = Math.min(TILE, columns - first);
    let i = x.offset + first * step;
    for (let row = 0; row < rows; row++, i += rowStep, p += TILE) {
      for (let k = 0; k < TILE; k++) target[p + k] = k < width ? x.data[i + k * step] : 0;
    }
  }
}

// The panels of weights are made once for all runs: for WebAssembly, for loops, or for both, since int8
// weights may be multiplied by floats and by integers.
const isWeight = (x) => x.store.uses === Infinity;
function packedOnce(x, packing) {
  const key = [packing.name, x.offset, x.shape, x.strides].join("/");
  x.store.packs ??= new Map();
  if (!x.store.packs.has(key)) x.store.packs.set(key, packing(x));
  return x.store.packs.get(key);
}

// One matrix of a right factor. Weights are packed one by one, since any of them may be needed alone,
// such as those of some experts.
function matrixOf(x, batch) {
  const [, ...shape] = x.shape;
  const [step, ...strides] = x.strides;
  return view(x, shape, strides, x.offset + batch * step);
}

function packInProduct(x) {
  const [rows, columns] = x.shape;
  const at = reserve(rows * roundUp(columns));
  pack(new Float32Array(product.memory.buffer), at, x);
  return at;
}

// out = A B, with a dense A (batches, M, K) and B (batches, K, N).
function multiplyInProduct(out, A, B) {
  const [batches, M, K] = A.shape;
  const N = B.shape[2];
  const rows = roundUp(M);
  const columns = roundUp(N);
  const matrices = Array.from({length: batches}, (_, batch) => matrixOf(B, batch));
  const weights = isWeight(B) ? matrices.map((matrix) => packedOnce(matrix, packInProduct)) : null;
  const ofLeft = 2 * rows * K;  // numbers of 64 bits
  const ofRight = weights ? 0 : K * columns;
  const left = workspaceFor(ofLeft + ofRight + rows * columns);
  const right = left + ofLeft;
  const result = right + ofRight;
  // Made here, when the memory grows no more. The rows that the last tile lacks are whatever was there:
  // their results are not read.
  const numbers = new Float32Array(product.memory.buffer);
  const leftNumbers = new Float64Array(product.memory.buffer, 4 * left, rows * K);
  matrices.forEach((matrix, batch) => {
    const start = A.offset + batch * M * K;
    leftNumbers.set(A.data.subarray(start, start + M * K));
    if (!weights) pack(numbers, right, matrix);
    const panels = weights ? weights[batch] : right;
    product.multiply(4 * result, 4 * left, 4 * panels, rows, K, columns);
    copyInto(
      {data: out.data, offset: batch * M * N, strides: [N, 1]},
      {data: numbers, offset: result, strides: [columns, 1], shape: [M, N]});
  });
}

// The same in loops: o = a b, with a dense (M, K) and b in panels. A tile of 4 x 4 results is twice as
// fast as adding multiples of rows.
function multiplyTiles(o, at, a, i, b, j, M, K, N) {
  for (let n = 0; n < N; n += TILE, j += K * TILE) {
    const width = Math.min(TILE, N - n);
    let m = 0;
    for (; m + TILE <= M; m += TILE) {
      let c00 = 0, c01 = 0, c02 = 0, c03 = 0;
      let c10 = 0, c11 = 0, c12 = 0, c13 = 0;
      let c20 = 0, c21 = 0, c22 = 0, c23 = 0;
      let c30 = 0, c31 = 0, c32 = 0, c33 = 0;
      const row0 = i + m * K, row1 = row0 + K, row2 = row1 + K, row3 = row2 + K;
      for (let k = 0, q = j; k < K; k++, q += TILE) {
        const a0 = a[row0 + k], a1 = a[row1 + k], a2 = a[row2 + k], a3 = a[row3 + k];
        const b0 = b[q], b1 = b[q + 1], b2 = b[q + 2], b3 = b[q + 3];
        c00 += a0 * b0; c01 += a0 * b1; c02 += a0 * b2; c03 += a0 * b3;
        c10 += a1 * b0; c11 += a1 * b1; c12 += a1 * b2; c13 += a1 * b3;
        c20 += a2 * b0; c21 += a2 * b1; c22 += a2 * b2; c23 += a2 * b3;
        c30 += a3 * b0; c31 += a3 * b1; c32 += a3 * b2; c33 += a3 * b3;
      }
      const p = at + m * N + n;
      writeRow(o, p, width, c00, c01, c02, c03);
      writeRow(o, p + N, width, c10, c11, c12, c13);
      writeRow(o, p + 2 * N, width, c20, c21, c22, c23);
      writeRow(o, p + 3 * N, width, c30, c31, c32, c33);
    }
    for (; m < M; m++) {
      let c0 = 0, c1 = 0, c2 = 0, c3 = 0;
      const row = i + m * K;
      for (let k = 0, q = j; k < K; k++, q += TILE) {
        const x = a[row + k];
        c0 += x * b[q]; c1 += x * b[q + 1]; c2 += x * b[q + 2]; c3 += x * b[q + 3];
      }
      writeRow(o, at + m * N + n, width, c0, c1, c2, c3);
    }
  }
}

function writeRow(o, p, width, c0, c1, c2, c3) {
  o[p] = c0;
  if (width > 1) o[p + 1] = c1;
  if (width > 2) o[p + 2] = c2;
  if (width > 3) o[p + 3] = c3;
}

function multiplyTilesOfIntegers(o, at, a, i, b, j, M, K, N) {
  for (let m = 0; m < M; m++) {
    for (let n = 0; n < N; n++) {
      let sum = 0;
      let q = j + (n - n % TILE) * K + n % TILE;
      for (let k = 0; k < K; k++, q += TILE) sum = (sum + Math.imul(a[i + m * K + k], b[q])) | 0;
      o[at + m * N + n] = sum;
    }
  }
}

function permuted(x, order) {
  return view(x, order.map((axis) => x.shape[axis]), order.map((axis) => x.strides[axis]));
}

// A view with groups of axes merged into one each, or a dense copy where steps don't allow that.
function merged(x, counts) {
  const shapes = [];
  let axis = 0;
  for (const count of counts) {
    shapes.push(x.shape.slice(axis, axis + count));
    axis += count;
  }
  const shape = shapes.map(sizeOf);
  axis = 0;
  const strides = [];
  for (const count of counts) {
    const part = view(x, x.shape.slice(axis, axis + count), x.strides.slice(axis, axis + count));
    axis += count;
    const {sizes, steps} = loopsOver(part.shape, [part]);
    if (sizes.length > 1) {
      const whole = dense(x);
      return view(whole, shape, denseStrides(shape));
    }
    strides.push(steps[0][0]);
  }
  return view(x, shape, strides);
}

const otherAxes = (x, ...axes) =>
  x.shape.map((_, axis) => axis).filter((axis) => !axes.flat().includes(axis));

function dotGeneral(operands, parameters, [type]) {
  const ofFloats = operands.some((x) => isFloat(x.dtype));
  const [a, b] = ofFloats ? operands.map(asFloats) : operands;
  const {left, right, left_batch: leftBatch, right_batch: rightBatch} = parameters;
  const leftFree = otherAxes(a, left, leftBatch);
  const rightFree = otherAxes(b, right, rightBatch);
  const A = dense(merged(
    permuted(a, [...leftBatch, ...leftFree, ...left]),
    [leftBatch.length, leftFree.length, left.length]));
  const B = merged(
    permuted(b, [...rightBatch, ...right, ...rightFree]),
    [rightBatch.length, right.length, rightFree.length]);
  const out = make(type.dtype, type.shape);
  if (sizeOf(A.shape) === 0 || sizeOf(B.shape) === 0) out.data.fill(0);
  else if (ofFloats) multiplyFloats(out, A, B);
  else multiplyInLoops(out, A, B, multiplyTilesOfIntegers);
  return out;
}

// In loops also if WebAssembly's memory can't grow.
function multiplyFloats(out, A, B) {
  if (!product) {
    multiplyInLoops(out, A, B, multiplyTiles);
    return;
  }
  try {
    multiplyInProduct(out, A, B);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    multiplyInLoops(out, A, B, multiplyTiles);
  }
}

// JAX multiplies an integer by a float as two floats. One of 32 bits may have to be rounded.
function asFloats(x) {
  if (BITS[x.dtype] !== 32) return x;
  return map1(unary((number) => number), {dtype: "float32", shape: x.shape}, x);
}

function multiplyInLoops(out, A, B, multiply) {
  const [batches, M, K] = A.shape;
  const N = B.shape[2];
  for (let batch = 0; batch < batches; batch++) {
    const matrix = matrixOf(B, batch);
    const {data} = isWeight(B) ? packedOnce(matrix, packInLoops) : packInLoops(matrix);
    multiply(out.data, batch * M * N, A.data, A.offset + batch * M * K, data, 0, M, K, N);
  }
}

function packInLoops(x) {
  const [rows, columns] = x.shape;
  const panels = make(x.dtype, [rows * roundUp(columns)]);
  pack(panels.data, 0, x);
  if (isWeight(x)) panels.store.uses = Infinity;
  return panels;
}

// --- shapes --------------------------------------------------------------------------------------

function reshape([x], parameters, [type]) {
  const whole = dense(x);
  return view(whole, type.shape, denseStrides(type.shape));
}

function broadcastInDim([x], {broadcast_dimensions: dimensions}, [type]) {
  const strides = type.shape.map(() => 0);
  dimensions.forEach((axis, k) => {
    if (x.shape[k] !== 1) strides[axis] = x.strides[k];
  });
  return view(x, type.shape, strides);
}

function slice([x], {start_indices: starts, strides: steps}, [type]) {
  let offset = x.offset;
  starts.forEach((start, axis) => { offset += start * x.strides[axis]; });
  const strides = x.strides.map((stride, axis) => stride * (steps ? steps[axis] : 1));
  return view(x, type.shape, strides, offset);
}

function rev([x], {dimensions}) {
  let offset = x.offset;
  const strides = [...x.strides];
  if (sizeOf(x.shape) === 0) return x;
  for (const axis of dimensions) {
    offset += (x.shape[axis] - 1) * x.strides[axis];
    strides[axis] = -x.strides[axis];
  }
  return view(x, x.shape, strides, offset);
}

// A part of a dense array that begins at some place along each axis.
function partOf(x, starts, shape) {
  let offset = x.offset;
  starts.forEach((start, axis) => { offset += start * x.strides[axis]; });
  return view(x, shape, x.strides, offset);
}

function concatenate(operands, {dimension}, [type]) {
  const out = make(type.dtype, type.shape);
  let start = 0;
  for (const x of operands) {
    const starts = type.shape.map((_, axis) => axis === dimension ? start : 0);
    copyInto(partOf(out, starts, x.shape), x);
    start += x.shape[dimension];
  }
  return out;
}

function stack(operands, {axis}, types) {
  const withAxis = operands.map((x) => view(
    x, [...x.shape.slice(0, axis), 1, ...x.shape.slice(axis)],
    [...x.strides.slice(0, axis), 0, ...x.strides.slice(axis)]));
  return concatenate(withAxis, {dimension: axis}, types);
}

function split([x], {axis}, types) {
  let start = 0;
  return types.map((type) => {
    const starts = x.shape.map((_, other) => other === axis ? start : 0);
    start += type.shape[axis];
    return partOf(x, starts, type.shape);
  });
}

// Each axis as two: its repetitions, in steps of 0, and itself.
function tile([x], {reps}, [type]) {
  const shape = x.shape.flatMap((size, axis) => [reps[axis], size]);
  const strides = x.strides.flatMap((stride) => [0, stride]);
  return reshape([view(x, shape, strides)], {}, [type]);
}

function pad([x, value], {padding_config: padding}, [type]) {
  const out = make(type.dtype, type.shape);
  out.data.fill(value.data[value.offset]);
  // Only the elements that stay inside, since padding may be negative.
  const from = [];
  const to = [];
  const shape = [];
  padding.forEach(([low, , interior], axis) => {
    const step = 1 + interior;
    const first = Math.max(0, Math.ceil(-low / step));
    const last = Math.min(x.shape[axis] - 1, Math.floor((type.shape[axis] - 1 - low) / step));
    from.push(first);
    to.push(low + first * step);
    shape.push(Math.max(0, last - first + 1));
  });
  if (sizeOf(shape) === 0) return out;
  const target = partOf(out, to, shape);
  const steps = target.strides.map((stride, axis) => stride * (1 + padding[axis][2]));
  copyInto(view(target, shape, steps), partOf(x, from, shape));
  return out;
}

// Starts are moved so that the whole part is inside.
function clampedStarts(operands, shape, part) {
  return operands.map((start, axis) =>
    Math.min(Math.max(start.data[start.offset], 0), shape[axis] - part[axis]));
}

function dynamicSlice([x, ...starts], parameters, [type]) {
  return partOf(x, clampedStarts(starts, x.shape, type.shape), type.shape);
}

function dynamicUpdateSlice([x, update, ...starts], parameters, [type]) {
  const out = make(type.dtype, type.shape);
  copyInto(out, x);
  copyInto(partOf(out, clampedStarts(starts, x.shape, update.shape), update.shape), update);
  return out;
}

function iota(operands, {dimension}, [type]) {
  const out = make(type.dtype, type.shape);
  const step = out.strides[dimension];
  const count = type.shape[dimension];
  for (let i = 0; i < out.data.length; i++) out.data[i] = Math.floor(i / step) % count;
  return out;
}

// The counters of random bits: the high and the low word of each place.
function iota2x32(operands, parameters, [high, low]) {
  const highWords = make(high.dtype, high.shape);
  const lowWords = make(low.dtype, low.shape);
  highWords.data.fill(0);
  for (let i = 0; i < lowWords.data.length; i++) lowWords.data[i] = i;
  return [highWords, lowWords];
}

function bitcast([x], {dtype}, [type]) {
  const from = numbersOf(x);
  const out = make(type.dtype, type.shape);
  out.data.set(new KINDS[dtype](from.buffer, from.byteOffset, from.length));
  return out;
}

// --- indices -------------------------------------------------------------------------------------


// Calls `visit` for each window with the place of its first element in `x`, or null if the window
// is dropped, and the place in the array of windows.
function eachWindow(x, indices, windows, {batchAxes, indexMap, batching, indexBatching, sizes, mode}, visit) {
  const last = indices.shape.length - 1;  // the axis of coordinates
  const batchShape = indices.shape.slice(0, last);
  const strides = denseStrides(batchShape);
  const count = sizeOf(batchShape);
  for (let number = 0; number < count; number++) {
    const coordinates = batchShape.map((size, axis) => Math.floor(number / strides[axis]) % size);
    let at = indices.offset;
    let place = windows.offset;
    coordinates.forEach((coordinate, axis) => {
      at += coordinate * indices.strides[axis];
      place += coordinate * windows.strides[batchAxes[axis]];
    });
    let start = x.offset;
    let isInside = true;
    indexMap.forEach((axis, k) => {
      let index = indices.data[at + k * indices.strides[last]];
      const most = x.shape[axis] - sizes[axis];
      if (index < 0 || index > most) isInside = false;
      index = Math.min(Math.max(index, 0), most);
      start += index * x.strides[axis];
    });
    batching.forEach((axis, k) => { start += coordinates[indexBatching[k]] * x.strides[axis]; });
    visit(isInside || mode === "clip" ? start : null, place);
  }
}

const SPECIAL = {nan: NaN, inf: Infinity, "-inf": -Infinity};
function fillOf(fill, dtype) {
  if (fill !== null) return SPECIAL[fill] ?? Number(fill);
  if (isFloat(dtype)) return NaN;
  if (dtype === "bool") return 1;
  return dtype.startsWith("u") ? RANGES[dtype][1] : RANGES[dtype][0];
}

function gather([x, indices], parameters, [type]) {
  const out = make(type.dtype, type.shape);
  const axes = otherAxes(x, parameters.collapsed_slice_dims, parameters.operand_batching_dims);
  const shape = axes.map((axis) => parameters.slice_sizes[axis]);
  const fill = fillOf(parameters.fill, type.dtype);
  const window = view(x, shape, axes.map((axis) => x.strides[axis]));
  const target = view(out, shape, parameters.offset_dims.map((axis) => out.strides[axis]));
  const nothing = {...array(type.dtype, [1], [fill]), shape, strides: shape.map(() => 0)};
  const options = {
    batchAxes: otherAxes(out, parameters.offset_dims),
    indexMap: parameters.start_index_map,
    batching: parameters.operand_batching_dims,
    indexBatching: parameters.start_indices_batching_dims,
    sizes: parameters.slice_sizes,
    mode: parameters.mode,
  };
  eachWindow(x, indices, out, options, (start, place) => {
    target.offset = place;
    window.offset = start ?? 0;
    copyInto(target, start === null ? nothing : window);
  });
  return out;
}

const COMBINATIONS = {
  set: (old, update) => update,
  add: (old, update) => old + update,
  mul: (old, update) => old * update,
  mulOfIntegers: Math.imul,
  max: Math.max,
  min: Math.min,
};
const scatters = (name, ofIntegers = name) => ([x, indices, updates], parameters, [type]) => {
  const out = make(type.dtype, type.shape);
  copyInto(out, x);
  const combine = COMBINATIONS[isFloat(type.dtype) ? name : ofIntegers];
  const axes = otherAxes(out, parameters.inserted_window_dims, parameters.operand_batching_dims);
  const shape = parameters.update_window_dims.map((axis) => updates.shape[axis]);
  const sizes = out.shape.map(() => 1);
  axes.forEach((axis, k) => { sizes[axis] = shape[k]; });
  const target = view(out, shape, axes.map((axis) => out.strides[axis]));
  const update = view(updates, shape, parameters.update_window_dims.map((axis) => updates.strides[axis]));
  const options = {
    batchAxes: otherAxes(updates, parameters.update_window_dims),
    indexMap: parameters.scatter_dims_to_operand_dims,
    batching: parameters.operand_batching_dims,
    indexBatching: parameters.scatter_indices_batching_dims,
    sizes,
    mode: parameters.mode,
  };
  const round = ROUNDINGS[type.dtype] ?? ((number) => number);
  const total = sizeOf(shape);
  eachWindow(out, indices, updates, options, (start, place) => {
    if (start === null || total === 0) return;
    target.offset = start;
    update.offset = place;
    const loops = loopsOver(shape, [target, update]);
    const n = loops.sizes[0];
    for (let done = 0; done < total; done += n) {
      let [p, i] = loops.starts;
      for (let k = 0; k < n; k++, p += loops.steps[0][0], i += loops.steps[1][0]) {
        out.data[p] = round(combine(out.data[p], updates.data[i]));
      }
      advance(loops);
    }
  });
  return out;
};

// --- the table -----------------------------------------------------------------------------------

const elementByElement = {
  abs: either1(unary(Math.abs), always(unary(Math.abs))),
  acos: each1(unary(Math.acos)),
  acosh: each1(unary(Math.acosh)),
  asin: each1(unary(Math.asin)),
  asinh: each1(unary(Math.asinh)),
  atan: each1(unary(Math.atan)),
  atanh: each1(unary(Math.atanh)),
  cbrt: each1(unary(Math.cbrt)),
  ceil: each1(unary(Math.ceil)),
  convert_element_type: ([x], {dtype}, [type]) => map1(conversion(x.dtype, dtype), type, x),
  cos: each1(unary(Math.cos)),
  cosh: each1(unary(Math.cosh)),
  erf: each1(unary(erf)),
  erf_inv: each1(unary(erfInverse)),
  erfc: each1(unary(erfc)),
  exp: each1(KERNELS.exp),
  exp2: each1(unary((x) => 2 ** x)),
  expm1: each1(unary(Math.expm1)),
  floor: each1(unary(Math.floor)),
  integer_pow: ([x], {y}, [type]) => {
    if (!isFloat(x.dtype)) return map1(unary((a) => powerOfIntegers(a, y)), type, x);
    return map1(y === 2 ? KERNELS.square : unary((a) => integerPower(a, y)), type, x);
  },
  is_finite: each1(unary((x) => Number.isFinite(x) ? 1 : 0)),
  log: each1(unary(Math.log)),
  log1p: each1(unary(Math.log1p)),
  logistic: each1(KERNELS.logistic),
  neg: each1(KERNELS.neg),
  not: ([x], parameters, [type]) =>
    map1(x.dtype === "bool" ? unary((a) => 1 - a) : unary((a) => ~a), type, x),
  reduce_precision: ([x], {dtype}, [type]) => {
    // XLA sets numbers below the smallest normal one of the dtype to zero.
    const least = dtype === "float16" ? 2 ** -14 : 2 ** -126;
    const round = (a) => {
      const rounded = ROUNDINGS[dtype](a);
      return Math.abs(rounded) < least ? 0 * Math.sign(a) : rounded;
    };
    return map1(unary(round), type, x);
  },
  round: ([x], {to_even: toEven}, [type]) => map1(unary(toEven ? roundToEven : roundAway), type, x),
  rsqrt: each1(KERNELS.rsqrt),
  sign: each1(unary(Math.sign)),
  sin: each1(unary(Math.sin)),
  sinh: each1(unary(Math.sinh)),
  sqrt: each1(unary(Math.sqrt)),
  square: either1(KERNELS.square, always(unary((a) => Math.imul(a, a)))),
  tan: each1(unary(Math.tan)),
  tanh: each1(KERNELS.tanh),

  add: each2(KERNELS.add),
  and: each2(binary((a, b) => a & b)),
  atan2: each2(binary(Math.atan2)),
  clamp: ([low, x, high], parameters, [type]) => {
    const raised = map2(KERNELS.max, type, x, low);
    return map2(KERNELS.min, type, raised, high);
  },
  div: either2(KERNELS.div, divideIntegers),
  eq: each2(KERNELS.eq),
  ge: each2(KERNELS.ge),
  gt: each2(KERNELS.gt),
  le: each2(KERNELS.le),
  lt: each2(KERNELS.lt),
  max: each2(KERNELS.max),
  min: each2(KERNELS.min),
  mul: either2(KERNELS.mul, multiplyIntegers),
  ne: each2(KERNELS.ne),
  or: each2(binary((a, b) => a | b)),
  pow: either2(binary(power), always(binary(powerOfIntegers))),
  rem: either2(binary((a, b) => a % b), remainderOfIntegers),
  select_n: ([which, ...cases], parameters, [type]) => {
    if (cases.length === 1) return cases[0];
    // From the last case back: each step chooses between one case and those behind it.
    let chosen = cases[cases.length - 1];
    for (let k = cases.length - 2; k >= 0; k--) {
      const isBehind = cases.length === 2 ? which : map1(
        unary((index) => index > k ? 1 : 0), {dtype: "bool", shape: which.shape}, which);
      chosen = map3(KERNELS.select, type, isBehind, cases[k], chosen);
    }
    return chosen;
  },
  shift_left: ([a, b], parameters, [type]) => map2(shiftLeft(a.dtype), type, a, b),
  shift_right_arithmetic: ([a, b], parameters, [type]) =>
    map2(shiftRightArithmetic(a.dtype), type, a, b),
  shift_right_logical: ([a, b], parameters, [type]) =>
    map2(shiftRightLogical(a.dtype), type, a, b),
  sub: each2(KERNELS.sub),
  xor: each2(binary((a, b) => a ^ b)),
};

const primitives = {
  ...elementByElement,
  bitcast_convert_type: bitcast,
  threefry2x32: (operands, parameters, types) => {
    const [key0, key1, x0, x1] = operands.map((x) => numbersOf(broadcast(x, types[0].shape)));
    const outs = types.map((type) => make(type.dtype, type.shape));
    const counters = [0, 0];
    for (let i = 0; i < outs[0].data.length; i++) {
      counters[0] = x0[i];
      counters[1] = x1[i];
      threefry(key0[i], key1[i], counters);
      outs[0].data[i] = counters[0];
      outs[1].data[i] = counters[1];
    }
    return outs;
  },
  broadcast_in_dim: broadcastInDim,
  concatenate,
  dynamic_slice: dynamicSlice,
  dynamic_update_slice: dynamicUpdateSlice,
  iota,
  iota_2x32_shape: iota2x32,
  pad,
  reshape,
  rev,
  slice,
  split,
  squeeze: reshape,
  stack,
  tile,
  transpose: ([x], {permutation}) => permuted(x, permutation),

  argmax: ([x], {axes}, [type]) => reduceAlong(x, axes, type, argmax),
  argmin: ([x], {axes}, [type]) => reduceAlong(x, axes, type, argmin),
  cummax: cumulates("max"),
  cummin: cumulates("min"),
  cumprod: cumulates("prod", "prodOfIntegers"),
  cumsum: cumulates("sum", "sumOfIntegers"),
  dot_general: dotGeneral,
  reduce_and: reduces("and"),
  reduce_max: reduces("max"),
  reduce_min: reduces("min"),
  reduce_or: reduces("or"),
  reduce_prod: reduces("prod", "prodOfIntegers"),
  reduce_sum: reduces("sum", "sumOfIntegers"),
  reduce_xor: reduces("xor"),
  sort,
  top_k: topK,

  gather,
  scatter: scatters("set"),
  "scatter-add": scatters("add"),
  "scatter-max": scatters("max"),
  "scatter-min": scatters("min"),
  "scatter-mul": scatters("mul", "mulOfIntegers"),

  cond: ([index, ...operands], {branches}) => {
    const chosen = Math.min(Math.max(index.data[index.offset], 0), branches.length - 1);
    return runInner(branches[chosen], operands);
  },
  while: (operands, parameters) => {
    const conditionEnd = parameters.condition_constants;
    const bodyEnd = conditionEnd + parameters.body_constants;
    const conditionConstants = operands.slice(0, conditionEnd);
    const bodyConstants = operands.slice(conditionEnd, bodyEnd);
    let carry = operands.slice(bodyEnd);
    for (;;) {
      const [goesOn] = runInner(parameters.condition, [...conditionConstants, ...carry]);
      if (!goesOn.data[goesOn.offset]) return carry;
      carry = runInner(parameters.body, [...bodyConstants, ...carry]);
    }
  },
};

// --- programs ------------------------------------------------------------------------------------

// The bytes of an array in base64, as Python writes them.
function decode(dtype, shape, text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return fromBytes(dtype, shape, bytes);
}

function fromBytes(dtype, shape, bytes) {
  if (dtype === "bfloat16" || dtype === "float16") {
    const words = new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.length / 2);
    return array(dtype, shape, widened(dtype, words));
  }
  const Kind = KINDS[dtype];
  const data = new Kind(bytes.buffer, bytes.byteOffset, bytes.length / Kind.BYTES_PER_ELEMENT);
  return array(dtype, shape, data);
}

// 16-bit floats as float32.
function widened(dtype, words) {
  if (dtype === "bfloat16") {
    const bits = Uint32Array.from(words, (word) => word << 16);
    return new Float32Array(bits.buffer);
  }
  return Float32Array.from(words, (word) => {
    const sign = word & 0x8000 ? -1 : 1;
    const exponent = (word >> 10) & 31;
    const fraction = word & 0x3ff;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    if (exponent === 0) return sign * fraction * 2 ** -24;
    return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  });
}

// A program made ready: what depends on constants and weights alone is computed here, once.
function load(program, weights = {}) {
  const types = program.types.map(([dtype, shape]) => ({dtype, shape}));
  const fixed = new Array(types.length);
  for (const [number, text] of program.constants) {
    fixed[number] = decode(types[number].dtype, types[number].shape, text);
  }
  const inputs = Object.entries(program.inputs);
  for (const [name, number] of inputs) {
    if (name in weights) fixed[number] = weights[name];
  }
  const operations = [];
  const machine = {types, inputs, outputs: program.outputs, fixed, operations, plans: new Map()};
  fixed.forEach((x) => { x.store.uses = Infinity; });
  for (const [name, read, made, parameters] of program.operations) {
    const operation = {name, read, made, parameters, types: made.map((number) => types[number])};
    if (read.every((number) => fixed[number])) {
      apply(operation, fixed);
      made.forEach((number) => { fixed[number].store.uses = Infinity; });
    } else {
      operations.push(operation);
    }
  }
  machine.run = (given, names) => runMachine(machine, given, names);
  return machine;
}

function apply(operation, values) {
  const operands = operation.read.map((number) => values[number]);
  withResults(operation, operands, operation.types, (results) => {
    results.forEach((result, k) => hold(values, operation.made[k], result));
  });
}

// Gives the results of an operation to `use`, and then frees what has been made and isn't held.
function withResults(operation, operands, types, use) {
  const outer = madeNow;
  madeNow = [];
  let results = primitives[operation.name](operands, operation.parameters, types);
  if (!Array.isArray(results)) results = [results];
  results.forEach((result, k) => {
    const {dtype} = types[k];
    if (dtype === "bfloat16" || dtype === "float16") roundAll(result, dtype);
  });
  use(results);
  for (const store of madeNow) {
    if (store.uses === 0) release(store);
  }
  madeNow = outer;
}

function hold(values, number, x) {
  const before = values[number];
  values[number] = x;
  x.store.uses++;
  if (before && --before.store.uses === 0) release(before.store);
}

// What an operation has computed, rather than moved, may have more digits than its dtype.
function roundAll(x, dtype) {
  if (!madeNow.includes(x.store)) return;
  const round = ROUNDINGS[dtype];
  const {data} = x;
  for (let i = 0; i < data.length; i++) data[i] = round(data[i]);
}

// The operations that some outputs need, and after each the values that nothing needs any more.
function planFor(machine, names) {
  const key = names.join("\n");
  if (machine.plans.has(key)) return machine.plans.get(key);
  const results = names.map((name) => machine.outputs[name]);
  const needed = new Set(results);
  const seen = new Set(results);
  const plan = [];
  for (let k = machine.operations.length - 1; k >= 0; k--) {
    const operation = machine.operations[k];
    if (!operation.made.some((number) => needed.has(number))) continue;
    operation.read.forEach((number) => needed.add(number));
    const ends = [...new Set([...operation.read, ...operation.made])].filter(
      (number) => !seen.has(number) && !machine.fixed[number]);
    ends.forEach((number) => seen.add(number));
    plan.push({operation, ends});
  }
  plan.reverse();
  machine.plans.set(key, plan);
  return plan;
}

// Runs a program for arrays by name; returns its outputs, or those of some names alone.
function runMachine(machine, given, names = Object.keys(machine.outputs)) {
  const values = [...machine.fixed];
  for (const [number, x] of inputsOf(machine, given)) hold(values, number, x);
  for (const {operation, ends} of planFor(machine, names)) {
    apply(operation, values);
    for (const number of ends) {
      const {store} = values[number];
      values[number] = undefined;
      if (--store.uses === 0) release(store);
    }
  }
  return outputsOf(machine, values, names);
}

// The arrays that a caller gives, with the numbers of their values.
function inputsOf(machine, given) {
  const inputs = [];
  for (const [name, number] of machine.inputs) {
    if (machine.fixed[number]) continue;
    const x = given[name];
    const {dtype, shape} = machine.types[number];
    if (!x || x.dtype !== dtype || x.shape.join() !== shape.join()) {
      throw new Error(`the input ${name} must be ${dtype} of shape [${shape}]`);
    }
    inputs.push([number, x]);
  }
  return inputs;
}

function outputsOf(machine, values, names) {
  const outputs = {};
  for (const name of names) outputs[name] = values[machine.outputs[name]];
  return outputs;
}

// Runs the program of a branch or of a loop's body.
function runInner(program, operands) {
  program.machine ??= load(program);
  const given = {};
  operands.forEach((operand, k) => { given[k] = operand; });
  const outputs = program.machine.run(given);
  return Object.keys(program.outputs).map((name) => outputs[name]);
}

return {array, copyOf, isFinite, isSame, numbersOf, decode, fromBytes, load, primitives, sizeOf};
})();

if (typeof module !== "undefined") module.exports = interpreter;
