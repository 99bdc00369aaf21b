"""Models of random configs: the page's arrays, changes and gradients are those of JAX.

JGPT_RANDOM_CONFIGS=200 python -m pytest -m slow tests/page/test_random_configs.py
"""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgpt
from jgpt.config import ModelConfig
from jgpt.nn.models import abstract_model
from jgpt.page.model import page_model
from jgpt.page.numbers import Look
from tests.javascript import needs_javascript, run_model
from tests.models import compiled, loud
from tests.page.records import Changes, record_of
from tests.page.test_model import assert_close_values, assert_same_record
from tests.page.test_program import TOKENIZER

CONFIGS = int(os.environ.get("JGPT_RANDOM_CONFIGS", "6"))


def random_config(random: np.random.Generator) -> ModelConfig:
    """A small GPT whose every field of the architecture is drawn."""

    def draw(*values: Any) -> Any:
        return values[random.integers(len(values))]

    heads = draw(1, 2, 3, 4, 6)
    groups = [count for count in range(1, heads + 1) if heads % count == 0]
    block_size = int(random.integers(4, 25))
    tied = draw(True, False)
    qk_norm = draw(True, False)
    ngram_sizes = draw((), (), (2,), (2, 3))
    return ModelConfig(
        vocab_size=TOKENIZER.vocab_size,
        block_size=block_size,
        num_layers=draw(1, 2, 3),
        num_heads=heads,
        num_kv_heads=draw(*groups),
        head_dim=draw(None, 2, 4, 6),
        embed_dim=heads * draw(2, 4, 6),
        hidden_dim=draw(None, 5, 16),
        activation=draw("relu", "gelu", "gelu_tanh", "relu_squared", "silu"),
        gated=draw(True, False),
        qkv_bias=draw(True, False),
        use_bias=draw(True, False),
        head_bias=not tied and draw(True, False),
        tie_embeddings=tied,
        positions=draw("learned", "rotary"),
        rotary_base=draw(100.0, 10_000.0),
        norm=draw("layer", "rms"),
        norm_scale=draw(True, False),
        qk_norm=qk_norm,
        qk_norm_scale=qk_norm and draw(True, False),
        attention_scale=draw(None, 0.3),
        attention_window=draw(None, None, 1, 3, block_size - 1),
        ngram_sizes=ngram_sizes,
        ngram_rows=17,
        embedding_shortcut=draw(True, False),
        logit_softcap=draw(None, 2.0),
        scan_layers=draw(True, False),
        remat=draw(True, False),
    )


def drawn_changes(look: Look, random: np.random.Generator) -> tuple[dict[str, Any], Changes]:
    """A head and a block that are changed, as a request has them and as a record is asked for."""
    layers = look.anatomy.switchable_layers()
    layer = int(random.integers(len(layers)))
    head = int(random.integers(look.anatomy.heads))
    factor = float(random.choice([0.0, 0.5, 2.0]))
    request = {"heads": [[layer, head, factor]], "blocks": [[layer, 0.5]]}
    return request, Changes(heads={(layer, head): factor}, blocks={layer: 0.5})


def assert_same_gradients(look: Look, record: dict[str, Any], tokens: list[int]) -> None:
    """What each module returns has the gradient that JAX gives a change of it by `jgpt.edit`."""
    text = jnp.asarray(tokens)[None]
    arrays = {}
    for array in record["arrays"]:
        *_, last_part = array["path"].split(".")
        if array["name"] in (last_part, array["path"]):  # no argument
            arrays.setdefault(array["path"], []).append(array)
    returned = {path: found for path, (found, *others) in arrays.items() if not others}

    def loss_with(changes: dict[str, Any]) -> Any:
        def changed_by(change: Any) -> Any:
            return lambda x: x + change

        edits = {path: changed_by(change) for path, change in changes.items()}
        logits = jgpt.edit(look.model, edits)(text)
        return jgpt.cross_entropy(logits[:, :-1], text[:, 1:])

    changes = {path: jnp.zeros(array["sizes"]) for path, array in returned.items()}
    for path, gradient in compiled(jax.grad(loss_with), changes).items():
        token_axis = returned[path]["sizes"].index(len(tokens))
        assert_close_values(returned[path]["gradient"], np.moveaxis(gradient, token_axis, 0))
    assert len(returned) >= 4 * look.model.config.num_layers


@pytest.mark.slow
@needs_javascript
@pytest.mark.parametrize("seed", range(CONFIGS))
def test_the_page_of_a_random_config_computes_what_jax_computes(seed):
    random = np.random.default_rng(seed)
    config = random_config(random)
    look = Look(loud(abstract_model(config), size=0.2), TOKENIZER, f"random {seed}")
    times = set(range(2, config.block_size + 1))
    # heads come before tokens, and an axis of as many would be taken for theirs
    time = int(random.choice(sorted(times - {config.num_heads, config.num_kv_heads})))
    tokens = random.integers(TOKENIZER.vocab_size, size=time).tolist()
    changes, changed = drawn_changes(look, random)
    requests = [{"tokens": tokens, "gradient": True}, {"tokens": tokens, "changes": changes}]

    plain, edited = run_model(page_model(look), look.named_weights(), requests)

    assert "error" not in plain, plain
    assert "error" not in edited, edited
    assert_same_record(plain, record_of(look, tokens))
    assert_same_record(edited, record_of(look, tokens, changes=changed))
    assert_same_gradients(look, plain, tokens)
