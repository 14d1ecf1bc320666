"""The container: everything that a whole file holds, and one clear error for every broken one."""

import contextlib
import random
import struct

import gguf
import numpy as np
import pytest

from jserve.checkpoints.gguf import file as gguf_file
from jserve.checkpoints.gguf.file import GgufFile
from jserve.checkpoints.gguf.tensors import read_tensor
from jserve.errors import CheckpointError, UnsupportedModel
from jserve.testing.gguf import write_gguf, write_tiny_gguf


def header(pairs=b"", *, tensors=b"", pair_count=0, tensor_count=0, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensor_count, pair_count) + pairs + tensors


def text(value):
    return struct.pack("<Q", len(value)) + value


def pair(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def opened(tmp_path, data):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    return GgufFile(path)


def test_reads_what_the_gguf_package_reads(tmp_path):
    path = tmp_path / "t.gguf"
    write_tiny_gguf(path, kind="Q8_0")
    reader = gguf.GGUFReader(path)
    with GgufFile(path) as file:
        theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        assert file.metadata == theirs
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            ours = file.tensors[tensor.name]
            assert ours.shape == tuple(int(n) for n in tensor.shape[::-1])
            assert (ours.kind, ours.offset, ours.nbytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
            whole = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(ours.shape)
            np.testing.assert_array_equal(read_tensor(file, ours), whole)


def test_every_scalar_type(tmp_path):
    values = [
        (0, "<B", 255), (1, "<b", -1), (2, "<H", 65535), (3, "<h", -2), (4, "<I", 2**32 - 1), (5, "<i", -3),
        (6, "<f", 0.5), (7, "<?", True), (10, "<Q", 2**64 - 1), (11, "<q", -4), (12, "<d", 0.1),
    ]  # fmt: skip
    pairs = b"".join(pair(b"k%d" % kind, kind, struct.pack(code, value)) for kind, code, value in values)
    pairs += b"".join(
        pair(b"a%d" % kind, 9, struct.pack("<IQ", kind, 2) + struct.pack(code, value) * 2)
        for kind, code, value in values
    )
    pairs += pair(b"text", 8, text("é".encode())) + pair(b"texts", 9, struct.pack("<IQ", 8, 2) + text(b"") + text(b"b"))
    with opened(tmp_path, header(pairs, pair_count=2 * len(values) + 2)) as file:
        assert file.metadata == {
            **{f"k{kind}": value for kind, _, value in values},
            **{f"a{kind}": [value, value] for kind, _, value in values},
            "text": "é",
            "texts": ["", "b"],
        }


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"", CheckpointError, "is not a GGUF file"),
        (b"GGU", CheckpointError, "is not a GGUF file"),
        (header(magic=b"PK\3\4"), CheckpointError, r"begins with b'PK\\x03\\x04'"),
        (header(version=1), UnsupportedModel, "has version 1; little-endian versions 2 and 3"),
        (header(version=0x03000000), UnsupportedModel, "is a big-endian GGUF file of version 3"),
        (header(pair_count=2**63), CheckpointError, "announces .* entries"),
        (header(tensor_count=2**40), CheckpointError, "announces .* entries"),
        (header(struct.pack("<Q", 2**63), pair_count=1), CheckpointError, "wants 9223372036854775808 bytes"),
        (header(pair(b"k", 9, struct.pack("<IQ", 8, 2**60)), pair_count=1), CheckpointError, "announces"),
        (header(pair(b"k", 9, struct.pack("<IQ", 4, 10**6)), pair_count=1), CheckpointError, "wants 4000000 bytes"),
        (header(pair(b"k", 9, struct.pack("<IQ", 9, 1)), pair_count=1), CheckpointError, "an array of arrays"),
        (header(pair(b"k", 13, b""), pair_count=1), CheckpointError, "unknown type 13"),
        (header(pair(b"k", 8, text(b"\xff")), pair_count=1), CheckpointError, "not UTF-8"),
        (header(pair(b"k", 7, b"\1") * 2, pair_count=2), CheckpointError, "names the key 'k' twice"),
        (
            header(pair(b"general.alignment", 4, struct.pack("<I", 3)), pair_count=1),
            CheckpointError,
            "general.alignment 3",
        ),
        (header(tensors=text(b"t") + struct.pack("<I", 5), tensor_count=1), CheckpointError, "5 dimensions"),
        (header(tensors=text(b"t") + struct.pack("<I", 0), tensor_count=1), CheckpointError, "0 dimensions"),
    ],
)
def test_broken_headers(tmp_path, data, error, words):
    with pytest.raises(error, match=words) as caught:
        opened(tmp_path, data)
    assert str(tmp_path / "x.gguf") in caught.value.message


def tensor_entry(*, name=b"t", shape=(4,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    ("entries", "error", "words"),
    [
        ([tensor_entry(shape=(2**62, 2**62))], CheckpointError, "is cut short"),
        ([tensor_entry(shape=(0,))], CheckpointError, "at least one"),
        ([tensor_entry(offset=7)], CheckpointError, "aligned to 32 bytes"),
        ([tensor_entry(offset=2**63)], CheckpointError, "is cut short"),
        ([tensor_entry(shape=(33,), kind=8)], CheckpointError, "Q8_0 wants rows of whole blocks of 32"),
        ([tensor_entry(), tensor_entry()], CheckpointError, "names the tensor 't' twice"),
        ([tensor_entry(kind=99)], UnsupportedModel, r"types that are not known: t \(type 99\)"),
    ],
)
def test_broken_directories(tmp_path, entries, error, words):
    data = header(tensors=b"".join(entries), tensor_count=len(entries)).ljust(1024, b"\0")
    with pytest.raises(error, match=words):
        opened(tmp_path, data)


def test_headers_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "MAX_HEADER_BYTES", 100)
    with pytest.raises(CheckpointError, match="a header of more than 100 bytes"):
        opened(tmp_path, header(pair(b"k", 8, text(b"x" * 200)), pair_count=1))


def test_a_file_cut_anywhere_gives_one_clear_error(tmp_path):
    path = tmp_path / "whole.gguf"
    write_gguf(
        path,
        {"general.architecture": "llama", "k": ["a", "b"], "n": [1, 2], "f": 0.5},
        {"t": ("F32", np.ones((2, 8), np.float32))},
    )
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=str(cut)):
            GgufFile(cut)
    cut.write_bytes(whole)
    with GgufFile(cut) as file:
        assert read_tensor(file, file.tensors["t"]).tolist() == np.ones((2, 8)).tolist()


def test_damage_never_gives_another_kind_of_error(tmp_path):
    path = tmp_path / "whole.gguf"
    write_tiny_gguf(path, kind="Q4_0", num_layers=1)
    whole = path.read_bytes()
    end = whole.index(b"output_norm.weight")
    rng = random.Random(0)
    damaged = tmp_path / "damaged.gguf"
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(end)] = rng.randrange(256)
        damaged.write_bytes(data)
        with contextlib.suppress(CheckpointError), GgufFile(damaged):
            pass


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "t.gguf"
    write_tiny_gguf(path)
    with GgufFile(path) as file:
        tensor = file.tensors["output_norm.weight"]
        with path.open("r+b") as writer:
            writer.truncate(tensor.offset + 4)
        with pytest.raises(CheckpointError, match=r"ended within tensor output_norm\.weight"):
            read_tensor(file, tensor)


def test_a_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot open .*/none\.gguf: No such file"):
        GgufFile(tmp_path / "none.gguf")
