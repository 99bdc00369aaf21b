"""What the checks of written parts call: each says what is wrong.

A part is compared with the given one, which gets other weights than it begins
with, and so does yours. Where the values differ, they are compared with those
of common mistakes, and the message names the mistake.
"""

import inspect
from collections.abc import Callable
from typing import Any

import given
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import TypeCheckError

import jgpt

BATCH = 3
TIME = 5
VOCAB_SIZE = 11
BLOCK_SIZE = 7
EMBED_DIM = 12
HEAD_DIM = 4
NUM_HEADS = 3
NUM_LAYERS = 2

Mistakes = dict[str, Any]
"""What a mistake is, and the values that it gives."""
OF_PYTORCH = {
    "'dim'": "PyTorch's `dim` is `axis` here",
    "'keepdim'": "PyTorch's `keepdim` is `keepdims` here",
    "'gather'": "PyTorch's `gather` is `jnp.take_along_axis` here",
    "'masked_fill'": "PyTorch's `masked_fill` is `jnp.where` here",
    "'relu'": "a ReLU is `jax.nn.relu`",
    "array.view()": "PyTorch's `view` is `reshape` here",
    "transpose permutation": (
        "`transpose` takes all axes here; `swapaxes` exchanges two"
    ),
}
"""What of an error shows that PyTorch's name was written, and JAX's name."""


# --- what is compared ---------------------------------------------------------


def weights_of(model: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a module's weights, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(
        nnx.to_pure_dict(nnx.state(model, nnx.Param))
    )
    shapes = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shapes[name] = jnp.shape(leaf)
    return dict(sorted(shapes.items()))


def copied_gpt(mine: Any, theirs: jgpt.GPT) -> None:
    """Give a GPT of one's own the weights of `jgpt.GPT`."""
    for name in ("token_embedding", "position_embedding"):
        table = getattr(theirs, name).embedding[...]
        getattr(mine, name).table[...] = table
    for my_block, their_block in zip(mine.blocks, theirs.blocks, strict=True):
        copied_block(my_block, their_block)
    _copied(mine.final_norm, theirs.final_norm)
    _copied(mine.head, theirs.head)


def copied_block(mine: Any, theirs: jgpt.Block) -> None:
    """Give a block the weights of `jgpt.Block`."""
    _copied(mine.attention_norm, theirs.attention_norm)
    copied_attention(mine.attention, theirs.attention)
    _copied(mine.feed_forward_norm, theirs.feed_forward_norm)
    for name in ("expansion", "projection"):
        layer = getattr(theirs.feed_forward, name)
        _copied(getattr(mine.feed_forward, name), layer)


def copied_attention(mine: Any, theirs: jgpt.MultiHeadAttention) -> None:
    """Give heads and their projection the weights of jgpt's: its columns."""
    size = theirs.head_dim
    for number, head in enumerate(mine.heads):
        columns = slice(number * size, (number + 1) * size)
        for name in ("query", "key", "value"):
            kernel = getattr(theirs, name).kernel[...]
            getattr(head, name).kernel[...] = kernel[:, columns]
    _copied(mine.projection, theirs.projection)


def _copied(mine: Any, theirs: Any) -> None:
    """Give a linear layer or a norm the weights of another."""
    for name in ("kernel", "bias", "scale"):
        if getattr(theirs, name, None) is not None:
            getattr(mine, name)[...] = getattr(theirs, name)[...]


def _random(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def _loud(model: Any) -> Any:
    """Replace all weights by large ones, so that each of them matters."""
    random = np.random.default_rng(3)
    state = nnx.state(model, nnx.Param)
    loud = jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(0.2, 0.7, leaf.shape)).astype(
            leaf.dtype
        ),
        state,
    )
    nnx.update(model, loud)
    return model


# --- how the difference is named ----------------------------------------------


def difference(
    found: Any,
    expected: jax.Array,
    mistakes: Callable[[], Mistakes] = dict,
    axes: tuple[str, ...] = ("batch", "time", "features"),
) -> str:
    """What is wrong with an array; an empty text if it is right.

    `axes` are the names of the expected array's axes.
    """
    if found is None:
        return "nothing is returned: is there a `return`?"
    if not isinstance(found, jax.Array | np.ndarray | float):
        kind = type(found).__name__
        return f"the result is of the type {kind}, and not an array"
    found = jnp.asarray(found)
    named = ", ".join(axes[-expected.ndim :]) if expected.ndim else "no axes"
    if found.shape != expected.shape:
        wrong = (
            f"the result has the shape {found.shape}, not {expected.shape} "
            f"({named})"
        )
        if sorted(found.shape) == sorted(expected.shape):
            return f"{wrong}: its axes are transposed"
        if expected.ndim == 0:
            return f"{wrong}: take the mean of all"
        return wrong
    if _same(found, expected):
        return ""
    if jnp.isnan(found).any():
        return _of_nan(found)
    for name, values in mistakes().items():
        if jnp.shape(values) == found.shape and _same(found, values):
            return f"the values are those of {name}"
    return _of_values(found, expected)


def _of_nan(found: jax.Array) -> str:
    """Where an array has no numbers."""
    if found.ndim > 1:
        bad = jnp.isnan(found).any(axis=tuple(range(2, found.ndim)))
        times = [int(time) for time in jnp.flatnonzero(bad.any(axis=0))]
        if len(times) < found.shape[1]:
            return (
                f"positions {times} aren't numbers: each position needs a key "
                "that it may attend to"
            )
    return "the result isn't a number (nan)"


def _of_values(found: jax.Array, expected: jax.Array) -> str:
    """How values differ that are none of a known mistake."""
    distance = float(jnp.abs(found - expected).max())
    unlike = f"the values differ by up to {distance:.2g} from those wanted"
    if found.ndim == 0:  # each number is some multiple of another
        return unlike
    ratio = float((found * expected).sum() / (expected**2).sum())
    if _same(found, ratio * expected):
        return f"the values are {ratio:.3g} times what they should be"
    shift = (found - expected).ravel()[0]
    if _same(found, expected + shift):
        return f"{float(shift):.3g} is added to all values"
    if found.ndim == 3:
        for places, what in ((-1, "after"), (1, "before")):
            moved = jnp.roll(expected, places, axis=1)
            if _same(found[:, 1:-1], moved[:, 1:-1]):
                return f"each position has the values of the one {what} it"
        right = jnp.isclose(found, expected, rtol=1e-4, atol=1e-4)
        times = jnp.flatnonzero(~right.all(axis=(0, 2))).tolist()
        rows = jnp.flatnonzero(~right.all(axis=(1, 2))).tolist()
        if len(times) < found.shape[1]:
            return f"only positions {times} are wrong"
        if len(rows) < found.shape[0]:
            return f"only the sequences {rows} of the batch are wrong"
    return unlike


def _same(found: Any, expected: Any) -> bool:
    return bool(jnp.allclose(found, expected, rtol=1e-4, atol=1e-4))


def _wrong_weights(mine: Any, theirs: Any) -> str:
    """What is wrong with a module's weights as it begins."""
    found, expected = weights_of(mine), weights_of(theirs)
    for name in ("heads", "blocks"):
        modules = list(getattr(mine, name, ()))
        if len({id(module) for module in modules}) < len(modules):
            return (
                f"`{name}` has the same module several times, with the same "
                "weights: make a new one for each"
            )
        wanted = len(getattr(theirs, name, modules))
        if hasattr(mine, name) and len(modules) != wanted:
            return f"there are {len(modules)} {name}, not {wanted}"
    parts = [
        (name, part)
        for name, part in vars(mine).items()
        if isinstance(part, nnx.Module)
    ]
    for number, (name, part) in enumerate(parts):
        for other, earlier in parts[:number]:
            if part is earlier:
                return (
                    f"`{other}` and `{name}` are the same module, with the "
                    "same weights: make a new one for each"
                )
    if absent := sorted(expected.keys() - found.keys()):
        if isinstance(getattr(mine, absent[0], None), jax.Array):
            return (
                f"`{absent[0]}` isn't an `nnx.Param`, so it would not be "
                "trained"
            )
        return f"there are no weights {_some_of(absent)}"
    if more := sorted(found.keys() - expected.keys()):
        return f"the weights {_some_of(more)} are too many"
    for name, shape in expected.items():
        if found[name] != shape:
            return f"{name} has the shape {found[name]}, not {shape}"
    return _wrong_beginning(mine, theirs)


def _some_of(names: list[str]) -> str:
    others = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return ", ".join(names[:3]) + others


def _wrong_beginning(mine: Any, theirs: Any) -> str:
    """Whether the weights begin with another deviation."""
    arrays = zip(
        weights_of(theirs),
        jax.tree.leaves(nnx.state(mine, nnx.Param)),
        jax.tree.leaves(nnx.state(theirs, nnx.Param)),
        strict=True,
    )
    for name, first, wanted in arrays:
        deviation, right = float(first.std()), float(wanted.std())
        if abs(deviation - right) > 0.5 * right or (
            right == 0 and not _same(first[...], wanted[...])
        ):
            beginning = f"{right:.2f}" if right else f"{wanted[...].mean():.0f}"
            return (
                f"{name} begins with a deviation of {deviation:.2f} and a mean "
                f"of {float(first.mean()):.2f}, not with {beginning}"
            )
    return ""


def _unannotated(call: Callable[..., Any], *arguments: Any) -> str:
    """What is wrong with a function's annotations.

    The last argument has a wrong size, which they have to reject.
    """
    signature = inspect.signature(call)
    hints = [each.annotation for each in signature.parameters.values()]
    if inspect.Parameter.empty in (*hints, signature.return_annotation):
        return "an argument or the result has no annotation"
    try:
        call(*arguments)
    except TypeCheckError:
        return ""
    except Exception as error:
        return (
            "a wrong shape is not rejected by the annotations, but later "
            f"({type(error).__name__}): is `@jgpt.typed` above the function, "
            "and is each size of the module named?"
        )
    return "the annotations accept a wrong shape"


def _first(*problems: Callable[[], str]) -> str:
    """The first problem that there is; later ones are not looked for."""
    for problem in problems:
        if text := problem():
            return text
    return ""


def _called(call: Any, x: jax.Array, *others: jax.Array) -> Any:
    """Call a part; an error says which size is which."""
    if not callable(call):
        raise AssertionError("the call has the name `__call__`, not `forward`")
    try:
        return call(x, *others)
    except TypeCheckError:  # which says what it wanted
        raise
    except Exception as error:
        said = str(error).splitlines()[0].rstrip(".")
        sizes = (
            f"batch is {x.shape[0]}, time {x.shape[1]}, embed_dim {EMBED_DIM}, "
            f"head_dim {HEAD_DIM} and vocab_size {VOCAB_SIZE}"
        )
        for sign, name in OF_PYTORCH.items():
            if sign in said:
                raise AssertionError(f"{name} ({said})") from error
        raise AssertionError(f"the call fails: {said}. Here {sizes}") from error


def _compared(
    mine: Any,
    theirs: Any,
    inputs: jax.Array,
    mistakes: Callable[[Any], Mistakes],
) -> str:
    """What is wrong with a module, whose given twin is `theirs`.

    Two texts, of other lengths, so that no length is taken for granted.
    """

    def values() -> str:
        _loud(theirs)
        nnx.update(mine, nnx.state(theirs, nnx.Param))
        for given_to_both in (inputs, inputs[:2, :-1]):
            right = theirs(given_to_both)

            def named(right: Any = right, x: Any = given_to_both) -> Mistakes:
                return mistakes(x) if x is inputs else {}

            found = _called(mine, given_to_both)
            if text := difference(found, right, named):
                return text
        return ""

    return _first(lambda: _wrong_weights(mine, theirs), values)


# --- the parts ----------------------------------------------------------------


def problem_of_loss(cross_entropy: Callable[..., Any]) -> str:
    """What is wrong with a cross entropy; an empty text if it is right."""
    logits = 3 * _random((BATCH, TIME, VOCAB_SIZE))
    targets = jax.random.randint(
        jax.random.key(1), (BATCH, TIME), 0, VOCAB_SIZE
    )
    of_targets = jax.nn.one_hot(targets, VOCAB_SIZE)
    right = given.cross_entropy(logits, targets)

    def mean_of(values: jax.Array) -> jax.Array:
        return -(values * of_targets).sum() / BATCH / TIME

    def mistakes() -> Mistakes:
        each = -(jax.nn.log_softmax(logits) * of_targets).sum(axis=-1)
        return {
            "a sum: take the mean over batch and time": right * BATCH * TIME,
            "a sum over time: take the mean over batch and time": right * TIME,
            "a sum over the batch: take the mean over batch and time": right
            * BATCH,
            "a mean over the vocabulary too": right / VOCAB_SIZE,
            "a log probability: the loss is its negative": -right,
            "a softmax over time: normalise over the vocabulary": mean_of(
                jax.nn.log_softmax(logits, axis=1)
            ),
            "a softmax over the batch: normalise over the vocabulary": mean_of(
                jax.nn.log_softmax(logits, axis=0)
            ),
            "a softmax over all logits: normalise over the vocabulary": mean_of(
                logits - jax.nn.logsumexp(logits)
            ),
            "logits that are not normalised": mean_of(logits),
            "probabilities without a logarithm": mean_of(
                jax.nn.softmax(logits)
            ),
            "a logarithm to base 2": right / np.log(2),
            "two softmaxes: log_softmax takes logits": mean_of(
                jax.nn.log_softmax(jax.nn.softmax(logits))
            ),
            "two log-softmaxes": mean_of(jax.nn.softmax(logits) - 1),
            "the mean over the whole vocabulary: take the target's entry": (
                -jax.nn.log_softmax(logits).mean()
            ),
            "the largest log probability: take the target's": (
                -jax.nn.log_softmax(logits).max(axis=-1).mean()
            ),
            "the last position alone: take the mean of all": each[:, -1].mean(),
            "the first position alone: take the mean of all": each[:, 0].mean(),
            "the first sequence alone: take the mean of all": each[0].mean(),
            "perplexity: the loss is its logarithm": jnp.exp(right),
            "probabilities with 1 - p": mean_of(
                jnp.log(1 - jax.nn.softmax(logits))
            ),
            "targets that are shifted once more: they are shifted already": (
                given.cross_entropy(logits[:, :-1], targets[:, 1:])
            ),
            "a squared error: the loss is minus a logarithm": (
                (jax.nn.softmax(logits) - of_targets) ** 2
            ).mean(),
            "targets that are an index of the batch: take one entry of each "
            "row": -jax.nn.log_softmax(logits)[targets].mean(),
            "all targets, taken from each row: take one entry of each row": (
                -jax.nn.log_softmax(logits)[..., targets].mean()
            ),
        }

    def at_large_logits() -> str:
        found = cross_entropy(100 * logits, targets)
        if not jnp.isfinite(found):
            return (
                f"for large logits the loss is {float(found)}: use "
                "`jax.nn.log_softmax`, which doesn't overflow"
            )
        return ""

    return _first(
        lambda: difference(
            _called(cross_entropy, logits, targets), right, mistakes
        ),
        at_large_logits,
    )


def problem_of_embedding(embedding: Callable[..., Any]) -> str:
    """What is wrong with a table of rows; an empty text if it is right."""
    sizes = (VOCAB_SIZE, EMBED_DIM)
    mine = embedding(*sizes, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (BATCH, TIME), 0, VOCAB_SIZE)
    theirs = given.Embedding(*sizes, rngs=nnx.Rngs(0))

    def drawing() -> str:
        first = mine.table[...]
        if _same(first[0], first[1]):
            return "all rows of the table are equal: draw numbers for each row"
        again = embedding(*sizes, rngs=nnx.Rngs(1)).table[...]
        if _same(first, again):
            return "another seed gives the same table: draw with `rngs`"
        two = nnx.Rngs(0)
        tables = [embedding(*sizes, rngs=two).table[...] for _ in range(2)]
        if _same(*tables):
            return "two tables of one `rngs` are equal: ask it for a new key"
        large = embedding(*sizes, deviation=1.0, rngs=nnx.Rngs(0)).table[...]
        if abs(float(large.std()) - 1) > 0.3:
            return (
                "with `deviation=1.0` the table has a deviation of "
                f"{float(large.std()):.2f}"
            )
        if abs(float(large.mean())) > 0.4:
            return f"the mean of the table is {float(large.mean()):.2f}, not 0"
        return ""

    def values(tokens: jax.Array) -> Mistakes:
        table = theirs.table[...]
        return {
            "the row before: token 0 has row 0": table[tokens - 1],
            "the row after: token 0 has row 0": table[
                (tokens + 1) % VOCAB_SIZE
            ],
            "the rows in reverse order": table[-tokens - 1],
            "the row of the position: read the row of the token": (
                jnp.broadcast_to(table[:TIME], (BATCH, TIME, EMBED_DIM))
            ),
            "a softmax of the rows: a table returns its rows": jax.nn.softmax(
                table[tokens]
            ),
            "a row that is normalised": table[tokens]
            / jnp.linalg.norm(table[tokens], axis=-1, keepdims=True),
        }

    def of_no_table() -> str:
        if not hasattr(mine, "table"):
            return "there are no weights table: the attribute is `self.table`"
        if not isinstance(mine.table, nnx.Param):
            return "`table` isn't an `nnx.Param`, so it would not be trained"
        return ""

    return _first(
        of_no_table,
        lambda: _wrong_weights(mine, theirs),
        drawing,
        lambda: _compared(mine, theirs, tokens, values),
    )


def problem_of_head(head: Callable[..., Any]) -> str:
    """What is wrong with a head; an empty text if it is right."""
    mine = head(EMBED_DIM, HEAD_DIM, rngs=nnx.Rngs(0))
    theirs = given.Head(EMBED_DIM, HEAD_DIM, rngs=nnx.Rngs(0))
    inputs = _random((BATCH, TIME, EMBED_DIM))

    def mistakes(x: jax.Array) -> Mistakes:
        query, key, value = theirs.query(x), theirs.key(x), theirs.value(x)
        mask = jgpt.causal_mask(TIME)
        products = jnp.einsum("bqd,bkd->bqk", query, key)
        scores = products / HEAD_DIM**0.5
        unmasked = jax.nn.softmax(scores, axis=-1)
        blocked = jnp.where(mask, 0, -1e9)
        after = jax.nn.softmax(products + blocked, axis=-1) / HEAD_DIM**0.5
        right = jax.nn.softmax(scores + blocked, axis=-1)

        def of(**changes: Any) -> jax.Array:
            arrays = {"query": query, "key": key, "value": value} | changes
            return jgpt.attend(**{"mask": mask} | arrays)

        return {
            "a head without a mask": of(mask=None),
            "an inverted mask: a query may attend to itself and the past": (
                of(mask=mask.T)
            ),
            "a mask that hides the position itself": jnp.where(
                jnp.arange(TIME)[:, None] > 0,
                of(mask=jnp.tril(mask, -1).at[0, 0].set(True)),
                0,
            ),
            "a mask that shows one position of the future": of(
                mask=jnp.tril(jnp.ones((TIME, TIME), bool), 1)
            ),
            "scores without a scale": of(scale=1.0),
            "scores divided by `head_dim`, and not by its square root": of(
                scale=1 / HEAD_DIM
            ),
            "scores multiplied by the square root of `head_dim`": of(
                scale=HEAD_DIM**0.5
            ),
            "the scale of `embed_dim`: a product has `head_dim` terms": of(
                scale=EMBED_DIM**-0.5
            ),
            "the scale of `time`: a product has `head_dim` terms": of(
                scale=TIME**-0.5
            ),
            "a scale after the softmax: scale the scores": after @ value,
            "queries and keys that are exchanged": of(query=key, key=query),
            "queries and values that are exchanged": of(
                query=value, value=query
            ),
            "keys and values that are exchanged": of(key=value, value=key),
            "the keys in place of the values": of(value=key),
            "the queries in place of the values": of(value=query),
            "the queries in place of the keys": of(key=query),
            "the keys in place of the queries": of(query=key),
            "a softmax over the queries: normalise over the keys": (
                jax.nn.softmax(scores + blocked, axis=1) @ value
            ),
            "a softmax over the batch: normalise over the keys": (
                jnp.nan_to_num(jax.nn.softmax(scores + blocked, axis=0)) @ value
            ),
            "a softmax over all numbers: normalise over the keys": (
                jax.nn.softmax(scores + blocked, axis=None) @ value
            ),
            "the values in place of the queries": of(query=value),
            "the values in place of the keys": of(key=value),
            "keys that are reshaped: exchange their last two axes": (
                jax.nn.softmax(
                    query @ key.reshape(BATCH, HEAD_DIM, TIME) / HEAD_DIM**0.5
                    + blocked,
                    axis=-1,
                )
                @ value
            ),
            "weights that are masked after the softmax: mask before it": (
                (unmasked * mask) @ value
            ),
            "weights that are transposed": right.swapaxes(1, 2) @ value,
            "scores that are 0 where they are masked: exp(0) is 1": (
                jax.nn.softmax(scores * mask, axis=-1) @ value
            ),
            "scores without a softmax": (scores * mask) @ value,
            "a sum of the values: there is no mean": mask @ value,
            "the plain mean of lesson 2: no score is used": (
                mask / mask.sum(axis=-1, keepdims=True)
            )
            @ value,
            "the values alone: no position reads another": value,
            "a head with its residual: that is the block's": (
                right @ value + x[..., :HEAD_DIM]
            ),
        }

    def of_nan() -> str:
        """Masked scores that leave a row without a key."""
        nnx.update(mine, nnx.state(_loud(theirs), nnx.Param))
        found = _called(mine, inputs)
        if not isinstance(found, jax.Array) or not jnp.isnan(found).any():
            return ""
        if jnp.isnan(found[:, -1]).any() and not jnp.isnan(found[:, 0]).any():
            return (
                "the last positions have no key: the mask hides the past, and "
                "not the future"
            )
        bad = jnp.isnan(found).any(axis=(0, 2))
        if bad.tolist() == [True] + [False] * (TIME - 1):
            return (
                "the first position has no key: a position may attend to itself"
            )
        if bad.tolist() == [True] * (TIME - 1) + [False]:
            return (
                "only the last position has numbers: is the softmax over the "
                "keys (axis -1), and not over the batch?"
            )
        return ""

    return _first(
        lambda: _wrong_weights(mine, theirs),
        of_nan,
        lambda: _compared(mine, theirs, inputs, mistakes),
    )


def problem_of_heads(multi_head: Callable[..., Any]) -> str:
    """What is wrong with many heads; an empty text if they are right."""
    mine = multi_head(EMBED_DIM, NUM_HEADS, rngs=nnx.Rngs(0))
    theirs = given.MultiHeadAttention(EMBED_DIM, NUM_HEADS, rngs=nnx.Rngs(0))
    inputs = _random((BATCH, TIME, EMBED_DIM))

    def mistakes(x: jax.Array) -> Mistakes:
        outputs = [head(x) for head in theirs.heads]
        project = theirs.projection
        joined = jnp.concatenate(outputs, axis=-1)
        interleaved = jnp.stack(outputs, axis=-1).reshape(joined.shape)
        stacked = jnp.stack(outputs, axis=1)
        repeated = [jnp.tile(each, (1, 1, NUM_HEADS)) for each in outputs]
        summed = jnp.tile(sum(outputs), (1, 1, NUM_HEADS))
        chained = jnp.concatenate(outputs[::-1], axis=-1)
        of_slices = []
        for number, head in enumerate(theirs.heads):
            columns = slice(number * HEAD_DIM, (number + 1) * HEAD_DIM)
            kept = jnp.zeros_like(x).at[..., columns].set(x[..., columns])
            of_slices.append(head(kept))
        return {
            "the heads without their projection": joined,
            "heads in the reverse order": project(chained),
            "heads whose features are interleaved: put them side by side": (
                project(interleaved)
            ),
            "a reshape of stacked heads: time and heads are mixed": project(
                stacked.reshape(joined.shape)
            ),
            "the first head, repeated": project(repeated[0]),
            "the last head, repeated": project(repeated[-1]),
            "heads that are summed: put them side by side": project(summed),
            "heads whose mean is taken: put them side by side": project(
                summed / NUM_HEADS
            ),
            "a projection without its bias": joined @ project.kernel[...],
            "a transposed kernel of the projection": joined
            @ project.kernel[...].T
            + project.bias[...],
            "a projection that is added to the heads": joined + project(joined),
            "a projection of `x`: project the heads": project(x),
            "a projection before the heads: it comes after them": (
                jnp.concatenate(
                    [head(project(x)) for head in theirs.heads], axis=-1
                )
            ),
            "two projections: project once": project(project(joined)),
            "heads that read a slice of x each: each reads all of it": project(
                jnp.concatenate(of_slices, axis=-1)
            ),
            "a ReLU after the projection": jax.nn.relu(project(joined)),
            "a ReLU before the projection": project(jax.nn.relu(joined)),
            "heads with their residual, which is the block's": x
            + project(joined),
            "heads that are normalised": project(jax.nn.softmax(joined)),
            "the first heads alone: one is missing": project(
                joined.at[..., -HEAD_DIM:].set(0)
            ),
        }

    return _compared(mine, theirs, inputs, mistakes)


def problem_of_norm(layer_norm: Callable[..., Any]) -> str:
    """What is wrong with a layer norm; an empty text if it is right."""
    mine = layer_norm(EMBED_DIM, rngs=nnx.Rngs(0))
    theirs = given.LayerNorm(EMBED_DIM, rngs=nnx.Rngs(0))
    inputs = 3 * _random((BATCH, TIME, EMBED_DIM)) + 2

    def mistakes(x: jax.Array) -> Mistakes:
        scale, bias = theirs.scale[...], theirs.bias[...]
        centred = x - x.mean(axis=-1, keepdims=True)
        deviation = x.std(axis=-1, keepdims=True)
        normed = centred / deviation

        def over(axes: int | tuple[int, ...]) -> jax.Array:
            mean = x.mean(axis=axes, keepdims=True)
            variance = x.var(axis=axes, keepdims=True) + 1e-5
            return (x - mean) / jnp.sqrt(variance) * scale + bias

        def with_epsilon(epsilon: float) -> jax.Array:
            variance = x.var(axis=-1, keepdims=True) + epsilon
            return centred / jnp.sqrt(variance) * scale + bias

        off_centre = x - x.mean(axis=1, keepdims=True)
        around = (off_centre**2).mean(axis=-1, keepdims=True)

        return {
            "a norm over time: normalise over the features": over(1),
            "a norm over the batch: normalise over the features": over(0),
            "batch norm: normalise over the features": over((0, 1)),
            "one mean and deviation for all numbers": over((0, 1, 2)),
            "one mean and deviation for each sequence": over((1, 2)),
            "a mean over time: take it over the features": off_centre
            / jnp.sqrt(around + 1e-5)
            * scale
            + bias,
            "an epsilon of 1e-3: add 1e-5": with_epsilon(1e-3),
            "an epsilon of 1e-2: add 1e-5": with_epsilon(1e-2),
            "an epsilon of 1: add 1e-5": with_epsilon(1.0),
            "a norm without its scale": normed + bias,
            "a norm without its bias": normed * scale,
            "a norm without scale and bias": normed,
            "a norm without the mean, as RMS norm is": x
            / jnp.sqrt((x**2).mean(axis=-1, keepdims=True))
            * scale
            + bias,
            "numbers that are divided by their root mean square": centred
            / jnp.sqrt((x**2).mean(axis=-1, keepdims=True))
            * scale
            + bias,
            "numbers that are divided by the deviation, not centred": x
            / deviation
            * scale
            + bias,
            "numbers that are divided by the variance: take its root": centred
            / deviation**2
            * scale
            + bias,
            "numbers that are centred alone": centred * scale + bias,
            "numbers that are multiplied by the deviation": centred
            * deviation
            * scale
            + bias,
            "a deviation with n - 1: layer norm divides by n": centred
            / x.std(axis=-1, keepdims=True, ddof=1)
            * scale
            + bias,
            "a bias that is scaled: add it last": (normed + bias) * scale,
            "a scale that is divided by": normed / scale + bias,
            "a norm of length 1: divide by the deviation": centred
            / jnp.linalg.norm(centred, axis=-1, keepdims=True)
            * scale
            + bias,
            "scale and bias that are exchanged": normed * bias + scale,
            "a bias that is subtracted": normed * scale - bias,
            "a norm with its residual, which is the block's": x
            + normed * scale
            + bias,
            "the mean that is added: subtract it": (x + x - centred)
            / deviation
            * scale
            + bias,
        }

    def epsilon() -> str:
        found = mine(jnp.zeros((1, 2, EMBED_DIM)))
        if not jnp.isfinite(found).all():
            return (
                "equal features give nan: add 1e-5 to the variance, so that "
                "nothing is divided by 0"
            )
        x = 0.003 * inputs
        return difference(
            mine(x),
            theirs(x),
            lambda: {"another epsilon: add 1e-5 to the variance": mine(x)},
        )

    return _first(lambda: _compared(mine, theirs, inputs, mistakes), epsilon)


def problem_of_mlp(feed_forward: Callable[..., Any]) -> str:
    """What is wrong with an MLP; an empty text if it is right."""
    mine = feed_forward(EMBED_DIM, rngs=nnx.Rngs(0))
    theirs = given.FeedForward(EMBED_DIM, rngs=nnx.Rngs(0))
    inputs = _random((BATCH, TIME, EMBED_DIM))

    def hidden_features() -> str:
        if not hasattr(mine, "expansion"):
            return ""
        hidden_dim = mine.expansion.kernel.shape[1]
        if hidden_dim != 4 * EMBED_DIM:
            return f"there are {hidden_dim} hidden features, not 4 * embed_dim"
        return ""

    def mistakes(x: jax.Array) -> Mistakes:
        expand, project = theirs.expansion, theirs.projection
        hidden = expand(x)
        right = theirs(x)
        return {
            "an MLP without a non-linearity": project(hidden),
            "a GELU: the lecture's MLP has a ReLU": project(
                jax.nn.gelu(hidden)
            ),
            "the exact GELU: the lecture's MLP has a ReLU": project(
                jax.nn.gelu(hidden, approximate=False)
            ),
            "a tanh: the lecture's MLP has a ReLU": project(jnp.tanh(hidden)),
            "a sigmoid: the lecture's MLP has a ReLU": project(
                jax.nn.sigmoid(hidden)
            ),
            "a SiLU: the lecture's MLP has a ReLU": project(
                jax.nn.silu(hidden)
            ),
            "an absolute value: the lecture's MLP has a ReLU": project(
                jnp.abs(hidden)
            ),
            "a squared ReLU: the lecture's MLP has a ReLU": project(
                jax.nn.relu(hidden) ** 2
            ),
            "an inverted ReLU: keep what is above 0": project(
                jnp.minimum(hidden, 0)
            ),
            "a softmax: the lecture's MLP has a ReLU": project(
                jax.nn.softmax(hidden)
            ),
            "a ReLU at the end: the stream may also become smaller": (
                jax.nn.relu(right)
            ),
            "a ReLU at the end alone: it is between the layers": jax.nn.relu(
                project(hidden)
            ),
            "a ReLU of the input alone": project(expand(jax.nn.relu(x))),
            "a ReLU of the input, too": project(
                jax.nn.relu(expand(jax.nn.relu(x)))
            ),
            "an MLP with its residual, which is the block's": x + right,
            "layers without their biases": jax.nn.relu(x @ expand.kernel[...])
            @ project.kernel[...],
        }

    return _first(
        hidden_features, lambda: _compared(mine, theirs, inputs, mistakes)
    )


def problem_of_block(block: Callable[..., Any]) -> str:
    """What is wrong with a block; an empty text if it is right."""
    mine = block(EMBED_DIM, NUM_HEADS, rngs=nnx.Rngs(0))
    theirs = given.Block(EMBED_DIM, NUM_HEADS, rngs=nnx.Rngs(0))
    # so small that the epsilon of the first norm matters
    inputs = 0.03 * _random((BATCH, TIME, EMBED_DIM))

    def mistakes(x: jax.Array) -> Mistakes:
        attend, think = theirs.attention, theirs.feed_forward
        first, second = theirs.attention_norm, theirs.feed_forward_norm
        attended = x + attend(first(x))
        right = attended + think(second(attended))
        normed_later = first(x + attend(x))
        on_stream = first(x) + attend(first(x))
        return {
            "a block without residual connections": think(
                second(attend(first(x)))
            ),
            "attention without its residual connection": attend(first(x))
            + think(second(attend(first(x)))),
            "an MLP without its residual connection": think(second(attended)),
            "a block without norms": x + attend(x) + think(x + attend(x)),
            "a block without the norm before attention": x
            + attend(x)
            + think(second(x + attend(x))),
            "a block without the norm before the MLP": attended
            + think(attended),
            "norms after the addition: put them before each part": second(
                normed_later + think(normed_later)
            ),
            "norms on the stream: `x` itself goes past them": second(on_stream)
            + think(second(on_stream)),
            "a norm on the stream before attention: add `x` itself": on_stream
            + think(second(on_stream)),
            "a norm on the stream before the MLP: add the stream itself": (
                second(attended) + think(second(attended))
            ),
            "norms of what the parts return: a norm is before a part": x
            + first(attend(x))
            + second(think(x + first(attend(x)))),
            "a norm of what attention returns: it is before attention": x
            + first(attend(x))
            + think(second(x + first(attend(x)))),
            "a norm of what the MLP returns: it is before the MLP": attended
            + second(think(attended)),
            "parts that both read the input: the MLP reads what attention "
            "added": attended + think(second(x)),
            "an MLP that reads `attended + x`: the stream holds `x` already": (
                attended + think(second(attended + x))
            ),
            "an MLP that reads what attention returns: it reads the stream": (
                attended + think(second(attended - x))
            ),
            "an MLP that reads `x` without a norm: it reads the stream": (
                attended + think(x)
            ),
            "an MLP without a norm that reads what attention returns": (
                attended + think(attended - x)
            ),
            "an MLP whose result is added to the input of the block": x
            + think(second(attended)),
            "an MLP whose result is added to its norm": second(attended)
            + think(second(attended)),
            "an MLP whose norm is attention's": attended
            + think(first(attended)),
            "attention whose norm is the MLP's": x
            + attend(second(x))
            + think(second(x + attend(second(x)))),
            "norms that are exchanged": x
            + attend(second(x))
            + think(first(x + attend(second(x)))),
            "an MLP before attention": x
            + think(second(x))
            + attend(first(x + think(second(x)))),
            "attention alone": attended,
            "an MLP alone": x + think(second(x)),
            "a stream that is added twice": right + x,
            "a stream that is subtracted": attend(first(x))
            - x
            + think(second(attend(first(x)) - x)),
            "a product: the stream is a sum": (x * attend(first(x)))
            + think(second(x * attend(first(x)))),
            "attention twice": attended + attend(second(attended)),
        }

    return _compared(mine, theirs, inputs, mistakes)


def _small_config() -> jgpt.ModelConfig:
    """The config of the preset `lecture`, with small sizes."""
    return jgpt.ModelConfig(
        vocab_size=VOCAB_SIZE,
        block_size=BLOCK_SIZE,
        num_layers=NUM_LAYERS,
        num_heads=NUM_HEADS,
        embed_dim=EMBED_DIM,
        activation="relu",
        use_bias=True,
        head_bias=True,
        tie_embeddings=False,
    )


def problem_of_norm_after(block: Callable[..., Any]) -> str:
    """What is wrong with a block whose norms come after the additions."""
    mine = block(_small_config(), rngs=nnx.Rngs(0))
    theirs = _loud(jgpt.Block(_small_config(), rngs=nnx.Rngs(0)))
    x = _random((BATCH, TIME, EMBED_DIM))

    def values() -> str:
        nnx.update(mine, nnx.state(theirs, nnx.Param))
        attend, think = theirs.attention, theirs.feed_forward
        first, second = theirs.attention_norm, theirs.feed_forward_norm
        attended = first(x + attend(x))
        right = second(attended + think(attended))
        unnormed = x + attend(x)

        def mistakes() -> Mistakes:
            return {
                "norms before the parts: put them after the additions": (
                    theirs(x)
                ),
                "a block without norms": unnormed + think(unnormed),
                "norms of what the parts return: add first, then normalise": (
                    x + first(attend(x)) + second(think(x + first(attend(x))))
                ),
                "a block without residual connections": second(
                    think(first(attend(x)))
                ),
                "one norm for both: the second is feed_forward_norm": first(
                    attended + think(attended)
                ),
                "a block without the norm after attention": second(
                    unnormed + think(unnormed)
                ),
                "a block without the norm after the MLP": attended
                + think(attended),
                "an MLP whose result is added to the input of the block": (
                    second(x + think(attended))
                ),
            }

        return difference(mine(x), right, mistakes)

    names = weights_of(theirs).keys() - weights_of(mine).keys()
    if names:
        return f"there are no weights {', '.join(sorted(names))}"
    return values()


class _GPT(nnx.Module):
    """The weights of lesson 18's GPT, of the given parts."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        def norm() -> given.LayerNorm:
            return given.LayerNorm(EMBED_DIM, rngs=rngs)

        self.token_embedding = given.Embedding(VOCAB_SIZE, EMBED_DIM, rngs=rngs)
        self.position_embedding = given.Embedding(
            BLOCK_SIZE, EMBED_DIM, rngs=rngs
        )
        self.blocks = nnx.List(
            given.Block(EMBED_DIM, NUM_HEADS, rngs=rngs)
            for _ in range(NUM_LAYERS)
        )
        self.final_norm = norm()
        self.head = nnx.Linear(
            EMBED_DIM, VOCAB_SIZE, kernel_init=given.SMALL, rngs=rngs
        )


def problem_of_gpt(gpt: Callable[..., Any]) -> str:
    """What is wrong with a GPT; an empty text if it is right."""
    sizes = (VOCAB_SIZE, BLOCK_SIZE, NUM_LAYERS, NUM_HEADS, EMBED_DIM)
    mine = gpt(*sizes, rngs=nnx.Rngs(0))
    parts = _GPT(rngs=nnx.Rngs(0))
    theirs = jgpt.GPT(_small_config(), rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (BATCH, TIME), 0, VOCAB_SIZE)

    def attributes() -> str:
        for name, size in (
            ("vocab_size", VOCAB_SIZE),
            ("block_size", BLOCK_SIZE),
        ):
            if getattr(mine, name, None) != size:
                return f"the GPT doesn't keep `{name}`: sampling reads it"
        return ""

    def values() -> str:
        _loud(theirs)
        copied_gpt(mine, theirs)
        copied_gpt(parts, theirs)
        of_tokens = parts.token_embedding(tokens)
        table = parts.position_embedding.table[...]
        norm = theirs.final_norm
        right = theirs(tokens)

        def logits_of(x: jax.Array, blocks: Any = theirs.blocks) -> jax.Array:
            for block in blocks:
                x = block(x)
            return theirs.logits(norm(x))

        x = of_tokens + table[:TIME]
        states = theirs.hidden_states(tokens)
        first, *_, last = theirs.blocks
        added = [block(x) for block in theirs.blocks]
        mean = x.mean(axis=1, keepdims=True)

        def mistakes() -> Mistakes:
            return {
                "a GPT without the final norm": theirs.logits(states[-1]),
                "a GPT without its blocks": logits_of(x, ()),
                "the first block alone": logits_of(x, [first]),
                "the last block alone: each reads the one before": logits_of(
                    x, [last]
                ),
                "the first block, repeated": logits_of(x, [first] * NUM_LAYERS),
                "the last block, repeated": logits_of(x, [last] * NUM_LAYERS),
                "blocks in the reverse order": logits_of(
                    x, list(reversed(theirs.blocks))
                ),
                "blocks that all read the embedding: each reads the one "
                "before": theirs.logits(norm(sum(added))),
                "a residual around the blocks: each block has its own": (
                    theirs.logits(norm(x + states[-1]))
                ),
                "the final norm before the blocks": theirs.logits(
                    _through(theirs.blocks, norm(x))
                ),
                "a final norm after each block": theirs.logits(
                    _through(theirs.blocks, x, norm)
                ),
                "the tokens alone: add the position's embedding": logits_of(
                    of_tokens
                ),
                "the positions alone: add the token's embedding": logits_of(
                    jnp.broadcast_to(table[:TIME], x.shape)
                ),
                "a product of token and position: add the two": logits_of(
                    of_tokens * table[:TIME]
                ),
                "a difference of token and position: add the two": logits_of(
                    of_tokens - table[:TIME]
                ),
                "positions that begin at 1: begin at 0": logits_of(
                    of_tokens + table[1 : TIME + 1]
                ),
                "the last positions of the block: begin at 0": logits_of(
                    of_tokens + table[-TIME:]
                ),
                "positions in reverse order": logits_of(
                    of_tokens + table[:TIME][::-1]
                ),
                "one position for all: each has its own": logits_of(
                    of_tokens + table[0]
                ),
                "the position's table, read with the tokens": logits_of(
                    of_tokens + table[tokens]
                ),
                "the two tables, exchanged": logits_of(
                    table[tokens] + parts.token_embedding.table[:TIME]
                ),
                "the mean of all positions": logits_of(
                    jnp.broadcast_to(mean, x.shape)
                ),
                "probabilities: a model returns logits": jax.nn.softmax(right),
                "log probabilities: a model returns logits": jax.nn.log_softmax(
                    right
                ),
                "a head without its bias": right - theirs.head.bias[...],
            }

        found = _called(mine, tokens)
        if isinstance(found, tuple):
            return "a tuple is returned: the model returns logits alone"
        if jnp.issubdtype(jnp.asarray(found).dtype, jnp.integer):
            return "tokens are returned: a model returns logits"
        if jnp.shape(found) == (BATCH, VOCAB_SIZE):
            return "logits of one position are returned: training needs all"
        if jnp.shape(found) == (BATCH * TIME, VOCAB_SIZE):
            return "batch and time are merged: keep the axes batch, time, vocab"
        names = ("batch", "time", "vocab_size")
        text = difference(found, right, mistakes, names)
        return text or difference(
            mine(tokens[:2, :-1]), theirs(tokens[:2, :-1]), axes=names
        )

    def size_in_braces() -> str:
        mine.vocab_size += 1
        try:
            mine(tokens)
        except TypeCheckError:
            return ""
        finally:
            mine.vocab_size -= 1
        return (
            "the annotation of the result accepts any number of logits: write "
            "the module's size in braces, `{self.vocab_size}`"
        )

    return _first(
        attributes,
        lambda: _wrong_weights(mine, parts),
        values,
        lambda: _unannotated(mine.__call__, tokens[0]),
        size_in_braces,
    )


def _through(
    blocks: Any, x: jax.Array, after: Callable[..., Any] = lambda x: x
) -> jax.Array:
    for block in blocks:
        x = after(block(x))
    return x


def problem_of_train(train_loop: Callable[..., Any]) -> str:
    """What is wrong with a training loop; an empty text if it is right.

    Its weights and losses are compared with those of loops with mistakes.
    """
    steps = 6
    start = {"w": jnp.array([0.5, -1.0, 2.0]), "b": jnp.array(0.3)}
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    calls: list[None] = []
    asked: list[Any] = []

    def loss_of(weights: Any, batch: jax.Array) -> jax.Array:
        calls.append(None)
        return ((weights["w"] * batch - 1) ** 2).mean() + weights["b"] ** 2

    def batch_at(step: Any) -> jax.Array:
        asked.append(step)
        return 1 + jnp.sin(3 * step + jnp.arange(3.0))

    result = train_loop(loss_of, optimizer, start, batch_at, steps)
    called = len(calls)
    if result is None:
        return "nothing is returned: is there a `return`?"
    if not isinstance(result, tuple) or len(result) != 2:
        return "the loop returns two things: the weights and the losses"
    weights, losses = result
    if isinstance(losses, dict) and not isinstance(weights, dict):
        return "the losses come first: return the weights, then the losses"
    if jax.tree.structure(weights) != jax.tree.structure(start):
        return "the new weights have another structure than the old ones"
    if not isinstance(losses, list | tuple) and jnp.ndim(losses) == 0:
        return "one loss is returned: return that of each step, as a list"
    losses = list(losses)
    if any(jnp.ndim(loss) for loss in losses):
        shape = jnp.shape(losses[0])
        return f"a loss has the shape {shape}: is it the gradient?"
    if len(losses) != steps:
        return f"there are {len(losses)} losses for {steps} steps"
    if any(isinstance(loss, jax.core.Tracer) for loss in losses):
        return "the losses are tracers of a compiled function: return them"

    def right(weights: Any, state: Any, gradient: Any) -> Any:
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state

    def loop(
        change: Callable[..., Any] = right,
        at: Callable[[int], int] = lambda step: step,
    ) -> tuple[Any, list[Any]]:
        weights, state, losses = start, optimizer.init(start), []
        for step in range(steps):
            loss, gradient = jax.value_and_grad(loss_of)(
                weights, batch_at(at(step))
            )
            weights, state = change(weights, state, gradient)
            losses.append(loss)
        return weights, losses

    def kept_state(weights: Any, state: Any, gradient: Any) -> Any:
        return right(weights, state, gradient)[0], state

    def negative(weights: Any, state: Any, gradient: Any) -> Any:
        return right(weights, state, jax.tree.map(jnp.negative, gradient))

    def changed(change: Callable[..., Any]) -> Callable[..., Any]:
        def once(weights: Any, state: Any, gradient: Any) -> Any:
            updates, state = optimizer.update(gradient, state, weights)
            return jax.tree.map(change, weights, updates, gradient), state

        return once

    mistaken = {
        "the optimizer's state is still the first one: each step needs the "
        "state of the step before": loop(kept_state),
        "the weights are still the old ones: a step begins with the weights "
        "of the step before": loop(changed(lambda w, u, g: w)),
        "the step goes uphill: add the updates, they have their sign": loop(
            changed(lambda w, u, g: w - u)
        ),
        "the new weights are the updates alone: add them to the weights": loop(
            changed(lambda w, u, g: u)
        ),
        "the step goes uphill: give the optimizer the gradient itself": loop(
            negative
        ),
        "the gradient is subtracted as it is: give it to the optimizer": loop(
            changed(lambda w, u, g: w - g)
        ),
        "the gradient is added to the weights: give it to the optimizer": loop(
            changed(lambda w, u, g: w + g)
        ),
        "the weights are the gradient": loop(changed(lambda w, u, g: g)),
        "each step reads the first batch: ask for `batch_at(step)`": loop(
            at=lambda step: 0
        ),
        "each step reads the last batch: ask for `batch_at(step)`": loop(
            at=lambda step: steps
        ),
        "the steps begin at 1: the first batch is `batch_at(0)`": loop(
            at=lambda step: step + 1
        ),
        "the batches come in the reverse order": loop(
            at=lambda step: steps - 1 - step
        ),
    }
    wanted_weights, wanted_losses = loop()
    after: list[Any] = []
    loop(lambda *args: _kept(after, right(*args)))
    late = [loss_of(after[n], batch_at(n)) for n in range(steps)]
    if not _same_trees(weights, wanted_weights):
        for name, (others, _) in mistaken.items():
            if _same_trees(weights, others):
                return name
        if _same_trees(losses, [wanted_losses[0]] * steps):
            return "each step begins with the first weights"
    if not _same_trees(losses, wanted_losses):
        if _same_trees(losses, late):
            return "a loss isn't that of the weights before the step"
        if _same_trees(losses[::-1], wanted_losses):
            return "the losses are in the reverse order"
        if _same_trees(losses, np.cumsum(wanted_losses).tolist()):
            return "the losses are added up: return each step's own"
        if _same_trees(weights, wanted_weights):
            return "the weights are right, and the losses are others"
        return "neither the losses nor the weights are those of six steps"
    if not _same_trees(weights, wanted_weights):
        return "the losses are right: are the last weights returned?"
    if called > 3:
        return (
            f"the loss was computed {called} times by Python in {steps} steps: "
            "compile the step with `jax.jit`, once, before the loop"
        )
    return ""


def _kept(found: list[Any], result: Any) -> Any:
    """The result of a step, whose weights are appended to a list."""
    found.append(result[0])
    return result


def _same_trees(found: Any, wanted: Any) -> bool:
    if jax.tree.structure(found) != jax.tree.structure(wanted):
        return False
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return all(bool(jnp.allclose(a, b, atol=1e-4)) for a, b in pairs)


def problem_of_loss_of(
    loss_of: Callable[..., Any], graph: Any, weights: Any, window: jax.Array
) -> str:
    """What is wrong with the loss of a window; an empty text if it is right."""
    # two windows at least, so that a slice of the batch isn't empty
    window = jnp.concatenate([window, window[:, ::-1]])

    def of(weights: Any) -> tuple[Any, jax.Array]:
        model = nnx.merge(graph, weights)
        logits = model(window[:, :-1])
        right = jgpt.cross_entropy(logits, window[:, 1:])

        def mistakes() -> Mistakes:
            whole = model(window[:, 1:])
            each = jax.vmap(
                lambda one, target: jgpt.cross_entropy(one[None], target[None])
            )(logits, window[:, 1:])
            return {
                "targets that are the inputs: a target is the token after": (
                    jgpt.cross_entropy(logits, window[:, :-1])
                ),
                "inputs that are the targets: a target is the token after": (
                    jgpt.cross_entropy(whole, window[:, 1:])
                ),
                "a shift backwards: a target is the token after": (
                    jgpt.cross_entropy(whole, window[:, :-1])
                ),
                "the last position alone: take the mean of all": (
                    jgpt.cross_entropy(logits[:, -1:], window[:, -1:])
                ),
                "the first position alone: take the mean of all": (
                    jgpt.cross_entropy(logits[:, :1], window[:, 1:2])
                ),
                "the first window alone: take the mean of all": each[0],
                "a target that is two tokens later": jgpt.cross_entropy(
                    logits[:, :-1], window[:, 2:]
                ),
                "the negative of the loss": -right,
                "a loss of probabilities: give it the logits": (
                    jgpt.cross_entropy(jax.nn.softmax(logits), window[:, 1:])
                ),
                "slices of the batch: the time is the second axis": (
                    jgpt.cross_entropy(model(window[:-1]), window[1:])
                ),
                "a sum over windows: take the mean": right * len(window),
                "a sum over positions: take the mean": right * logits.shape[1],
            }

        return difference(loss_of(weights, window), right, mistakes), right

    # two states: a function of a state must not read another one
    other = jax.tree.map(lambda leaf: 3 * leaf + 0.05, weights)
    problem, _ = of(weights)
    if problem:
        return problem
    problem, _ = of(other)
    if problem and _same(loss_of(weights, window), loss_of(other, window)):
        return "other weights give the same loss: make the model of `weights`"
    return problem


class _Table(nnx.Module):
    """A model whose logits are those of the last token and its position."""

    def __init__(self, table: jax.Array, block_size: int) -> None:
        self.table = nnx.Param(table)
        self.block_size = block_size
        self.vocab_size = table.shape[1]

    def __call__(self, tokens: jax.Array) -> jax.Array:
        if tokens.shape[1] > self.block_size:
            raise ValueError(f"{tokens.shape[1]} tokens are more than a block")
        return self.table[...][tokens]


class _Oldest(_Table):
    """A model whose logits are those of the oldest token that it reads."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        logits = super().__call__(tokens)
        return jnp.broadcast_to(logits[:, :1], logits.shape)


def problem_of_sampling(generate: Callable[..., Any]) -> str:
    """What is wrong with sampling; an empty text if it is right."""
    key = jax.random.key(0)
    following = (jnp.arange(VOCAB_SIZE) + 1) % VOCAB_SIZE
    likely = 50 * jax.nn.one_hot(following, VOCAB_SIZE)
    prompt = jnp.array([[3, 4], [8, 1]])
    written = generate(_Table(likely, 100), prompt, 4, key)
    if written is None:
        return "nothing is returned: is there a `return`?"
    if written.shape != (2, 6):
        return (
            f"a prompt of 2 tokens and 4 more have the shape {written.shape}, "
            "not (2, 6): return both"
        )
    if not (written[:, :2] == prompt).all():
        return "the result doesn't begin with the prompt"
    counted = jnp.array([[3, 4, 5, 6, 7, 8], [8, 1, 2, 3, 4, 5]])
    if not (written == counted).all():
        return (
            "a token isn't drawn from the logits at the last position: after "
            "3, 4 of a model that counts came "
            f"{written[0, 2:].tolist()}"
        )
    try:
        long = generate(_Oldest(likely, 3), prompt, 4, key)
    except ValueError:
        return "the context isn't cropped to the last `block_size` tokens"
    if not (long[0] == jnp.array([3, 4, 4, 4, 5, 5])).all():
        return "the context is cropped, but not to its last tokens"
    even = _Table(jnp.zeros((VOCAB_SIZE, VOCAB_SIZE)), 100)
    many = generate(even, jnp.zeros((200, 1), int), 6, key)[:, 1:]
    if (many == 0).all():
        return (
            "the likeliest token is always taken: draw one, with "
            "`jax.random.categorical`"
        )
    if (many == many[:, :1]).all():
        return "each step draws with the same key: make another for each step"
    if (many == many[:1]).all():
        return "all sequences of the batch get the same tokens"
    other = generate(even, jnp.zeros((200, 1), int), 6, jax.random.key(1))
    if (other[:, 1:] == many).all():
        return "another key gives the same text: draw with the key"
    rising = jnp.arange(VOCAB_SIZE) / 3
    peaked = _Table(jnp.tile(rising, (VOCAB_SIZE, 1)), 100)
    drawn = generate(peaked, jnp.zeros((2000, 1), int), 1, key)[:, 1]
    shares = jnp.bincount(drawn, length=VOCAB_SIZE) / 2000
    if jnp.abs(shares - jax.nn.softmax(rising)).max() > 0.05:
        return (
            "tokens aren't drawn in proportion to the softmax of the logits: "
            "`jax.random.categorical` takes logits, and not probabilities"
        )
    return ""
