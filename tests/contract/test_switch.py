"""Off, the checks are gone and nothing else is; on, they cost the compiled step nothing."""

import os
import subprocess
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError, config

import jgpt
from jgpt.nn.attention import split_heads
from jgpt.training.state import abstract_state, dropout_stream
from jgpt.training.step import make_eval_step, make_train_steps

PROGRAM = """
import jax.numpy as jnp, numpy as np, jgpt
from flax import nnx
from jaxtyping import Array, Float
head = jgpt.Head(4, 2, rngs=nnx.Rngs(0))
head(np.ones((1, 3, 4)))
jgpt.check(1, Float[Array, "batch {missing}"])
jgpt.CharTokenizer("ab").encode("ab")
"""


@pytest.mark.slow
def test_the_environment_switches_the_checks_off():
    environment = os.environ | {"JAXTYPING_DISABLE": "1"}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)


@pytest.fixture
def switch() -> Iterator[None]:
    yield
    config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("switch")
def test_it_switches_while_python_runs():
    wrong = jnp.ones((3, 5))
    with pytest.raises(TypeCheckError):
        split_heads(wrong, 2)
    config.update("jaxtyping_disable", True)
    with pytest.raises(ValueError, match="unpack") as unchecked:
        split_heads(wrong, 2)
    assert not isinstance(unchecked.value, TypeCheckError)


def lowered(config: jgpt.TrainConfig) -> str:
    """The compiler's input for the train and evaluation steps."""
    windows = jax.ShapeDtypeStruct((5, 3, config.model.block_size + 1), jnp.int32)
    counts = jax.ShapeDtypeStruct((5, 3, config.model.block_size), jnp.bool)
    state = abstract_state(config)
    key = dropout_stream(0)
    train = make_train_steps(config).lower(state, windows, key, 2, 0)  # type: ignore[attr-defined]
    evaluate = make_eval_step(config.model).lower(state["model"], windows, counts)  # type: ignore[attr-defined]
    return train.as_text() + evaluate.as_text()


@pytest.mark.slow
@pytest.mark.usefixtures("switch")
def test_the_compiled_step_is_the_same_to_the_byte():
    model = jgpt.ModelConfig(block_size=8, num_layers=2, num_heads=2, embed_dim=16, dropout=0.1)
    train = jgpt.TrainConfig(model=model)
    checked = lowered(train)
    config.update("jaxtyping_disable", True)

    assert lowered(train) == checked
    assert "stablehlo.dot_general" in checked
