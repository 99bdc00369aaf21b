"""Cases of what computes: attention, layers, models, loss and steps."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jgpt import heads, layers, model, optimizer, step
from jgpt.config import ModelConfig, OptimizerConfig, TrainConfig
from tests.contract.contract import SIZES, Case, closure

BATCH, HEADS, HEAD_DIM, EMBED = (SIZES[n] for n in ("batch", "heads", "head_dim", "embed_dim"))
CONFIG = ModelConfig(
    vocab_size=SIZES["vocab"],
    block_size=SIZES["block_size"],
    num_layers=1,
    num_heads=HEADS,
    embed_dim=EMBED,
    hidden_dim=SIZES["hidden"],
    dropout=0.1,
)
BIGRAM = ModelConfig(architecture="bigram", vocab_size=SIZES["vocab"], block_size=8)
TRAIN = TrainConfig(model=BIGRAM, optimizer=OptimizerConfig(schedule="constant"), steps=3)


def zeros(make: Any, *args: Any, **options: Any) -> Any:
    """A module with zeros for parameters, which is quicker to make than a random one."""
    abstract = nnx.eval_shape(lambda: make(*args, rngs=nnx.Rngs(0), **options))
    graph, state = nnx.split(abstract)
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state))


def dropout_rngs() -> nnx.Rngs:
    return nnx.Rngs(dropout=0)


HEAD = zeros(heads.Head, EMBED, HEAD_DIM)
TRAINED_HEAD = zeros(heads.Head, EMBED, HEAD_DIM, dropout=0.1, use_bias=True)
MULTI = zeros(heads.MultiHeadAttention, EMBED, HEADS, dropout=0.1)
FEED_FORWARD = zeros(model.FeedForward, EMBED, SIZES["hidden"], dropout=0.1)
BLOCK = zeros(model.Block, EMBED, HEADS, dropout=0.1)
GPT = zeros(model.GPT, CONFIG)
UNTIED = zeros(
    model.GPT, ModelConfig(**{**vars(CONFIG), "tie_embeddings": False, "head_bias": True})
)
TABLE = zeros(model.BigramLM, SIZES["vocab"])
NORM = layers.LayerNorm(EMBED)
LINEAR = zeros(layers.Linear, SIZES["in_features"], SIZES["out_features"])
EMBEDDING = zeros(layers.Embedding, SIZES["vocab"], EMBED)

WEIGHTS = nnx.to_pure_dict(nnx.state(TABLE, nnx.Param))
STEPS = step.make_train_steps(TRAIN)
STEP = closure(STEPS, "step")
GRADIENTS = closure(STEP, "gradients_of")
STATE = step.init_state(TRAIN)
CLIP = closure(optimizer.clip_by_global_norm(1.0).update, "f")

SELF_ATTENTION = {"x": "float batch time embed_dim"}
CROSS_ATTENTION = {**SELF_ATTENTION, "context": "float batch key embed_dim"}
QKV = {
    "query": "float *batch query head_dim",
    "key": "float *batch key head_dim",
    "value": "float *batch key value_dim",
    "mask": "bool query key",
}
SCALAR = ()

ATTENTION = [
    Case("jgpt.attention.causal_mask", {}, (5, 5), static={"time": 5}),
    Case(
        "jgpt.attention.attention_weights",
        {name: QKV[name] for name in ("query", "key", "mask")},
        (BATCH, 2, 4, 5),
        checks=1,
    ),
    Case("jgpt.attention.attend", QKV, (BATCH, 2, 4, 13)),
    Case(
        "jgpt.attention.attend",
        {**QKV, "dropout_key": "key"},
        (BATCH, 2, 4, 13),
        static={"dropout": 0.1},
        note="dropout",
    ),
    Case(
        "jgpt.attention.dropped",
        {"x": "float *batch time", "key": "key"},
        (BATCH, 2, 7),
        static={"rate": 0.1},
    ),
    Case(
        "jgpt.attention.split_heads",
        {"x": "float batch time features"},
        (BATCH, 2, 7, 13),
        static={"heads": 2},
    ),
    Case(
        "jgpt.attention.merge_heads",
        {"x": "float batch heads time value_dim"},
        (BATCH, 7, 26),
    ),
]
LAYERS = [
    Case(
        "jgpt.layers.Linear.__call__",
        {"x": "float *batch in_features"},
        (BATCH, 2, 29),
        fixed="in_features",
        owner=LINEAR,
    ),
    Case(
        "jgpt.layers.project",
        {"x": "float *batch in_features", "kernel": "float in_features out_features"},
        (BATCH, 2, 29),
        static={"dtype": "float32"},
    ),
    Case(
        "jgpt.layers.Embedding.__call__", {"index": "int *batch"}, (BATCH, 2, 22), owner=EMBEDDING
    ),
    Case(
        "jgpt.layers.LayerNorm.__call__",
        {"x": "float *batch embed_dim"},
        (BATCH, 2, 22),
        fixed="embed_dim",
        owner=NORM,
    ),
]


def of_model(name: str, arrays: dict[str, str], returns: Any, **options: Any) -> Case:
    return Case(f"jgpt.model.{name}", arrays, returns, fixed="embed_dim", **options)


def of_heads(name: str, arrays: dict[str, str], returns: Any, **options: Any) -> Case:
    return Case(f"jgpt.heads.{name}", arrays, returns, **{"fixed": "embed_dim"} | options)


STREAM = (BATCH, 7, EMBED)
TOKENS = {"tokens": "int batch time"}
LOGITS = (BATCH, 7, 17)
MODEL = [
    of_heads("_Attention._source_length", CROSS_ATTENTION, None, owner=HEAD),
    of_heads("_Attention._mask", SELF_ATTENTION, (7, 7), owner=HEAD, static={"context": None}),
    of_heads("_Attention._mask", CROSS_ATTENTION, None, owner=HEAD, note="cross"),
    of_heads("Head.__call__", SELF_ATTENTION, (BATCH, 7, 11), owner=HEAD),
    of_heads("Head.__call__", CROSS_ATTENTION, (BATCH, 7, 11), owner=HEAD, note="cross"),
    of_heads(
        "Head.__call__",
        SELF_ATTENTION,
        (BATCH, 7, 11),
        owner=TRAINED_HEAD,
        static={"rngs": dropout_rngs},
        note="train",
    ),
    of_heads("Head.weights", SELF_ATTENTION, (BATCH, 7, 7), owner=HEAD),
    of_heads("Head.weights", CROSS_ATTENTION, (BATCH, 7, 5), owner=HEAD, note="cross"),
    of_heads("MultiHeadAttention.__call__", SELF_ATTENTION, STREAM, owner=MULTI, checks=1),
    of_heads(
        "MultiHeadAttention.__call__",
        CROSS_ATTENTION,
        STREAM,
        owner=MULTI,
        static={"rngs": dropout_rngs},
        checks=1,
        note="cross-train",
    ),
    of_heads("MultiHeadAttention.weights", SELF_ATTENTION, (BATCH, 2, 7, 7), owner=MULTI),
    of_heads(
        "MultiHeadAttention.weights", CROSS_ATTENTION, (BATCH, 2, 7, 5), owner=MULTI, note="cross"
    ),
    of_model("FeedForward.__call__", SELF_ATTENTION, STREAM, owner=FEED_FORWARD, checks=1),
    of_model("Block.__call__", SELF_ATTENTION, STREAM, owner=BLOCK),
    of_model("GPT.__call__", TOKENS, LOGITS, owner=GPT),
    of_model(
        "GPT.__call__",
        TOKENS,
        LOGITS,
        owner=UNTIED,
        static={"rngs": dropout_rngs},
        note="untied-train",
    ),
    of_model("GPT.embed", TOKENS, STREAM, owner=GPT),
    of_model("GPT.logits", SELF_ATTENTION, LOGITS, owner=GPT),
    of_model("GPT.logits", SELF_ATTENTION, LOGITS, owner=UNTIED, note="untied"),
    of_model("BigramLM.__call__", TOKENS, LOGITS, owner=TABLE),
    Case("jgpt.layers.dropout_key", {}, SCALAR, static={"rngs": dropout_rngs}),
]

LOSS = [
    Case(
        "jgpt.loss.token_losses",
        {"logits": "float *batch vocab", "targets": "int *batch"},
        (BATCH, 2),
    ),
    Case(
        "jgpt.loss.cross_entropy",
        {"logits": "float *batch vocab", "targets": "int *batch"},
        SCALAR,
    ),
]

METRICS = {name: "float steps" for name in ("loss", "gradient_norm", "learning_rate")}
LOCAL = "jgpt.step.make_train_steps.<locals>"
STEP_CASES = [
    Case("jgpt.optimizer.decay_mask", {}, static={"weights": WEIGHTS}),
    Case(
        "jgpt.optimizer.clip_by_global_norm.<locals>.clip",
        {},
        (17, 17),
        static={"gradients": WEIGHTS, "weights": WEIGHTS},
        function=CLIP,
    ),
    Case(
        "jgpt.step.TrainState.__init__",
        {"step": "int"},
        owner=object.__new__(step.TrainState),
        static={"weights": WEIGHTS, "optimizer": STATE.optimizer},
    ),
    Case("jgpt.step.Metrics.__init__", METRICS, owner=object.__new__(step.Metrics)),
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
        {"window": "int batch window"},
        function=STEP,
        static={"state": STATE},
    ),
    Case(
        f"{LOCAL}.steps",
        {"windows": "int steps batch window", "count": "int", "first_step": "int"},
        function=STEPS,
        static={"state": STATE},
    ),
    Case(
        "jgpt.step.make_eval_step.<locals>.evaluate",
        {"windows": "int batches batch window", "counts": "bool batches batch window-1"},
        SCALAR,
        static={"weights": WEIGHTS},
        function=step.make_eval_step(BIGRAM),
    ),
    Case("jgpt.step._stream", {}, SCALAR, static={"seed": 1, "stream": 2}),
]

REPORT = [
    Case(
        "jgpt.report.attention_maps",
        {"tokens": "int batch time"},
        (1, BATCH, HEADS, SIZES["time"], SIZES["time"]),
        static={"model": GPT},
    ),
]
COMPUTING = [*ATTENTION, *LAYERS, *MODEL, *LOSS, *STEP_CASES, *REPORT]
