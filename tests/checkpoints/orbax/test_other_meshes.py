"""Saved on eight devices, restored on fewer and on meshes of other shapes and names."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from restored_elsewhere import digest, split
from saving import flat, save_standard, save_steps

from jserve import LLM, SamplingParams
from jserve.checkpoints.arrays.place import place
from jserve.checkpoints.arrays.tree import flatten
from jserve.checkpoints.manifest import Manifest
from jserve.checkpoints.open import open_checkpoint
from jserve.checkpoints.own.folder import open_arrays
from jserve.errors import MeshError
from jserve.models.naive import naive_generate
from jserve.progress import SILENT
from jserve.testing.models import TINY_LLAMA, tiny_llama

TRAINED_ON = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
CHILD = Path(__file__).with_name("restored_elsewhere.py")


def described(folder, **overrides):
    manifest = Manifest(
        name="tiny",
        family="llama",
        config=TINY_LLAMA | overrides,
        dtype="float32",
        generation={},
        eos_ids=[],
        source="tiny",
        source_sha256="",
        files={},
    )
    (folder / "jserve.json").write_bytes(manifest.to_json())


def trained(params):
    """Parameters as fully sharded training has them: no device holds a whole one."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, split(leaf.shape, TRAINED_ON)), params)


@pytest.fixture(scope="module")
def params():
    return tiny_llama()[1]


@pytest.fixture(scope="module", params=["StandardCheckpointer", "train state by CheckpointManager"])
def folder(request, tmp_path_factory, params):
    root = tmp_path_factory.mktemp("trained")
    described(root)
    tree = trained(params)
    assert all(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(tree))
    if request.param == "StandardCheckpointer":
        save_standard(root / "run", tree)
    else:
        save_steps(root / "run", {5: {"params": tree, "opt_state": {"mu": tree}, "step": 5}})
    return root / "run"


def asked(params, shape):
    names = ("rows", "columns")[: len(shape)]
    mesh = Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), names)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split(leaf.shape, mesh)), params
    )


@pytest.mark.parametrize("shape", [(1,), (2,), (4,), (2, 2), (8,)], ids=str)
def test_on_another_mesh_each_device_reads_its_part_and_no_more(folder, params, shape):
    wanted = asked(params, shape)
    leaves = open_checkpoint(str(folder)).leaves
    read = {}

    def counted(path, leaf):
        def read_region(region):
            read.setdefault(path, []).append(math.prod(s.stop - s.start for s in region))
            return leaf.read_region(region)

        return dataclasses.replace(leaf, read_region=read_region)

    restored = place({path: counted(path, leaf) for path, leaf in leaves.items()}, wanted, where="run")
    again = open_arrays(str(folder)).restore(wanted)
    values = flat(params)
    for tree in (restored, again):
        for path, array in flatten(tree).items():
            assert array.sharding == flatten(wanted)[path].sharding
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), values[path][shard.index])
    for path, sizes in read.items():
        assert sum(sizes) == values[path].size
        assert max(sizes) == math.prod(flatten(wanted)[path].sharding.shard_shape(values[path].shape))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_in_a_process_with_fewer_devices_and_without_a_warning(folder, params, devices):
    command = [sys.executable, "-W", "error", str(CHILD), str(folder), str(devices)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not _of_start(line)] == []
    answers = json.loads(done.stdout)
    assert len(answers) == (4 if devices == 4 else 2)
    for answer in answers:
        assert {name: told[2] for name, told in answer.items()} == {
            ".".join(path): digest(value) for path, value in flat(params).items()
        }
        for path, value in flat(params).items():
            count, sizes, _ = answer[".".join(path)]
            assert count == devices
            if value.ndim > 1:  # a vector lies on one axis of the mesh only
                assert sizes == [value.size // devices]


def _of_start(line):
    """What a JAX with GPU plug-ins says on a machine without one."""
    return "absl::InitializeLog" in line or "cudart_stub" in line


def test_orbax_itself_warns_where_it_is_asked_for_no_shardings(folder):
    """Else the tests that nothing is warned of would show nothing."""
    path = open_arrays(str(folder)).saved.layout.arrays
    with (
        pytest.warns(UserWarning, match="option is unsafe when restoring on a different topology"),
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
    ):
        checkpointer.restore(path)


# --- heads that the mesh does not divide ------------------------------------------------------------------------------

NINE = {"num_heads": 9, "num_kv_heads": 3, "vocab_size": 252, "intermediate_size": 96, "hidden_size": 36}
SMALL = {"max_num_seqs": 1, "max_num_tokens": 8, "num_pages": 8, "max_model_len": 64, "program_store": False}


def served(folder, mesh):
    with LLM(str(folder), mesh=mesh, **SMALL, progress=SILENT) as llm:
        return llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].token_ids


@pytest.fixture(scope="module")
def nine(tmp_path_factory):
    root = tmp_path_factory.mktemp("nine")
    described(root, **NINE)
    graphdef, params = tiny_llama(**NINE)
    save_standard(root / "run", trained(params))
    return root / "run", naive_generate(graphdef, params, [5, 6, 7], 8)


@pytest.mark.parametrize("mesh", ["", "tensor=3"])
def test_nine_heads_on_the_devices_that_divide_them(nine, mesh):
    folder, wanted = nine
    assert served(folder, mesh) == wanted


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("tensor=2", r"tensor=2 does not divide heads 9 \(such as .*\), kv_heads 3 \(.*; tensor may be 1, 3"),
        ("tensor=4", r"tensor=4 does not divide heads 9 \(such as .*\), kv_heads 3 \(.*; tensor may be 1, 3"),
    ],
)
def test_nine_heads_on_others_are_refused_with_the_numbers(nine, mesh, words):
    with pytest.raises(MeshError, match=words):
        served(nine[0], mesh)


def test_one_head_of_keys_on_two_devices_is_refused_with_the_numbers(tmp_path):
    described(tmp_path, num_kv_heads=1)
    save_standard(tmp_path / "run", trained(tiny_llama(num_kv_heads=1)[1]))
    with pytest.raises(MeshError, match=r"tensor=2 does not divide kv_heads 1 \(such as .*\); tensor may be 1"):
        served(tmp_path / "run", "tensor=2")


def test_a_sharding_that_does_not_divide_is_no_restore_of_a_part(folder, params):
    """Where no rules stand before it, JAX itself refuses: nothing is padded or cut."""
    mesh = Mesh(np.array(jax.devices()[:3]), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows), params)
    with pytest.raises(ValueError, match="partitioned 3 times, but the dimension size is 256"):
        open_checkpoint(str(folder)).restore(wanted)
