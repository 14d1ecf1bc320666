import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.models.linear import linear


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
@pytest.mark.parametrize(("out", "inner"), [((24,), (16,)), ((3, 8), (16,)), ((24,), (2, 8)), ((2, 3), (4, 4))])
def test_equals_numpy(rows, out, inner):
    rng = np.random.default_rng(0)
    w = rng.normal(size=(*out, *inner)).astype(np.float32)
    x = rng.normal(size=(rows, *inner)).astype(np.float32)
    got = jax.jit(linear)(w, x)
    want = x.reshape(rows, -1).astype(np.float64) @ w.reshape(-1, 16).astype(np.float64).T
    np.testing.assert_allclose(got, want.reshape(rows, *out), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_bfloat16_sums_in_float32(rows):
    w = jnp.ones((4, 2, 2048), jnp.bfloat16)
    x = jnp.ones((rows, 2, 2048), jnp.bfloat16).at[:, 0, 0].set(2.0)
    got = jax.jit(lambda w, x: linear(w, x, out_dtype=jnp.float32))(w, x)
    np.testing.assert_array_equal(got, np.full((rows, 4), 4097.0, np.float32))  # 4097 is no bfloat16
    assert linear(w, x).dtype == jnp.bfloat16


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"weight \(4, 16\) .* activations \(2, 17\)"):
        linear(jnp.zeros((4, 16)), jnp.zeros((2, 17)))
