"""s3:// through real clients: what is restored, what is asked for, and what is said when it cannot be had."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from saving import Tiny, assert_same, save, save_standard, save_steps, shapes

from jserve.checkpoints.orbax.peel import fit_tree
from jserve.checkpoints.own_folder import open_arrays
from jserve.errors import CheckpointError, SourceError


class Notes:
    def __init__(self):
        self.notes = []

    def note(self, message):
        self.notes.append(message)

    def start(self, *arguments):
        pass

    advance = start

    def done(self):
        pass


@pytest.fixture(scope="module")
def params():
    return nnx.to_pure_dict(nnx.state(Tiny(nnx.Rngs(0)), nnx.Param))


def restored(opened, params):
    return fit_tree(opened.saved.tree, shapes(params), where="s3").leaves


def test_small(tmp_path, s3, params):
    save_standard(tmp_path / "ck", params)
    s3.upload(tmp_path / "ck", "run/ck")
    s3.forget()
    opened = open_arrays(f"{s3.uri}/run/ck")
    print(len(s3.requests))
    print(s3.requests)
    s3.forget()
    assert_same(restored(opened, params), params)
    print(len(s3.requests))
    print(s3.requests)
