// Unpacks what jgpt/page/weights.py has packed into the page.
//
//   const weights = await unpackWeights(packed, interpreter);  // arrays by name
//   const values = await unpackJson(text);
"use strict";

// The bytes of a text: gzip in base64.
async function unpackBytes(text) {
  const letters = atob(text);
  const compressed = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) compressed[i] = letters.charCodeAt(i);
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("gzip"));
  try {
    return await new Response(stream).arrayBuffer();
  } catch {  // whose own words are "Failed to fetch"
    throw new Error("the file is damaged, or too large for the browser's memory");
  }
}

async function unpackJson(text) {
  return JSON.parse(new TextDecoder().decode(await unpackBytes(text)));
}

async function unpackWeights(packed, interpreter) {
  const buffer = await unpackBytes(packed.data);
  const read = ({stored, start, bytes}, shape) =>
    interpreter.fromBytes(stored, shape, new Uint8Array(buffer, start, bytes));
  const weights = {};
  for (const row of packed.table) {
    let array = read(row, row.shape);
    if (row.scales) {
      const {axis} = row.scales;
      const shape = row.shape.map((size, k) => k === axis ? 1 : size);
      const numbers = scaled(array.data, read(row.scales, shape).data, row.shape, axis);
      array = interpreter.array("float32", row.shape, numbers);
    }
    // What is stored in 16 bits is float32 here, and so the program's dtype.
    weights[row.name] = {...array, dtype: row.dtype};
  }
  return weights;
}

// Integers times scales, of which there is one for all places along an axis.
function scaled(integers, scales, shape, axis) {
  const count = shape[axis];
  const inner = shape.slice(axis + 1).reduce((product, size) => product * size, 1);
  const numbers = new Float32Array(integers.length);
  let place = 0;
  for (let first = 0; first < scales.length; first += inner) {
    for (let k = 0; k < count; k++) {
      for (let i = 0; i < inner; i++, place++) numbers[place] = integers[place] * scales[first + i];
    }
  }
  return numbers;
}

if (typeof module !== "undefined") module.exports = unpackWeights;
