"""Arrays in s3:// through real clients: what is restored, of which step, and what is asked for."""

from pathlib import PurePosixPath

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from buckets import Notes, data_keys, leaves
from flax import serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from saving import WRITERS, assert_same, save, save_composite, save_standard, save_steps

from jserve.checkpoints.own.folder import open_arrays
from jserve.errors import CheckpointError, SourceError


@pytest.mark.parametrize("writer", WRITERS)
def test_whoever_wrote_it(tmp_path, s3, params, writer):
    WRITERS[writer](tmp_path / "ck", params)
    s3.upload(tmp_path / "ck", "runs/a b/ck")
    assert_same(leaves(open_arrays(f"{s3.uri}/runs/a b/ck"), params), params)


@pytest.mark.parametrize("devices", [1, 2])
def test_onto_devices_as_from_a_folder(tmp_path, s3, params, devices):
    save_steps(tmp_path / "run", {3: params})
    s3.upload(tmp_path / "run", "run")
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("tensor",))
    wanted = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape,
            jnp.bfloat16,
            sharding=NamedSharding(mesh, PartitionSpec(*[None] * (a.ndim - 1), "tensor")),
        ),
        params,
    )
    near, far = open_arrays(str(tmp_path / "run")).restore(wanted), open_arrays(f"{s3.uri}/run").restore(wanted)
    jax.tree.map(np.testing.assert_array_equal, far, near)
    assert jax.tree.all(jax.tree.map(lambda a, w: a.sharding == w.sharding, far, wanted))


def test_the_bucket_itself_may_be_the_checkpoint(tmp_path, s3, params):
    save_standard(tmp_path / "ck", params)
    s3.upload(tmp_path / "ck")
    for uri in (s3.uri, f"{s3.uri}/"):
        assert_same(leaves(open_arrays(uri), params), params)


def test_flaxs_msgpack_file_is_copied(s3, params):
    for step in (5, 10):
        s3.put(f"run/checkpoint_{step}", serialization.to_bytes(jax.tree.map(lambda a, step=step: a * step, params)))
    s3.forget()
    assert_same(leaves(open_arrays(f"{s3.uri}/run"), params), jax.tree.map(lambda a: a * 10, params))
    assert s3.got == ["run/checkpoint_10"]
    assert_same(leaves(open_arrays(f"{s3.uri}/run/checkpoint_5"), params), jax.tree.map(lambda a: a * 5, params))


def test_the_newest_finished_step(tmp_path, s3, params):
    save_steps(tmp_path / "run", {n: jax.tree.map(lambda a, n=n: a + n, params) for n in (1, 3, 9, 12)})
    (tmp_path / "run" / "12" / "commit_success.txt").unlink()
    s3.upload(tmp_path / "run", "run")
    s3.forget()
    progress = Notes()
    opened = open_arrays(f"{s3.uri}/run", progress=progress)
    assert opened.saved.layout.step == "9"
    assert f"{s3.uri}/run: step 12 is passed over, it is unfinished" in "\n".join(progress.notes)
    assert_same(leaves(opened, params), jax.tree.map(lambda a: a + 9, params))
    assert not [key for key in data_keys(s3.got) if not key.startswith("run/9/")]
    assert not [key for key in s3.got if key.startswith("run/12/")]
    with pytest.raises(SourceError, match=rf"{s3.uri}/run/12 is unfinished: it has no commit_success.txt"):
        open_arrays(f"{s3.uri}/run/12")


def test_steps_of_usual_names_come_first_and_rivals_are_refused(tmp_path, s3, params):
    """Also beyond the few newest steps that are looked into."""
    run = tmp_path / "run"
    for name in ("1", "backup_2024", "best_30", "best_31", "best_32", "best_33"):
        save_standard(run / name, params)
    s3.upload(run, "run")
    assert open_arrays(f"{s3.uri}/run").saved.layout.step == "1"
    for name in ("40", "41", "42", "43", "checkpoint_3"):
        save_standard(run / name, params)
    s3.upload(run, "run")
    with pytest.raises(SourceError, match="2 kinds of names, the newest of each 43, checkpoint_3"):
        open_arrays(f"{s3.uri}/run")


def test_a_copy_beside_the_steps_does_not_hide_them(tmp_path, s3, params):
    save_steps(tmp_path / "run", {n: jax.tree.map(lambda a, n=n: a + n, params) for n in (1, 3)})
    save_standard(tmp_path / "run" / "best", params)
    s3.upload(tmp_path / "run", "run")
    opened = open_arrays(f"{s3.uri}/run")
    assert opened.saved.layout.step == "3"
    assert_same(leaves(opened, params), jax.tree.map(lambda a: a + 3, params))


def test_a_damaged_step_is_passed_over(tmp_path, s3, params):
    save_steps(tmp_path / "run", {3: params, 9: params})
    s3.upload(tmp_path / "run", "run")
    s3.put("run/9/default/manifest.ocdbt", b"x")
    progress = Notes()
    assert open_arrays(f"{s3.uri}/run", progress=progress).saved.layout.step == "3"
    assert any(f"{s3.uri}/run/9/default is damaged" in note for note in progress.notes)


def test_a_newer_step_is_seen_at_the_next_start(tmp_path, s3, params):
    save_steps(tmp_path / "run", {3: params})
    s3.upload(tmp_path / "run", "run")
    assert open_arrays(f"{s3.uri}/run").saved.layout.step == "3"
    save_steps(tmp_path / "run", {9: params})
    s3.upload(tmp_path / "run", "run")
    assert open_arrays(f"{s3.uri}/run").saved.layout.step == "9"


@pytest.mark.parametrize("item", ["", "/params"])
def test_a_named_step_is_held_against_those_beside_it(tmp_path, s3, params, item):
    save_composite(tmp_path / "run", {3: params, 9: params})
    (tmp_path / "run" / "step_0009" / "commit_success.txt").unlink()
    s3.upload(tmp_path / "run", "run")
    for start in (tmp_path, s3.uri):
        with pytest.raises(SourceError, match=rf"{start}/run/step_0009{item} is unfinished: it has no commit_success"):
            open_arrays(f"{start}/run/step_0009{item}")
        assert_same(leaves(open_arrays(f"{start}/run/step_0003{item}"), params), params)


@pytest.mark.parametrize("item", ["", "/params"])
def test_a_right_that_ends_at_a_step_or_an_item_is_enough(tmp_path, s3, params, item):
    save_composite(tmp_path / "run", {9: params})
    (tmp_path / "run" / "step_0009" / "commit_success.txt").unlink()
    s3.upload(tmp_path / "run", "team/run")
    s3.end_right_at(f"team/run/step_0009{item}")
    assert_same(leaves(open_arrays(f"{s3.uri}/team/run/step_0009{item}"), params), params)


@pytest.mark.parametrize("inside", ["", "/5/params"])
def test_small_arrays_that_old_orbax_keeps_in_one_file(tmp_path, s3, params, inside):
    folder = tmp_path / "run" / inside.strip("/")
    save(folder, params, use_ocdbt=False)
    for name in ("_METADATA", "_CHECKPOINT_METADATA", "_sharding", "commit_success.txt"):
        (folder / name).unlink()
    (folder / "checkpoint").write_bytes(serialization.to_bytes({"step": jnp.asarray(7)}))
    s3.upload(tmp_path / "run", "run")
    near, far = open_arrays(str(tmp_path / "run")), open_arrays(f"{s3.uri}/run")
    assert "checkpoint" not in [PurePosixPath(key).name for key in data_keys(s3.got)]
    assert far.saved.tree.keys() == near.saved.tree.keys() >= {("step",)}
    for path, array in near.saved.tree.items():
        np.testing.assert_array_equal(far.saved.tree[path].read(), array.read())


def test_only_what_is_needed_is_fetched(tmp_path, s3):
    tree = {"params": {"w": jnp.arange(64.0).reshape(8, 8), "v": jnp.ones(4)}, "opt_state": {"mu": jnp.zeros((8, 8))}}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    args = jax.tree.map(lambda a: ocp.SaveArgs(chunk_byte_size=128), tree)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "ck", args=ocp.args.PyTreeSave(tree, save_args=args))
    s3.upload(tmp_path / "ck", "ck")
    s3.put("ck/logs/events.out", b"x" * 1000)
    s3.forget()
    opened = open_arrays(f"{s3.uri}/ck")
    assert data_keys(s3.got) == []
    assert sum(method == "GET" and path == f"/{s3.bucket}" for method, path in s3.requests) == 1  # one listing
    s3.forget()
    kernel = opened.saved.tree["params", "w"]
    np.testing.assert_array_equal(kernel.read((slice(4, 8), slice(0, 8))), np.arange(32.0, 64).reshape(4, 8))
    chunks = [key for key in s3.got if not key.endswith(".zarray")]
    everything = {path.name for path in (tmp_path / "ck" / "params.w").iterdir()} - {".zarray"}
    assert chunks
    assert len(set(chunks)) == len(chunks) < len(everything)
    assert all(key.startswith("ck/params.w/") for key in chunks)


@pytest.mark.parametrize("cut", [True, False])
def test_a_lost_or_damaged_chunk_is_named(tmp_path, s3, params, cut):
    save(tmp_path / "ck", params, use_ocdbt=False)
    s3.upload(tmp_path / "ck", "ck")
    s3.put("ck/layers.1.kernel/0.0", b"x") if cut else s3.delete("ck/layers.1.kernel/0.0")
    opened = open_arrays(f"{s3.uri}/ck")
    with pytest.raises(CheckpointError, match=f"{s3.uri}/ck is damaged at layers.1.kernel: "):
        opened.restore(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params))
