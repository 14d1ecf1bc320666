"""One tiny tree, and checkpoints of it, each made once a module."""

import sys
from pathlib import Path

import pytest
from flax import nnx

sys.path.insert(0, str(Path(__file__).parent))
from saving import WRITERS, Tiny


@pytest.fixture(scope="session")
def tiny():
    return Tiny(nnx.Rngs(0))


@pytest.fixture(scope="session")
def params(tiny):
    """The pure dict of its parameters."""
    return nnx.to_pure_dict(nnx.state(tiny, nnx.Param))


@pytest.fixture(scope="module")
def written(tmp_path_factory, params):
    """``written(name)``: the folder of ``WRITERS[name]``, with the tree of ``params``."""
    root = tmp_path_factory.mktemp("written")

    def make(name):
        folder = root / name.replace(", ", "-").replace(" ", "-")
        if not folder.exists():
            WRITERS[name](folder, params)
        return folder

    return make
