// Unpacks the weights that jgpt/pictures/weights.py has packed into the page.
//
//   const weights = await unpackWeights(packed, interpreter);  // arrays by name
"use strict";

async function unpackWeights(packed, interpreter) {
  const text = atob(packed.data);
  const compressed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) compressed[i] = text.charCodeAt(i);
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const weights = {};
  for (const {name, shape, dtype, stored, start, bytes} of packed.table) {
    const array = interpreter.fromBytes(stored, shape, new Uint8Array(buffer, start, bytes));
    // What is stored in 16 bits is float32 here, and so the program's dtype.
    weights[name] = {...array, dtype};
  }
  return weights;
}

if (typeof module !== "undefined") module.exports = unpackWeights;
