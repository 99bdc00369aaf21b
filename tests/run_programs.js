// Runs programs of jgpt/pictures/program.py: cases in, the bytes of their results out.
//
// node tests/run_programs.js FUNCTION INTERPRETER MODEL WEIGHTS < question.json

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
  return cases.map(({program, weights, inputs}) => {
    const machine = interpreter.load(program, arraysOf(weights));
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

// The same numbers, except for a few in a row that come from other places of an array.
function withOthers(arrays, from) {
  const changed = {};
  Object.entries(arrays).forEach(([name, x], which) => {
    const numbers = x.data.slice();
    const n = numbers.length;
    const start = Math.floor(n * ((from + 0.3 * which) % 1));  // not at the same place of all arrays
    for (let i = start; i < Math.min(n, start + Math.ceil(n / 12)); i++) {
      numbers[i] = x.data[(5 * i + 3) % n];
    }
    changed[name] = interpreter.array(x.dtype, x.shape, numbers);
  });
  return changed;
}

// Runs each case after other inputs, so that it computes what differs alone. Returns, for each case,
// how many outputs the other inputs have changed, and the names of those that aren't as before.
function runUpdates(cases) {
  const bytesOf = (outputs) => {
    const found = {};
    for (const [name, x] of Object.entries(outputs)) {
      const numbers = interpreter.copyOf(x);
      // A NaN may have any sign.
      numbers.forEach((number, i) => { if (Number.isNaN(number)) numbers[i] = NaN; });
      found[name] = toBase64(numbers);
    }
    return found;
  };
  return cases.map(({program, weights, inputs}) => {
    const machine = interpreter.load(program, arraysOf(weights));
    const given = arraysOf(inputs);
    const updated = (numbers) => {
      try {
        return bytesOf(machine.update(numbers));
      } catch {
        return {};  // no output is right
      }
    };
    const expected = bytesOf(machine.run(given));
    const differing = (found, wanted) => Object.keys(wanted).filter((name) => found[name] !== wanted[name]);
    const wrong = new Set();
    let changed = 0;
    for (const from of [0, 0.2, 0.4, 0.6, 0.8, 0.95]) {
      const others = withOthers(given, from);
      const ofOthers = bytesOf(machine.run(others));
      changed += differing(ofOthers, expected).length;
      for (const name of differing(updated(others), ofOthers)) wrong.add(name);
      for (const name of differing(updated(given), expected)) wrong.add(name);
    }
    return {changed, wrong: [...wrong]};
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
  const [, , name, interpreterPath, modelPath, unpackingPath] = process.argv;
  globalThis.interpreter = require(interpreterPath);
  globalThis.createModel = require(modelPath);
  globalThis.unpackWeights = require(unpackingPath);
  const question = JSON.parse(readFileSync(0, "utf8"));
  Promise.resolve({runCases, runModel, runUnpacking, runUpdates}[name](question)).then(
    (answer) => process.stdout.write(JSON.stringify(answer)));
}
