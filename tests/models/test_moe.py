"""A mixture of experts against one token at a time in numpy, on one device and sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jserve.errors import UnsupportedModel
from jserve.models.linear import grouped_linear
from jserve.models.moe import Experts, ExpertsConfig
from sharding import MeshSpec, param_shardings

E, D, F = 6, 16, 24


def build(dtype=jnp.float32, **changed):
    config = ExpertsConfig(**{"count": E, "per_token": 2, "normalize": True, **changed})
    return Experts(config, hidden_size=D, intermediate_size=F, dtype=dtype, rngs=nnx.Rngs(0))


def tokens(count, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).normal(size=(count, D)), dtype)


def by_hand(experts, x):
    p = {
        name: np.asarray(getattr(experts, name)[...], np.float32).astype(np.float64)
        for name in ("router", "gate", "up", "down")
    }
    out = []
    for row in np.asarray(x, np.float32).astype(np.float64):
        given = np.exp(p["router"] @ row)
        given /= given.sum()
        chosen = np.argsort(-given)[: experts.config.per_token]
        weights = given[chosen] / (given[chosen].sum() if experts.config.normalize else 1.0)
        total = np.zeros(D)
        for e, weight in zip(chosen, weights, strict=True):
            gate = p["gate"][e] @ row
            total += weight * (p["down"][e] @ (gate / (1 + np.exp(-gate)) * (p["up"][e] @ row)))
        out.append(total)
    return np.stack(out)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("per_token", "count"), [(1, 1), (2, 7), (6, 3)])
def test_equals_one_token_at_a_time(normalize, per_token, count):
    experts, x = build(normalize=normalize, per_token=per_token), tokens(count)
    np.testing.assert_allclose(jax.jit(lambda x: experts(x))(x), by_hand(experts, x), rtol=1e-5, atol=1e-5)


def test_weights_that_are_not_normalized_are_what_the_router_gave():
    x = tokens(5)
    part, whole = build(normalize=False)(x), build(normalize=True)(x)
    ratio = np.asarray(part / whole)
    np.testing.assert_allclose(ratio, np.broadcast_to(ratio[:, :1], ratio.shape), rtol=1e-3)
    assert (ratio < 1).all()


def test_a_token_does_not_depend_on_the_others():
    """So rows of padding, whatever is in them, change nothing."""
    experts, x = build(), tokens(9)
    alone = jnp.concatenate([experts(x[i : i + 1]) for i in range(9)])
    np.testing.assert_allclose(experts(x), alone, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(experts(x.at[5:].set(1e6))[:5], experts(x)[:5])


def test_the_router_is_float32_in_bfloat16():
    """Logits that bfloat16 would round to the same choose rightly."""
    experts = build(jnp.bfloat16, per_token=1, normalize=False)
    router = jnp.ones((E, D), jnp.bfloat16).at[3, 0].set(1.0078125)
    experts.router.set_value(router)
    x = jnp.ones((1, D), jnp.bfloat16) * 16
    assert float(jnp.bfloat16(16 * D)) == float(jnp.bfloat16(16 * D + 16 * 0.0078125))
    weights, chosen = experts._route(x)
    assert chosen.tolist() == [[3]]
    assert weights.dtype == jnp.float32
    assert experts(x).dtype == jnp.bfloat16


@pytest.mark.parametrize("mesh", ["tensor=2", "tensor=4", "expert=2,tensor=2"])
def test_sharded_equals_one_device(mesh):
    mesh = MeshSpec.parse(mesh).build()
    experts, x = build(), tokens(7)
    graphdef, state = nnx.split(experts)
    params = jax.device_put(nnx.to_pure_dict(state), param_shardings(state, mesh))
    tensor = mesh.shape["tensor"]
    assert params["gate"].addressable_shards[0].data.shape == (E // mesh.shape["expert"], F // tensor, D)
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
    got = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))(params, x)
    np.testing.assert_allclose(got, experts(tokens(7)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [[3, 0, 4, 1], [0, 0, 0, 8], [8, 0, 0, 0]])
def test_a_grouped_product_is_one_of_each_group(sizes):
    rng = np.random.default_rng(1)
    w, x = rng.normal(size=(4, 5, 6)).astype(np.float32), rng.normal(size=(8, 6)).astype(np.float32)
    want = np.concatenate([rows @ w[e].T for e, rows in enumerate(np.split(x, np.cumsum(sizes)[:-1]))])
    got = grouped_linear(w, x, jnp.asarray(sizes, jnp.int32))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_choices_that_cannot_be_are_refused():
    with pytest.raises(UnsupportedModel, match="a token goes to 7 of 6 experts; allowed: 1 to all"):
        build(per_token=7)
    with pytest.raises(UnsupportedModel, match="the number of experts is 4097; allowed are 1 to 4096"):
        ExpertsConfig(count=4097, per_token=2, normalize=True)
