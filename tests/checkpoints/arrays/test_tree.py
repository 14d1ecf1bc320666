"""Trees of parameters as a whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.checkpoints.arrays.tree import main_dtype


@pytest.mark.parametrize("kind", [np.zeros, jax.ShapeDtypeStruct])
def test_the_main_dtype_is_the_one_that_most_bytes_have(kind):
    norm, table, ids = kind((3,), jnp.float32), kind((4, 8), jnp.bfloat16), kind((5,), jnp.int32)
    assert main_dtype([norm, table, ids]) == "bfloat16"
    assert main_dtype([norm]) == "float32"
