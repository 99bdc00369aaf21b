"""The page's worker in a real browser: a model goes in, and records and tokens come out."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgpt.generation.decoding import generate
from jgpt.page.html import worker_script
from jgpt.page.model import page_model
from jgpt.page.weights import pack_json, pack_weights
from tests.browser import CHROMIUM, shared_browser
from tests.page.records import record_of
from tests.page.test_model import assert_same_record
from tests.page.test_program import TOKENS, look_of

ASK = """
new Promise((done) => {
  const worker = new Worker(URL.createObjectURL(new Blob([SOURCE])));
  const answers = [];
  worker.onerror = (error) => done([{error: error.message}]);
  worker.onmessage = ({data}) => {
    answers.push(data);
    if (data.id !== QUESTIONS.length - 1 || data.token !== undefined) return;
    const plain = (key, value) => ArrayBuffer.isView(value) ? Array.from(value) : value;
    done(JSON.parse(JSON.stringify(answers, plain)));
  };
  QUESTIONS.forEach((question, id) => worker.postMessage({id, ...question}));
})
"""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_worker_computes_records_and_writes_on(tmp_path):
    look = look_of("one's own")
    tokens = list(TOKENS[:4])
    model = {
        "description": pack_json(page_model(look)),
        "weights": pack_weights(look.named_weights()).as_data(),
    }
    questions = [
        {"load": model},
        {"compute": {"tokens": tokens, "prompt": 2}},
        {"compute": {"tokens": []}},
        {"write": {"tokens": tokens, "count": 3, "temperature": 0.9, "seed": 7}},
    ]
    script = ASK.replace("SOURCE", json.dumps(worker_script()))
    script = script.replace("QUESTIONS", json.dumps(questions))
    path = tmp_path / "empty.html"
    path.write_text("<!doctype html><title>worker</title>")

    page = shared_browser()
    page.open(path)
    loaded, computed, failed, *written = page.run(script)

    assert loaded == {"id": 0, "done": True}
    assert_same_record(computed["done"], record_of(look, tokens, 2))
    assert failed == {"id": 2, "error": "the prompt is empty: give at least one character"}
    batch = jnp.asarray(tokens)[None]
    continued = generate(look.model, batch, 3, key=jax.random.key(7), temperature=0.9)
    first, second, third = np.asarray(continued)[0, 4:].tolist()
    assert written == [
        {"id": 3, "token": first},
        {"id": 3, "token": second},
        {"id": 3, "token": third},
        {"id": 3, "done": [first, second, third]},
    ]


STOP = """
new Promise((done) => {
  const worker = new Worker(URL.createObjectURL(new Blob([SOURCE])));
  worker.onmessage = ({data: {id, done: written, token}}) => {
    if (token !== undefined) worker.postMessage({stop: id});
    if (id === 1 && written) done(written.length);
  };
  worker.postMessage({id: 0, load: LOAD});
  worker.postMessage({id: 1, write: {tokens: [1], count: COUNT, temperature: 0, seed: 0}});
})
"""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_worker_stops_writing_when_it_is_told(tmp_path):
    look = look_of("one's own")
    weights = pack_weights(look.named_weights()).as_data()
    load = {"description": pack_json(page_model(look)), "weights": weights}
    # After each token the worker listens, rather than after many milliseconds.
    source = worker_script().replace("LISTENING_PAUSE = 50", "LISTENING_PAUSE = 0")
    count = look.model.block_size - 1
    script = STOP.replace("SOURCE", json.dumps(source)).replace("LOAD", json.dumps(load))
    path = tmp_path / "empty.html"
    path.write_text("<!doctype html><title>worker</title>")

    page = shared_browser()
    page.open(path)
    written = page.run(script.replace("COUNT", str(count)))

    assert 1 <= written < count
