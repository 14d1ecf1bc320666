"""Restore: onto any sharding, in any dtype, strictly, and without a word on stderr."""

import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jserve.checkpoints.arrays import place as placing
from jserve.checkpoints.arrays.place import place
from jserve.checkpoints.arrays.tree import flatten
from jserve.checkpoints.convert import convert
from jserve.checkpoints.orbax import write
from jserve.checkpoints.orbax.read import read_tree
from jserve.checkpoints.written import open_written
from jserve.errors import CheckpointError
from jserve.testing.gguf import write_tiny_gguf
from sharding.mesh import MeshSpec
from sharding.rules import param_shardings


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    leaves = write_tiny_gguf(folder / "t.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "xdg"))
        convert(str(folder / "t.gguf"), folder / "ck")
    return open_written(folder / "ck"), leaves


@pytest.mark.parametrize("mesh", ["", "tensor=2", "data=2,tensor=2"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_straight_onto_a_mesh_in_the_dtype_asked_for(made, mesh, dtype, caplog, capfd):
    checkpoint, leaves = made
    graphdef, state = checkpoint.abstract(dtype)
    shardings = param_shardings(state, MeshSpec.parse(mesh).build())
    asked = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nnx.to_pure_dict(state),
        shardings,
    )
    with caplog.at_level(logging.WARNING):
        params = checkpoint.restore(asked)
    assert caplog.records == []
    assert capfd.readouterr().err == ""
    nnx.merge(graphdef, params)
    wanted = flatten(asked)
    found = flatten(params)
    assert found.keys() == wanted.keys() == leaves.keys()
    for name, leaf in found.items():
        assert leaf.dtype == dtype
        assert leaf.sharding == wanted[name].sharding
        np.testing.assert_array_equal(np.asarray(leaf), leaves[name].astype(dtype), err_msg=str(name))


def test_leaves_without_a_sharding_go_to_the_first_device(made):
    checkpoint, _ = made
    params = checkpoint.restore(checkpoint.abstract(jnp.float32)[1])
    assert {leaf.devices().pop() for leaf in jax.tree.leaves(params)} == {jax.devices()[0]}
    assert list(params["layers"]) == [0, 1]


def test_how_it_was_sharded_when_saved_does_not_matter(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(8), ("x",))
    value = jnp.arange(64, dtype=jnp.float32).reshape(16, 4)
    saved = jax.device_put(value, NamedSharding(mesh, PartitionSpec("x")))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ck", {"a": {"b": saved}})
    other = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("y",)), PartitionSpec(None, "y"))
    asked = {"a": {"b": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=other)}}
    restored = place(read_tree(tmp_path / "ck").arrays, asked, where="ck")["a"]["b"]
    assert restored.sharding == other
    np.testing.assert_array_equal(np.asarray(restored), np.asarray(value))


def test_large_arrays_lie_in_pieces(made, tmp_path, monkeypatch):
    monkeypatch.setattr(write, "_CHUNK_BYTES", 4096)
    leaves = write_tiny_gguf(tmp_path / "t.gguf")
    convert(str(tmp_path / "t.gguf"), tmp_path / "ck")
    checkpoint = open_written(tmp_path / "ck")
    for name, leaf in flatten(checkpoint.restore(checkpoint.abstract(jnp.float32)[1])).items():
        np.testing.assert_array_equal(np.asarray(leaf), leaves[name])


def test_every_difference_is_named_with_the_shape_wanted_and_found(made):
    checkpoint, _ = made
    tree = nnx.to_pure_dict(checkpoint.abstract(jnp.float32)[1])
    tree["layers"][0]["q"] = jax.ShapeDtypeStruct((4, 8, 32), jnp.float32)
    tree["layers"][1]["bias"] = jax.ShapeDtypeStruct((7,), jnp.float32)
    del tree["head"]
    with pytest.raises(CheckpointError) as error:
        checkpoint.restore(tree)
    assert error.value.message.splitlines()[1:] == [
        "  layers.0.q: wanted [4, 8, 32], found [4, 16, 32]",
        "  layers.1.bias is missing: wanted [7]",
        "  head [272, 32] is not of this model",
    ]


def test_a_restore_holds_little_more_than_its_largest_leaf(made, monkeypatch):
    monkeypatch.setattr(placing, "_IN_FLIGHT_BYTES", 1)
    checkpoint, leaves = made
    params = checkpoint.restore(checkpoint.abstract(jnp.float32)[1])
    np.testing.assert_array_equal(np.asarray(params["norm"]), leaves["norm",])


def test_damaged_metadata_is_one_clear_error(made, tmp_path):
    checkpoint, _ = made
    shutil.copytree(checkpoint.path / "params", tmp_path / "params")
    (tmp_path / "params" / "_METADATA").write_bytes(b"\0" * 40)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/params/_METADATA is damaged"):
        read_tree(tmp_path / "params")


def test_a_folder_without_arrays(tmp_path):
    (tmp_path / "params").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot read .*/params/_METADATA: No such file"):
        read_tree(tmp_path / "params")
