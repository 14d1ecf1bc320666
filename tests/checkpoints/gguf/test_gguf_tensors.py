"""Values of every block type that is read, against sums written out from the format's definition."""

import gguf
import ml_dtypes
import numpy as np
import pytest

from jserve.checkpoints.gguf import tensors
from jserve.checkpoints.gguf.file import GgufFile
from jserve.checkpoints.gguf.tensors import READABLE, read_tensor, stored_dtype
from jserve.testing.gguf import write_gguf

RNG = np.random.default_rng(0)


def q4_k(block):
    """144 bytes -> 256 values: d, dmin, twelve bytes of 6-bit scales and mins, 128 bytes of 4-bit quants."""
    d, dmin = block[:4].view(np.float16).astype(np.float32)
    packed = [int(byte) for byte in block[4:16]]
    scales, mins = [], []
    for j in range(8):
        if j < 4:
            scales.append(packed[j] & 63)
            mins.append(packed[j + 4] & 63)
        else:
            scales.append((packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4))
            mins.append((packed[j + 4] >> 4) | ((packed[j] >> 6) << 4))
    quants = block[16:]
    out = []
    for j in range(8):
        bytes_ = quants[32 * (j // 2) : 32 * (j // 2) + 32]
        nibbles = (bytes_ >> 4 if j % 2 else bytes_ & 15).astype(np.float32)
        out.append(d * np.float32(scales[j]) * nibbles - dmin * np.float32(mins[j]))
    return np.concatenate(out)


def q6_k(block):
    """210 bytes -> 256 values: 128 bytes of low nibbles, 64 of high pairs, sixteen int8 scales, d."""
    low, high = block[:128], block[128:192]
    scales, d = block[192:208].view(np.int8), block[208:210].view(np.float16).astype(np.float32)[0]
    out = np.empty(256, np.float32)
    for i in range(256):
        half, inside = divmod(i, 128)
        group, column = divmod(inside, 32)
        nibble = (int(low[64 * half + 32 * (group % 2) + column]) >> (4 * (group // 2))) & 15
        pair = (int(high[32 * half + column]) >> (2 * group)) & 3
        out[i] = d * np.float32(scales[i // 16]) * np.float32((nibble | pair << 4) - 32)
    return out


def blocks(kind, rows, per_row, *, scales):
    """Random blocks whose float16 fields, at byte offsets ``scales``, are small and finite."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    data = RNG.integers(0, 256, (rows, per_row, size), dtype=np.uint8)
    for offset in scales:
        values = RNG.uniform(-0.02, 0.02, (rows, per_row, 1)).astype(np.float16)
        data[:, :, offset : offset + 2] = values.view(np.uint8)
    return data


@pytest.mark.parametrize(("kind", "oracle", "scales"), [("Q4_K", q4_k, (0, 2)), ("Q6_K", q6_k, (208,))])
def test_k_quants(tmp_path, kind, oracle, scales):
    data = blocks(kind, 3, 2, scales=scales)
    write_gguf(tmp_path / "k.gguf", {"general.architecture": "llama"}, {"t": (kind, data.reshape(3, -1))})
    wanted = np.stack([np.concatenate([oracle(block) for block in row]) for row in data])
    with GgufFile(tmp_path / "k.gguf") as file:
        np.testing.assert_allclose(read_tensor(file, file.tensors["t"]), wanted, rtol=1e-6, atol=1e-7)


def q8_0(block):
    return block[:2].view(np.float16).astype(np.float32) * block[2:].view(np.int8).astype(np.float32)


def nibbles(block):
    return np.concatenate([block & 15, block >> 4]).astype(np.float32)


def fifth_bits(block):
    return np.unpackbits(block, bitorder="little").astype(np.float32)


def q4_0(block):
    return block[:2].view(np.float16).astype(np.float32) * (nibbles(block[2:]) - 8)


def q4_1(block):
    d, m = block[:4].view(np.float16).astype(np.float32)
    return d * nibbles(block[4:]) + m


def q5_0(block):
    d = block[:2].view(np.float16).astype(np.float32)
    return d * (nibbles(block[6:]) + 16 * fifth_bits(block[2:6]) - 16)


def q5_1(block):
    d, m = block[:4].view(np.float16).astype(np.float32)
    return d * (nibbles(block[8:]) + 16 * fifth_bits(block[4:8])) + m


@pytest.mark.parametrize(
    ("kind", "oracle", "scales"),
    [("Q8_0", q8_0, (0,)), ("Q4_0", q4_0, (0,)), ("Q4_1", q4_1, (0, 2)), ("Q5_0", q5_0, (0,)), ("Q5_1", q5_1, (0, 2))],
)
def test_simple_blocks_in_chunks(tmp_path, monkeypatch, kind, oracle, scales):
    monkeypatch.setattr(tensors, "_CHUNK_ELEMENTS", 130)
    data = blocks(kind, 7, 2, scales=scales)
    write_gguf(tmp_path / "q.gguf", {"general.architecture": "llama"}, {"t": (kind, data.reshape(7, -1))})
    wanted = np.stack([np.concatenate([oracle(block) for block in row]) for row in data])
    with GgufFile(tmp_path / "q.gguf") as file:
        values = read_tensor(file, file.tensors["t"])
    assert (values.shape, values.dtype) == ((7, 64), np.float32)
    np.testing.assert_allclose(values, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_plain_types_are_kept_as_they_are(tmp_path, kind, dtype):
    values = RNG.normal(size=(2, 3, 5)).astype(dtype)
    write_gguf(tmp_path / "p.gguf", {"general.architecture": "llama"}, {"t": (kind, values.astype(np.float32))})
    with GgufFile(tmp_path / "p.gguf") as file:
        read = read_tensor(file, file.tensors["t"])
    assert read.dtype == stored_dtype(gguf.GGMLQuantizationType[kind]) == dtype
    np.testing.assert_array_equal(read.view(np.uint8), values.view(np.uint8))


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("shape", [(256,), (6, 256), (3, 5, 256)])
def test_no_more_is_read_than_the_rows_asked_for(tmp_path, monkeypatch, kind, shape):
    monkeypatch.setattr(tensors, "_CHUNK_ELEMENTS", 600)
    values = RNG.normal(size=shape).astype(np.float16)
    if kind != "F16":
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        scales = (0, 2) if kind == "Q4_K" else (0,)
        values = blocks(kind, values.size // block, 1, scales=scales).reshape(*shape[:-1], shape[-1] // block * size)
    write_gguf(tmp_path / "r.gguf", {"general.architecture": "llama"}, {"t": (kind, values)})
    with GgufFile(tmp_path / "r.gguf") as file:
        tensor, read, taken = file.tensors["t"], file.read, []
        whole = read_tensor(file, tensor)
        monkeypatch.setattr(file, "read", lambda *asked: taken.append(asked[2]) or read(*asked))
        for rows in (slice(0, 1), slice(1, 3), slice(2, None), slice(2, 2)):
            taken.clear()
            np.testing.assert_array_equal(read_tensor(file, tensor, rows), whole[rows])
            if len(shape) > 1:
                assert sum(taken) == tensor.nbytes // shape[0] * len(range(shape[0])[rows])


def test_the_types_that_are_read():
    assert {kind.name for kind in READABLE} == {
        "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    }  # fmt: skip
