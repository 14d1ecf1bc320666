"""The engine's two programs, compiled for a TPU and for GPUs that are not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jserve.engine.plan import decode_arrays, mixed_arrays
from jserve.engine.state import CacheLayout, state_shapes
from jserve.engine.step import Programs
from jserve.models.contract import trace_layer_caches
from jserve.models.llama import LlamaConfig
from jserve.models.registry import build_abstract, family
from sharding import param_shardings

pytestmark = pytest.mark.aot

SLOTS, WIDTH, PAGES, PAGE_SIZE = 8, 4, 4096, 128


@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_the_step_is_sharded_and_updates_its_cache_in_place(tensor_mesh, kind):
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        head_dim=128,
        max_position=512,
    )
    graphdef, state = build_abstract(family("llama"), config, jnp.bfloat16)
    shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nnx.to_pure_dict(state),
        param_shardings(state, tensor_mesh),
    )
    layers, _ = trace_layer_caches(graphdef, shapes)
    layout = CacheLayout.build(layers, num_pages=PAGES, page_size=PAGE_SIZE)
    programs = Programs(graphdef=graphdef, layout=layout, mesh=tensor_mesh, vocab_size=1024, max_steps=16)
    pools = layout.pool_shapes(tensor_mesh)
    platform = {"tpu": "tpu", "gpu": "cuda"}[tensor_mesh.devices.flat[0].platform]

    traced = jax.jit(programs.function(kind), donate_argnums=(1, 2)).trace(
        shapes, pools, state_shapes(SLOTS, tensor_mesh), _plan_shapes(kind, tensor_mesh)
    )
    compiled = traced.lower(lowering_platforms=(platform,)).compile()

    pool_bytes = sum(np.prod(pool.sharding.shard_shape(pool.shape)) * pool.dtype.itemsize for pool in pools)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes, "the step copies its cache"
    assert "all-reduce" in compiled.as_text()


def _plan_shapes(kind, mesh):
    if kind == "mixed":
        arrays = mixed_arrays([], bucket=64, size=SLOTS, width=WIDTH, num_slots=SLOTS)
    else:
        arrays = decode_arrays([], size=SLOTS, width=WIDTH, num_slots=SLOTS, steps=1, leave_early=False)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated), arrays)
