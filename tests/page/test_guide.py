"""The questions that a page begins with, and the source beside its arrays."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt.page.code import code_of
from jgpt.page.numbers import Look
from jgpt.user_code import load_code
from tests.browser import CHROMIUM, TWO_FRAMES, Page
from tests.page.records import Changes, record_of
from tests.page.test_page import RECORD, opened, page_of
from tests.page.test_program import TOKENIZER, look_of

TEXT = "ips/bestca"
# where the answer is, what has the focus, and whether the marked line can be read in its box
IN_SIGHT = """(() => {
    const line = document.querySelector(".text.marked");
    const box = line.closest("pre").getBoundingClientRect();
    const { top, bottom } = line.getBoundingClientRect();
    return [$("answer").getBoundingClientRect().top, document.activeElement.id,
        top >= box.top && bottom <= box.bottom];
})()"""
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


def asked(page: Page, question: str) -> str:
    """Press the button of a question; return its answer."""
    page.run(f"""(async () => {{
        const buttons = [...$("questions").querySelectorAll("button")];
        await buttons.find(button => button.textContent.includes({json.dumps(question)})).onclick();
    }})()""")
    return page.run("$('answer').querySelector('p').textContent")


def attention_of(look: Look, tokens: list[int]) -> np.ndarray:
    """The weights of each layer, head, query and key, from the blocks themselves."""
    model: Any = look.model
    batch = jnp.asarray(tokens)[None]
    weights = []
    for block, x in zip(model.blocks, model.hidden_states(batch), strict=False):
        weights.append(block.attention.weights(block.attention_norm(x))[0])
    return np.asarray(weights)


def gradient_at_the_last_block(look: Look, tokens: list[int]) -> np.ndarray:
    """The length of the gradient of the last token's loss, at each position."""
    model: Any = look.model

    def loss(x: jax.Array) -> jax.Array:
        logits = model.logits(model.final_norm(x))
        return -jax.nn.log_softmax(logits[0, -2])[tokens[-1]]

    gradient = jax.grad(loss)(model.hidden_states(jnp.asarray(tokens)[None])[-1])
    return np.linalg.norm(np.asarray(gradient)[0], axis=-1)


def chosen_in(page: Page) -> dict[str, int]:
    return page.run(
        "({ query: chosen.query, key: chosen.key, layer: chosen.layer, head: chosen.head })"
    )


@pytest.mark.slow
@needs_chromium
def test_each_question_is_answered_with_the_numbers_of_python(tmp_path):
    look = look_of("gpt2")
    tokens = TOKENIZER.encode(TEXT).tolist()
    time = len(tokens)
    with opened(tmp_path / "page.html", page_of(look, TEXT)) as page:
        earlier = asked(page, "Which earlier letters")
        chosen = chosen_in(page)
        arithmetic = asked(page, "How is that weight computed")
        widths = page.run("[$('answer').offsetWidth, $('why').offsetWidth]")
        without = asked(page, "What happens without that head")
        tops = page.run("[...$('answer').children].map(each => each.offsetTop)")
        record = json.loads(page.run(RECORD))
        page.run("$('answer').querySelector('button').onclick()")  # on again
        page.run("choose(goTo(time - 1))")
        gradient = asked(page, "Where does the gradient")
        last_row = page.run("flowRows().at(-1).sizes")
        page.run("change({ gradient: false })")
        line = asked(page, "Which line of code")
        page.run(TWO_FRAMES)
        answer_top, focused, marked = page.run(IN_SIGHT)
        page.run("[...$('answer').querySelectorAll('button')].at(-1).onclick()")
        back_on = page.run("document.activeElement.textContent")
        verdicts = page.run("[verdict(.5, .51), verdict(.5, .4), verdict(.4, .5)]")
        errors = page.errors

    layer = chosen["layer"]
    head = chosen["head"]
    query = chosen["query"]
    key = chosen["key"]
    weights = attention_of(look, tokens)
    assert weights[layer, head, query, key] == weights[:, :, query, :query].max()
    share = f"{100 * weights[layer, head, query, key]:.0f}%"
    assert f"head {head} of layer {layer}: it takes {share} from" in earlier
    assert f"In head {head} of layer {layer}" in arithmetic
    assert widths[0] == widths[1]
    sentence, on_again, back = tops
    assert sentence < on_again == back  # buttons stand side by side below the sentence
    assert f"Head {head} of layer {layer} is off and adds nothing" in without
    assert query == time - 1  # the token that was chosen before the question
    switched = record_of(look, tokens, changes=Changes(heads={(layer, head): 0.0}))
    found = np.reshape(record["log_probabilities"][-1], np.shape(switched["log_probabilities"][-1]))
    np.testing.assert_allclose(found, switched["log_probabilities"][-1], atol=2e-5)
    assert "nats: minus the logarithm" in gradient
    expected = gradient_at_the_last_block(look, tokens)
    np.testing.assert_allclose(last_row, expected, rtol=1e-3, atol=1e-6)
    assert (last_row[:-2] + last_row[-1:]) == [0] * (time - 1)
    assert "jgpt/nn/attention.py, in attention_weights: “weights = jax.nn.softmax" in line
    assert 0 <= answer_top < 100
    assert focused == "answer"
    assert marked  # its line is in sight, far down in its function
    assert back_on == "Which line of code made this array?"
    assert verdicts == [
        "That is hardly a change: this prediction doesn't need the head.",
        "So the head helps this prediction.",
        "So the head holds this prediction down.",
    ]
    assert errors == []


# how far what is drawn later moves the answer, in a browser that doesn't scroll with what is read
MOVED = """(async () => {
    document.documentElement.style.overflowAnchor = "none";
    const top = () => $("answer").getBoundingClientRect().top;
    await showLine();
    const before = top();
    await FRAMES;
    await FRAMES;
    return [before, top() - before];
})()"""


@needs_chromium
def test_the_answer_about_a_line_stays_where_the_numbers_were_there_before(tmp_path):
    with opened(tmp_path / "page.html", page_of(look_of("gpt2"), TEXT), open_groups=False) as page:
        page.run("change({ gradient: true })")  # which brings the numbers of closed groups, too
        has_numbers = page.run("parts.every(part => part.array.values)")
        was_open = page.run("$('blocks.0').open")
        top, moved = page.run(MOVED.replace("FRAMES", TWO_FRAMES))
        gradient_of = page.run("data.gradientOf")  # whose numbers are zero for the last token
        errors = page.errors

    assert has_numbers
    assert not was_open
    assert 0 <= top < 100
    assert moved == 0
    assert not gradient_of
    assert errors == []


@needs_chromium
def test_an_answer_among_the_arrays_outlives_them(tmp_path):
    with opened(tmp_path / "page.html", page_of(look_of("default preset"), TEXT)) as page:
        asked(page, "Which line of code")
        was_among_them = page.run("$('arrays').contains($('answer'))")
        paths = page.run("data.arrays.map(({ path }) => path)")
        page.run("change({ prompt: 'c' })")
        is_hidden = page.run("$('answer').hidden")
        paths_of_one_token = page.run("data.arrays.map(({ path }) => path)")
        page.run("change({ prompt: 'cabs' })")
        again = asked(page, "Which earlier letters")
        errors = page.errors

    assert was_among_them
    assert paths != paths_of_one_token  # so that the rows are laid out anew
    assert is_hidden
    assert again.startswith("After ")
    assert errors == []


def test_each_array_has_the_line_that_makes_it():
    look = look_of("gpt2")

    code = code_of(look.model)

    assert code is not None
    lines = {}
    for path, name, (index, number), callers in code["arrays"]:
        function = code["functions"][index]
        (line,) = [each for each in function["lines"] if each[0] == number]
        lines[path, name] = (function["name"], line[1].strip(), line[2], len(callers))
    assert lines["blocks.0.attention.attention_weights", "attention_weights"][:2] == (
        "attention_weights",
        "weights = jax.nn.softmax(scores, axis=-1)",
    )
    name, text, shapes, callers = lines["blocks.1", "blocks.1"]
    assert name == "Block.__call__"
    assert text == "return x + transformed.astype(x.dtype)"
    assert shapes == f"return: float32[batch=1 time=time embed_dim={look.model.config.embed_dim}]"
    assert callers > 1  # it is called in a loop over blocks, which is called in turn
    record = record_of(look, TOKENIZER.encode(TEXT).tolist())
    places = {(array["path"], array["name"]) for array in record["arrays"]}
    assert places - {("", "tokens")} <= set(lines)


def test_an_array_of_a_function_inside_another_has_the_line_of_the_inner_one():
    code = code_of(look_of("default preset").model)

    assert code is not None
    names = {}
    for path, name, (index, _), _ in code["arrays"]:
        names[path, name] = code["functions"][index]["name"]
    inner = "attend_windowed.<locals>.first_window"
    assert names["blocks.0.attention.attend", "attend(query)"] == inner
    assert names["blocks.0.attention.attend_windowed", "attend_windowed"] == "attend_windowed"


HOSTILE = """
import jax.numpy as jnp
import jgpt


class GPT(jgpt.GPT):
    def logits(self, x):
        logits = super().logits(x)
        return 2 * logits  # </script><script>document.title='ran'</script>{{style}}<img src=x>
"""


@pytest.mark.slow
@needs_chromium
def test_nothing_in_a_line_of_source_runs(tmp_path):
    file = tmp_path / "evil.py"
    file.write_text(HOSTILE)
    make = load_code(f"{file}:GPT")
    config = jgpt.ModelConfig(vocab_size=17, block_size=8, num_layers=1, num_heads=2, embed_dim=8)
    look = Look(make(config, rngs=nnx.Rngs(0)), TOKENIZER, "evil")
    with opened(tmp_path / "page.html", page_of(look, "ips")) as page:
        title = page.run("document.title")
        code = json.loads(page.run("JSON.stringify(first.code)"))
        page.run(
            "parts.forEach(part => { part.group.open = part.row.open = true; drawPart(part) })"
        )
        images = page.run("document.querySelectorAll('img').length")
        shown = page.run(
            "[...document.querySelectorAll('details.array')].map(each => each.textContent).join('')"
        )
        errors = page.errors

    texts = [line[1] for function in code["functions"] for line in function["lines"]]
    assert any("</script>" in text for text in texts)  # the control: the line is there
    assert "document.title='ran'" in shown
    assert title == "Inside x"
    assert images == 0
    assert errors == []
