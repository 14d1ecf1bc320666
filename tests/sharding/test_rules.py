import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from sharding import MeshSpec, check_divisible, param_axes, param_shardings, partition


def _param(shape, axes):
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), out_sharding=axes, eager_sharding=False)


class Smol(nnx.Module):
    """The attention of SmolLM2-135M: 9 query heads, 3 KV heads; and a parameter that declares no axes."""

    def __init__(self):
        self.layers = nnx.List([nnx.Dict(q=_param((9, 64, 576), ("heads", "head_dim", "embed")))])
        self.k = _param((3, 64, 576), ("kv_heads", "head_dim", "embed"))
        self.table = _param((49152, 576), ("vocab", None))
        self.plain = nnx.Param(jax.ShapeDtypeStruct((5, 7), jnp.float32))


STATE = nnx.state(Smol())


def test_axes_have_the_structure_of_the_pure_dict():
    assert param_axes(STATE) == {
        "layers": {0: {"q": ("heads", "head_dim", "embed")}},
        "k": ("kv_heads", "head_dim", "embed"),
        "table": ("vocab", None),
        "plain": (),
    }


def test_shardings_follow_the_rules():
    mesh = MeshSpec(tensor=3).build()
    shardings = param_shardings(STATE, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(nnx.to_pure_dict(STATE))
    assert shardings["layers"][0]["q"] == NamedSharding(mesh, PartitionSpec("tensor", None, None))
    assert shardings["table"] == NamedSharding(mesh, PartitionSpec("tensor", None))
    assert shardings["plain"] == NamedSharding(mesh, PartitionSpec())


def test_what_does_not_divide_is_refused_with_all_numbers_and_what_would_work():
    with pytest.raises(ValueError) as caught:
        check_divisible(STATE, MeshSpec(tensor=2).shape)
    assert str(caught.value) == (
        "tensor=2 does not divide heads 9 (such as layers.0.q), kv_heads 3 (such as k); tensor may be 1, 3"
    )
    with pytest.raises(ValueError, match="tensor may be 1, 3"):
        param_shardings(STATE, MeshSpec(tensor=2).build())
    check_divisible(STATE, MeshSpec(tensor=3).shape)


def test_rules_refuse_unknown_names_and_collisions():
    with pytest.raises(ValueError, match=r"no rule for logical axes \['width'\]"):
        partition(("width", "embed"))
    with pytest.raises(ValueError, match="put two dimensions on mesh axis tensor"):
        partition(("heads", "mlp"))
    assert partition(("heads", None, "embed"), {"heads": "stage", "embed": None}) == PartitionSpec("stage", None, None)
