import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention import CacheSpec, cache_shape, read_pages, write_pages

SPEC = CacheSpec(num_kv_heads=3, head_dim=8, page_size=16, dtype=jnp.float32)


def test_written_pages_are_read_back_and_ids_out_of_range_are_dropped():
    cache = jnp.zeros(cache_shape(SPEC, 5, "cpu"), jnp.float32)
    tokens = jnp.asarray(np.random.default_rng(0).normal(size=(3 * 16, 3, 2, 8)), jnp.float32)
    cache = write_pages(cache, jnp.array([4, -1, 99]), tokens)
    np.testing.assert_array_equal(read_pages(cache, jnp.array([4])), tokens[:16])
    assert float(jnp.abs(read_pages(cache, jnp.arange(4))).sum()) == 0.0
    assert float(jnp.abs(read_pages(cache, jnp.array([99]))).sum()) == 0.0


def test_token_bytes():
    assert SPEC.token_bytes == 3 * 2 * 8 * 4
