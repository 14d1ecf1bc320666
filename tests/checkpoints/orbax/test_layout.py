"""Whatever wrote it, a folder's newest finished and readable tree is found, and words say which it was."""

import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.training import checkpoints, train_state
from saving import WRITERS, assert_same, save, save_standard, save_steps, shapes

from jserve.checkpoints.orbax import integrity
from jserve.checkpoints.orbax.fit import fit_tree
from jserve.checkpoints.orbax.layout import find_layouts, is_checkpoint
from jserve.checkpoints.orbax.peel import peel
from jserve.checkpoints.orbax.saved import open_saved
from jserve.errors import CheckpointError, SourceError, UnsupportedModel

WORDS = {
    "StandardCheckpointer": "Orbax checkpoint (OCDBT, zarr)",
    "PyTreeCheckpointer": "Orbax checkpoint (OCDBT, zarr)",
    "PyTreeCheckpointer, without OCDBT": "Orbax checkpoint (zarr in a folder each)",
    "PyTreeCheckpointer, zarr3": "Orbax checkpoint (OCDBT, zarr3)",
    "PyTreeCheckpointer, zarr3 without OCDBT": "Orbax checkpoint (zarr3 in a folder each)",
    "CheckpointManager": "Orbax checkpoint, step 23 (2 finished, 0 unfinished), item default (OCDBT, zarr)",
    "CheckpointManager, items": (
        "Orbax checkpoint, step step_0009 (1 finished, 0 unfinished), "
        "item params (others: info, opt_state) (OCDBT, zarr)"
    ),
    "v1": "Orbax checkpoint (v1 API), item state (OCDBT, zarr3)",
    "v1, items": "Orbax checkpoint (v1 API), item model_params (others: x) (OCDBT, zarr3)",
    "train state": "Orbax checkpoint (OCDBT, zarr)",
    "v1, steps": "Orbax checkpoint, step 23 (2 finished, 0 unfinished), item state (OCDBT, zarr3)",
    "Linen train state": "Orbax checkpoint (OCDBT, zarr)",
    "Linen train state, PyTreeCheckpointer": "Orbax checkpoint (zarr in a folder each)",
    "Linen train state, items": ("Orbax checkpoint, step 5 (1 finished, 0 unfinished), item items (OCDBT, zarr)"),
    "Linen train state, as Flax's guide": (
        "Orbax checkpoint, step 1 (1 finished, 0 unfinished), item default (OCDBT, zarr)"
    ),
    "msgpack": "Flax msgpack file flax_model.msgpack (msgpack)",
    "msgpack of a train state": "Flax msgpack file checkpoint (msgpack)",
    "params of a train state": "Orbax checkpoint (OCDBT, zarr)",
}


class Notes:
    """A Progress that keeps what it is told."""

    def __init__(self):
        self.notes = []

    def note(self, message):
        self.notes.append(message)


@pytest.mark.parametrize("writer", WRITERS)
def test_whoever_wrote_it(written, params, writer):
    folder = written(writer)
    assert is_checkpoint(folder)
    saved = open_saved(folder)
    assert saved.words == WORDS[writer]
    assert_same(fit_tree(saved.tree, shapes(params), where=str(folder)).leaves, params)


def test_a_step_and_an_item_may_be_named(written, params):
    folder = written("CheckpointManager")
    zeros = jax.tree.map(jnp.zeros_like, params)
    for name, tree in {"23": params, "3": zeros, "23/default": params}.items():
        assert_same(fit_tree(open_saved(folder / name).tree, shapes(params), where=name).leaves, tree)


@pytest.mark.parametrize("name", ["{}", "step_{}", "checkpoint_{}", "ckpt-{}", "epoch_{}"])
def test_steps_of_usual_names_come_before_copies_with_higher_numbers(tmp_path, params, name):
    zeros = jax.tree.map(jnp.zeros_like, params)
    for step, tree in {name.format(100): zeros, name.format(200): params}.items():
        save_standard(tmp_path / "run" / step, tree)
    others = [] if name == "epoch_{}" else ["backup_20240101", "best_7"]
    for copy in others:
        save_standard(tmp_path / "run" / copy, zeros)
        (tmp_path / "run" / copy / "commit_success.txt").touch()  # says nothing of the run's own steps
    (tmp_path / "run" / "logs_2024").mkdir()
    layout = open_saved(tmp_path / "run").layout
    assert (layout.step, layout.finished) == (name.format(200), (name.format(200), name.format(100)))
    assert layout.unfinished == ()


@pytest.mark.parametrize("names", [("100", "checkpoint_300"), ("best_7", "last_9")])
def test_steps_of_rival_names_are_refused_by_name(tmp_path, params, names):
    for name in names:
        save_standard(tmp_path / "run" / name, params)
    with pytest.raises(SourceError, match=rf"2 kinds of names, the newest of each {names[1]}, {names[0]}") as error:
        open_saved(tmp_path / "run")
    assert error.value.fix == f"name the step, such as {tmp_path}/run/{names[1]}"


def test_what_an_optimizer_takes_is_told_apart(written, params):
    saved = open_saved(written("train state"))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert sum(array.nbytes for array in peel(saved.tree).params.values()) == size
    assert sum(array.nbytes for array in saved.tree.values()) == 3 * size + 8


def test_unfinished_steps_are_passed_over_with_a_word(tmp_path, params):
    save_steps(tmp_path / "run", {3: params, 9: params, 12: params})
    os.rename(tmp_path / "run" / "12", tmp_path / "run" / "12.orbax-checkpoint-tmp-1700000000")
    (tmp_path / "run" / "9" / "commit_success.txt").unlink()
    progress = Notes()
    saved = open_saved(tmp_path / "run", progress=progress)
    assert saved.layout.step == "3"
    assert saved.layout.finished == ("3",)
    assert [step.name for step in saved.layout.unfinished] == ["12.orbax-checkpoint-tmp-1700000000", "9"]
    assert progress.notes[0] == (
        f"{tmp_path}/run: step 12.orbax-checkpoint-tmp-1700000000 is passed over, it is unfinished: its name has "
        ".orbax-checkpoint-tmp in it, which Orbax takes away when all is written"
    )
    assert "step 9 is passed over, it is unfinished: it has no commit_success.txt" in progress.notes[1]


@pytest.mark.parametrize(
    "name", ["9", "12.orbax-checkpoint-tmp-1700000000", "12.orbax-checkpoint-tmp-1700000000/default"]
)
def test_an_unfinished_step_that_is_named_is_refused(tmp_path, params, name):
    save_steps(tmp_path / "run", {3: params, 9: params, 12: params})
    os.rename(tmp_path / "run" / "12", tmp_path / "run" / "12.orbax-checkpoint-tmp-1700000000")
    (tmp_path / "run" / "9" / "commit_success.txt").unlink()
    with pytest.raises(SourceError, match=f"run/{name} is unfinished: "):
        open_saved(tmp_path / "run" / name)


def test_nothing_but_unfinished_steps(tmp_path, params):
    save_steps(tmp_path / "run", {12: params})
    os.rename(tmp_path / "run" / "12", tmp_path / "run" / "12.orbax-checkpoint-tmp")
    with pytest.raises(
        SourceError, match=r"holds no finished step: 12.orbax-checkpoint-tmp is unfinished: its name has"
    ):
        open_saved(tmp_path / "run")


def _cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda step: _cut(step / "default" / "_METADATA"), "_METADATA is damaged"),
        (lambda step: (step / "default" / "_METADATA").write_bytes(b""), "_METADATA is damaged"),
        (
            lambda step: (step / "default" / "manifest.ocdbt").unlink(),
            "manifest.ocdbt, the index of its arrays, is missing",
        ),
        (lambda step: _cut(step / "default" / "manifest.ocdbt"), "arrays that cannot be opened"),
        (lambda step: shutil.rmtree(step / "default" / "d"), "arrays that cannot be opened"),
        (lambda step: shutil.rmtree(step / "default"), "it has no arrays; its items are default"),
        (lambda step: _cut(step / "_CHECKPOINT_METADATA"), "_CHECKPOINT_METADATA is damaged"),
    ],
)
def test_a_damaged_step_is_passed_over_and_refused_where_it_is_named(tmp_path, params, damage, words):
    save_steps(tmp_path / "run", {3: params, 12: params})
    damage(tmp_path / "run" / "12")
    progress = Notes()
    saved = open_saved(tmp_path / "run", progress=progress)
    assert saved.layout.step == "3"
    assert_same(fit_tree(saved.tree, shapes(params), where="3").leaves, params)
    assert words in progress.notes[0]
    assert str(tmp_path / "run" / "12") in progress.notes[0]
    with pytest.raises(CheckpointError, match=words) as error:
        open_saved(tmp_path / "run" / "12")
    assert str(tmp_path / "run" / "12") in error.value.message
    damage(tmp_path / "run" / "3")
    with pytest.raises(CheckpointError, match=r"(?s)no step of .*/run can be read:\n.*run/12.*\n.*run/3"):
        open_saved(tmp_path / "run")


LARGER = {name: {"kernel": np.random.default_rng(0).standard_normal((300, 8), np.float32)} for name in ("a", "b")}
"""Arrays that OCDBT keeps in files of data, as small ones it does not."""


def _data_file(folder):
    """The largest file of an OCDBT database."""
    return max((folder / "ocdbt.process_0" / "d").iterdir(), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, r"has \d+ bytes of at least \d+; in it lie "),
        (lambda file: file.write_bytes(b""), r"has 0 bytes of at least \d+; in it lie "),
        (lambda file: file.unlink(), "is missing; in it lie "),
    ],
)
def test_a_step_whose_arrays_are_cut_off_is_passed_over(tmp_path, damage, words):
    save_steps(tmp_path / "run", {3: LARGER, 12: LARGER})
    file = _data_file(tmp_path / "run" / "12" / "default")
    damage(file)
    progress = Notes()
    saved = open_saved(tmp_path / "run", progress=progress)
    assert saved.layout.step == "3"
    assert_same(saved.tree, LARGER)
    with pytest.raises(CheckpointError, match=f"{file.name} {words}") as error:
        open_saved(tmp_path / "run" / "12")
    assert error.value.message.startswith(f"{tmp_path}/run/12/default is damaged:")
    assert "kernel" not in error.value.message.partition("in it lie ")[0]
    assert error.value.message.partition("in it lie ")[2] in ("a.kernel", "b.kernel", "a.kernel, b.kernel")
    assert error.value.fix == "copy it anew from where it was made, or give an older step"
    assert error.value.message in progress.notes[0]


def test_a_database_that_leads_out_of_its_folder_is_refused(tmp_path):
    save(tmp_path / "ck", LARGER)
    file = _data_file(tmp_path / "ck")
    shutil.move(file, tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    with pytest.raises(SourceError, match=file.name):
        open_saved(tmp_path / "ck")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.unlink(), "layers.1.kernel has 0 of its 1 files"),
        (lambda file: file.write_bytes(b""), "layers.1.kernel/.* is empty"),
    ],
)
@pytest.mark.parametrize("zarr3", [False, True])
def test_a_lost_chunk_is_damage_and_not_zeros(tmp_path, params, zarr3, damage, words):
    save(tmp_path / "ck", params, use_ocdbt=False, use_zarr3=zarr3)
    damage(tmp_path / "ck" / "layers.1.kernel" / ("c/0/0" if zarr3 else "0.0"))
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/ck is damaged:\n  {words}"):
        open_saved(tmp_path / "ck")


def test_an_index_that_is_too_large_to_look_through_is_refused(tmp_path, params, monkeypatch):
    save_standard(tmp_path / "ck", params)
    monkeypatch.setattr(integrity, "_MAX_NODES", 0)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/ck is damaged: the index of its arrays has more than 0 nod"):
        open_saved(tmp_path / "ck")


@pytest.mark.parametrize("zarr3", [False, True])
def test_a_damaged_chunk_is_found_when_it_is_read_and_named_with_its_file(tmp_path, params, zarr3):
    save(tmp_path / "ck", params, use_ocdbt=False, use_zarr3=zarr3)
    file = tmp_path / "ck" / "layers.1.kernel" / ("c/0/0" if zarr3 else "0.0")
    _cut(file)
    tree = open_saved(tmp_path / "ck").tree
    tree["layers", "0", "kernel"].read()
    with pytest.raises(CheckpointError, match=f"{tmp_path}/ck is damaged at layers.1.kernel: .*{file}") as error:
        tree["layers", "1", "kernel"].read()
    assert error.value.fix == "copy it anew from where it was made, or give an older step"


def test_folders_of_arrays_without_metadata(tmp_path, params):
    save(tmp_path / "ck", params, use_ocdbt=False)
    for name in ("_METADATA", "_CHECKPOINT_METADATA", "_sharding", "commit_success.txt"):
        (tmp_path / "ck" / name).unlink()
    saved = open_saved(tmp_path / "ck")
    assert saved.words == "arrays in a folder each, without metadata (zarr in a folder each)"
    assert_same(fit_tree(saved.tree, shapes(params), where="ck").leaves, params)


class Linear(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


@pytest.fixture
def linen_state():
    import optax

    variables = Linear().init(jax.random.key(0), jnp.ones((1, 2)))
    return train_state.TrainState.create(apply_fn=Linear().apply, params=variables["params"], tx=optax.adam(1e-3))


@pytest.mark.filterwarnings("ignore:Flax Checkpointing will soon be deprecated:DeprecationWarning")
@pytest.mark.parametrize("through_orbax", [True, False])
def test_a_linen_train_state_by_flax(tmp_path, linen_state, through_orbax):
    from flax import config

    before = config.flax_use_orbax_checkpointing
    config.update("flax_use_orbax_checkpointing", through_orbax)
    try:
        for step in (5, 10):
            checkpoints.save_checkpoint(str(tmp_path / "run"), linen_state, step=step, keep=2)
    finally:
        config.update("flax_use_orbax_checkpointing", before)
    saved = open_saved(tmp_path / "run")
    assert saved.layout.step == "checkpoint_10"
    kind = "Orbax checkpoint" if through_orbax else "Flax msgpack file checkpoint_10"
    assert saved.words.startswith(f"{kind}, step checkpoint_10 (2 finished")
    fitted = fit_tree(saved.tree, shapes(linen_state.params), where="run")
    assert_same(fitted.leaves, linen_state.params)
    assert fitted.root == ("params",)


def test_others_are_refused_by_name(tmp_path):
    (tmp_path / "metadata.json").write_text("{}")
    (tmp_path / "model").mkdir()
    with pytest.raises(UnsupportedModel, match="looks like a Levanter checkpoint"):
        open_saved(tmp_path)


def test_nothing_is_there(tmp_path):
    assert not is_checkpoint(tmp_path)
    with pytest.raises(
        SourceError, match=r"holds no Flax checkpoint; looked for orbax.checkpoint, _CHECKPOINT_METADATA"
    ):
        open_saved(tmp_path)
    with pytest.raises(SourceError, match=r"cannot read .*/none: No such file or directory"):
        open_saved(tmp_path / "none")


def test_items_of_which_none_is_known(tmp_path, params):
    for name in ("policy", "critic"):
        save_standard(tmp_path / "ck" / name, params)
    with pytest.raises(SourceError, match="has the items critic, policy, none of them called params") as error:
        find_layouts(tmp_path / "ck")
    assert error.value.fix == f"name the one that holds the parameters, such as {tmp_path}/ck/critic"
    assert len(open_saved(tmp_path / "ck" / "policy").tree) == len(shapes(params))


def test_values_that_are_no_arrays(tmp_path):
    tree = {"params": {"w": jnp.ones((2, 3), jnp.bfloat16)}, "note": "text", "none": None, "empty": {}, "step": 3}
    save(tmp_path / "ck", tree)
    found = open_saved(tmp_path / "ck").tree
    assert found.keys() == {("params", "w"), ("step",)}
    assert found["params", "w"].dtype.name == "bfloat16"
    np.testing.assert_array_equal(found["step",].read(), 3)


@pytest.mark.parametrize("name", ["init", "best", "final"])
def test_a_copy_beside_the_steps_does_not_hide_them(tmp_path, params, name):
    save_steps(tmp_path / "run", {100: params, 200: params})
    save_standard(tmp_path / "run" / name, params)
    (layout,) = find_layouts(tmp_path / "run")[:1]
    assert (layout.step, layout.finished) == ("200", ("200", "100"))
    assert find_layouts(tmp_path / "run" / name)[0].arrays == tmp_path / "run" / name


def test_a_number_that_is_no_step_hides_nothing(tmp_path, params):
    save_standard(tmp_path / "run" / "params", params)
    (tmp_path / "run" / "2024").mkdir()
    assert find_layouts(tmp_path / "run")[0].item == "params"


def test_parameters_beside_steps_are_not_chosen_between(tmp_path, params):
    save_steps(tmp_path / "run", {100: params})
    save_standard(tmp_path / "run" / "params", params)
    with pytest.raises(SourceError, match=r"holds the steps 100, and beside them params; which is meant") as error:
        find_layouts(tmp_path / "run")
    assert str(tmp_path / "run" / "params") in error.value.fix


def test_a_path_may_climb(tmp_path, params, monkeypatch):
    save_standard(tmp_path / "ck", params)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert_same(open_saved(Path("../ck")).tree, params)
