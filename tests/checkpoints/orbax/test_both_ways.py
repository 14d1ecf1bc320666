"""Every way of saving, opened as a family that is known and as a module of one's own, with equal values on a mesh."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from saving import MODULE_WRITERS, WRITERS, flat, save, save_msgpack, save_standard, stacked
from trees import GEMMA3, LLAMA, QWEN3, deepmind_gemma, flax_names, hf_weights, maxtext

from jserve.checkpoints.hf.families import HF_FAMILIES
from jserve.checkpoints.open import open_checkpoint
from jserve.checkpoints.own.folder import open_arrays
from jserve.errors import CheckpointError
from jserve.models.registry import build_abstract, family

MESH = jax.make_mesh((2,), ("tensor",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])


@pytest.fixture(scope="module")
def llama():
    """A module of a family, with random parameters."""
    found = HF_FAMILIES["llama"]
    graphdef, state = build_abstract(family("llama"), found.config(LLAMA), np.float32)
    rng = np.random.default_rng(0)
    return nnx.merge(
        graphdef, jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape, np.float32)), state)
    )


@pytest.fixture(scope="module")
def values(llama):
    return nnx.to_pure_dict(nnx.state(llama, nnx.Param))


@pytest.fixture
def described(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path / "run"


def asked(tree, dtype=None):
    """Shapes of ``tree``, each split on its first axis that the mesh divides."""

    def one(leaf):
        axis = next((axis for axis, size in enumerate(leaf.shape) if size % 2 == 0), None)
        spec = () if axis is None else (*(None,) * axis, "tensor")
        sharding = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=sharding)

    return jax.tree.map(one, tree)


def assert_restored(params, wanted, values):
    """Values, dtypes and shardings, and that each device has its part only."""
    found, wanted, values = (dict(_leaves(tree)) for tree in (params, wanted, values))
    assert found.keys() == values.keys()
    for path, leaf in found.items():
        assert (leaf.dtype, leaf.sharding) == (wanted[path].dtype, wanted[path].sharding)
        for shard in leaf.addressable_shards:
            part = np.asarray(values[path])[shard.index].astype(leaf.dtype)
            np.testing.assert_array_equal(np.asarray(shard.data), part, err_msg=".".join(path))


def _leaves(tree, at=()):
    for key, child in tree.items():
        if isinstance(child, dict):
            yield from _leaves(child, (*at, str(key)))
        else:
            yield (*at, str(key)), child


def assert_both(folder, values):
    """``values``: the pure dict of the family's parameters."""
    wanted = asked(values)
    assert_restored(open_checkpoint(str(folder)).restore(wanted), wanted, values)
    assert_restored(open_arrays(str(folder)).restore(wanted), wanted, values)


@pytest.mark.parametrize("writer", WRITERS)
def test_whatever_a_tree_is_saved_in(described, values, writer, caplog, capfd):
    WRITERS[writer](described, values)
    capfd.readouterr()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert_both(described, values)
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("writer", MODULE_WRITERS)
def test_whatever_a_module_is_saved_as(described, llama, values, writer):
    MODULE_WRITERS[writer](described, llama)
    assert_both(described, values)


STACK_WRITERS = {
    "OCDBT": save_standard,
    "zarr3 without OCDBT": lambda path, tree: save(path, tree, use_zarr3=True, use_ocdbt=False),
    "Linen train state": WRITERS["Linen train state, items"],
    "msgpack": save_msgpack,
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("writer", STACK_WRITERS)
def test_stacked_layers(described, values, writer, axis):
    STACK_WRITERS[writer](described, stacked(values, axis))
    assert f"layers stacked on axis {axis}" in open_checkpoint(str(described)).layout
    assert_both(described, values)


KNOWN = {
    "Hugging Face's names": (LLAMA, lambda weights: flax_names(weights)),
    "MaxText": (QWEN3, lambda weights: maxtext(QWEN3, weights, scan_axis=1)),
    **{
        f"Gemma, {form}": (GEMMA3, lambda weights, form=form: deepmind_gemma(GEMMA3, weights, form))
        for form in ("nested", "flat", "stacked")
    },
}


@pytest.mark.parametrize("name", KNOWN)
def test_trees_of_public_code_for_a_module_with_their_names(tmp_path, name):
    """That families read them is shown in test_open_orbax; a module of one's own may have the same names."""
    config, tree = KNOWN[name]
    tree = {key: value for key, value in tree(hf_weights(config)).items() if not key.startswith("SigLiP")}
    save_standard(tmp_path / "run", {"params": tree, "step": 3})
    wanted = asked(tree)
    assert_restored(open_arrays(str(tmp_path / "run")).restore(wanted), wanted, tree)


@pytest.mark.parametrize(("stored", "served"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_the_dtype_asked_for(described, values, stored, served):
    values = jax.tree.map(lambda leaf: leaf.astype(stored), values)
    save_standard(described, values)
    wanted = asked(values, jnp.dtype(served))
    for restored in (open_checkpoint(str(described)).restore(wanted), open_arrays(str(described)).restore(wanted)):
        assert {leaf.dtype.name for leaf in jax.tree.leaves(restored)} == {served}
        assert_restored(restored, wanted, values)


def test_numbers_of_layers_are_kept(described, values):
    """A checkpoint of 3 layers for a module of 2, and the reverse, are refused whichever way they are opened."""
    save_standard(described, values)
    for count in (2, 4):
        (described.parent / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": count}))
        with pytest.raises(CheckpointError, match="does not fit the model") as error:
            open_checkpoint(str(described))
        assert len(error.value.message.splitlines()) == 1 + len(flat(values["layers"][0]))
