"""Small programs that mix positions, right and wrong, as functions of an array (2, time, 3)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
Program = Callable[[Array], Any]
WIDTH = 3
KEYS = jax.random.split(jax.random.key(7), 8)
W = jax.random.normal(KEYS[0], (WIDTH, WIDTH))
V = jax.random.normal(KEYS[1], (WIDTH, WIDTH))
TAPS = jax.random.normal(KEYS[2], (3, WIDTH))
ROUTER = jax.random.normal(KEYS[3], (WIDTH, 4))
EXPERTS = jax.random.normal(KEYS[4], (4, WIDTH, WIDTH))
MIXING = jnp.eye(16) + 0.1 * jax.random.normal(KEYS[5], (16, 16))
FLOAT_MASK = jnp.tril(jnp.ones((16, 16)))
NUMPY_MASK = np.tril(np.ones((16, 16), bool))
NUMPY_FLOAT_MASK = np.tril(np.ones((16, 16), np.float32))


def tril(x: Array, k: int = 0) -> Array:
    time = x.shape[1]
    return jnp.tril(jnp.ones((time, time), bool), k)


def unsigned(x: Array) -> Array:
    return jnp.arange(x.shape[1], dtype=jnp.uint32)


def scores_of(x: Array) -> Array:
    return (x @ W) @ x.mT * 0.3


def attend(
    mask: Callable[[Array], Any] = tril,
    fill: float = -jnp.inf,
    axis: int = -1,
    before: Callable[[Array], Array] = lambda scores: scores,
    after: Callable[[Array], Array] = lambda scores: scores,
) -> Program:
    """Attention with a mask, with functions of the scores before and after it."""

    def program(x: Array) -> Array:
        scores = after(jnp.where(mask(x), before(scores_of(x)), fill))
        return jax.nn.softmax(scores, axis=axis) @ (x @ V)

    return program


def weighted(weights: Callable[[Array, Array], Array]) -> Program:
    """Values averaged with weights that are a function of the scores and the mask."""
    return lambda x: weights(scores_of(x), tril(x)) @ (x @ V)


def softcap(scores: Array) -> Array:
    return 5 * jnp.tanh(scores / 5)


def additive(fill: float) -> Program:
    def program(x: Array) -> Array:
        return jax.nn.softmax(scores_of(x) + jnp.where(tril(x), 0, fill)) @ x

    return program


def multi_head(split: Callable[[Array, int], Array], merge: Callable[[Array], Array]) -> Program:
    def program(x: Array) -> Array:
        heads = 3
        q, k, v = (split(x @ w, heads) for w in (W, V, W.T))
        scores = jnp.where(tril(x), q @ k.mT, -jnp.inf)
        return merge(jax.nn.softmax(scores) @ v)

    return program


def split(x: Array, heads: int) -> Array:
    batch, time, width = x.shape
    return x.reshape(batch, time, heads, width // heads).swapaxes(1, 2)


def split_wrongly(x: Array, heads: int) -> Array:
    batch, time, width = x.shape
    return x.reshape(batch, heads, time, width // heads)


def merge(x: Array) -> Array:
    batch, heads, time, size = x.shape
    return x.swapaxes(1, 2).reshape(batch, time, heads * size)


def merge_wrongly(x: Array) -> Array:
    batch, heads, time, size = x.shape
    return x.reshape(batch, time, heads * size)


def scanned(step: Callable[[Array, Array], Array], *, reverse: bool = False) -> Program:
    def program(x: Array) -> Array:
        def body(carry: Array, item: Array) -> tuple[Array, Array]:
            carry = step(carry, item)
            return carry, carry

        _, states = lax.scan(body, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1), reverse=reverse)
        return states.swapaxes(0, 1)

    return program


def convolved(padding: Any, dilation: int = 1) -> Program:
    def program(x: Array) -> Array:
        kernel = TAPS[:, :, None] * jnp.ones((1, WIDTH, WIDTH))
        return lax.conv_general_dilated(
            x,
            kernel,
            (1,),
            padding,
            rhs_dilation=(dilation,),
            dimension_numbers=("NWC", "WIO", "NWC"),
        )

    return program


def shifted(by: int) -> Program:
    def program(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (max(by, 0), max(-by, 0)), (0, 0)))
        return x + padded[:, max(-by, 0) :][:, : x.shape[1]]

    return program


def sliding_chunks(x: Array) -> Array:
    """Each chunk of two attends to itself and the one before."""
    batch, time, width = x.shape
    room = -time % 2
    padded = jnp.pad(x, ((0, 0), (0, room), (0, 0)))
    chunks = padded.reshape(batch, -1, 2, width)
    before = jnp.pad(chunks, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    both = jnp.concatenate([before, chunks], axis=2)
    is_past = np.arange(4)[None] <= 2 + np.arange(2)[:, None]
    scores = jnp.where(is_past, chunks @ both.mT, -jnp.inf)
    found = jax.nn.softmax(scores) @ both
    return found.reshape(batch, -1, width)[:, :time]


def blocks_of_queries(x: Array) -> Array:
    """A running softmax over blocks of keys, as in flash attention."""
    batch, time, _ = x.shape
    q, k, v = x @ W, x @ V, x
    position = jnp.arange(time)

    def block(state: Any, start: Array) -> tuple[Any, None]:
        maximum, total, summed = state
        key = lax.dynamic_slice_in_dim(k, start, 1, axis=1)
        value = lax.dynamic_slice_in_dim(v, start, 1, axis=1)
        scores = (q @ key.mT)[..., 0]
        scores = jnp.where(position >= start, scores, -1e30)
        new = jnp.maximum(maximum, scores)
        weight = jnp.exp(scores - new)
        old = jnp.exp(maximum - new)
        return (
            new,
            total * old + weight,
            summed * old[..., None] + weight[..., None] * value,
        ), None

    first = (jnp.full((batch, time), -1e30), jnp.zeros((batch, time)), jnp.zeros_like(x))
    (_, total, summed), _ = lax.scan(block, first, jnp.arange(time))
    return summed / total[..., None]


def relative_shift(x: Array) -> Array:
    """Transformer-XL's shift of relative scores, then a mask."""
    batch, time, _ = x.shape
    relative = (x @ W) @ jax.random.normal(KEYS[6], (WIDTH, time))
    padded = jnp.pad(relative, ((0, 0), (0, 0), (1, 0)))
    moved = padded.reshape(batch, time + 1, time)[:, 1:]
    weights = jax.nn.softmax(jnp.where(tril(x), scores_of(x) + moved, -jnp.inf))
    return weights @ x


def expert_choice(x: Array) -> Array:
    """Each expert takes its best two positions."""
    weights = jax.nn.softmax(x @ ROUTER)
    _, chosen = lax.top_k(weights.mT, min(2, x.shape[1]))
    is_chosen = jax.nn.one_hot(chosen, x.shape[1]).sum(2).mT
    return x + jnp.einsum("bte,btd,edf->btf", weights * is_chosen, x, EXPERTS)


def token_choice(x: Array) -> Array:
    """Each position takes its best two experts."""
    logits = x @ ROUTER
    smallest = lax.top_k(logits, 2)[0][..., -1:]
    weights = jax.nn.softmax(jnp.where(logits >= smallest, logits, -jnp.inf))
    return x + jnp.einsum("bte,btd,edf->btf", weights, x, EXPERTS)


def capacity(order: Callable[[Array], Array]) -> Program:
    """Experts with room for two, given to positions in an order."""

    def program(x: Array) -> Array:
        choice = jax.nn.one_hot((x @ ROUTER).argmax(-1), 4)
        has_room = order(choice) <= 2
        return x + jnp.einsum("bte,btd,edf->btf", choice * has_room, x, EXPERTS)

    return program


def over_batch(choice: Array) -> Array:
    batch, time, experts = choice.shape
    return jnp.cumsum(choice.reshape(batch * time, experts), 0).reshape(choice.shape)


def conditional(x: Array) -> Array:
    return lax.cond(x[:, -1].sum() > 0, lambda x: x, lambda x: 2 * x, x)


def looped(x: Array) -> Array:
    """Each position is multiplied until it is large, as data decides."""

    def one(row: Array) -> Array:
        return lax.while_loop(lambda r: jnp.abs(r).sum() < 3, lambda r: r * 1.5 + 0.1, row)

    return jax.vmap(jax.vmap(one))(x)


def looped_together(x: Array) -> Array:
    return lax.while_loop(lambda r: jnp.abs(r).sum() < 30, lambda r: r * 1.5 + 0.1, x)


def fori(step: Callable[[Array, Array], Array]) -> Program:
    return lambda x: lax.fori_loop(0, x.shape[1], lambda i, y: step(i, y), x)


def set_next(i: Array, y: Array) -> Array:
    """Add a position to the next one."""
    following = jnp.minimum(i + 1, y.shape[1] - 1)
    return y.at[:, following].add(y[:, i] * (i + 1 < y.shape[1]))


def set_before(i: Array, y: Array) -> Array:
    return y.at[:, jnp.maximum(i - 1, 0)].add(y[:, i])


def linear_attention(x: Array) -> Array:
    q, k = jax.nn.elu(x @ W) + 1, jax.nn.elu(x @ V) + 1
    states = jnp.cumsum(k[..., :, None] * x[..., None, :], axis=1)
    total = jnp.cumsum(k, axis=1)
    return jnp.einsum("btk,btkd->btd", q, states) / (q * total).sum(-1, keepdims=True)


def associative(x: Array, *, reverse: bool = False) -> Array:
    def combine(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[0] * a[1] + b[1]

    decay = jax.nn.sigmoid(x)
    return lax.associative_scan(combine, (decay, x), axis=1, reverse=reverse)[1]


def rotated(x: Array) -> Array:
    angle = jnp.arange(x.shape[1])[:, None] * jnp.array([1.0, 0.1, 0.01])
    turned = x * jnp.cos(angle) + jnp.roll(x, 1, -1) * jnp.sin(angle)
    return attend()(turned)


def alibi(x: Array) -> Array:
    position = jnp.arange(x.shape[1])
    distance = position[:, None] - position[None]
    return attend(after=lambda scores: scores - 0.5 * distance)(x)


def sinks(x: Array) -> Array:
    """Windows of two that also see the first position."""
    position = np.arange(x.shape[1])
    near = np.abs(position[:, None] - position) < 2
    return attend(lambda x: tril(x) & (near | (position == 0)))(x)


def top_k_sparse(x: Array) -> Array:
    scores = jnp.where(tril(x), scores_of(x), -jnp.inf)
    smallest = lax.top_k(scores, min(2, x.shape[1]))[0][..., -1:]
    return jax.nn.softmax(jnp.where(scores >= smallest, scores, -jnp.inf)) @ x


def counted(x: Array) -> Array:
    """Running counts of signs, by a scatter in a scan over time."""

    def body(counts: Array, sign: Array) -> tuple[Array, Array]:
        counts = counts + jax.nn.one_hot(sign, 2)
        return counts, counts

    signs = (x[..., 0] > 0).astype(jnp.int32)
    _, counts = lax.scan(body, jnp.zeros((x.shape[0], 2)), signs.T)
    return jnp.concatenate([x, counts.swapaxes(0, 1)], -1)


def normed(axes: Any) -> Program:
    def program(x: Array) -> Array:
        centred = x - x.mean(axes, keepdims=True)
        return centred * lax.rsqrt(jnp.square(centred).mean(axes, keepdims=True) + 1e-5)

    return program


def gathered(index: Callable[[Array], Array]) -> Program:
    def program(x: Array) -> Array:
        places = jnp.clip(index(jnp.arange(x.shape[1])), 0, x.shape[1] - 1)
        return x + jnp.take(x, places, axis=1)

    return program


def scattered(index: Callable[[Array], Array]) -> Program:
    def program(x: Array) -> Array:
        places = jnp.clip(index(jnp.arange(x.shape[1])), 0, x.shape[1] - 1)
        return jnp.zeros_like(x).at[:, places].add(x)

    return program


def mixed(mixing: Any) -> Program:
    return lambda x: mixing[: x.shape[1], : x.shape[1]] @ x


def remat(program: Program) -> Program:
    return lambda x: jax.checkpoint(program)(x)


def jitted(program: Program) -> Program:
    return lambda x: jax.jit(lambda x: program(x))(x)


def stacked(program: Program) -> Program:
    """Two layers in a scan over their weights."""

    def layers(x: Array) -> Array:
        def body(x: Array, scale: Array) -> tuple[Array, None]:
            return x + scale * program(x), None

        return lax.scan(body, x, jnp.array([0.5, 2.0]))[0]

    return layers


@jax.custom_jvp
def custom(x: Array) -> Array:
    return jnp.cumsum(x, axis=1)


custom.defjvp(lambda primals, tangents: (custom(*primals), custom(*tangents)))


def total_minus_future(x: Array) -> Array:
    future = jnp.cumsum(x[:, ::-1], 1)[:, ::-1]
    return x.sum(1, keepdims=True) - future + x


def fft_convolution(x: Array) -> Array:
    time = x.shape[1]
    signal = jnp.fft.rfft(x, 2 * time, axis=1)
    kernel = jnp.fft.rfft(jnp.ones((time, 1)), 2 * time, axis=0)
    return jnp.fft.irfft(signal * kernel, 2 * time, axis=1)[:, :time]


RIGHT: dict[str, Program] = {
    "a mask of -inf": attend(),
    "of -1e9": attend(fill=-1e9),
    "of finfo.min": attend(fill=float(jnp.finfo(jnp.float32).min)),
    "of NumPy": attend(lambda x: NUMPY_MASK[: x.shape[1], : x.shape[1]]),
    "strictly before, and itself": attend(lambda x: tril(x, -1) | np.eye(x.shape[1], dtype=bool)),
    "additive, -inf": additive(-jnp.inf),
    "additive, -1e9": additive(-1e9),
    "where= of softmax": weighted(lambda s, mask: jax.nn.softmax(s, where=mask)),
    "softmax of a NumPy mask as floats": weighted(
        lambda s, mask: jnp.tanh(s) * NUMPY_FLOAT_MASK[: s.shape[-1], : s.shape[-1]]
    ),
    "a window": attend(lambda x: tril(x) & ~tril(x, -2)),
    "softcap before the mask": attend(before=softcap),
    "in bfloat16": attend(before=lambda s: s.astype(jnp.bfloat16)),
    "ALiBi": alibi,
    "sinks": sinks,
    "sparse": top_k_sparse,
    "rotary": rotated,
    "a relative shift": relative_shift,
    "heads": multi_head(split, merge),
    "both reshapes wrong": multi_head(split_wrongly, merge_wrongly),
    "sliding chunks": sliding_chunks,
    "blocks of keys": blocks_of_queries,
    "linear attention": linear_attention,
    "a running sum": lambda x: jnp.cumsum(x, 1),
    "a running maximum": lambda x: lax.cummax(x, 1),
    "an RNN": scanned(lambda h, x: jnp.tanh(h @ W + x)),
    "a gated RNN": scanned(
        lambda h, x: jax.nn.sigmoid(x @ V) * h + (1 - jax.nn.sigmoid(x @ V)) * x
    ),
    "an associative scan": associative,
    "a causal convolution": convolved([(2, 0)]),
    "a dilated convolution": convolved([(4, 0)], 2),
    "a shift": shifted(1),
    "a roll with its first masked": lambda x: jnp.roll(x, 1, 1).at[:, 0].set(0),
    "top-2 experts": token_choice,
    "capacity in order of time": capacity(lambda choice: jnp.cumsum(choice, 1)),
    "counts by a scatter": counted,
    "a loop for each position": looped,
    "a loop forwards": fori(set_next),
    "a norm of each position": normed(-1),
    "the position before": gathered(lambda t: t - 1),
    "scattered to later ones": scattered(lambda t: t + 1),
    "two flips": lambda x: jnp.cumsum(x[:, ::-1][:, ::-1], 1),
    "a known branch": lambda x: lax.cond(x.shape[1] > 100, lambda x: x[:, ::-1], jnp.negative, x),
    "a known choice": lambda x: jnp.where(np.arange(x.shape[1])[:, None] >= 0, x, x[:, ::-1]),
    "what is multiplied by 0": lambda x: x + 0 * jnp.ones_like(x) * 2,
    "remat": remat(attend()),
    "jit": jitted(attend()),
    "layers in a scan": stacked(attend()),
    "a custom gradient": custom,
    "vmap": lambda x: jax.vmap(lambda row: attend()(row[None])[0])(x),
    "a bigram": lambda x: jnp.take(W, (x[..., 0] > 0).astype(int), axis=0) + x,
    "einsum in heads": lambda x: jnp.einsum("bqk,bkd->bqd", jnp.tril(scores_of(x)), x),
    "parts joined": lambda x: jnp.concatenate([x[:, :1], x[:, 1:] + x[:, :-1]], 1),
    "stacked and unstacked": lambda x: jnp.stack([x, jnp.cumsum(x, 1)]).sum(0),
    "a dynamic slice": lambda x: (
        x
        + lax.dynamic_slice_in_dim(
            jnp.pad(x, ((0, 0), (1, 0), (0, 0))), jnp.int32(0), x.shape[1], 1
        )
    ),
    "a dynamic update": lambda x: lax.dynamic_update_slice(x, x[:, :1], (0, 0, 0)),
    "dropout": lambda x: attend()(x) * jax.random.bernoulli(KEYS[7], 0.5, x.shape),
    "a softmax of the negative": attend(fill=1e9, after=jnp.negative),
    "unsigned positions": attend(lambda x: unsigned(x)[:, None] >= unsigned(x)),
    "the logarithm of a mask": lambda x: jax.nn.softmax(scores_of(x) + jnp.log(tril(x) * 1.0)) @ x,
}


def reversed_sum(x: Array) -> Array:
    return jnp.cumsum(x[:, ::-1], 1)[:, ::-1]


WRONG: dict[str, Program] = {
    "no mask": attend(lambda x: True),
    "one too far": attend(lambda x: tril(x, 1)),
    "transposed": attend(lambda x: tril(x).T),
    "filled with -5": attend(fill=-5.0),
    "multiplied by a mask before the softmax": weighted(lambda s, mask: jax.nn.softmax(s * mask)),
    "a mask after the softmax": weighted(lambda s, mask: jax.nn.softmax(s) * mask),
    "softmax over queries": attend(axis=-2),
    "softcap after the mask": attend(after=softcap),
    "a clip after the mask": attend(after=lambda s: jnp.clip(s, -5, 5)),
    "a row without an entry": attend(lambda x: tril(x, -1), fill=-1e9),
    "a wrong split": multi_head(split_wrongly, merge),
    "a wrong merge": multi_head(split, merge_wrongly),
    "batch norm": normed((0, 1)),
    "a norm over time": normed(1),
    "a norm over all": normed((0, 1, 2)),
    "the maximum over all": lambda x: x - x.max(),
    "the loss in the logits": lambda x: x + jnp.square(x).mean(),
    "a sum from the end": reversed_sum,
    "an RNN from the end": scanned(lambda h, x: jnp.tanh(h @ W + x), reverse=True),
    "an associative scan from the end": functools.partial(associative, reverse=True),
    "a roll": lambda x: jnp.roll(x, 1, 1),
    "a shift to the front": shifted(-1),
    "a SAME convolution": convolved("SAME"),
    "a convolution one too far": convolved([(1, 1)]),
    "sorted positions": lambda x: jnp.sort(x, 1),
    "an FFT": lambda x: jnp.fft.fft(x, axis=1).real,
    "the next position": gathered(lambda t: t + 1),
    "scattered to earlier ones": scattered(lambda t: t - 1),
    "a branch on the last": conditional,
    "a loop on all": looped_together,
    "a loop backwards": fori(lambda i, y: set_before(y.shape[1] - 1 - i, y)),
    "expert choice": expert_choice,
    "capacity from the end": capacity(lambda choice: jnp.cumsum(choice[:, ::-1], 1)[:, ::-1]),
    "capacity over the batch": capacity(over_batch),
    "a mixing of positions": mixed(MIXING),
    "a choice by the last": lambda x: jnp.where(x[:, -1:] > 0, x, -x),
    "a slice from where data says": lambda x: jax.vmap(
        lambda row: row + lax.dynamic_slice_in_dim(row, row[-1, 0].astype(int), 1, 0)
    )(x),
    "negated after the mask": attend(fill=-1e9, after=jnp.negative),
    "unsigned differences": attend(lambda x: unsigned(x)[:, None] - unsigned(x) >= 0),
    "one zero in a sum": lambda x: (
        x * jnp.concatenate([0 * x[:, :1], x[:, -1:]], 1).sum(1)[:, None]
    ),
    "one zero in a product of matrices": lambda x: x + np.array([[0.0, 1.0]]) @ x[:, -2:],
    "a logarithm of weights": weighted(lambda s, mask: jnp.log(jax.nn.softmax(s) * mask + 1)),
    "0 times the logarithm of what may be 0, in float16": lambda x: (
        x + 0 * jnp.log(jnp.where(x[:, -1:] > 0, jnp.float16(65504), jnp.float16(0)))
    ),
    "any of the positions": lambda x: jnp.where((x > 1).any(1, keepdims=True), x, -x),
}
UNSURE: dict[str, Program] = {
    "a trained mixing that begins at the identity": mixed(jnp.eye(16)),
    "a trained mixing that begins at zero": mixed(jnp.zeros((16, 16))),
    "a mask of floats": weighted(
        lambda s, mask: jnp.tanh(s) * FLOAT_MASK[: s.shape[-1], : s.shape[-1]]
    ),
    "a total minus its future": total_minus_future,
    "a convolution by FFT": fft_convolution,
}
"""Not proven, though no input that is tried here shows a dependence beyond rounding."""
SEPARATE = {
    "batch norm",
    "a norm over all",
    "the maximum over all",
    "the loss in the logits",
    "capacity over the batch",
    "a branch on the last",
    "a loop on all",
}
"""Programs whose sequences read each other."""
