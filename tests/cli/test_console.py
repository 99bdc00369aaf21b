"""What a person reads when training begins."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jgpt import ModelConfig, OptimizerConfig
from jgpt.cli.console import describe_optimizer_groups
from jgpt.nn.models import abstract_model
from tests.nn.test_models import ATTENTION, FEED_FORWARD, MODERN

NGRAMS = ModelConfig(**{**vars(MODERN), "ngram_sizes": (2, 4), "ngram_rows": 19})
MUON = {"optimizer": "muon", "muon_weight_decay": 0.25, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("optimizer", "lines"),
    [
        (
            {**MUON, "embedding_learning_rate": 0.5},
            [
                f"muon: 12 matrices (decay 0.25) with {ATTENTION + FEED_FORWARD:,} parameters",
                "adamw: 1 matrix (decay 0.1) with 408 parameters, 1 vector with 2 parameters",
                "embedding: 2 matrices (decay 0.1) with 1,320 parameters",
            ],
        ),
        (
            MUON,
            [
                f"muon: 12 matrices (decay 0.25) with {ATTENTION + FEED_FORWARD:,} parameters",
                "adamw: 3 matrices (decay 0.1) with 1,728 parameters, 1 vector with 2 parameters",
            ],
        ),
        (
            {"weight_decay": 0.0},
            ["adamw: 15 matrices (decay 0) with 7,968 parameters, 1 vector with 2 parameters"],
        ),
    ],
    ids=["three rules", "two", "one"],
)
def test_each_rule_names_what_it_moves(optimizer, lines):
    assert ATTENTION + FEED_FORWARD == 6240
    abstract = nnx.to_pure_dict(nnx.state(abstract_model(NGRAMS), nnx.Param))
    weights = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), abstract)
    assert describe_optimizer_groups(OptimizerConfig(**optimizer), weights) == lines
