"""A run that is still being trained is converted: one step is read, whatever is saved meanwhile."""

import json

import numpy as np
import pytest

from jserve.checkpoints.arrays.tree import nest
from jserve.checkpoints.convert import convert
from jserve.checkpoints.manifest import read_manifest
from jserve.checkpoints.origin import read_origin
from jserve.checkpoints.sources.local import LocalFolder
from jserve.checkpoints.written import open_written
from jserve.progress import SILENT
from jserve.testing.gguf import write_tiny_gguf


@pytest.fixture
def run(tmp_path):
    """A converted model, and steps of a trainer in it; ``save(step)`` adds one, all of whose values are its number."""
    import orbax.checkpoint as ocp

    leaves = write_tiny_gguf(tmp_path / "t.gguf")
    convert(str(tmp_path / "t.gguf"), tmp_path / "model")

    def save(step):
        with ocp.StandardCheckpointer() as checkpointer:
            tree = nest({path: np.full_like(leaf, step) for path, leaf in leaves.items()})
            checkpointer.save(tmp_path / "model" / "steps" / str(step), tree)

    save(200)
    return tmp_path / "model" / "steps", save


class Trainer:
    """A Progress: when ``task`` begins, a step is saved."""

    def __init__(self, task, save):
        self.task = task
        self.save = save

    def start(self, task, total, unit):
        if task == self.task:
            self.save(300)

    def advance(self, n): ...

    def note(self, message): ...

    def done(self): ...


@pytest.mark.parametrize("task", ["hash the source", "convert steps"])
def test_the_step_that_was_hashed_is_the_one_that_is_converted(run, tmp_path, task):
    folder, save = run
    origin = read_origin(LocalFolder(path=folder, kind="orbax"), progress=SILENT)
    convert(str(folder), tmp_path / "out", progress=Trainer(task, save))
    assert (folder / "300").is_dir()
    checkpoint = open_written(tmp_path / "out")
    assert {float(value) for leaf in checkpoint.leaves.values() for value in np.unique(leaf.read())} == {200.0}
    assert read_manifest(tmp_path / "out").source_sha256 == origin.sha256
    assert json.loads((tmp_path / "out" / "jserve.json").read_text())["eos_ids"] == [2]
