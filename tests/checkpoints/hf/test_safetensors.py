"""One .safetensors file: read as the safetensors package reads it, written as it writes it, and refused in words."""

import errno
import itertools
import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save, save_file

from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.hf import safetensors
from jserve.checkpoints.hf.safetensors import read_tensor_file, write_tensor_file
from jserve.errors import CheckpointError
from jserve.progress import SILENT

DTYPES = (
    np.float64,
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    np.int64,
    np.int32,
    np.int16,
    np.int8,
    np.uint64,
    np.uint32,
    np.uint16,
    np.uint8,
    np.bool_,
)


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    made = {f"t.{np.dtype(kind).name}": rng.integers(0, 2, (3, 5, 4)).astype(kind) for kind in DTYPES}
    return made | {
        "one": np.array(3.5, np.float32),
        "none": np.zeros((0, 4), np.float32),
        'odd "name" / ü\n': rng.standard_normal((2, 3)),
    }


def test_every_type_and_region_is_what_the_package_reads(tensors, tmp_path):
    path = tmp_path / "f.safetensors"
    save_file(tensors, path)
    found = read_tensor_file(path)
    assert found.problems == ()
    assert found.tensors.keys() == tensors.keys()
    with safe_open(path, framework="numpy") as file:
        for name, lazy in found.tensors.items():
            if "float8" not in name:  # which the package does not give to numpy
                np.testing.assert_array_equal(lazy.read(), file.get_tensor(name))
            np.testing.assert_array_equal(lazy.read(), tensors[name])
            assert (lazy.shape, lazy.dtype) == (tensors[name].shape, tensors[name].dtype)
            assert type(lazy.read()) is np.ndarray
            if lazy.shape == (3, 5, 4):
                region = (slice(1, 3), slice(0, 5), slice(1, 2))
                np.testing.assert_array_equal(lazy.read(region), tensors[name][region])


def test_the_bytes_written_are_those_of_the_package(tensors, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "_PIECE_BYTES", 16)
    lazy = {name: LazyArray.of(t) for name, t in reversed(tensors.items())}
    write_tensor_file(tmp_path / "f", lazy, progress=SILENT)
    assert (tmp_path / "f").read_bytes() == save(tensors, metadata={"format": "pt"})


def test_a_header_of_odd_length_is_read(tmp_path):
    header = b'{"a":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]}}'
    assert len(header) % 2 == 1
    values = np.arange(3).astype(ml_dtypes.bfloat16)
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    np.testing.assert_array_equal(read_tensor_file(tmp_path / "f").tensors["a"].read(), values)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": entry()}, 4, r"has \d+ bytes; its header says \d+"),
        ({"a": entry()}, 9, r"has \d+ bytes; its header says \d+"),
        ({"a": entry("F4")}, 8, "holds a as F4; types that are known: U64, I64, F64, F32"),
        ({"a": entry(offsets=(0, 4))}, 4, r"a \[2\] F32 takes bytes 0 to 4 in its header; wanted 0 to 8"),
        ({"a": entry(), "b": entry()}, 8, r"b \[2\] F32 takes bytes 0 to 8 in its header; wanted 8 to 16"),
        ({"a": entry(offsets=(8, 16))}, 16, r"takes bytes 8 to 16 in its header; wanted 0 to 8"),
        ({"a": entry(shape=(-2,), offsets=(0, -8))}, 0, "is damaged: a"),
        (
            {"a": entry(shape=(0, 2**70), offsets=(0, 0))},
            0,
            r"holds a in the shape \(0, 1180\d+\); allowed are 32 axes",
        ),
        ({"a": entry(shape=(1,) * 32 + (2,))}, 8, "allowed are 32 axes and 9223372036854775807 bytes"),
        ({"a": 3}, 0, "has a damaged header: Expected `object`"),
        ([], 0, "has a damaged header"),
        ({"a": {"dtype": "F32"}}, 0, "has a damaged header: Object missing required field"),
    ],
)
def test_what_is_wrong_is_said_with_the_file(tmp_path, header, data, words):
    text = json.dumps(header).encode()
    path = tmp_path / "f.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    found = read_tensor_file(path)
    assert len(found.problems) == 1
    assert found.problems[0].startswith(f"{path} ")
    with pytest.raises(CheckpointError, match=words):
        raise CheckpointError(found.problems[0])
    assert found.tensors == {}


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 100, (10**9).to_bytes(8, "little") + b" " * 50])
def test_what_is_no_such_file(tmp_path, data):
    (tmp_path / "f").write_bytes(data)
    assert read_tensor_file(tmp_path / "f").problems == (
        f"{tmp_path / 'f'} has {len(data)} bytes and no header of safetensors",
    )
    assert read_tensor_file(tmp_path / "g").problems == (f"{tmp_path / 'g'} cannot be read: No such file or directory",)


@pytest.mark.parametrize("span", [1, 40, 500, 1 << 20])
def test_any_region_is_read_whatever_is_read_at_once(tmp_path, monkeypatch, span):
    monkeypatch.setattr(safetensors, "_SPAN_BYTES", span)
    values = np.arange(4 * 3 * 5, dtype=np.int32).reshape(4, 3, 5)
    save_file({"before": np.zeros(3, np.int8), "a": values}, tmp_path / "f")
    lazy = read_tensor_file(tmp_path / "f").tensors["a"]
    for ends in itertools.product(*(itertools.combinations(range(size + 1), 2) for size in values.shape)):
        region = tuple(slice(*pair) for pair in ends)
        np.testing.assert_array_equal(lazy.read(region), values[region])
    assert lazy.read((slice(2, 2), slice(None), slice(0, 1))).shape == (0, 3, 1)


@pytest.fixture
def opened(tmp_path):
    """A file of a while ago, and its tensor."""
    path = tmp_path / "f"
    save_file({"a": np.zeros((100, 100))}, path)
    os.utime(path, (1e9, 1e9))
    return path, read_tensor_file(path).tensors["a"]


def test_links_and_rights_are_no_change(opened, tmp_path):
    path, lazy = opened
    os.link(path, tmp_path / "backup")
    path.chmod(0o400)
    assert lazy.read().shape == (100, 100)


def test_a_file_that_becomes_shorter_under_the_reader_is_an_error_in_words(opened):
    path, lazy = opened
    path.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        lazy.read()


def test_a_file_that_takes_the_place_of_one_of_its_size_is_not_read_with_it(opened):
    path, lazy = opened
    other = path.with_name("other")
    save_file({"a": np.ones((100, 100))}, other)
    assert other.stat().st_size == path.stat().st_size
    other.replace(path)
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        lazy.read()
    path.unlink()
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        lazy.read()


def test_a_disk_that_fails_is_an_error_in_words(opened, monkeypatch):
    path, lazy = opened

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(CheckpointError, match=f"cannot read {path}: Input/output error"):
        lazy.read()
