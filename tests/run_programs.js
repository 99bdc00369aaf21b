// Runs programs of jgpt/page/program.py: cases in, the bytes of their results out.
//
// node tests/run_programs.js FUNCTION PRODUCT INTERPRETER MODEL WEIGHTS < question.json

function toBase64(data) {
  const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  let text = "";
  for (let i = 0; i < bytes.length; i += 4096) {
    text += String.fromCharCode(...bytes.subarray(i, i + 4096));
  }
  return btoa(text);
}

function arraysOf(encoded) {
  const arrays = {};
  for (const [name, [dtype, shape, text]] of Object.entries(encoded)) {
    arrays[name] = interpreter.decode(dtype, shape, text);
  }
  return arrays;
}

function runCases(cases) {
  return cases.map(({program, inputs}) => {
    const machine = interpreter.load(program, {});
    const given = arraysOf(inputs);
    // Twice, since the second run has the buffers of the first.
    machine.run(given);
    const results = {};
    for (const [name, x] of Object.entries(machine.run(given))) {
      results[name] = toBase64(interpreter.numbersOf(x));
    }
    return results;
  });
}

function runModel({description, weights, requests}) {
  const model = createModel(description, arraysOf(weights), interpreter);
  const plain = (key, value) => ArrayBuffer.isView(value) ? Array.from(value) : value;
  return requests.map((request) => {
    try {
      const answer = request.count === undefined ? model.compute(request) : [...model.writing(request)];
      return JSON.parse(JSON.stringify(answer, plain));
    } catch (error) {
      return {error: error.message};
    }
  });
}

async function runUnpacking(packed) {
  const arrays = {};
  for (const [name, x] of Object.entries(await unpackWeights(packed, interpreter))) {
    arrays[name] = [x.dtype, x.shape, Array.from(interpreter.numbersOf(x))];
  }
  return arrays;
}

if (typeof require !== "undefined") {
  const {readFileSync} = require("node:fs");
  const [, , name, productPath, interpreterPath, modelPath, unpackingPath] = process.argv;
  globalThis.PRODUCT = readFileSync(productPath).toString("base64");
  globalThis.interpreter = require(interpreterPath);
  globalThis.createModel = require(modelPath);
  globalThis.unpackWeights = require(unpackingPath);
  const question = JSON.parse(readFileSync(0, "utf8"));
  Promise.resolve({runCases, runModel, runUnpacking}[name](question)).then(
    (answer) => process.stdout.write(JSON.stringify(answer)));
}
