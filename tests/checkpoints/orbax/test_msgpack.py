"""Flax's msgpack files: what flax writes is read, and what is no such file is refused in bounds."""

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from hypothesis import given
from hypothesis import strategies as st

from jserve.checkpoints.orbax.msgpack import read_msgpack
from jserve.errors import CheckpointError, UnsupportedModel

TREE = {
    "w": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "b": jnp.arange(5, dtype=jnp.bfloat16),
    "deep": {"er": {"i": np.array([1, -2], np.int8), "s": np.float32(1.5)}},
    "list": {"0": np.ones((), np.float16), "1": np.zeros((0, 3), np.uint8)},
    "step": 70_000,
    "name": "x" * 300,
    "z": 1 + 2j,
    "off": None,
    "flag": True,
    "loss": -0.5,
}


def write(path, tree):
    path.write_bytes(serialization.msgpack_serialize(tree))
    return path


def test_what_flax_writes(tmp_path):
    found = read_msgpack(write(tmp_path / "m.msgpack", TREE))
    assert found.keys() == {
        ("w",), ("b",), ("deep", "er", "i"), ("deep", "er", "s"), ("list", "0"), ("list", "1"),
    }  # fmt: skip
    for path, leaf in found.items():
        wanted = TREE
        for part in path:
            wanted = wanted[part]
        np.testing.assert_array_equal(leaf.read(), np.asarray(wanted), strict=True)
    np.testing.assert_array_equal(found["w",].read((slice(1, 2), slice(0, 2), slice(3, 4))), TREE["w"][1:2, 0:2, 3:4])


def test_large_arrays_lie_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 40)
    found = read_msgpack(write(tmp_path / "m.msgpack", {"w": TREE["w"]}))
    np.testing.assert_array_equal(found["w",].read(), TREE["w"])


def test_cut_off_at_any_byte(tmp_path):
    path = write(tmp_path / "m.msgpack", TREE)
    data = path.read_bytes()
    for end in range(0, len(data), 7):
        path.write_bytes(data[:end])
        with pytest.raises(CheckpointError, match=r"m.msgpack is (damaged or cut off|empty|no Flax checkpoint)"):
            read_msgpack(path)


@given(data=st.binary(max_size=200))
def test_any_bytes(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("m") / "checkpoint"
    path.write_bytes(data)
    with contextlib.suppress(CheckpointError):
        read_msgpack(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x81\xa1a" * 100, "nests deeper than 64"),
        (b"\xdf\xff\xff\xff\xff", "damaged or cut off"),
        (b"\xdd\xff\xff\xff\xff", "damaged or cut off"),
        (b"\x81\xa1a\xc7\x14\x01\x93\x91\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xa5int32\xc4\x00", "damaged or cut off"),
        (b"\x90", "it is not one map of msgpack"),
        (b"\x80\x80", "it is not one map of msgpack"),
    ],
)
def test_hostile_files(tmp_path, data, words):
    (tmp_path / "checkpoint").write_bytes(data)
    with pytest.raises(CheckpointError, match=words):
        read_msgpack(tmp_path / "checkpoint")


def test_dtypes_that_are_no_numbers(tmp_path):
    (tmp_path / "checkpoint").write_bytes(b"\x81\xa1a\xc7\x0c\x01\x93\x91\x00\xa6object\xc4\x00")
    with pytest.raises(UnsupportedModel, match="holds an array of type 'object'"):
        read_msgpack(tmp_path / "checkpoint")
