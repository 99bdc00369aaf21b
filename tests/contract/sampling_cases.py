"""Cases of sampling: the cache of keys and values, the tokens, and their text."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jgpt import blocks, heads, model
from jgpt.config import ModelConfig
from jgpt.generation import TOKENS_PER_CALL, Rules
from jgpt.text import _Writer
from jgpt.tokenizer import ByteTokenizer
from tests.contract.contract import SIZES, Case
from tests.contract.model_cases import GPT, TABLE, zeros

BATCH, VOCAB, DIM = SIZES["batch"], SIZES["vocab"], SIZES["modern_dim"]
HEADS: dict[str, Any] = {"num_heads": SIZES["query_heads"], "num_kv_heads": SIZES["kv_heads"]}
GROUPED = zeros(heads.MultiHeadAttention, DIM, **HEADS, rotary=True, qk_norm=True)
BLOCK = zeros(blocks.Block, DIM, **HEADS, rotary=True, norm="rms")
MODERN_CONFIG = ModelConfig(
    vocab_size=VOCAB,
    block_size=SIZES["block_size"],
    num_layers=1,
    embed_dim=DIM,
    hidden_dim=SIZES["hidden"],
    positions="rotary",
    embedding_shortcut=True,
    attention_window=5,
    ngram_sizes=(2, 1 + SIZES["lookback"]),
    ngram_rows=19,
    **HEADS,
)
MODERN = zeros(model.GPT, MODERN_CONFIG)
LOOKING_BACK = zeros(model.BigramLM, VOCAB)
LOOKING_BACK.lookback = SIZES["lookback"]  # its own is 0, an axis that can't be wrong
STREAM, KEPT = (BATCH, 7, DIM), (BATCH * 10, 15, 12)
CACHE_SHAPE = (BATCH * 10, 64, 12)


def continuing(name: str, owner: Any) -> Case:
    """Of a module: the batch is in the first axis of a cache, times the heads."""
    arrays = {
        "x": "float batch time modern_dim",
        "length": "int batch",
        "keys": "float batch*kv_heads places rotary_dim",
        "values": "float batch*kv_heads places rotary_dim",
    }
    fixed = "modern_dim kv_heads rotary_dim"
    return Case(f"jgpt.{name}.continued", arrays, (STREAM, KEPT, KEPT), fixed=fixed, owner=owner)


CACHE = [
    Case(
        "jgpt.attention.cache_mask",
        {"length": "int", "slot": "int"},
        (7, 15),
        static={"time": 7, "places": 15},
    ),
    Case(
        "jgpt.attention.write_to_cache",
        {
            "cache": "float *batch places head_dim",
            "new": "float *batch time head_dim",
            "slot": "int",
        },
        (BATCH, 2, 15, 11),
    ),
    continuing("heads.MultiHeadAttention", GROUPED),
    continuing("blocks.Block", BLOCK),
    Case(
        "jgpt.model.GPT.empty_cache",
        {},
        (CACHE_SHAPE, CACHE_SHAPE),
        static={"batch": BATCH},
        owner=MODERN,
    ),
    Case(
        "jgpt.model.GPT.continued",
        {"tokens": "int batch time", "length": "int batch", "before": "int batch lookback"},
        ((BATCH, VOCAB), CACHE_SHAPE, CACHE_SHAPE),
        fixed="batch lookback",
        static={"cache": MODERN.empty_cache(BATCH)},
        owner=MODERN,
    ),
    Case(
        "jgpt.model.GPT.continued",
        {"tokens": "int batch time", "length": "int batch"},
        ((BATCH, VOCAB), (BATCH * 2, 64, 11), (BATCH * 2, 64, 11)),
        fixed="batch",
        static={"cache": GPT.empty_cache(BATCH)},
        owner=GPT,
        note="learned",
    ),
    Case(
        "jgpt.bigram.BigramLM.continued",
        {"tokens": "int batch time", "length": "int batch"},
        ((BATCH, VOCAB),),
        static={"cache": ()},
        owner=TABLE,
    ),
    Case(
        "jgpt.bigram.BigramLM.continued",
        {"tokens": "int batch time", "length": "int batch", "before": "int batch lookback"},
        ((BATCH, VOCAB),),
        fixed="lookback",
        static={"cache": ()},
        owner=LOOKING_BACK,
        note="lookback",
    ),
]

LEARNED = zeros(model.GPT, dataclasses.replace(GPT.config, block_size=SIZES["time"]))
RULES = Rules(jnp.float32(1), jnp.float32(0.9), jnp.float32(0.1))
PROMPT = {"prompt": "int batch time", "key": "key", "lengths": "int batch"}
# with no token to draw nothing is compiled
NOTHING: dict[str, Any] = {"model": TABLE, "max_new_tokens": 0}


def drawing(of: Any, cache: Any, **options: Any) -> Case:
    graph, weights = nnx.split(of)
    shapes = tuple(leaf.shape for layer in cache for leaf in layer)
    return Case(
        "jgpt.generation._draw",
        {
            "window": "int batch time",
            "length": "int batch",
            "start": "int",
            "count": "int",
            "key": "key",
        },
        ((BATCH, 7), (BATCH,), *shapes, (BATCH, TOKENS_PER_CALL), ()),
        static={
            "weights": weights,
            "cache": cache,
            "rules": RULES,
            "graph": graph,
            "top_k": 3,
            "rereads": bool(shapes),
        },
        **options,
    )


GENERATION = [
    Case(
        "jgpt.generation.Rules.__init__",
        {"temperature": "float", "top_p": "float", "min_p": "float"},
        owner=object.__new__(Rules),
    ),
    Case(
        "jgpt.generation.next_token",
        {"logits": "float batch vocab", "key": "key"},
        (BATCH,),
        static={"rules": RULES, "top_k": 3},
    ),
    drawing(TABLE, ()),
    drawing(LEARNED, LEARNED.empty_cache(BATCH), fixed="batch", note="rereading"),
    Case(
        "jgpt.generation._prefill",
        {"tokens": "int batch time", "length": "int batch"},
        ((BATCH * 2, 64, 11), (BATCH * 2, 64, 11)),
        fixed="batch",
        static=dict(zip(("graph", "weights"), nnx.split(GPT), strict=True)),
        agreeing=True,
    ),
    Case(
        "jgpt.generation.generate",
        {"prompt": "int batch time", "key": "key"},
        (BATCH, 7),
        static=NOTHING,
        takes="values",
    ),
    Case(
        "jgpt.generation.generate",
        PROMPT,
        static=NOTHING,
        takes="values",
        host="lengths",
        note="lengths",
    ),
    Case(
        "jgpt.generation.stream",
        PROMPT,
        static=NOTHING,
        takes="values",
        host="lengths",
    ),
    Case(
        "jgpt.generation._pieces",
        {"prompt": "int batch time", "ends": "int batch", "key": "key"},
        static={**NOTHING, "rules": RULES, "top_k": None},
        takes="numpy",
    ),
]
BYTES = ByteTokenizer()
TEXT: dict[str, Any] = {
    "model": TABLE,
    "tokenizer": BYTES,
    "prompts": ("\n",),
    "max_new_tokens": 0,
}
WRITING = [
    Case("jgpt.text.generate_text", {"key": "key"}, static=TEXT, takes="values"),
    Case("jgpt.text.stream_text", {"key": "key"}, static=TEXT, takes="values"),
    Case(
        "jgpt.text._texts",
        {},
        static={"writers": (_Writer(BYTES, ()),), "pieces": iter([np.zeros((1, 3), np.int32)])},
        takes="numpy",
    ),
    Case(
        "jgpt.text.decode_stream",
        {},
        static={"tokenizer": BYTES, "pieces": [np.zeros(3, np.int32)]},
        takes="numpy",
    ),
    Case("jgpt.text.opening", {}, (1,), static={"tokenizer": BYTES}, takes="numpy", loose=True),
    Case(
        "jgpt.text._Writer.write",
        {"tokens": "integer tokens"},
        owner=_Writer(BYTES, ()),
        takes="numpy",
    ),
]
SAMPLING = [*CACHE, *GENERATION, *WRITING]
