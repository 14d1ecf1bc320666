"""Files and targets that are not what they are taken for are refused in words, whatever Python makes of them."""

import json
import os
import struct
from dataclasses import dataclass

import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jserve.checkpoints.hf.files import read_json
from jserve.checkpoints.hf.folder import open_hf
from jserve.checkpoints.hf.safetensors import read_tensor_file
from jserve.checkpoints.hf.shards import read_index
from jserve.checkpoints.inspection.inspect import inspect
from jserve.checkpoints.orbax.msgpack import read_msgpack
from jserve.checkpoints.orbax.saved import open_saved
from jserve.checkpoints.own.config import read_config
from jserve.checkpoints.own.module import build_own_module
from jserve.errors import CheckpointError, ConfigError, SourceError
from jserve.testing.hf import write_tiny_hf

DEEP = b'{"a":' + 100_000 * b"[" + 100_000 * b"]" + b"}"


@dataclass
class Unresolved:
    width: "Nowhere"  # noqa: F821


class WithoutSelf:
    def __init__():
        pass


def file(folder, data):
    path = folder / "file.json"
    path.write_bytes(data)
    return path


def tensors(folder, header):
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(4))
    return path


def raise_problems(path):
    if problems := read_tensor_file(path).problems:
        raise CheckpointError("; ".join(problems))


def packed(folder, value):
    path = folder / "flax_model.msgpack"
    path.write_bytes(msgpack.packb(value, strict_types=True))
    return path


def array(*parts):
    return {"w": msgpack.ExtType(1, msgpack.packb(list(parts)))}


def chunked(shape, *chunks):
    whole = [msgpack.ExtType(1, msgpack.packb([[len(c) // 4], "float32", c])) for c in chunks]
    sizes = {str(i): size for i, size in enumerate(shape)}
    return {"w": {"__msgpack_chunked_array__": True, "shape": sizes, "chunks": dict(zip("0123", whole, strict=False))}}


def both_ways(folder):
    """An array ``params`` beside one ``params.w``, in a folder each and without metadata."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        tree = {"params": jnp.ones(2), "params.w": jnp.ones(2)}
        checkpointer.save(folder / "ck", args=ocp.args.PyTreeSave(tree))
    for name in ("_METADATA", "_CHECKPOINT_METADATA", "_sharding", "commit_success.txt"):
        (folder / "ck" / name).unlink(missing_ok=True)
    return folder / "ck"


def build(target):
    return build_own_module(target, where=(), dtype=jnp.float32)


HOSTILE = {
    "config.json, deep": (CheckpointError, "cannot read .*file.json", lambda f: read_config(file(f, DEEP), dict)),
    "annotations": (
        ConfigError,
        "the annotations of Unresolved cannot be read: NameError: name 'Nowhere'",
        lambda f: read_config(file(f, b'{"width": 1}'), Unresolved),
    ),
    "a target in C": (ConfigError, "builtins:min has no signature that can be read", lambda f: build("builtins:min")),
    "a class without self": (
        CheckpointError,
        "building it raised TypeError",
        lambda f: build(f"{__name__}:WithoutSelf"),
    ),
    "settings, deep": (
        CheckpointError,
        "file.json is damaged",
        lambda f: file(f, DEEP) and read_json(f, "file.json"),
    ),
    "index, deep": (
        CheckpointError,
        "file.json is damaged",
        lambda f: read_index(file(f, b'{"weight_map": {}, "more":' + DEEP + b"}")),
    ),
    "header, deep": (CheckpointError, "has a damaged header", lambda f: raise_problems(tensors(f, DEEP))),
    "msgpack, an int as a shape": (
        CheckpointError,
        "damaged or cut off",
        lambda f: read_msgpack(packed(f, array(4, "float32", bytes(16)))),
    ),
    "msgpack, an int as bytes": (
        CheckpointError,
        "damaged or cut off",
        lambda f: read_msgpack(packed(f, array([4], "float32", 16))),
    ),
    "msgpack, a text as bytes": (
        CheckpointError,
        "damaged or cut off",
        lambda f: read_msgpack(packed(f, array([4], "float32", 16 * "x"))),
    ),
    "msgpack, chunks of a negative shape": (
        CheckpointError,
        "do not make up its shape",
        lambda f: read_msgpack(packed(f, chunked([-2, -2], bytes(16)))),
    ),
    "msgpack, chunks of an endless shape": (
        CheckpointError,
        "do not make up its shape",
        lambda f: read_msgpack(packed(f, chunked([float("inf")], bytes(16)))),
    ),
    "an array that holds arrays": (
        CheckpointError,
        "ck is damaged: params is an array and holds arrays",
        lambda f: open_saved(both_ways(f)),
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_input_is_refused_in_words(case, tmp_path):
    kind, words, read = HOSTILE[case]
    with pytest.raises(kind, match=words):
        read(tmp_path)


@pytest.mark.parametrize("number", ["²", "٣", 5000 * "9"])
def test_names_that_only_look_like_numbers_are_names(tmp_path, number):
    name = f"layers.{number}.w"
    tensors(tmp_path, {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
    (tmp_path / "config.json").write_text('{"model_type": "none"}')
    report = inspect(str(tmp_path))
    assert [array.name for array in report.arrays] == [name]
    assert name in str(report)


def test_a_region_of_a_large_msgpack_array_reads_only_its_chunks(tmp_path, monkeypatch):
    values = np.arange(24, dtype=np.float32)
    path = packed(tmp_path, chunked([6, 4], *(part.tobytes() for part in np.split(values, 4))))
    found = read_msgpack(path)["w",]
    read = []
    whole = np.fromfile

    def counting(path, dtype, count, **keywords):
        read.append(count)
        return whole(path, dtype, count, **keywords)

    monkeypatch.setattr(np, "fromfile", counting)
    np.testing.assert_array_equal(found.read((slice(2, 4), slice(1, 3))), values.reshape(6, 4)[2:4, 1:3])
    assert read == [4, 4]  # rows 2 and 3 lie in chunks 1 and 2 of 6 values each
    np.testing.assert_array_equal(found.read(), values.reshape(6, 4))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_pipes_and_loops_are_not_waited_for(tmp_path, name):
    write_tiny_hf(tmp_path / "m")
    (tmp_path / "m" / name).unlink()
    os.mkfifo(tmp_path / "m" / name)
    with pytest.raises(SourceError, match=rf"{name} is neither a file nor a folder"):
        open_hf(tmp_path / "m", source="x")
    (tmp_path / "m" / name).unlink()
    (tmp_path / "m" / name).symlink_to(name)
    with pytest.raises(CheckpointError, match="link"):
        open_hf(tmp_path / "m", source="x")


def test_a_header_of_too_many_tensors(tmp_path):
    empty = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(200_001)}
    header = json.dumps(empty).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert read_tensor_file(path).problems == (f"{path} names 200001 tensors; allowed are 200000",)
