// Draw what is chosen

function draw() {
  if (!data) return;
  drawText();
  drawLens();
  drawBars();
  drawChanges();
  drawAttention();
  drawForward();
  drawFlow();
}

/** Say what the page is of, and what the model lacks. */
function buildTitle() {
  const { name, vocab_size, prompt, window, blocks } = data;
  const sampled = time - prompt;
  const bits = lossOf(data.next_log_probabilities[depths].slice(prompt - 1)) / Math.LN2;
  const lacking = [
    data.attention ? [] : "no module with a method weights: no attention is drawn",
    depths ? [] : "no numbered blocks: there is no logit lens",
    data.arrays.length > 1 ? [] : "no typed module or function: only its logits are known",
    blocks.some(Boolean) ? [] : "no blocks that add to a stream: none can be scaled",
    data.layers.some(Boolean) ? [] : "no heads that can be switched off",
  ].flat();
  const counted = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;
  const size = layers ? `${counted(layers, "layer")} of ${counted(heads, "head")}, ` : "";
  document.title = $("title").textContent = `Inside ${name}`;
  $("summary").textContent = `${size}a vocabulary of ${vocab_size}; `
    + `${counted(prompt, "token")} of a prompt${sampled ? ` and ${sampled} sampled` : ""}`
    + (lacking.length ? `. This model has ${lacking.join("; ")}.` : "");
  $("lens-part").hidden = depths === 0;
  $("blind-guess").textContent = Math.log2(vocab_size).toFixed(1);
  $("mean").textContent = sampled ? `mean of what was sampled: ${bits.toFixed(2)} bits` : "";
  $("windowed").textContent = window
    ? `each token attends to the last ${window} tokens: further ones have no weight` : "";
}

start(JSON.parse($("data").textContent));
