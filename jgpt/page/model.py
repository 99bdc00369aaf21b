"""The model in a page: the programs that compute its numbers, for `browser/model.js`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core

from jgpt.generation.sampling import Sampling, next_token
from jgpt.nn.models import CachedLanguageModel
from jgpt.page.numbers import CANDIDATES, MOST_CANDIDATES, SHORTEST, Look
from jgpt.page.program import (
    Program,
    Uncomputable,
    line_of,
    make_program,
    with_line,
)
from jgpt.shapes.jaxprs import inner_program


def page_model(look: Look) -> dict[str, Any]:
    """Return what a page computes a model's numbers with, as plain data; the weights are apart.

    Raises Uncomputable if the model needs a primitive that the page lacks.
    """
    anatomy = look.anatomy
    programs = []
    for length in program_lengths(look):
        programs.append(_program_for(look, length))
    return {
        "name": look.name,
        "vocab_size": look.model.vocab_size,
        "block_size": look.model.block_size,
        "most_tokens": look.most_tokens(),
        "candidates": CANDIDATES,
        "most_candidates": MOST_CANDIDATES,
        "window": anatomy.window,
        "blocks": anatomy.switchable_blocks(),
        "layers": anatomy.switchable_layers(),
        "heads": anatomy.heads,
        "width": anatomy.width,
        "programs": programs,
        "decoding": _decoding_of(look),
        "sampling": sampling_program(look.model.vocab_size).as_data(),
    }


def program_lengths(look: Look) -> list[int]:
    """Return the numbers of tokens that programs are made for: texts are padded to the next.

    The last length holds every text that a page can show.
    """
    most = look.most_tokens()
    block_size = look.model.block_size
    length = min(SHORTEST, block_size)
    lengths = [length]
    while length < most:
        length = min(2 * length, block_size)
        lengths.append(length)
    return lengths


def _program_for(look: Look, length: int) -> dict[str, Any]:
    rows = []
    for row in look.rows(length):
        rows.append(row.text | {"token_axes": row.token_axes})
    return {
        "length": length,
        "rows": rows,
        "forward": forward_program(look, length).as_data(),
        "gradient": gradient_program(look, length).as_data(),
    }


def forward_program(look: Look, length: int) -> Program:
    """Return the program of all numbers of a page. Its inputs are `0/...` for the weights, and
    `1/tokens`, `1/heads`, `1/blocks`, `1/replaced` and `1/streams`."""
    return make_program(look.forward, look.weights, look.neutral_inputs(length))


def gradient_program(look: Look, length: int) -> Program:
    """Return the program of the loss's gradient for each array of the forward pass.

    Its inputs are those of the forward program, and `2`: the share of each prediction in the loss,
    which is 0 for those of padding. `arrays/i` is the gradient for array i.

    JAX gives gradients for a function's arguments, and these arrays are made inside. So a change is
    added to each of them, and the gradient is taken for the changes, at zero.
    """
    inputs = look.neutral_inputs(length)
    no_shares = np.zeros(length - 1, np.float32)
    forward = functools.partial(_loss_and_arrays, look)
    closed = jax.make_jaxpr(forward)(look.weights, inputs, no_shares)
    _, *arrays = closed.jaxpr.outvars
    # Each variable once. A function may return its argument, and then two arrays are one variable.
    variables = list(dict.fromkeys(arrays))

    def gradients(weights: Any, inputs: Any, shares: Any) -> dict[str, Any]:
        arguments = jax.tree.leaves((weights, inputs, shares))

        def changed_loss(changes: Sequence[Any]) -> Any:
            change_of = dict(zip(variables, changes, strict=True))
            loss, *_ = _evaluate(closed, arguments, change_of)
            return loss

        # Made while this function is traced: an operation in the program, not numbers in the page.
        zeros = []
        for variable in variables:
            zeros.append(jnp.zeros(variable.aval.shape, variable.aval.dtype))
        loss, for_variables = jax.value_and_grad(changed_loss)(zeros)
        gradient_of = dict(zip(variables, for_variables, strict=True))
        return {"loss": loss, "arrays": [gradient_of[variable] for variable in arrays]}

    try:
        return make_program(gradients, look.weights, inputs, no_shares)
    except Uncomputable:
        raise
    except (ValueError, TypeError, NotImplementedError):  # JAX's, of an operation without gradient
        raise Uncomputable(_refusal_of_gradient(closed.jaxpr)) from None


def _loss_and_arrays(look: Look, weights: Any, inputs: Any, shares: Any) -> list[Any]:
    """Return the loss on a text and padding, then the arrays of its pass."""
    arrays = look.traced_arrays(weights, inputs)
    logits = arrays[-1].astype(jnp.float32)  # 1 time vocab
    # The last position predicts a token that the text doesn't have.
    log_probabilities = jax.nn.log_softmax(logits)[0, :-1]  # time-1 vocab
    following = inputs["tokens"][0, 1:]  # time-1
    chosen = jnp.take_along_axis(log_probabilities, following[:, None], axis=-1)[:, 0]
    # Not a product alone: a prediction of padding may be -inf, and 0 * inf is NaN.
    counted = jnp.where(shares > 0, shares * chosen, 0)
    return [-counted.sum(), *arrays]


def _evaluate(closed: Any, arguments: Sequence[Any], changes: dict[Any, Any]) -> list[Any]:
    """Evaluate a jaxpr, with a change added to each of some variables.

    The gradient for the change is that for the variable: for what a module returns, but also for an
    argument that is the sum of two results, which no function returns.
    """
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = {}

    def read(variable: Any) -> Any:
        if isinstance(variable, core.Literal):
            return variable.val
        return values[variable]

    def write(variables: Sequence[Any], results: Sequence[Any]) -> None:
        for variable, result in zip(variables, results, strict=True):
            values[variable] = result
            if variable in changes:
                values[variable] = result + changes[variable]

    write(jaxpr.constvars, closed.consts)
    write(jaxpr.invars, arguments)
    variables_read = _variables_read(jaxpr)
    for equation in jaxpr.eqns:
        operands = _distinct_variables(equation.invars)
        # JAX writes a result that is never read as `_`, which can't be asked for.
        results = [variable for variable in equation.outvars if variable in variables_read]
        function = _function_of(jaxpr, equation, operands, results)
        arguments_of_equation = [values[variable] for variable in operands]
        write(results, function(*arguments_of_equation))
    return [read(variable) for variable in jaxpr.outvars]


def _function_of(
    jaxpr: Any, equation: Any, operands: Sequence[Any], results: Sequence[Any]
) -> Callable[..., Any]:
    """Return an equation of a jaxpr as a function from its operands to some of its results."""
    # As a jaxpr of its own, which a public function of JAX evaluates.
    alone = jaxpr.replace(
        constvars=[], invars=list(operands), outvars=list(results), eqns=[equation]
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))


def _refusal_of_gradient(jaxpr: Any) -> str:
    """Say which operation of a model has no gradient, and where the model uses it."""
    for equation in jaxpr.eqns:
        if _has_gradient(jaxpr, equation):
            continue
        inner = inner_program(equation.params)
        if inner is not None:
            return _refusal_of_gradient(inner.jaxpr)
        text = f"the page can't compute the gradient of {equation.primitive.name}"
        return with_line(text, line_of(equation))
    return "the page can't compute the model's gradient"


def _has_gradient(jaxpr: Any, equation: Any) -> bool:
    """Return whether JAX differentiates an equation. Nothing is computed."""
    operands = _distinct_variables(equation.invars)
    reals = [each for each in equation.outvars if jnp.issubdtype(each.aval.dtype, jnp.inexact)]
    if not operands:
        return True  # it makes constants
    function = _function_of(jaxpr, equation, operands, reals)

    # `jax.grad` is of one real number, and integers among the operands have no gradient.
    def total(*arguments: Any) -> Any:
        sums = [result.sum().astype(jnp.float32) for result in function(*arguments)]
        return sum(sums, start=jnp.zeros(()))

    gradient = jax.grad(total, argnums=tuple(range(len(operands))), allow_int=True)
    shapes = [jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in operands]
    try:
        jax.eval_shape(gradient, *shapes)
    except (ValueError, TypeError, NotImplementedError):
        return False
    return True


def _variables_read(jaxpr: Any) -> set[Any]:
    """Return the variables that an equation reads, and those that are results of the jaxpr."""
    variables = set(_distinct_variables(jaxpr.outvars))
    for equation in jaxpr.eqns:
        variables.update(_distinct_variables(equation.invars))
    return variables


def _distinct_variables(atoms: Sequence[Any]) -> list[Any]:
    """Return each variable once, without the literals."""
    variables = [atom for atom in atoms if not isinstance(atom, core.Literal)]
    return list(dict.fromkeys(variables))


# --- writing on -----------------------------------------------------------------------------------

CHUNK = 16
"""The number of prompt tokens that one step of decoding reads, where so many are left."""


def _decoding_of(look: Look) -> dict[str, Any] | None:
    """Return the programs that continue a text with a KV cache, or None for a model without one.

    Each array of an empty cache has one number everywhere, which is `fill`.
    """
    if not isinstance(look.model, CachedLanguageModel):
        return None
    _, cache = _empty_cache(look)
    fill = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(cache):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        first_number = np.asarray(leaf).ravel()[:1]  # none for an array without entries
        fill[f"1/{name}"] = first_number.tolist()
    # A cache takes no padding, so tokens that don't fill a chunk are read one by one.
    chunk = min(CHUNK, look.model.block_size)
    programs = {}
    for count in sorted({1, chunk}):
        programs[str(count)] = decoding_program(look, count).as_data()
    return {"programs": programs, "fill": fill}


def _empty_cache(look: Look) -> tuple[Any, Any]:
    graph, state = nnx.split(look.model.empty_cache(1))
    return graph, nnx.to_pure_dict(state)


def decoding_program(look: Look, count: int) -> Program:
    """Return the program that reads `count` tokens after those in a KV cache of a whole block.

    Its inputs are `0/...` for the weights, `1/...` for the cache and `2` for the tokens; its
    results are the `logits` after the last token, and `cache/...`.
    """
    graph, cache = _empty_cache(look)

    def step(weights: Any, cache: Any, tokens: Any) -> dict[str, Any]:
        model = look.model_with(weights)
        updated = nnx.merge(graph, cache)
        hidden = model.hidden(tokens, cache=updated)
        # After the last token alone, since the page samples nowhere else.
        logits = model.logits(hidden[:, -1:])[0, 0]
        return {"logits": logits, "cache": nnx.to_pure_dict(nnx.state(updated))}

    tokens = np.zeros((1, count), np.int32)
    return make_program(step, look.weights, cache, tokens)


def sampling_program(vocab_size: int) -> Program:
    """Return the program that draws a token as `generate` does, with temperature alone.

    Its inputs are the logits, the two words of the seed's key, the number of the token after the
    prompt, and the temperature. A token whose logit is -inf is never drawn, so that other filters
    can be applied before.
    """

    def draw(logits: Any, words: Any, number: Any, temperature: Any) -> Any:
        key = jax.random.fold_in(jax.random.wrap_key_data(words), number)
        # A dataclass with a traced number, which its constructor doesn't take.
        sampling = jax.tree.map(lambda _: temperature, Sampling(1.0))
        return next_token(logits[None], key, sampling)[0]

    logits = np.zeros(vocab_size, np.float32)
    words = np.zeros(2, np.uint32)
    return make_program(draw, logits, words, np.int32(0), np.float32(1))
