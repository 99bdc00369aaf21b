"""The questions that a page begins with, and the source beside its arrays."""

from jgpt.page.code import code_of
from tests.page.records import record_of
from tests.page.test_program import TOKENIZER, look_of

TEXT = "ips/bestca"


def test_each_array_has_the_line_that_makes_it():
    look = look_of("gpt2")

    code = code_of(look.model)

    assert code is not None
    lines = {}
    for path, name, (index, number), callers in code["arrays"]:
        function = code["functions"][index]
        (line,) = [each for each in function["lines"] if each[0] == number]
        lines[path, name] = (function["name"], line[1].strip(), line[2], len(callers))
    assert lines["blocks.0.attention.attention_weights", "attention_weights"][:2] == (
        "attention_weights",
        "weights = jax.nn.softmax(scores, axis=-1)",
    )
    name, text, shapes, callers = lines["blocks.1", "blocks.1"]
    assert name == "Block.__call__"
    assert text == "return x + transformed.astype(x.dtype)"
    assert shapes == f"return: float32[batch=1 time=time embed_dim={look.model.config.embed_dim}]"
    assert callers > 1  # it is called in a loop over blocks, which is called in turn
    record = record_of(look, TOKENIZER.encode(TEXT).tolist())
    places = {(array["path"], array["name"]) for array in record["arrays"]}
    assert places - {("", "tokens")} <= set(lines)
