"""A GPT in plain JAX: parameters in a dict, pure functions, and no other library.

    python docs/one_page_gpt.py [TEXT]      # trains on a text file, or on this page itself

With the same weights it is `jgpt.GPT`: `tests/test_one_page_gpt.py` compares logits and gradients.
Comments give shapes: B batch, T time, C embed_dim, H heads, D head_dim, V vocab_size. All sizes of
the model are those of its parameters.
"""

import sys

import jax
import jax.numpy as jnp

# --- parameters -----------------------------------------------------------------------------------


def init_params(key, vocab_size, block_size, num_layers, num_heads, embed_dim):
    """Weights from N(0, 0.02), smaller where a residual branch ends, as in GPT-2."""
    C, H, D = embed_dim, num_heads, embed_dim // num_heads
    keys = iter(jax.random.split(key, 2 + 6 * num_layers))
    small = 0.02 / (2 * num_layers) ** 0.5

    def normal(*shape, std=0.02):
        return std * jax.random.normal(next(keys), shape)

    def init_block():
        return {
            "attention_norm": jnp.ones(C),
            "query": normal(C, H, D),
            "key": normal(C, H, D),
            "value": normal(C, H, D),
            "projection": normal(H, D, C, std=small),
            "mlp_norm": jnp.ones(C),
            "expansion": normal(C, 4 * C),
            "contraction": normal(4 * C, C, std=small),
        }

    return {
        "token_embedding": normal(vocab_size, C),
        "position_embedding": normal(block_size, C),
        "blocks": [init_block() for _ in range(num_layers)],
        "final_norm": jnp.ones(C),
    }


# --- the model ------------------------------------------------------------------------------------


def layer_norm(scale, x):
    """Mean 0 and variance 1 over the features of each position, times a learned scale."""
    x = x - x.mean(axis=-1, keepdims=True)  # B T C
    variance = (x**2).mean(axis=-1, keepdims=True)  # B T 1
    return scale * x / jnp.sqrt(variance + 1e-5)


def attention(block, x):
    """Causal multi-head self-attention."""
    query = jnp.einsum("btc,chd->bthd", x, block["query"])
    key = jnp.einsum("btc,chd->bthd", x, block["key"])
    value = jnp.einsum("btc,chd->bthd", x, block["value"])

    T, D = query.shape[1], query.shape[3]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / D**0.5  # B H T T
    mask = jnp.tril(jnp.ones((T, T), dtype=bool))  # a query attends to itself and the past
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))  # each row sums to 1
    heads = jnp.einsum("bhqk,bkhd->bqhd", weights, value)  # B T H D
    return jnp.einsum("bthd,hdc->btc", heads, block["projection"])


def mlp(block, x):
    """Two layers at each position, with four times as many features between them."""
    hidden = jax.nn.gelu(x @ block["expansion"], approximate=False)  # B T 4C
    return hidden @ block["contraction"]  # B T C


def gpt(params, tokens):
    """Tokens (B T) to logits of the token after each (B T V)."""
    T = tokens.shape[1]
    x = params["token_embedding"][tokens] + params["position_embedding"][:T]  # B T C
    for block in params["blocks"]:
        x = x + attention(block, layer_norm(block["attention_norm"], x))
        x = x + mlp(block, layer_norm(block["mlp_norm"], x))
    return layer_norm(params["final_norm"], x) @ params["token_embedding"].T  # the tied head


# --- training -------------------------------------------------------------------------------------


def loss_of(params, window):
    """Mean cross entropy over a window (B T+1): its inputs, and one later their targets."""
    inputs, targets = window[:, :-1], window[:, 1:]
    log_probabilities = jax.nn.log_softmax(gpt(params, inputs))  # B T V
    return -jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1).mean()


def init_adam(params):
    """Both moments of all gradients, and the count of steps."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return zeros, zeros, 0


def adam(gradients, state, params, learning_rate, beta1=0.9, beta2=0.99, epsilon=1e-8):
    """A step of Adam (Kingma and Ba 2015, algorithm 1): new parameters and new state."""
    first, second, count = state
    count = count + 1
    first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, first, gradients)
    second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g**2, second, gradients)

    def updated(p, m, v):
        m, v = m / (1 - beta1**count), v / (1 - beta2**count)  # both began at 0
        return p - learning_rate * m / (jnp.sqrt(v) + epsilon)

    return jax.tree.map(updated, params, first, second), (first, second, count)


@jax.jit
def train_step(params, state, window, learning_rate):
    """A pure function: from parameters, state and a window to new ones and the loss."""
    loss, gradients = jax.value_and_grad(loss_of)(params, window)
    params, state = adam(gradients, state, params, learning_rate)
    return params, state, loss


# --- sampling -------------------------------------------------------------------------------------


@jax.jit
def write(params, context, length, key, temperature):
    """Sample the token (B) after the first `length` of a context (B T), and put it behind them."""
    # what lies behind them is hidden by the causal mask, so one program serves all lengths
    logits = gpt(params, context)[:, length - 1]  # B V
    token = jax.random.categorical(key, logits / temperature)  # B
    T = context.shape[1]
    context = jnp.where(length == T, jnp.roll(context, -1, axis=1), context)  # drop the oldest
    length = jnp.minimum(length + 1, T)
    return context.at[:, length - 1].set(token), length, token


def sample(params, prompt, count, key, temperature=1.0):
    """Continue a prompt (B T) by `count` tokens, each from as many as there are positions for."""
    size = params["position_embedding"].shape[0]
    context = prompt[:, -size:]
    length = context.shape[1]
    context = jnp.pad(context, ((0, 0), (0, size - length)))
    written = []
    for i in range(count):
        at = jax.random.fold_in(key, i)
        context, length, token = write(params, context, length, at, temperature)
        written.append(token)
    return jnp.concatenate([prompt, jnp.stack(written, axis=1)], axis=1)


def main(path, steps=400, batch_size=16, block_size=32):
    """Train on a text and print a sample."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    characters = sorted(set(text))
    tokens = jnp.array([characters.index(character) for character in text])
    print(f"{len(text):,} characters, {len(characters)} different ones")

    key = jax.random.key(0)
    params = init_params(key, len(characters), block_size, num_layers=2, num_heads=4, embed_dim=64)
    state = init_adam(params)
    for step in range(steps):
        at = jax.random.fold_in(key, step)
        starts = jax.random.randint(at, (batch_size, 1), 0, len(tokens) - block_size)
        window = tokens[starts + jnp.arange(block_size + 1)]  # B T+1
        params, state, loss = train_step(params, state, window, learning_rate=3e-3)
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:3}   loss {loss:.2f}")

    written = sample(params, tokens[None, :1], 200, key, temperature=0.8)
    print("".join(characters[token] for token in written[0]))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else __file__)
