"""The questions that a page begins with, and the source beside its arrays."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt.page.numbers import Look
from jgpt.user_code import load_code
from tests.browser import CHROMIUM, Page
from tests.page.records import Changes, record_of
from tests.page.test_page import RECORD, opened, page_of
from tests.page.test_program import TOKENIZER, look_of

TEXT = "ips/bestca"


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


def asked(page: Page, question: str) -> str:
    """Press the button of a question; return its answer."""
    page.run(f"""(async () => {{
        const buttons = [...$("questions").querySelectorAll("button")];
        await buttons.find(button => button.textContent.includes({json.dumps(question)})).onclick();
    }})()""")
    return page.run("$('answer').querySelector('p').textContent")


def gradient_at_the_last_block(look: Look, tokens: list[int]) -> np.ndarray:
    """The length of the gradient of the last token's loss, at each position."""
    model: Any = look.model

    def loss(x: jax.Array) -> jax.Array:
        logits = model.logits(model.final_norm(x))
        return -jax.nn.log_softmax(logits[0, -2])[tokens[-1]]

    gradient = jax.grad(loss)(model.hidden_states(jnp.asarray(tokens)[None])[-1])
    return np.linalg.norm(np.asarray(gradient)[0], axis=-1)


@pytest.mark.slow
@needs_chromium
def test_each_question_is_answered_with_the_numbers_of_python(tmp_path):
    look = look_of("gpt2")
    tokens = TOKENIZER.encode(TEXT).tolist()
    with opened(tmp_path / "page.html", page_of(look, TEXT)) as page:
        earlier = asked(page, "Which earlier letters")
        chosen = page.run("[chosen.layer, chosen.head, chosen.query, chosen.key]")
        without = asked(page, "What happens without that head")
        record = json.loads(page.run(RECORD))
        page.run("$('answer').querySelector('button').onclick()")  # on again
        page.run("choose(goTo(time - 1))")
        gradient = asked(page, "Where does the gradient")
        last_row = page.run("flowRows().at(-1).sizes")
        line = asked(page, "Which line of code")
        errors = page.errors

    layer, head, query, key = chosen
    first = query * (query + 1) // 2  # row by row, up to the diagonal
    weights = record_of(look, tokens)["attention"][..., first : first + query + 1]
    assert weights[layer, head, key] == weights[..., :query].max()
    share = f"{100 * weights[layer, head, key]:.0f}%"
    assert f"head {head} of layer {layer}: it takes {share} from" in earlier
    assert f"Head {head} of layer {layer} is off and adds nothing" in without
    switched = record_of(look, tokens, changes=Changes(heads={(layer, head): 0.0}))
    found = np.reshape(record["log_probabilities"][-1], np.shape(switched["log_probabilities"][-1]))
    np.testing.assert_allclose(found, switched["log_probabilities"][-1], atol=2e-5)
    assert "nats: minus the logarithm" in gradient
    expected = gradient_at_the_last_block(look, tokens)
    np.testing.assert_allclose(last_row, expected, rtol=1e-3, atol=1e-6)
    assert "jgpt/nn/attention.py, in attention_weights: “weights = jax.nn.softmax" in line
    assert errors == []


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
def test_nothing_in_a_name_a_prompt_or_a_line_of_source_runs(tmp_path):
    file = tmp_path / "evil.py"
    file.write_text(HOSTILE)
    make = load_code(f"{file}:GPT")
    config = jgpt.ModelConfig(vocab_size=17, block_size=8, num_layers=1, num_heads=2, embed_dim=8)
    look = Look(make(config, rngs=nnx.Rngs(0)), TOKENIZER, "evil")
    name = "</script><script>document.title='ran'</script>{{style}}"
    with opened(tmp_path / "page.html", page_of(look, "<!/<!/s", name)) as page:
        text = page.run("data.text")
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
    assert title == f"Inside {name}"
    assert text == "<!/<!/s"
    assert images == 0
    assert errors == []
