"""What the checks of lessons 18 and 20 call: each says what is wrong.

A part of a GPT is compared with jgpt's, which has the same weights. Where the
values differ, they are compared with those of common mistakes, and the message
names the mistake.
"""

import inspect
from collections.abc import Callable
from typing import Any

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


# --- what is compared ---------------------------------------------------------


def weights_of(model: Any) -> list[str]:
    """The paths of a module's weights, sorted."""
    leaves = jax.tree_util.tree_leaves_with_path(
        nnx.to_pure_dict(nnx.state(model, nnx.Param))
    )
    paths = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in leaves
    ]
    return sorted(paths)


def copied_head(head: Any, attention: Any, number: int) -> None:
    """Give a head the columns of one head of `jgpt.MultiHeadAttention`."""
    size = attention.head_dim
    columns = slice(number * size, (number + 1) * size)
    for name in ("query", "key", "value"):
        kernel = getattr(attention, name).kernel[...]
        getattr(head, name).kernel[...] = kernel[:, columns]


def copied_linear(mine: Any, theirs: Any) -> None:
    """Give a linear layer or a norm the weights of another."""
    for name in ("kernel", "bias", "scale"):
        if getattr(theirs, name, None) is not None:
            getattr(mine, name)[...] = getattr(theirs, name)[...]


def copied_attention(mine: Any, theirs: Any) -> None:
    """Give several heads and their projection the weights of jgpt's."""
    for number, head in enumerate(mine.heads):
        copied_head(head, theirs, number)
    copied_linear(mine.projection, theirs.projection)


def copied_block(mine: Any, theirs: Any) -> None:
    """Give a block the weights of `jgpt.Block`."""
    copied_linear(mine.attention_norm, theirs.attention_norm)
    copied_attention(mine.attention, theirs.attention)
    copied_linear(mine.feed_forward_norm, theirs.feed_forward_norm)
    copied_linear(mine.feed_forward.expansion, theirs.feed_forward.expansion)
    copied_linear(mine.feed_forward.projection, theirs.feed_forward.projection)


def copied_gpt(mine: Any, theirs: jgpt.GPT) -> None:
    """Give a GPT of one's own the weights of `jgpt.GPT`."""
    for name in ("token_embedding", "position_embedding"):
        table = getattr(theirs, name).embedding[...]
        getattr(mine.embedding, name).embedding[...] = table
    for my_block, their_block in zip(mine.blocks, theirs.blocks, strict=True):
        copied_block(my_block, their_block)
    copied_linear(mine.final_norm, theirs.final_norm)
    copied_linear(mine.head, theirs.head)


def _config(**sizes: Any) -> jgpt.ModelConfig:
    """The config of the preset `lecture`, with small sizes."""
    given = {
        "vocab_size": VOCAB_SIZE,
        "block_size": BLOCK_SIZE,
        "num_layers": NUM_LAYERS,
        "num_heads": NUM_HEADS,
        "embed_dim": EMBED_DIM,
        "activation": "relu",
        "use_bias": True,
        "head_bias": True,
        "tie_embeddings": False,
    }
    return jgpt.ModelConfig(**(given | sizes))


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


def _difference(
    found: Any, expected: jax.Array, mistakes: Callable[[], Mistakes]
) -> str:
    """What is wrong with an array; an empty text if it is right."""
    if not isinstance(found, jax.Array):
        return f"the result is {found!r}, and not an array"
    if found.shape != expected.shape:
        return f"the result has the shape {found.shape}, not {expected.shape}"
    if _same(found, expected):
        return ""
    if not jnp.isfinite(found).all():
        return (
            "the result isn't finite: does the first position have any key "
            "that it may attend to?"
        )
    for name, values in mistakes().items():
        if jnp.shape(values) == found.shape and _same(found, values):
            return f"the values are those of {name}"
    distance = float(jnp.abs(found - expected).max())
    return f"the values differ from jgpt's by up to {distance:.2g}"


def _same(found: Any, expected: Any) -> bool:
    return bool(jnp.allclose(found, expected, rtol=1e-4, atol=1e-4))


def _missing(part: Any, expected: list[str]) -> str:
    """What is wrong with the names of a module's weights."""
    found = weights_of(part)
    if absent := sorted(set(expected) - set(found)):
        return f"there are no weights {', '.join(absent)}"
    if more := sorted(set(found) - set(expected)):
        return f"the weights {', '.join(more)} are too many"
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


def _weights_of_linear(*names: str, bias: bool = True) -> list[str]:
    kinds = ("bias", "kernel") if bias else ("kernel",)
    return [f"{name}.{kind}" for name in names for kind in kinds]


# --- the parts ----------------------------------------------------------------


def problem_of_loss(cross_entropy: Callable[..., Any]) -> str:
    """What is wrong with a cross entropy; an empty text if it is right."""
    logits = 3 * _random((BATCH, TIME, VOCAB_SIZE))
    targets = jax.random.randint(
        jax.random.key(1), (BATCH, TIME), 0, VOCAB_SIZE
    )
    of_time = jax.nn.log_softmax(logits, axis=1)
    of_targets = jax.nn.one_hot(targets, VOCAB_SIZE)
    right = jgpt.cross_entropy(logits, targets)

    def mistakes() -> Mistakes:
        return {
            "a sum: take the mean over batch and time": right * BATCH * TIME,
            "a mean over the vocabulary too": right / VOCAB_SIZE,
            "a log probability: the loss is its negative": -right,
            "a softmax over time: normalise over the vocabulary": -(
                of_time * of_targets
            ).sum()
            / BATCH
            / TIME,
            "logits that are not normalised": -(logits * of_targets).sum()
            / BATCH
            / TIME,
            "probabilities without a logarithm": -(
                jax.nn.softmax(logits) * of_targets
            ).sum()
            / BATCH
            / TIME,
            "a logarithm to base 2": right / np.log(2),
        }

    return _first(
        lambda: _difference(cross_entropy(logits, targets), right, mistakes),
        lambda: _unannotated(cross_entropy, logits, targets[:, 1:]),
    )


def problem_of_embedding(embedding: Callable[..., Any]) -> str:
    """What is wrong with an embedding; an empty text if it is right."""
    mine = embedding(VOCAB_SIZE, BLOCK_SIZE, EMBED_DIM, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (BATCH, TIME), 0, VOCAB_SIZE)
    names = ["position_embedding.embedding", "token_embedding.embedding"]

    def values() -> str:
        _loud(mine)
        of_tokens = mine.token_embedding.embedding[...]
        of_positions = mine.position_embedding.embedding[...]
        positions = of_positions[:TIME]

        def mistakes() -> Mistakes:
            return {
                "the tokens alone: add the position's embedding": (
                    of_tokens[tokens]
                ),
                "the positions alone": jnp.broadcast_to(
                    positions, (BATCH, TIME, EMBED_DIM)
                ),
                "a product: add the two": of_tokens[tokens] * positions,
                "positions that begin at 1": of_tokens[tokens]
                + of_positions[1 : TIME + 1],
                "the last positions of the block: begin at 0": of_tokens[tokens]
                + of_positions[-TIME:],
                "the position's table, read with the tokens": of_tokens[tokens]
                + of_positions[tokens % BLOCK_SIZE],
            }

        return _difference(
            mine(tokens), of_tokens[tokens] + positions, mistakes
        )

    return _first(
        lambda: _missing(mine, names),
        values,
        lambda: _unannotated(mine.__call__, tokens[0]),
    )


def problem_of_head(head: Callable[..., Any]) -> str:
    """What is wrong with a head; an empty text if it is right."""
    mine = head(EMBED_DIM, HEAD_DIM, rngs=nnx.Rngs(0))
    x = _random((BATCH, TIME, EMBED_DIM))

    def values() -> str:
        _loud(mine)
        arrays = []
        for name in ("query", "key", "value"):
            arrays.append(x @ getattr(mine, name).kernel[...])
        query, key, value = arrays
        mask = jgpt.causal_mask(TIME)
        scores = jnp.einsum("bqd,bkd->bqk", query, key) / HEAD_DIM**0.5
        unmasked = jax.nn.softmax(scores, axis=-1)
        blocked = jnp.where(mask, 0, -1e9)
        over_queries = jax.nn.softmax(scores + blocked, axis=1)

        def mistakes() -> Mistakes:
            return {
                "a head without a mask": jgpt.attend(query, key, value),
                "an inverted mask: a query may attend to itself and the past": (
                    jgpt.attend(query, key, value, mask.T)
                ),
                "scores without a scale": jgpt.attend(
                    query, key, value, mask, scale=1.0
                ),
                "scores divided by `head_dim`, and not by its square root": (
                    jgpt.attend(query, key, value, mask, scale=1 / HEAD_DIM)
                ),
                "scores multiplied by the root of `head_dim`": jgpt.attend(
                    query, key, value, mask, scale=HEAD_DIM**0.5
                ),
                "the scale of `embed_dim`: a product has `head_dim` terms": (
                    jgpt.attend(query, key, value, mask, scale=EMBED_DIM**-0.5)
                ),
                "queries and keys that are exchanged": jgpt.attend(
                    key, query, value, mask
                ),
                "a softmax over the queries: normalise over the keys": (
                    over_queries @ value
                ),
                "weights that are masked after the softmax: mask before it": (
                    (unmasked * mask) @ value
                ),
                "scores that are 0 where they are masked: exp(0) is 1": (
                    jax.nn.softmax(scores * mask, axis=-1) @ value
                ),
                "scores without a softmax": (scores * mask) @ value,
            }

        right = jgpt.attend(query, key, value, mask)
        return _difference(mine(x), right, mistakes)

    return _first(
        lambda: _missing(
            mine, _weights_of_linear("key", "query", "value", bias=False)
        ),
        values,
        lambda: _unannotated(mine.__call__, x[..., 1:]),
    )


def problem_of_heads(multi_head: Callable[..., Any]) -> str:
    """What is wrong with many heads; an empty text if they are right."""
    mine = multi_head(EMBED_DIM, NUM_HEADS, rngs=nnx.Rngs(0))
    theirs = _loud(jgpt.MultiHeadAttention(_config(), rngs=nnx.Rngs(0)))
    x = _random((BATCH, TIME, EMBED_DIM))
    names = _weights_of_linear("projection")
    for number in range(NUM_HEADS):
        for name in ("query", "key", "value"):
            names.append(f"heads.{number}.{name}.kernel")

    def values() -> str:
        copied_attention(mine, theirs)
        outputs = [head(x) for head in mine.heads]
        kernel = theirs.projection.kernel[...]
        bias = theirs.projection.bias[...]
        joined = jnp.concatenate(outputs, axis=-1)
        backwards = jnp.concatenate(outputs[::-1], axis=-1)
        interleaved = jnp.stack(outputs, axis=-1).reshape(joined.shape)
        one = jnp.concatenate([outputs[0]] * NUM_HEADS, axis=-1)

        def mistakes() -> Mistakes:
            return {
                "the heads without their projection": joined,
                "heads in the reverse order": backwards @ kernel + bias,
                "heads whose features are interleaved": interleaved @ kernel
                + bias,
                "the first head, repeated": one @ kernel + bias,
                "a projection without its bias": joined @ kernel,
                "a projection that is added to the heads": joined
                + joined @ kernel
                + bias,
            }

        return _difference(mine(x), theirs(x), mistakes)

    return _first(
        lambda: _missing(mine, names),
        values,
        lambda: _unannotated(mine.__call__, x[..., 1:]),
    )


def problem_of_mlp(feed_forward: Callable[..., Any]) -> str:
    """What is wrong with an MLP; an empty text if it is right."""
    mine = feed_forward(EMBED_DIM, rngs=nnx.Rngs(0))
    theirs = _loud(jgpt.FeedForward(_config(), rngs=nnx.Rngs(0)))
    x = _random((BATCH, TIME, EMBED_DIM))

    def values() -> str:
        hidden_dim = mine.expansion.kernel.shape[1]
        if hidden_dim != 4 * EMBED_DIM:
            return f"there are {hidden_dim} hidden features, not 4 * embed_dim"
        copied_linear(mine.expansion, theirs.expansion)
        copied_linear(mine.projection, theirs.projection)
        hidden = mine.expansion(x)
        right = theirs(x)

        def mistakes() -> Mistakes:
            return {
                "an MLP without a non-linearity": mine.projection(hidden),
                "a GELU: the lecture's MLP has a ReLU": mine.projection(
                    jax.nn.gelu(hidden)
                ),
                "the exact GELU: the lecture's MLP has a ReLU": mine.projection(
                    jax.nn.gelu(hidden, approximate=False)
                ),
                "a ReLU at the end: the stream may also become smaller": (
                    jax.nn.relu(right)
                ),
                "a ReLU of the input alone": mine.projection(
                    mine.expansion(jax.nn.relu(x))
                ),
                "an MLP with its residual, which is the block's": x + right,
            }

        return _difference(mine(x), right, mistakes)

    return _first(
        lambda: _missing(mine, _weights_of_linear("expansion", "projection")),
        values,
        lambda: _unannotated(mine.__call__, x[..., 1:]),
    )


def problem_of_block(block: Callable[..., Any]) -> str:
    """What is wrong with a block; an empty text if it is right."""
    mine = block(EMBED_DIM, NUM_HEADS, rngs=nnx.Rngs(0))
    theirs = _loud(jgpt.Block(_config(), rngs=nnx.Rngs(0)))
    # so small that the epsilon of the first norm matters
    x = 0.03 * _random((BATCH, TIME, EMBED_DIM))
    parts = ("attention_norm", "attention", "feed_forward_norm", "feed_forward")

    def attributes() -> str:
        absent = [name for name in parts if not hasattr(mine, name)]
        return f"the block has no {', '.join(absent)}" if absent else ""

    def values() -> str:
        copied_block(mine, theirs)
        attend, think = theirs.attention, theirs.feed_forward
        first, second = theirs.attention_norm, theirs.feed_forward_norm
        attended = x + attend(first(x))
        normed_later = first(x + attend(x))

        def mistakes() -> Mistakes:
            return {
                "a block without residual connections": think(
                    second(attend(first(x)))
                ),
                "attention without its residual connection": attend(first(x))
                + think(second(attend(first(x)))),
                "an MLP without its residual connection": think(
                    second(attended)
                ),
                "a block without norms": x + attend(x) + think(x + attend(x)),
                "norms after the addition: put them before each part": second(
                    normed_later + think(normed_later)
                ),
                "parts that both read the input: the MLP reads what attention "
                "added": attended + think(second(x)),
                "an MLP whose norm is attention's": attended
                + think(first(attended)),
                "an MLP before attention": x
                + think(second(x))
                + attend(first(x + think(second(x)))),
                "attention alone": attended,
            }

        problem = _difference(mine(x), theirs(x), mistakes)
        epsilon = getattr(mine.attention_norm, "epsilon", 1e-5)
        if problem and epsilon != 1e-5:
            return f"epsilon of a norm is {epsilon}, not 1e-5"
        return problem

    return _first(
        attributes, values, lambda: _unannotated(mine.__call__, x[..., 1:])
    )


def problem_of_norm_after(block: Callable[..., Any]) -> str:
    """What is wrong with a block whose norms come after the additions."""
    mine = block(_config(), rngs=nnx.Rngs(0))
    theirs = _loud(jgpt.Block(_config(), rngs=nnx.Rngs(0)))
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

        return _difference(mine(x), right, mistakes)

    return _first(lambda: _missing(mine, weights_of(theirs)), values)


def problem_of_gpt(gpt: Callable[..., Any]) -> str:
    """What is wrong with a GPT; an empty text if it is right."""
    sizes = (VOCAB_SIZE, BLOCK_SIZE, NUM_LAYERS, NUM_HEADS, EMBED_DIM)
    mine = gpt(*sizes, rngs=nnx.Rngs(0))
    theirs = _loud(jgpt.GPT(_config(), rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (BATCH, TIME), 0, VOCAB_SIZE)

    def attributes() -> str:
        names = ("embedding", "blocks", "final_norm", "head", "vocab_size")
        names += ("block_size",)
        absent = [name for name in names if not hasattr(mine, name)]
        if absent:
            return f"the GPT has no {', '.join(absent)}"
        if len(mine.blocks) != NUM_LAYERS:
            return f"there are {len(mine.blocks)} blocks, not {NUM_LAYERS}"
        return ""

    def values() -> str:
        copied_gpt(mine, theirs)
        states = theirs.hidden_states(tokens)
        norm, first = theirs.final_norm, theirs.blocks[0]
        backwards = states[0]
        for block in reversed(theirs.blocks):
            backwards = block(backwards)
        repeated = states[0]
        for _ in range(NUM_LAYERS):
            repeated = first(repeated)
        right = theirs(tokens)

        def mistakes() -> Mistakes:
            return {
                "a GPT without the final norm": theirs.logits(states[-1]),
                "a GPT without its blocks": theirs.logits(norm(states[0])),
                "the first block alone": theirs.logits(norm(states[1])),
                "the first block, repeated": theirs.logits(norm(repeated)),
                "blocks in the reverse order": theirs.logits(norm(backwards)),
                "probabilities: a model returns logits": jax.nn.softmax(right),
                "log probabilities: a model returns logits": jax.nn.log_softmax(
                    right
                ),
                "a head without its bias": right - theirs.head.bias[...],
            }

        return _difference(mine(tokens), right, mistakes)

    return _first(
        attributes, values, lambda: _unannotated(mine.__call__, tokens[0])
    )


def problem_of_train_step(
    train_step: Callable[..., Any],
    loss_of: Callable[..., Any],
    weights: Any,
    optimizer: optax.GradientTransformation,
    window: jax.Array,
) -> str:
    """What is wrong with a train step; an empty text if it is right.

    Its loss is compared with that of `jgpt.cross_entropy`, its weights with
    those that the optimizer gives for the gradient.
    """
    state = optimizer.init(weights)
    result = train_step(weights, state, window)
    found_loss = loss_of(weights, window)
    if jnp.shape(found_loss) != ():
        return f"the loss has the shape {jnp.shape(found_loss)}, not ()"
    # compiled: one operation at a time they take three times as long
    gradient = jax.jit(jax.grad(loss_of))(weights, window)
    updates, after = jax.jit(optimizer.update)(gradient, state, weights)
    expected = optax.apply_updates(weights, updates)
    uphill = jax.tree.map(lambda w, u: w - u, weights, updates)
    if not isinstance(result, tuple) or len(result) != 3:
        return "a step returns three things: weights, optimizer state and loss"
    new_weights, new_state, new_loss = result

    def same(found: Any, wanted: Any) -> bool:
        pairs = zip(
            jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True
        )
        return all(bool(jnp.allclose(a, b, atol=1e-5)) for a, b in pairs)

    if jax.tree.structure(new_weights) != jax.tree.structure(weights):
        return "the new weights have another structure than the old ones"
    if same(new_weights, weights):
        return "the weights are still the old ones"
    if same(new_weights, uphill):
        return "the step goes uphill: add the updates, they have their sign"
    if same(new_weights, updates):
        return "the new weights are the updates alone: add them to the weights"
    if same(new_weights, jax.tree.map(lambda w, g: w - g, weights, gradient)):
        return "the gradient is subtracted as it is: give it to the optimizer"
    if not same(new_weights, expected):
        return "the new weights are not what the optimizer gives"
    if not same(new_state, after):
        return "the optimizer's state is still the old one"
    if not jnp.allclose(new_loss, found_loss, atol=1e-5):
        return "the loss isn't that of the weights before the step"
    return ""


def problem_of_loss_of(
    loss_of: Callable[..., Any], graph: Any, weights: Any, window: jax.Array
) -> str:
    """What is wrong with the loss of a window; an empty text if it is right."""
    model = nnx.merge(graph, weights)
    logits = model(window[:, :-1])
    right = jgpt.cross_entropy(logits, window[:, 1:])

    def mistakes() -> Mistakes:
        return {
            "targets that are the inputs: a target is the token after": (
                jgpt.cross_entropy(logits, window[:, :-1])
            ),
            "the last position alone: take the mean of all": (
                jgpt.cross_entropy(logits[:, -1:], window[:, -1:])
            ),
        }

    return _difference(loss_of(weights, window), right, mistakes)


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
