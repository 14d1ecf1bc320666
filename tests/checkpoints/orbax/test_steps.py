"""Folders of many steps, and folders beside them whose names say little."""

from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import pytest
from saving import save, save_standard, save_steps

from jserve.checkpoints.inspection.inspect import inspect
from jserve.checkpoints.orbax import layout as layouts
from jserve.checkpoints.orbax.layout import find_layouts, is_checkpoint
from jserve.checkpoints.orbax.saved import open_saved
from jserve.checkpoints.orbax.steps import COMMITTED, find_steps
from jserve.errors import CheckpointError

TREE = {"w": jnp.ones((2, 3))}


@pytest.mark.parametrize("committed", [False, True])
def test_each_step_is_looked_at_once(tmp_path, monkeypatch, committed):
    """A run of 2,000 steps whose siblings were asked for each of them took a minute."""
    for step in range(40):
        (tmp_path / str(step)).mkdir()
        if committed and step != 7:
            (tmp_path / str(step) / COMMITTED).touch()
    asked = Counter()
    real = Path.exists

    def counted(path, **options):
        asked[path] += 1
        return real(path, **options)

    monkeypatch.setattr(Path, "exists", counted)
    finished, unfinished = find_steps(tmp_path)
    assert (len(finished), len(unfinished)) == ((39, 1) if committed else (40, 0))
    assert asked == {tmp_path / str(step) / COMMITTED: 1 for step in range(40)}


def test_the_metadata_of_a_step_is_read_once(tmp_path, monkeypatch):
    save_steps(tmp_path / "run", dict.fromkeys((1, 2, 3), TREE))
    read = []
    real = layouts._described
    monkeypatch.setattr(layouts, "_described", lambda folder: read.append(folder.name) or real(folder))
    assert find_layouts(tmp_path / "run")[0].step == "3"
    assert sorted(read) == ["1", "2", "3"]


def test_a_folder_that_is_called_as_pickles_are_hides_no_steps(tmp_path):
    save_steps(tmp_path / "run", {100: TREE})
    save_standard(tmp_path / "run" / "best.ckpt", TREE)
    assert open_saved(tmp_path / "run").layout.step == "100"
    assert open_saved(tmp_path / "run" / "best.ckpt").layout.kind == "orbax"


def test_an_item_and_an_array_may_be_called_as_pickles_are(tmp_path):
    save(tmp_path / "run" / "best.ckpt", {"w": {"bin": jnp.ones((2, 3))}}, use_ocdbt=False)
    assert (tmp_path / "run" / "best.ckpt" / "w.bin").is_dir()
    saved = open_saved(tmp_path / "run")
    assert saved.layout.item == "best.ckpt"
    assert saved.tree["w", "bin"].read().shape == (2, 3)


@pytest.mark.parametrize("name", ["weights", "policy"])
def test_an_item_of_any_name_is_a_checkpoint_to_whoever_asks(tmp_path, name):
    save_standard(tmp_path / "run" / name, TREE)
    assert find_layouts(tmp_path / "run")[0].item == name
    assert is_checkpoint(tmp_path / "run")
    assert inspect(str(tmp_path / "run")).item == name


def test_an_item_without_metadata_is_one_too(tmp_path):
    save(tmp_path / "run" / "params", TREE, use_ocdbt=False)
    for file in ("_METADATA", "_CHECKPOINT_METADATA"):
        (tmp_path / "run" / "params" / file).unlink()
    assert find_layouts(tmp_path / "run")[0].item == "params"
    assert is_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("handlers", ["5", '"items"', "[1]", "true", "null"])
def test_handlers_that_are_no_table_name_no_items(tmp_path, handlers):
    (tmp_path / "_CHECKPOINT_METADATA").write_text(f'{{"item_handlers": {handlers}}}')
    with pytest.raises(CheckpointError, match="holds no Flax checkpoint"):
        open_saved(tmp_path)
    with pytest.raises(CheckpointError, match="holds no Flax checkpoint"):
        inspect(str(tmp_path))
