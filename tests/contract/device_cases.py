"""Cases of what computes around the transformer: loss and steps."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from jgpt.config import ModelConfig, OptimizerConfig, TrainConfig
from jgpt.training import optimizer, step
from jgpt.training.stacking import stack_blocks
from tests.contract.contract import SIZES, Case, closure
from tests.contract.model_cases import (
    BATCH,
    EMBED,
    SCALAR,
    TABLE,
    TRANSFORMER,
    concrete,
)

BIGRAM = ModelConfig(architecture="bigram", vocab_size=SIZES["vocab"], block_size=8)
TRAIN = TrainConfig(model=BIGRAM, optimizer=OptimizerConfig(schedule="constant"), steps=3)

WEIGHTS = nnx.to_pure_dict(nnx.state(TABLE, nnx.Param))
STEPS = step.make_train_steps(TRAIN)
STEP = closure(STEPS, "step")
GRADIENTS = closure(STEP, "gradients_of")
STATE = concrete(step.abstract_state(TRAIN))
BLOCKS = {"blocks": {i: {"a": jnp.zeros(5), "b": jnp.zeros((3, 5))} for i in range(2)}}
CLIP = closure(optimizer.clip_by_global_norm(1.0).update, "f")
AVERAGE = optimizer.average_weights(optimizer.clip_by_global_norm(1.0), 0.9)

LOSS = [
    Case(
        "jgpt.nn.loss.token_losses",
        {"logits": "float *batch vocab", "targets": "int *batch"},
        (BATCH, 2),
    ),
    Case(
        "jgpt.nn.loss._target_logits",
        {"logits": "float *batch vocab", "targets": "int *batch"},
        (BATCH, 2),
    ),
    Case(
        "jgpt.nn.loss.cross_entropy",
        {"logits": "float *batch vocab", "targets": "int *batch"},
        SCALAR,
    ),
]

FEATURES = {"x": "float batch time embed_dim", "targets": "int batch time"}


def any_head() -> Any:
    """A head that takes whatever features there are."""
    return lambda x: jnp.zeros((*x.shape[:2], SIZES["vocab"]), x.dtype)


LOSS += [
    Case(
        f"jgpt.nn.loss.{name}",
        FEATURES,
        returns,
        static={"head": any_head, "at_once": at_once},
        note=note,
    )
    for name, returns in (("token_losses_from", (BATCH, 7)), ("cross_entropy_from", SCALAR))
    for note, at_once in (("whole", 1 << 20), ("chunks", 6))
]
LOSS.append(
    Case(
        "jgpt.nn.loss._chunked",
        FEATURES,
        ((4, BATCH, 2, EMBED), (4, BATCH, 2), (4, BATCH, 2)),
        static={"at_once": 6},
    )
)

METRICS = {name: "float steps" for name in ("loss", "gradient_norm", "learning_rate")}
LOCAL = "jgpt.training.step.make_train_steps.<locals>"
STEP_CASES = [
    Case("jgpt.training.optimizer.decay_mask", {}, static={"weights": WEIGHTS}),
    Case(
        "jgpt.cli.console.describe_optimizer_groups",
        {},
        static={"config": OptimizerConfig(), "weights": WEIGHTS},
        takes="values",
        loose=True,
    ),
    Case(
        "jgpt.training.optimizer.partition",
        {},
        static={"config": OptimizerConfig(optimizer="muon"), "weights": WEIGHTS},
        takes="values",
    ),
    Case(
        "jgpt.training.optimizer.clip_by_global_norm.<locals>.clip",
        {},
        (17, 17),
        static={"gradients": WEIGHTS, "weights": WEIGHTS},
        function=CLIP,
    ),
    Case(
        "jgpt.training.optimizer.average_weights.<locals>.update",
        {},
        static={"updates": WEIGHTS, "state": AVERAGE.init(WEIGHTS), "params": WEIGHTS},
        function=AVERAGE.update,
    ),
    Case(
        "jgpt.training.optimizer.trained_weights",
        {},
        static={"weights": WEIGHTS, "state": AVERAGE.init(WEIGHTS)},
    ),
    Case("jgpt.training.stacking.stack_blocks", {}, static={"tree": BLOCKS}),
    Case(
        "jgpt.training.stacking.unstack_blocks",
        {},
        static={"tree": stack_blocks(BLOCKS), "count": 2},
    ),
    Case(
        "jgpt.training.step.TrainState.__init__",
        {"step": "int"},
        owner=object.__new__(step.TrainState),
        static={"weights": WEIGHTS, "optimizer": STATE.optimizer},
    ),
    Case("jgpt.training.step.Metrics.__init__", METRICS, owner=object.__new__(step.Metrics)),
    Case("jgpt.training.step.dropout_stream", {}, SCALAR, static={"seed": 1}),
    Case(
        f"{LOCAL}.loss_of",
        {"window": "int batch window", "key": "key"},
        SCALAR,
        static={"weights": WEIGHTS},
        function=closure(GRADIENTS, "loss_of"),
    ),
    Case(
        f"{LOCAL}.gradients_of",
        {"window": "int batch window", "key": "key"},
        ((), (17, 17)),
        static={"weights": WEIGHTS},
        function=GRADIENTS,
    ),
    Case(
        f"{LOCAL}.step",
        {"window": "int batch window", "key": "key"},
        function=STEP,
        static={"state": STATE},
    ),
    Case(
        f"{LOCAL}.steps",
        {
            "windows": "int steps batch window",
            "key": "key",
            "count": "int",
            "first_step": "int",
        },
        function=STEPS,
        static={"state": STATE},
    ),
    Case(
        "jgpt.training.step.make_eval_step.<locals>.evaluate",
        {"windows": "int batches batch window", "counts": "bool batches batch window-1"},
        SCALAR,
        static={"weights": WEIGHTS},
        function=step.make_eval_step(BIGRAM),
    ),
    Case("jgpt.training.step._stream", {}, SCALAR, static={"seed": 1, "stream": 2}),
]

COMPUTING = [*TRANSFORMER, *LOSS, *STEP_CASES]
