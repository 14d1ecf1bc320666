"""What tests of checkpoints in buckets share: who listens, and what is compared."""

from pathlib import PurePosixPath

import numpy as np
from saving import shapes

from jserve.checkpoints.orbax.fit import fit_tree


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


def leaves(opened, params):
    return fit_tree(opened.saved.tree, shapes(params), where="s3").leaves


def data_keys(keys):
    """Of objects that hold values of arrays, or say where they are."""
    names = [PurePosixPath(key) for key in keys]
    return [str(key) for key in names if "d" in key.parts or key.name == "manifest.ocdbt" or key.name[:1].isdigit()]


def same_model(found, wanted):
    assert found.leaves.keys() == wanted.leaves.keys()
    for path, leaf in found.leaves.items():
        np.testing.assert_array_equal(leaf.read(), wanted.leaves[path].read(), err_msg=".".join(path))
