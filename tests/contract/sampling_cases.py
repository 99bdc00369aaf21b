"""Cases of sampling: the cache of keys and values, the tokens, and their text."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jgpt.config import ModelConfig
from jgpt.data.tokenizers import ByteTokenizer
from jgpt.generation.decoding import TOKENS_PER_CALL
from jgpt.generation.sampling import Sampling
from jgpt.generation.text import _Detokenizer
from jgpt.nn import heads, transformer
from jgpt.nn.cache import KVCache, LayerCache
from jgpt.nn.int8 import with_int8_weights
from tests.contract.contract import SIZES, Case
from tests.contract.model_cases import GPT, TABLE, zeros

BATCH, VOCAB, DIM = SIZES["batch"], SIZES["vocab"], SIZES["modern_dim"]
HEADS: dict[str, Any] = {"num_heads": SIZES["query_heads"], "num_kv_heads": SIZES["kv_heads"]}
ROTARY = ModelConfig(embed_dim=DIM, positions="rotary", norm="rms", qk_norm=True, **HEADS)
GROUPED = zeros(heads.MultiHeadAttention, ROTARY)
BLOCK = zeros(transformer.Block, ROTARY)
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
MODERN = zeros(transformer.GPT, MODERN_CONFIG)


def layer_cache() -> LayerCache:
    return LayerCache(BATCH, SIZES["capacity"], SIZES["kv_heads"], SIZES["rotary_dim"])


def looking_back() -> KVCache:
    return KVCache((layer_cache(),), batch=BATCH, lookback=SIZES["lookback"])


def over_a_cache(name: str, arrays: dict[str, str], returns: Any, owner: Any, cache: Any) -> Case:
    """A module's call with a cache, which is the first to see a batch that is not its own."""
    return Case(
        f"jgpt.nn.{name}",
        arrays,
        returns,
        fixed="batch modern_dim embed_dim",
        static={"cache": cache},
        owner=owner,
        checks=int("MultiHead" in name),
        blames="jgpt.nn.cache.LayerCache.positions jgpt.nn.cache.KVCache.append_tokens",
        note="cache",
    )


STREAM = {"x": "float batch time modern_dim"}
TOKENS = {"tokens": "int batch time"}
NEW = "float batch kv_heads time rotary_dim"
CACHE = [
    Case(
        "jgpt.nn.cache.LayerCache.positions",
        {"new": "any batch time *features"},
        (BATCH, 7),
        fixed="batch",
        owner=layer_cache(),
        takes="values",
    ),
    Case(
        "jgpt.nn.cache.LayerCache.append",
        {"key": NEW, "value": NEW},
        fixed="batch kv_heads rotary_dim",
        owner=layer_cache(),
        takes="values",
    ),
    Case(
        "jgpt.nn.cache.LayerCache.mask",
        {},
        (BATCH, 7, SIZES["capacity"]),
        owner=layer_cache(),
        static={"time": 7},
    ),
    Case(
        "jgpt.nn.cache.KVCache.set_lengths",
        {"length": "int batch"},
        fixed="batch",
        owner=looking_back(),
        takes="values",
    ),
    Case(
        "jgpt.nn.cache.KVCache.append_tokens",
        TOKENS,
        (BATCH, SIZES["lookback"] + 7),
        fixed="batch",
        owner=looking_back(),
        takes="values",
    ),
    over_a_cache(
        "heads.MultiHeadAttention.__call__", STREAM, (BATCH, 7, DIM), GROUPED, layer_cache
    ),
    Case(
        "jgpt.nn.kernels.attend_over_cache",
        {"query": "float batch query_heads time rotary_dim"},
        (BATCH, 30, 7, 12),
        fixed="batch rotary_dim",
        static={"cache": layer_cache()},
    ),
    over_a_cache("transformer.Block.__call__", STREAM, (BATCH, 7, DIM), BLOCK, layer_cache),
    *(
        over_a_cache(
            f"transformer.GPT.{name}", TOKENS, returns, MODERN, lambda: MODERN.empty_cache(BATCH)
        )
        for name, returns in (
            ("__call__", (BATCH, 7, VOCAB)),
            ("hidden", (BATCH, 7, DIM)),
            ("hidden_states", ((BATCH, 7, DIM),) * 2),
            ("embed", (BATCH, 7, DIM)),
        )
    ),
    over_a_cache(
        "transformer.GPT.__call__", TOKENS, (BATCH, 7, VOCAB), GPT, lambda: GPT.empty_cache(BATCH)
    ),
]

LEARNED = zeros(transformer.GPT, dataclasses.replace(GPT.config, block_size=SIZES["time"]))
INT8 = with_int8_weights(LEARNED)
SAMPLING_PARAMETERS = Sampling(jnp.float32(1), jnp.float32(0.9), jnp.float32(0.1))
PROMPT = {"prompt": "int batch time", "key": "key", "lengths": "int batch"}
# with no token to draw nothing is compiled
NOTHING: dict[str, Any] = {"model": TABLE, "max_new_tokens": 0}


def drawing(of: Any, cache: Any, **options: Any) -> Case:
    graph, weights = nnx.split(of)
    return Case(
        "jgpt.generation.decoding._draw",
        {
            "window": "int batch time",
            "length": "int batch",
            "start": "int",
            "count": "int",
            "key": "key",
        },
        ((BATCH, 7), (BATCH,), (BATCH, TOKENS_PER_CALL), ()),
        static={
            "weights": weights,
            "cache": cache,
            "sampling": SAMPLING_PARAMETERS,
            "graph": graph,
            "top_k": 3,
            "recomputes": of is not TABLE,
        },
        **options,
    )


GENERATION = [
    Case(
        "jgpt.generation.sampling.Sampling.__init__",
        {"temperature": "float", "top_p": "float", "min_p": "float"},
        owner=object.__new__(Sampling),
    ),
    Case(
        "jgpt.generation.sampling.next_token",
        {"logits": "float batch vocab", "key": "key"},
        (BATCH,),
        static={"sampling": SAMPLING_PARAMETERS, "top_k": 3},
    ),
    Case(
        "jgpt.generation.sampling._sample",
        {"logits": "float batch vocab", "key": "key"},
        (BATCH,),
        static={"sampling": SAMPLING_PARAMETERS, "top_k": 3},
    ),
    Case(
        "jgpt.generation.sampling._inverse_transform",
        {"weights": "float batch choices", "uniform": "float batch"},
        (BATCH,),
    ),
    drawing(TABLE, TABLE.empty_cache(BATCH)),
    drawing(LEARNED, LEARNED.empty_cache(BATCH), fixed="batch", note="rereading"),
    drawing(INT8, INT8.empty_cache(BATCH), fixed="batch", note="int8"),
    *(
        Case(
            "jgpt.generation.decoding._prefill",
            {"tokens": "int batch time", "length": "int batch"},
            static={"graph": nnx.graphdef(of), "weights": nnx.state(of), "capacity": 41},
            note=note,
        )
        for of, note in ((GPT, ""), (with_int8_weights(GPT), "int8"))
    ),
    Case(
        "jgpt.generation.decoding.generate",
        {"prompt": "int batch time", "key": "key"},
        (BATCH, 7),
        static=NOTHING,
        takes="values",
    ),
    Case(
        "jgpt.generation.decoding.generate",
        PROMPT,
        static=NOTHING,
        takes="values",
        host="lengths",
        note="lengths",
    ),
    Case(
        "jgpt.generation.decoding.stream",
        PROMPT,
        static=NOTHING,
        takes="values",
        host="lengths",
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
    Case("jgpt.generation.text.generate_text", {"key": "key"}, static=TEXT, takes="values"),
    Case("jgpt.generation.text.stream_text", {"key": "key"}, static=TEXT, takes="values"),
    Case(
        "jgpt.generation.text._texts",
        {},
        static={
            "writers": (_Detokenizer(BYTES, ()),),
            "pieces": iter([np.zeros((1, 3), np.int32)]),
        },
        takes="numpy",
    ),
    Case(
        "jgpt.generation.text.default_prompt",
        {},
        (1,),
        static={"tokenizer": BYTES},
        takes="numpy",
        loose=True,
    ),
    Case(
        "jgpt.generation.text._Detokenizer.write",
        {"tokens": "integer tokens"},
        owner=_Detokenizer(BYTES, ()),
        takes="numpy",
    ),
]
SAMPLING = [*CACHE, *GENERATION, *WRITING]
