"""What happens inside a call: watched, captured, edited, and drawn as a tree of shapes."""

import functools
import itertools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float, TypeCheckError

import jgpt
from jgpt.nn.layers import LayerNorm
from jgpt.shapes.calls import TypedCall
from jgpt.shapes.expressions import name_sizes
from tests.models import random_gpt

TOKENS = jnp.arange(10).reshape(2, 5)


def model_of(family: str = "lecture", **changes: object) -> jgpt.GPT:
    return random_gpt(family, num_layers=3, vocab_size=17, block_size=8, **changes)


def heard(function, *args) -> list[TypedCall]:
    calls: list[TypedCall] = []
    with jgpt.watching(calls.append):
        function(*args)
    return calls


def paths_of(calls: list[TypedCall]) -> list[str]:
    return [call.path for call in calls]


def by_hand(model: jgpt.GPT, edit=lambda x: x, edited: int = 1) -> dict[str, jax.Array]:
    """Results of the forward pass, with that of one block's attention replaced."""
    found = {}
    embedded = model.embed(TOKENS)
    x = embedded
    for index, block in enumerate(model.blocks):
        if model.shortcut is not None:
            x = x + model.shortcut[index] * embedded
        attended = block.attention(block.attention_norm(x))
        if index == edited:
            attended = edit(attended)
        x = x + attended
        x = x + block.feed_forward(block.feed_forward_norm(x))
        found[f"blocks.{index}.attention"] = attended
        found[f"blocks.{index}"] = x
    found["logits"] = model.logits(model.final_norm(x))
    return found


# --- watching ------------------------------------------------------------------------------------


def test_a_watch_hears_of_each_call_with_its_path_and_arguments():
    model = model_of()

    calls = heard(model, TOKENS)

    first = calls[0]
    assert first.path == ""
    assert first.arguments["self"] == model
    assert first.arguments["tokens"] is TOKENS
    assert first.annotations["return"].dim_str == "batch time {self.vocab_size}"
    paths = paths_of(calls)
    in_order = ["hidden", "embed", "blocks.1", "blocks.1.attention", "final_norm", "logits"]
    places = [paths.index(path) for path in in_order]
    assert places == sorted(places)
    (query,) = [call for call in calls if call.path == "blocks.2.attention.query"]
    assert query.arguments["self"] is model.blocks[2].attention.query
    # of queries, keys and values
    assert paths.count("blocks.0.attention.split_heads") == 3


@pytest.mark.parametrize(
    ("changes", "block"),
    [
        ({}, "blocks.1"),
        ({"remat": True}, "blocks.*"),
        ({"scan_layers": True}, "blocks.*"),
        ({"scan_layers": True, "remat": True}, "blocks.*"),
    ],
)
def test_paths_within_transformations(changes, block):
    graph, weights = nnx.split(model_of(**changes))

    def loss(weights, tokens):
        model = nnx.merge(graph, weights)
        return model(tokens).sum()

    def mapped_loss(weights, tokens):
        return jax.vmap(loss, (None, 0))(weights, tokens[:, None])

    for function in (loss, jax.jit(loss), jax.grad(loss), mapped_loss):
        jax.clear_caches()  # or nothing is traced again
        paths = paths_of(heard(jax.eval_shape, function, weights, TOKENS))
        assert paths.count(f"{block}.attention") == 1
        assert f"{block}.feed_forward.expansion" in paths
        # where all blocks are one program, none has a number
        assert ("blocks.2.attention" in paths) == (block == "blocks.1")


def test_calls_in_a_cached_program_are_not_watched_but_captured_edited_and_drawn():
    masked = jax.jit(jgpt.causal_mask, static_argnums=0)
    mask = masked(3)

    def first_row(size: int) -> jax.Array:
        return masked(size)[0]

    assert heard(first_row, 3) == []
    captured = jgpt.capture(first_row, "causal_mask")(3)
    np.testing.assert_array_equal(captured["causal_mask"], mask)
    edited = jgpt.edit(first_row, {"causal_mask": jnp.logical_not})
    np.testing.assert_array_equal(edited(3), ~mask[0])
    for _ in range(2):
        drawn = jgpt.shape_trace(functools.partial(first_row, 3))
        assert str(drawn).splitlines()[-1].split() == ["result", "bool[time=3", "time=3]"]
    np.testing.assert_array_equal(first_row(3), mask[0])


def zeroed(call: TypedCall):
    if call.path == "blocks.0.attention":
        return jnp.zeros_like
    return None


class Rematerialised(nnx.Module):
    """A block of one's own inside `jax.checkpoint`."""

    def __init__(self, block: nnx.Module) -> None:
        self.block = block

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.checkpoint(lambda x: self.block(x))(x)


def test_what_is_replaced_in_a_program_that_jax_would_cache_is_refused():
    model = model_of()
    refused = r"blocks\.0\.attention is called in a program that JAX caches"

    for call in (
        jax.jit(lambda tokens: model(tokens)),
        lambda tokens: nnx.jit(calling)(model, tokens),
    ):
        expected = np.asarray(model(TOKENS))
        with jgpt.watching(zeroed), pytest.raises(ValueError, match=refused):
            call(TOKENS)
        np.testing.assert_allclose(call(TOKENS), expected, rtol=1e-5, atol=1e-6)

    block = Rematerialised(model.blocks[0])
    x = model.embed(TOKENS)
    edited = jgpt.edit(block, {"attention": jnp.zeros_like})
    for call in (edited, jax.jit(lambda x: edited(x))):
        with pytest.raises(ValueError, match="attention is called in a program"):
            call(x)


def calling(model, tokens):
    return model(tokens)


def mapped(model, tokens):
    def of_row(row):
        batch = row[None]
        return model(batch)[0]

    return jax.vmap(of_row)(tokens)


def gradient(model, tokens):
    """The logits, since those of the first row are the gradient of their product with a weight."""
    graph, weights = nnx.split(model)

    def weighted(weight):
        return (nnx.merge(graph, weights)(tokens) * weight).sum()

    return jax.jit(jax.grad(weighted))(jnp.ones((*tokens.shape, model.vocab_size)))


JITTED_MAP = jax.jit(mapped)  # the typed calls see the tracers of `vmap` alone
NNX_JITTED = nnx.jit(calling)


@pytest.mark.parametrize(
    ("call", "changes"),
    [
        *((call, {}) for call in (calling, NNX_JITTED, JITTED_MAP)),
        (gradient, {"scan_layers": True, "remat": True}),
    ],
)
def test_edited_models_and_the_plain_one_are_programs_of_their_own(call, changes):
    """Called in turn, each gives its own result, as the eager one of a loop over the blocks."""
    model = model_of(**changes)
    first = jgpt.edit(model, {"blocks.0.attention": jnp.zeros_like})
    second = jgpt.edit(model, {"blocks.0.attention": lambda x: 3 * x, "logits": jnp.negative})
    of_edited = jgpt.edit(first, {"logits": jnp.negative})
    loop = nnx.merge(nnx.graphdef(model_of()), nnx.state(model))

    zeroed_by_hand = by_hand(loop, jnp.zeros_like, edited=0)["logits"]
    tripled_by_hand = by_hand(loop, lambda x: 3 * x, edited=0)["logits"]
    expected = [by_hand(loop)["logits"], zeroed_by_hand, -tripled_by_hand, -zeroed_by_hand]
    for _ in range(2):
        for one, result in zip([model, first, second, of_edited], expected, strict=True):
            np.testing.assert_allclose(call(one, TOKENS), result, rtol=2e-5, atol=2e-6)
    for one, other in itertools.combinations(expected, 2):
        assert np.abs(one - other).max() > 1e-3


# --- capture and edit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3", {}), ("modern", {"scan_layers": True, "remat": True})]
)
def test_results_are_captured_and_edited_as_by_hand(family, changes):
    def add_to_a_feature(x):
        return x.at[:, 2, 3].add(1.0)

    graph, weights = nnx.split(model_of(family, **changes))
    graph_of_a_loop = nnx.graphdef(model_of(family))  # of which each block can be called
    order = []

    @jax.jit
    def everything(weights):
        model = nnx.merge(graph, weights)
        plain = nnx.merge(graph_of_a_loop, weights)
        captured = jgpt.capture(model, "blocks.*", "blocks.*.attention", "logits")(TOKENS)
        order.extend(captured)
        edited = []
        for edit in (jnp.zeros_like, add_to_a_feature):
            found = jgpt.edit(model, {"blocks.1.attention": edit})(TOKENS)
            edited.append((found, by_hand(plain, edit)["logits"]))
        return captured, by_hand(plain), edited

    captured, expected_results, edited = everything(weights)

    in_turn = []
    for index in range(3):
        in_turn.append(f"blocks.{index}.attention")
        in_turn.append(f"blocks.{index}")
    assert order == [*in_turn, "logits"]
    assert captured.keys() == expected_results.keys()
    for path, result in captured.items():
        np.testing.assert_allclose(result, expected_results[path], rtol=2e-5, atol=2e-6)
    for found, expected in edited:
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
        # the edit is seen
        assert np.abs(found - expected_results["logits"]).max() > 1e-3


def test_a_module_whose_call_is_that_of_its_base_class_and_more_is_captured_and_edited_once():
    """A LayerNorm calls RMSNorm's call, and adds its bias."""
    model = model_of()
    hidden = by_hand(model)["blocks.2"]
    norm = model.final_norm
    assert isinstance(norm, LayerNorm)
    normed = norm(hidden)
    bias = norm.bias
    assert bias is not None
    assert abs(bias[...]).max() > 0.1

    found = jgpt.capture(model, "final_norm", "final_norm.__call__")(TOKENS)
    edited = jgpt.edit(model, {"final_norm": lambda x: x + 1.0})(TOKENS)

    np.testing.assert_allclose(found["final_norm"], normed, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["final_norm.__call__"], normed - bias[...], atol=1e-5)
    np.testing.assert_allclose(edited, model.logits(normed + 1.0), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_an_edited_model_is_sampled_as_it_predicts():
    """The whole context is computed for each token: positions are counted from its start."""
    model = random_gpt("modern", num_layers=2, vocab_size=17, block_size=8, scan_layers=True)
    edited = jgpt.edit(model, {"blocks.*.attention": lambda x: x.at[:, 2].set(-9.0)})
    misspelt = jgpt.edit(model, {"block.1": jnp.negative})
    prompt = TOKENS[:, :3]

    def sample(model):
        return jgpt.generate(model, prompt, 5, key=jax.random.key(0), temperature=0.0)

    found = sample(edited)
    plain = sample(model)

    logits = jax.jit(lambda tokens: edited(tokens))(found)
    likeliest = logits[:, 2:-1].argmax(-1)  # after each token from the prompt's last one on
    np.testing.assert_array_equal(found[:, 3:], likeliest)
    assert (found != plain).any()
    with pytest.raises(ValueError, match=r"no typed call has the path 'block\.1'"):
        sample(misspelt)


def test_what_can_t_be_captured_or_edited_is_rejected():
    model = model_of()
    mesh = jax.make_mesh((1,), ("data",))

    message = r"'block.1.attention' \(did you mean 'blocks.1.attention'\?\)"
    with pytest.raises(ValueError, match=message):
        jgpt.capture(model, "block.1.attention")(TOKENS)
    with pytest.raises(ValueError, match=r"no typed call has the path 'blocks\.7'"):
        jgpt.edit(model, {"blocks.7": jnp.zeros_like})(TOKENS)
    with pytest.raises(TypeCheckError, match=r"(?s)MultiHeadAttention.*wrong result.*time is 3"):
        jgpt.edit(model, {"blocks.1.attention": lambda x: x[:, :3]})(TOKENS)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="without a mesh"):
        jgpt.capture(model, "logits")(TOKENS)


# --- the tree of shapes --------------------------------------------------------------------------


@jgpt.typed
def scale(x: Float[Array, "batch features"], by: float) -> Float[Array, "batch features"]:
    return x * by


@jgpt.typed
def split(
    x: Float[Array, "batch features"],
) -> tuple[Float[Array, "batch {x.shape[-1]//2}"], Float[Array, "..."]]:
    x = scale(scale(x, 2.0), 3.0)
    half = x.shape[-1] // 2
    return x[:, :half], x[:, half:]


def test_a_trace_of_code_of_one_s_own():
    three_rows = jax.ShapeDtypeStruct((3, 8), jnp.bfloat16)
    five_rows = jax.ShapeDtypeStruct((5, 10), jnp.bfloat16)
    four_rows = jax.ShapeDtypeStruct((4, 13), jnp.bfloat16)

    trace = jgpt.shape_trace(split, three_rows)
    other = jgpt.shape_trace(split, five_rows)

    expected = """split(x: bfloat16[batch=3 features=8])
  scale  bfloat16[batch=3 features=8]
  scale  bfloat16[batch=3 features=8]
result   bfloat16[batch=3 4]
         bfloat16[3 4]"""
    assert str(trace) == expected
    assert re.sub("<[^>]*>", "", trace._repr_html_()) == expected
    traces = [trace, other, jgpt.shape_trace(split, four_rows)]
    named = name_sizes(traces, {"b": (3, 5, 4), "f": (8, 10, 13)}).tree
    assert named.lines(1)[-2:] == [
        "result   bfloat16[batch=b f//2]",
        "         bfloat16[b (f+1)//2]",
    ]
    with pytest.raises(ValueError, match="abs makes no typed call"):
        jgpt.shape_trace(jnp.abs, jnp.ones(3))


@pytest.mark.parametrize("changes", [{}, {"scan_layers": True}])
def test_a_watch_that_replaces_nothing_changes_no_program(changes):
    graph, weights = nnx.split(model_of(**changes))

    def lowered() -> str:
        # a function of its own each time: JAX would reuse the program that was traced before
        def forward(weights, tokens):
            model = nnx.merge(graph, weights)
            return model(tokens)

        return jax.jit(forward).lower(weights, TOKENS).as_text()

    alone = lowered()
    with jgpt.watching(lambda call: None):
        watched = lowered()

    assert watched == alone


def test_eager_calls_compile_nothing_anew_for_a_watch():
    model = model_of()
    heard(model, TOKENS)
    jgpt.capture(model, "blocks.1")(TOKENS)
    compiled: list[str] = []

    def handle(logger, record):
        compiled.append(record.msg)

    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.Logger, "handle", handle)
        for _ in range(3):
            heard(model, TOKENS)
            jgpt.capture(model, "blocks.1")(TOKENS)

    assert compiled == []
