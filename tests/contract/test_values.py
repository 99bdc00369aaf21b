"""Values that no shape can vouch for and that no other test holds; they pass unchecked too."""

import jax.numpy as jnp
import numpy as np

from jgpt.nn.attention import merge_heads, split_heads


def test_one_head_has_all_features():
    x = jnp.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(split_heads(x, 1), x[:, None])
    np.testing.assert_array_equal(merge_heads(split_heads(x, 1)), x)
