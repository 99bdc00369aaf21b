"""Cases of the transformer: attention, layers, heads, blocks and models, modern or not."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jgpt.config import ModelConfig
from jgpt.nn import bigram, heads, int8, layers, ngrams, transformer
from tests.contract.contract import SIZES, Case

BATCH, HEADS, HEAD_DIM, EMBED = (SIZES[n] for n in ("batch", "heads", "head_dim", "embed_dim"))
MODERN_DIM, QUERY_HEADS = SIZES["modern_dim"], SIZES["query_heads"]
CONFIG = ModelConfig(
    vocab_size=SIZES["vocab"],
    block_size=SIZES["block_size"],
    num_layers=1,
    num_heads=HEADS,
    embed_dim=EMBED,
    hidden_dim=SIZES["hidden"],
    dropout=0.1,
)
MODERN = dataclasses.replace(
    CONFIG,
    num_heads=QUERY_HEADS,
    num_kv_heads=SIZES["kv_heads"],
    embed_dim=MODERN_DIM,
    activation="relu_squared",
    tie_embeddings=False,
    positions="rotary",
    norm="rms",
    norm_scale=False,
    qk_norm=True,
    attention_scale=0.1,
    zero_init=True,
    embedding_shortcut=True,
    logit_softcap=15.0,
)


GATED = dataclasses.replace(
    CONFIG,
    num_heads=QUERY_HEADS,
    num_kv_heads=SIZES["kv_heads"],
    head_dim=SIZES["value_dim"],
    activation="silu",
    gated=True,
    norm="rms",
    qk_norm=True,
    qk_norm_scale=True,
)


def concrete(abstract: Any) -> Any:
    """Zeros in place of shapes, made by numpy: jnp.zeros would compile a program for each."""
    return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)), abstract)


def zeros(make: Any, *args: Any, **options: Any) -> Any:
    """A module with zeros for parameters, which is quicker to make than a random one."""
    abstract = nnx.eval_shape(lambda: make(*args, rngs=nnx.Rngs(0), **options))
    graph, state = nnx.split(abstract)
    return nnx.merge(graph, concrete(state))


def dropout_rngs() -> nnx.Rngs:
    return nnx.Rngs(dropout=0)


HEAD = zeros(heads.Head, EMBED, HEAD_DIM)
TRAINED_HEAD = zeros(heads.Head, EMBED, HEAD_DIM, dropout=0.1)
MULTI = zeros(heads.MultiHeadAttention, CONFIG)
FEED_FORWARD = zeros(transformer.FeedForward, CONFIG)
BLOCK = zeros(transformer.Block, CONFIG)
GPT = zeros(transformer.GPT, CONFIG)
UNTIED = zeros(transformer.GPT, dataclasses.replace(CONFIG, tie_embeddings=False, head_bias=True))
ROTARY = {"rotary": True, "qk_norm": True, "scale": 0.1, "dropout": 0.1}
ROTARY_HEAD = zeros(heads.Head, MODERN_DIM, SIZES["rotary_dim"], **ROTARY)
GROUPED = zeros(heads.MultiHeadAttention, MODERN)
MODERN_BLOCK = zeros(transformer.Block, MODERN)
MODERN_GPT = zeros(transformer.GPT, MODERN)
GATED_GPT = zeros(transformer.GPT, GATED)
GATED_BLOCK = GATED_GPT.blocks[0]
TABLE = zeros(bigram.BigramLM, SIZES["vocab"])
NORM = layers.LayerNorm(EMBED)
NGRAMS = zeros(ngrams.NGramEmbedding, (2, 3), SIZES["vocab"], EMBED)
RMS_NORM = layers.RMSNorm(EMBED)
LINEAR = zeros(layers.Linear, SIZES["in_features"], SIZES["out_features"])
EMBEDDING = zeros(layers.Embedding, SIZES["vocab"], EMBED)

SELF_ATTENTION = {"x": "float batch time embed_dim"}
CROSS_ATTENTION = {**SELF_ATTENTION, "context": "float batch key embed_dim"}
QKV = {
    "query": "float *batch query head_dim",
    "key": "float *batch key head_dim",
    "value": "float *batch key value_dim",
    "mask": "bool query key",
}
SCALAR = ()
STREAM = (BATCH, 7, EMBED)
LOGITS = (BATCH, 7, 17)

LOCAL_QKV = {
    "query": "float *batch time head_dim",
    "key": "float *batch time head_dim",
    "value": "float *batch time value_dim",
}
ATTENTION = [
    Case("jgpt.nn.attention.causal_mask", {}, (5, 5), static={"time": 5}),
    Case(
        "jgpt.nn.attention.attention_weights",
        {name: QKV[name] for name in ("query", "key", "mask")},
        (BATCH, 2, 4, 5),
        checks=1,
    ),
    Case("jgpt.nn.attention.attend", QKV, (BATCH, 2, 4, 13)),
    Case(
        "jgpt.nn.attention.attend",
        {**QKV, "dropout_key": "key"},
        (BATCH, 2, 4, 13),
        static={"dropout": 0.1},
        note="dropout",
    ),
    Case(
        "jgpt.nn.kernels.attend_windowed",
        {**QKV, "dropout_key": "key"},
        (BATCH, 2, 4, 13),
        static={"window": None, "dropout": 0.1},
    ),
    Case(
        "jgpt.nn.kernels.attend_windowed",
        {**LOCAL_QKV, "mask": "bool time time"},
        (BATCH, 2, 7, 13),
        static={"window": 3},
        note="local",
    ),
    Case(
        "jgpt.nn.kernels.fused_attend",
        {
            "query": "float batch query_heads query head_dim",
            "key": "float batch kv_heads key head_dim",
            "value": "float batch kv_heads key head_dim",
        },
        (BATCH, SIZES["query_heads"], 4, HEAD_DIM),
        static={"causal": True, "implementation": "xla"},
    ),
    Case(
        "jgpt.nn.layers.apply_dropout",
        {"x": "float *batch time", "key": "key"},
        (BATCH, 2, 7),
        static={"rate": 0.1},
    ),
    Case(
        "jgpt.nn.attention.apply_rotary",
        {"x": "float *batch time features", "position": "int time"},
        (BATCH, 2, 7, 26),
    ),
    Case(
        "jgpt.nn.attention.split_heads",
        {"x": "float batch time features"},
        (BATCH, 2, 7, 13),
        static={"heads": 2},
    ),
    Case(
        "jgpt.nn.attention.merge_heads",
        {"x": "float batch heads time value_dim"},
        (BATCH, 7, 26),
    ),
    Case(
        "jgpt.nn.kernels.repeat_heads",
        {"x": "float batch kv_heads key head_dim"},
        (BATCH, 30, 5, HEAD_DIM),
        static={"heads": QUERY_HEADS},
    ),
]
LAYERS = [
    Case(
        "jgpt.nn.layers.Linear.__call__",
        {"x": "float *batch in_features"},
        (BATCH, 2, 29),
        fixed="in_features",
        owner=LINEAR,
    ),
    Case(
        "jgpt.nn.int8.Int8Linear.__init__",
        {"kernel": "float in_features out_features", "bias": "float out_features"},
        function=lambda kernel, bias: int8.Int8Linear(kernel, bias),
    ),
    Case(
        "jgpt.nn.int8.Int8Linear.__call__",
        {"x": "float *batch in_features"},
        (BATCH, 2, 29),
        fixed="in_features",
        owner=int8.Int8Linear(jnp.zeros((SIZES["in_features"], SIZES["out_features"]))),
    ),
    Case("jgpt.nn.int8.quantise", {"x": "float batch features"}, ((BATCH, 26), (BATCH,))),
    Case(
        "jgpt.nn.products.project_to_vocabulary",
        {"x": "float *batch in_features", "kernel": "float in_features out_features"},
        (BATCH, 2, 29),
        static={"dtype": "float32"},
    ),
    Case(
        "jgpt.nn.products.project",
        {"x": "float *batch in_features", "kernel": "float in_features out_features"},
        (BATCH, 2, 29),
        static={"dtype": "float32"},
    ),
    Case(
        "jgpt.nn.products.project",
        {"x": "float *batch in_features", "kernel": "float in_features out_features"},
        (BATCH, 2, 29),
        static={"dtype": "bfloat16"},
        note="narrow",
    ),
    Case(
        "jgpt.nn.products.project_to_tied_vocabulary",
        {"x": "float batch time in_features", "embedding": "float vocab in_features"},
        LOGITS,
        static={"dtype": "float32"},
    ),
    Case(
        "jgpt.nn.products._product",
        {"x": "float batch in_features", "kernel": "float in_features out_features"},
        (BATCH, 29),
        static={"dtype": "bfloat16", "activation_dtype": None},
    ),
    Case(
        "jgpt.nn.layers.Embedding.__call__",
        {"index": "int *batch"},
        (BATCH, 2, 22),
        owner=EMBEDDING,
    ),
    Case(
        "jgpt.nn.layers.look_up",
        {"table": "float vocab embed_dim", "index": "int *batch"},
        (BATCH, 2, EMBED),
    ),
    Case(
        "jgpt.nn.ngrams.NGramEmbedding.__call__",
        {"tokens": "int batch time"},
        (BATCH, 7, EMBED),
        owner=NGRAMS,
    ),
    Case(
        "jgpt.nn.ngrams.NGramEmbedding.rows",
        {"tokens": "int batch time"},
        (BATCH, 7, 2),
        owner=NGRAMS,
    ),
    Case(
        "jgpt.nn.layers.LayerNorm.__call__",
        {"x": "float *batch embed_dim"},
        (BATCH, 2, 22),
        fixed="embed_dim",
        owner=NORM,
    ),
    Case(
        "jgpt.nn.layers.RMSNorm.__call__",
        {"x": "float *batch embed_dim"},
        (BATCH, 2, 22),
        fixed="embed_dim",
        owner=RMS_NORM,
    ),
    Case(
        "jgpt.nn.layers.rms_norm",
        {"x": "float *batch features"},
        (BATCH, 2, 26),
        static={"epsilon": 1e-5},
    ),
]


def of_blocks(name: str, arrays: dict[str, str], returns: Any, **options: Any) -> Case:
    return Case(f"jgpt.nn.transformer.{name}", arrays, returns, fixed="embed_dim", **options)


def of_model(name: str, arrays: dict[str, str], returns: Any, **options: Any) -> Case:
    return Case(f"jgpt.nn.transformer.{name}", arrays, returns, fixed="embed_dim", **options)


def of_bigram(name: str, arrays: dict[str, str], returns: Any, **options: Any) -> Case:
    return Case(f"jgpt.nn.bigram.{name}", arrays, returns, **options)


def of_heads(
    name: str, arrays: dict[str, str], returns: Any, fixed: str = "embed_dim", **options: Any
) -> Case:
    return Case(f"jgpt.nn.heads.{name}", arrays, returns, fixed=fixed, **options)


def of_modern(
    name: str,
    arrays: dict[str, str],
    returns: Any,
    fixed: str = "modern_dim query_heads kv_heads rotary_dim",
    note: str = "modern",
    **options: Any,
) -> Case:
    return Case(f"jgpt.nn.{name}", arrays, returns, fixed=fixed, note=note, **options)


TOKENS = {"tokens": "int batch time"}
MODEL = [
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
    of_blocks("FeedForward.__call__", SELF_ATTENTION, STREAM, owner=FEED_FORWARD, checks=1),
    of_blocks("Block.__call__", SELF_ATTENTION, STREAM, owner=BLOCK),
    of_model("GPT.__call__", TOKENS, LOGITS, owner=GPT),
    of_model(
        "GPT.__call__",
        TOKENS,
        LOGITS,
        owner=UNTIED,
        static={"rngs": dropout_rngs},
        note="untied-train",
    ),
    of_model("GPT.hidden", TOKENS, STREAM, owner=GPT),
    of_model("GPT.hidden_states", TOKENS, (STREAM, STREAM), owner=GPT),
    *(
        Case(
            f"jgpt.nn.depth.{name}",
            SELF_ATTENTION,
            (STREAM, STREAM),
            fixed="embed_dim",
            static={"config": CONFIG, "blocks": GPT.blocks, "shortcut": None, "rngs": None},
        )
        for name in ("run_blocks", "_scanned")
    ),
    of_model("GPT.attention_weights", TOKENS, (1, BATCH, 2, 7, 7), owner=GPT),
    of_model("GPT.embed", TOKENS, STREAM, owner=GPT),
    of_model("GPT.logits", SELF_ATTENTION, LOGITS, owner=GPT),
    of_model("GPT.logits", SELF_ATTENTION, LOGITS, owner=UNTIED, note="untied"),
    of_bigram("BigramLM.__call__", TOKENS, LOGITS, owner=TABLE),
    of_bigram("BigramLM.hidden", TOKENS, LOGITS, owner=TABLE),
    Case(
        "jgpt.nn.bigram.BigramLM.logits",
        {"x": "float batch time vocab"},
        LOGITS,
        fixed="vocab",
        owner=TABLE,
    ),
    Case(
        "jgpt.nn.module.Module.next_dropout_key",
        {},
        SCALAR,
        static={"rngs": dropout_rngs, "rate": 0.1},
        owner=HEAD,
    ),
    Case(
        "jgpt.nn.module.require_in_vocabulary",
        {"tokens": "int *rows"},
        static={"vocab_size": SIZES["vocab"]},
    ),
]
MODERN_X = {"x": "float batch time modern_dim"}
MODERN_CROSS = {**MODERN_X, "context": "float batch key modern_dim"}
MODERN_STREAM = (BATCH, 7, MODERN_DIM)
MODERN_FAMILY = [
    of_heads(
        "_Attention._normalise_and_rotate",
        {"x": "float *batch time head_dim"},
        (BATCH, 2, 7, 11),
        owner=HEAD,
        fixed="head_dim",
        static={"norm": None},
    ),
    of_modern(
        "heads._Attention._normalise_and_rotate",
        {"x": "float *batch time rotary_dim"},
        (BATCH, 2, 7, 12),
        owner=ROTARY_HEAD,
        static={"norm": ROTARY_HEAD.query_norm},
    ),
    of_modern(
        "heads._Attention._normalise_and_rotate",
        {"x": "float *batch time rotary_dim", "position": "int time"},
        (BATCH, 2, 7, 12),
        owner=GROUPED,
        static={"norm": GROUPED.key_norm},
        note="elsewhere",
    ),
    of_modern(
        "heads.MultiHeadAttention._project",
        {
            "x": "float batch time modern_dim",
            "source": "float batch key modern_dim",
        },
        ((BATCH, 30, 7, 12), (BATCH, 10, 5, 12), (BATCH, 10, 5, 12)),
        owner=GROUPED,
    ),
    of_modern(
        "heads.MultiHeadAttention._project",
        {
            "x": "float batch time modern_dim",
            "source": "float batch time modern_dim",
            "position": "int batch time",
        },
        ((BATCH, 30, 7, 12), (BATCH, 10, 7, 12), (BATCH, 10, 7, 12)),
        owner=GROUPED,
        blames="jgpt.nn.heads._Attention._normalise_and_rotate",
        note="positions",
    ),
    of_modern("heads.Head.__call__", MODERN_CROSS, (BATCH, 7, 12), owner=ROTARY_HEAD),
    of_modern("heads.Head.weights", MODERN_X, (BATCH, 7, 7), owner=ROTARY_HEAD),
    of_modern(
        "heads.MultiHeadAttention.__call__", MODERN_CROSS, MODERN_STREAM, owner=GROUPED, checks=1
    ),
    of_modern("heads.MultiHeadAttention.weights", MODERN_X, (BATCH, 30, 7, 7), owner=GROUPED),
    of_modern("transformer.Block.__call__", MODERN_X, MODERN_STREAM, owner=MODERN_BLOCK),
    of_modern(
        "transformer.GPT.__call__", TOKENS, LOGITS, owner=MODERN_GPT, static={"rngs": dropout_rngs}
    ),
    of_modern("transformer.GPT.attention_weights", TOKENS, (1, BATCH, 30, 7, 7), owner=MODERN_GPT),
    of_modern("transformer.GPT.embed", TOKENS, MODERN_STREAM, owner=MODERN_GPT),
    of_modern("transformer.GPT.logits", MODERN_X, LOGITS, owner=MODERN_GPT),
    of_heads(
        "MultiHeadAttention._project",
        {"x": "float batch time embed_dim", "source": "float batch key embed_dim"},
        ((BATCH, 30, 7, 13), (BATCH, 10, 5, 13), (BATCH, 10, 5, 13)),
        owner=GATED_BLOCK.attention,
        fixed="embed_dim query_heads kv_heads value_dim",
        note="head_dim",
    ),
    of_blocks(
        "FeedForward.__call__",
        SELF_ATTENTION,
        STREAM,
        owner=GATED_BLOCK.feed_forward,
        checks=1,
        note="gated",
    ),
    of_blocks("Block.__call__", SELF_ATTENTION, STREAM, owner=GATED_BLOCK, note="gated"),
    of_model("GPT.__call__", TOKENS, LOGITS, owner=GATED_GPT, note="gated"),
    of_model("GPT.attention_weights", TOKENS, (1, BATCH, 30, 7, 7), owner=GATED_GPT, note="gated"),
]
TRANSFORMER = [*ATTENTION, *LAYERS, *MODEL, *MODERN_FAMILY]
