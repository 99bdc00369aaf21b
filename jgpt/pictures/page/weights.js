// Unpacks what jgpt/pictures/weights.py has packed into the page.
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
  return new Response(stream).arrayBuffer();
}

async function unpackJson(text) {
  return JSON.parse(new TextDecoder().decode(await unpackBytes(text)));
}

async function unpackWeights(packed, interpreter) {
  const buffer = await unpackBytes(packed.data);
  const weights = {};
  for (const {name, shape, dtype, stored, start, bytes} of packed.table) {
    const array = interpreter.fromBytes(stored, shape, new Uint8Array(buffer, start, bytes));
    // What is stored in 16 bits is float32 here, and so the program's dtype.
    weights[name] = {...array, dtype};
  }
  return weights;
}

if (typeof module !== "undefined") module.exports = unpackWeights;
