"""Layers that lie in one stored array are read one after the other, while what was unpacked of it is kept."""

from contextlib import contextmanager

import numpy as np
import pytest
import tensorstore
from safetensors.numpy import load_file, save_file

from jserve.checkpoints.arrays.hold import Holder, by_source
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.hf.safetensors import write_tensor_file
from jserve.checkpoints.orbax import write
from jserve.checkpoints.orbax.read import read_folders, read_tree
from jserve.progress import SILENT

LAYERS = 4


class Stack:
    """A source: all layers of one kind in one piece. Keeps what is done with it."""

    def __init__(self, kind, log):
        self.values = np.random.default_rng(len(kind)).standard_normal((LAYERS, 3, 2)).astype(np.float32)
        self.nbytes = self.piece_nbytes = self.values.nbytes
        self._kind, self._log = kind, log
        self._whole = LazyArray(shape=self.values.shape, dtype=self.values.dtype, read_region=self._read, source=self)

    def layer(self, i):
        return self._whole.at(0, i)

    @contextmanager
    def held(self):
        self._log.append(f"hold {self._kind}")
        yield
        self._log.append(f"leave {self._kind}")

    def _read(self, region):
        self._log.append(f"read {self._kind}")
        return self.values[region]


@pytest.fixture
def log():
    return []


@pytest.fixture
def layers(log):
    """By path, layer after layer, as models have them."""
    stacks = {kind: Stack(kind, log) for kind in ("k", "down")}
    return {("layers", str(i), kind): stack.layer(i) for i in range(LAYERS) for kind, stack in stacks.items()}


ONCE = [f"{what} {kind}" for kind in ("down", "k") for what in ("hold", *["read"] * LAYERS, "leave")]


@pytest.mark.parametrize("batch", [1, 60, 1 << 20])
def test_orbax_is_written_from_stacks_that_are_read_once(tmp_path, monkeypatch, layers, log, batch):
    monkeypatch.setattr(write, "_BATCH_BYTES", batch)
    write.write_arrays(tmp_path / "params", layers, parts=tmp_path / "parts", progress=SILENT)
    assert sorted(log) == sorted(ONCE)
    assert [line for line in log if not line.startswith("read")] in (
        ["hold k", "leave k", "hold down", "leave down"],
        ["hold down", "leave down", "hold k", "leave k"],
    )
    for path, leaf in read_tree(tmp_path / "params").arrays.items():
        np.testing.assert_array_equal(leaf.read(), layers[path].read())


def test_safetensors_are_written_from_stacks_that_are_read_once(tmp_path, layers, log):
    tensors = {".".join(path): leaf for path, leaf in layers.items()}
    write_tensor_file(tmp_path / "ours.safetensors", tensors, progress=SILENT)
    assert log == ONCE
    values = {name: leaf.read() for name, leaf in tensors.items()}
    save_file(values, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert load_file(tmp_path / "ours.safetensors").keys() == values.keys()


def test_what_can_be_read_by_itself_keeps_its_order_and_is_not_held(layers, log):
    plain = {"z": LazyArray.of(np.ones(3)), "a": LazyArray.of(np.ones(3))}
    assert by_source(plain, plain.__getitem__) == ["z", "a"]
    whole = layers["layers", "0", "k"].source._whole
    with Holder() as holder:
        for array in (*plain.values(), whole):
            holder.turn_to(array)
    assert log == []


def test_holding_what_is_held_changes_nothing(tmp_path):
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/ck/w/"},
        "metadata": {"shape": [4, 3], "chunks": [4, 3], "dtype": "<f4"},
    }
    tensorstore.open(spec, create=True).result().write(np.ones((4, 3), np.float32)).result()
    array = read_folders(tmp_path / "ck").arrays["w",]
    with array.source.held():
        kept = array.source._array
        with array.source.held():
            assert array.source._array is kept
        assert array.source._array is kept
    assert array.source._array is not kept
