"""A few contracts said a second time by hand: what the tests read off annotations is this."""

import pytest

from tests.contract.calls import Call, Value, mutations
from tests.contract.programs import calls_of

QKV = {
    "query": "float *batch query head_dim",
    "key": "float *batch key head_dim",
    "value": "float *batch key value_dim",
    "mask": "bool query key",
}
METRICS = {name: "float steps" for name in ("loss", "gradient_norm", "learning_rate")}
SAMPLE = {
    "nn.attention.attend": (QKV, {}),
    "nn.attention.merge_heads": ({"x": "float batch heads time value_dim"}, {}),
    "nn.loss.token_losses": ({"logits": "float *rows vocab", "targets": "int *rows"}, {}),
    "nn.heads.MultiHeadAttention.__call__": (
        {"x": "float batch time embed_dim", "context": "float batch key embed_dim"},
        {"embed_dim": 22},
    ),
    "nn.bigram.BigramLM.logits": ({"x": "float batch time vocab"}, {"vocab": 17}),
    "nn.cache.LayerCache.append": (
        dict.fromkeys(("key", "value"), "float batch kv_heads time head_dim"),
        {"batch": 3, "kv_heads": 2, "head_dim": 12},
    ),
    "training.step.Metrics.__init__": (METRICS, {}),
    "training.step.make_train_steps.<locals>.loss_of": (
        {"window": "int batch window", "key": "key"},
        {},
    ),
    "generation.sampling.next_token": ({"logits": "float batch vocab", "key": "key"}, {}),
    "data.tokenizers.CharTokenizer.decode": ({"tokens": "integer tokens"}, {}),
}
DTYPES = {
    "float": {"bfloat16", "float32"},
    "int": {"int32"},
    "integer": {"int32", "uint8"},
    "bool": {"bool"},
    "key": {"key<fry>"},
}


def allowed(arrays: dict[str, str], fixed: dict[str, int], values: dict[str, Value]) -> bool:
    """Whether equal names have equal sizes, `*batch` being any number of them."""
    bound: dict[str, object] = dict(fixed)
    for name, text in arrays.items():
        kind, *dims = text.split()
        shape, dtype = values[name]
        if dims and dims[0][0] == "*":
            several = len(shape) - len(dims) + 1
            if several < 0:
                return False
            shape = (shape[:several], *shape[several:])
        if dtype not in DTYPES[kind] or len(dims) != len(shape):
            return False
        if any(bound.setdefault(dim, n) != n for dim, n in zip(dims, shape, strict=True)):
            return False
    return True


def whole(name: str, arrays: dict[str, str]) -> Call:
    return next(call for call in calls_of(f"jgpt.{name}") if set(call.good) == set(arrays))


@pytest.mark.parametrize("name", SAMPLE)
def test_the_annotations_say_what_is_meant(name: str):
    arrays, fixed = SAMPLE[name]
    call = whole(name, arrays)
    tried = list(mutations(call.good))
    for values in tried:
        expected = "ok" if allowed(arrays, fixed, values) else "contract"
        assert call.outcome(values) == expected, values
    assert call.outcome(call.good) == "ok"
    assert len(tried) > 10
