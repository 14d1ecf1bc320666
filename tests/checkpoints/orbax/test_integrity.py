"""Pieces of arrays that are not there: lost ones are refused, and those that may have been left out are named."""

import json

import numpy as np
import pytest
import tensorstore
from saving import save, save_steps

from jserve.checkpoints.inspection.inspect import inspect
from jserve.checkpoints.orbax.saved import open_saved
from jserve.errors import CheckpointError


class Notes:
    """A Progress that keeps what it is told."""

    def __init__(self):
        self.notes = []

    def note(self, message):
        self.notes.append(message)


def write(folder, values, *, driver="zarr", fill_value=None):
    """An array in pieces of two rows, as TensorStore writes it where it is told no more."""
    if driver == "zarr":
        chunks = {"chunks": [2, values.shape[1]], "dtype": "<f4", "fill_value": fill_value}
    else:
        grid = {"name": "regular", "configuration": {"chunk_shape": [2, values.shape[1]]}}
        chunks = {"chunk_grid": grid, "data_type": "float32", "fill_value": fill_value}
    spec = {
        "driver": driver,
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "metadata": {"shape": list(values.shape), **chunks},
    }
    tensorstore.open(spec, create=True).result().write(values).result()


HALF = np.concatenate([np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)])
"""The second of its two pieces holds zeros."""


@pytest.mark.parametrize("metadata", [False, True])
def test_a_lost_piece_of_a_tree_that_says_nothing_is_no_zeros(tmp_path, metadata):
    """Orbax's zarr has no fill value, and then every piece is written, be it zeros."""
    save(tmp_path / "ck", {"w": HALF, "v": HALF}, use_ocdbt=False)
    for name in ("w", "v"):
        write(tmp_path / "new" / name, HALF)
    for path in (tmp_path / "ck" / "w", tmp_path / "ck" / "v"):
        assert (path / "0.0").exists()
    if metadata:
        file = tmp_path / "ck" / "_METADATA"
        told = json.loads(file.read_text())
        del told["store_array_data_equal_to_fill_value"]  # as of an older Orbax
        (tmp_path / "new" / "_METADATA").write_text(json.dumps(told))
    np.testing.assert_array_equal(open_saved(tmp_path / "new").tree["w",].read(), HALF)
    (tmp_path / "new" / "w" / "1.0").unlink()
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/new is damaged:\n  w has 1 of its 2 files$"):
        open_saved(tmp_path / "new")


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_pieces_that_may_have_been_left_out_are_read_and_named(tmp_path, driver):
    for name, values in {"w": HALF, "v": HALF, "whole": HALF + 1}.items():
        write(tmp_path / "ck" / name, values, driver=driver, fill_value=0.0)
    write(tmp_path / "ck" / "opt_state.mu", HALF, driver=driver, fill_value=0.0)
    progress = Notes()
    saved = open_saved(tmp_path / "ck", progress=progress)
    assert saved.form == f"{driver} in a folder each"
    np.testing.assert_array_equal(saved.tree["w",].read(), HALF)
    assert sorted(".".join(path) for path in saved.absent) == ["opt_state.mu", "v", "w"]
    assert progress.notes[1] == (
        f"{tmp_path}/ck: pieces of v, w are not stored and are read as the fill value: their writer left them out, or "
        "they were lost"
    )
    report = inspect(str(tmp_path / "ck"))
    assert report.absent == ["opt_state.mu", "v", "w"]
    assert "  not stored     pieces of opt_state.mu, v, w: left out as equal to the fill value, or lost" in str(report)
    assert len(progress.notes) == 2


def test_an_optimizer_of_times_when_zeros_were_left_out_hinders_nobody(tmp_path):
    write(tmp_path / "ck" / "target.w", HALF)
    write(tmp_path / "ck" / "param_states.w.v", HALF)
    (tmp_path / "ck" / "param_states.w.v" / "1.0").unlink()
    tree = open_saved(tmp_path / "ck").tree
    np.testing.assert_array_equal(tree["target", "w"].read(), HALF)
    with pytest.raises(CheckpointError, match=r"is damaged at param_states\.w\.v"):
        tree["param_states", "w", "v"].read()


def test_a_step_that_lost_a_piece_is_passed_over(tmp_path):
    save_steps(tmp_path / "run", {1: {"w": HALF}})
    write(tmp_path / "run" / "2" / "w", HALF)
    (tmp_path / "run" / "2" / "w" / "1.0").unlink()
    for step in ("1", "2"):
        (tmp_path / "run" / step / "commit_success.txt").touch()
    saved = open_saved(tmp_path / "run")
    assert saved.layout.step == "1"
    assert "run/2 is damaged:\n  w has 1 of its 2 files" in saved.layout.damaged[0]


@pytest.mark.parametrize("ocdbt", [False, True])
def test_words_say_how_a_tree_is_stored_that_does_not_tell(tmp_path, ocdbt):
    save(tmp_path / "ck", {"w": HALF}, use_ocdbt=ocdbt)
    file = tmp_path / "ck" / "_METADATA"
    told = json.loads(file.read_text())
    del told["use_ocdbt"]
    file.write_text(json.dumps(told))
    assert open_saved(tmp_path / "ck").form == ("OCDBT, zarr" if ocdbt else "zarr in a folder each")
