"""Int8 weights for decoding, which read a quarter of the memory for each token."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Int8

from jgpt.nn.layers import Linear
from jgpt.nn.models import LanguageModel, named_parameters
from jgpt.nn.module import Module
from jgpt.nn.transformer import GPT
from jgpt.shapes.contract import typed


class Int8Linear(Module):
    """A `Linear` whose products are in int8, accumulated in int32.

    Weights have one scale for each output feature, and inputs one for each row (Dettmers et al.
    2022, section 3.1, "vector-wise quantization").
    """

    @typed
    def __init__(
        self,
        kernel: Float[Array, "in_features out_features"],
        bias: Float[Array, " out_features"] | None = None,
    ) -> None:
        self.in_features, self.out_features = kernel.shape
        rows, scale = quantise(kernel.T)
        # Output features first, since XLA's CPU backend multiplies these rows faster than columns.
        self.kernel = nnx.Param(rows)
        self.scale = nnx.Param(scale)
        self.bias = None if bias is None else nnx.Param(bias)

    @typed
    def __call__(
        self, x: Float[Array, "*rows {self.in_features}"]
    ) -> Float[Array, "*rows {self.out_features}"]:
        """Apply the layer to the last axis."""
        rows, scale = quantise(x.reshape(-1, self.in_features))  # rows in_features; rows
        if rows.shape[0] == 1:  # on a CPU, only matrix products are fast in int8
            rows = jnp.concatenate([rows, rows])
        contract_features = (((1,), (1,)), ((), ()))  # the last axis of both, without a batch
        product = jax.lax.dot_general(
            rows,
            self.kernel[...],
            contract_features,
            # The sum of int8 products fits: 127**2 times 133,000 features is below 2**31.
            preferred_element_type=jnp.int32,
        )
        # Each row and each column has a scale, which are factored out of the sum over features.
        product = product[: scale.shape[0]].astype(scale.dtype)
        y = product * scale[:, None] * self.scale[...][None]  # rows out_features
        y = y.reshape(*x.shape[:-1], self.out_features)
        if self.bias is None:
            return y
        return y + jax.lax.broadcast_to_rank(self.bias[...], y.ndim).astype(y.dtype)


@typed
def quantise(
    x: Float[Array, "rows features"],
) -> tuple[Int8[Array, "rows features"], Float[Array, " rows"]]:
    """Quantise rows to integers from -127 to 127; return them with the scale of each row."""
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(axis=-1)  # rows
    scale = jnp.where(largest > 0, largest, 1) / 127  # a row of zeros gets an arbitrary scale
    rounded = jnp.round(x / scale[:, None])  # rows features
    return rounded.astype(jnp.int8), scale


def with_int8_weights(model: LanguageModel) -> GPT:
    """Return a copy of a GPT for decoding, with its linear layers and head in int8.

    Embeddings and norms stay unchanged. Raises ValueError for another model, and FloatingPointError
    for weights that are not finite, which int8 can't represent.
    """
    if not isinstance(model, GPT):
        raise ValueError(
            f"a {type(model).__name__} has no linear layers to quantise: only a GPT can be in int8"
        )
    for name, parameter in named_parameters(model).items():
        if isinstance(parameter[...], Tracer):  # in a proof, it has no values
            continue
        if not jnp.isfinite(parameter[...]).all():
            raise FloatingPointError(
                f"{name} is not finite: the weights have diverged or are damaged"
            )
    model = nnx.clone(model)
    if model.head is None:
        # A tied head gets its own weights; the table stays unchanged for look-ups.
        model.head = nnx.data(Int8Linear(model.token_embedding.embedding[...].T))  # type: ignore[assignment]
    # Lists, since both are changed during iteration.
    for _, module in list(nnx.iter_modules(model)):
        for name, layer in list(vars(module).items()):
            if isinstance(layer, Linear):
                bias = None if layer.bias is None else layer.bias[...]
                setattr(module, name, Int8Linear(layer.kernel[...], bias))
    return model
