"""Llama files: settings, the key map, the order of rotary dimensions, and everything wrong named at once."""

import dataclasses
import math
import re

import numpy as np
import pytest

from jserve.checkpoints.gguf.file import GgufFile
from jserve.checkpoints.gguf.model import gguf_checkpoint
from jserve.errors import CheckpointError, UnsupportedModel
from jserve.models.llama import LlamaConfig
from jserve.models.rope import RopeScaling, inverse_frequencies
from jserve.testing.gguf import TINY_TOKENS, llama_metadata, llama_tensors, write_gguf, write_tiny_gguf
from jserve.testing.models import TINY_LLAMA

TINY = LlamaConfig(**{**TINY_LLAMA, "vocab_size": len(TINY_TOKENS)})


def load(path):
    """The model of ``path`` with every parameter read."""
    with GgufFile(path) as file:
        model = gguf_checkpoint(file, source="t")
        return model, {name: leaf.read() for name, leaf in model.leaves.items()}


def write_changed(path, *, tensors=None, drop=(), metadata=None):
    """A tiny file with some of its tensors replaced, added or left out."""
    leaves = write_tiny_gguf(path)
    changed = llama_tensors(leaves, kind="F32") | (tensors or {})
    kept = {name: tensor for name, tensor in changed.items() if name not in drop}
    write_gguf(path, {**llama_metadata(TINY), **(metadata or {})}, kept)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_parameters_come_back_in_our_layout(tmp_path, kind):
    wanted = write_tiny_gguf(tmp_path / "t.gguf", kind=kind)
    model, leaves = load(tmp_path / "t.gguf")
    assert dataclasses.asdict(model.config) == dataclasses.asdict(TINY) | {
        "rms_norm_eps": pytest.approx(TINY.rms_norm_eps, rel=1e-7)
    }
    assert leaves.keys() == wanted.keys()
    step = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8, "Q8_0": 2.0**-7}[kind]
    for name, leaf in leaves.items():
        assert leaf.shape == wanted[name].shape, name
        largest = np.abs(wanted[name]).max()
        np.testing.assert_allclose(
            leaf.astype(np.float32), wanted[name], rtol=0, atol=step * largest, err_msg=str(name)
        )


def test_query_and_key_rows_are_put_back_and_value_rows_left(tmp_path):
    """Converters of Llama interleave the halves of each head's rows; row r of the file is named by its value."""
    rows = np.arange(4 * 16, dtype=np.float32)[:, None] * np.ones((1, 32), np.float32)
    tensors = {"blk.0.attn_q.weight": ("F32", rows), "blk.0.attn_k.weight": ("F32", rows[:32])}
    write_changed(tmp_path / "t.gguf", tensors={**tensors, "blk.0.attn_v.weight": ("F32", rows[:32])})
    _, leaves = load(tmp_path / "t.gguf")
    order = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    for head in range(4):
        assert leaves["layers", "0", "q"][head, :, 0].tolist() == [16 * head + r for r in order]
    for head in range(2):
        assert leaves["layers", "0", "k"][head, :, 0].tolist() == [16 * head + r for r in order]
        assert leaves["layers", "0", "v"][head, :, 0].tolist() == [16 * head + r for r in range(16)]


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied(tmp_path, tied):
    wanted = write_tiny_gguf(tmp_path / "t.gguf", tie_embeddings=tied)
    model, leaves = load(tmp_path / "t.gguf")
    assert model.config.tie_embeddings is tied
    assert (("head",) in leaves) is not tied
    assert leaves.keys() == wanted.keys()


def test_defaults_of_absent_settings(tmp_path):
    left_out = [
        "llama.vocab_size",
        "llama.attention.head_count_kv",
        "llama.attention.key_length",
        "llama.attention.value_length",
        "llama.rope.dimension_count",
        "llama.rope.freq_base",
    ]
    write_tiny_gguf(tmp_path / "t.gguf", num_kv_heads=4, head_dim=8, rope_theta=5.0, metadata=dict.fromkeys(left_out))
    model, _ = load(tmp_path / "t.gguf")
    config = model.config
    assert (config.vocab_size, config.num_kv_heads, config.head_dim) == (len(TINY_TOKENS), 4, 8)
    assert config.rope_theta == 10000.0


def test_linear_rope_scaling(tmp_path):
    write_tiny_gguf(tmp_path / "t.gguf", rope_scaling=RopeScaling(kind="linear", factor=4.0))
    model, _ = load(tmp_path / "t.gguf")
    assert model.config.rope_scaling == RopeScaling(kind="linear", factor=4.0)


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        ({"rope.scaling.factor": 2.0}, 2.0),
        ({"rope.scale_linear": 2.0}, 2.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 3.0, "rope.scale_linear": 2.0}, 3.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, None),
    ],
)
def test_spellings_of_linear_scaling(tmp_path, metadata, factor):
    """A factor without a type is linear, as it is to llama.cpp."""
    write_tiny_gguf(tmp_path / "t.gguf", metadata={f"llama.{key}": value for key, value in metadata.items()})
    model, _ = load(tmp_path / "t.gguf")
    assert model.config.rope_scaling == (factor and RopeScaling(kind="linear", factor=factor))


LLAMA3 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)


def rope_factors(scaling):
    plain = inverse_frequencies(16, 500000.0, None)
    return (plain / inverse_frequencies(16, 500000.0, scaling)).astype(np.float32)


def test_llama3_scaling_is_found_again_from_its_factors(tmp_path):
    factors = rope_factors(LLAMA3)
    assert 1.0 in factors
    assert 8.0 in factors.round(5)
    write_changed(
        tmp_path / "t.gguf",
        tensors={"rope_freqs.weight": ("F32", factors)},
        metadata={"llama.rope.freq_base": 500000.0},
    )
    model, leaves = load(tmp_path / "t.gguf")
    found = model.config.rope_scaling
    assert found == dataclasses.replace(LLAMA3, factor=found.factor)
    assert found.factor == pytest.approx(8.0, rel=1e-6)
    assert not any("rope" in ".".join(name) for name in leaves)


def test_factors_of_one_change_nothing(tmp_path):
    write_changed(tmp_path / "t.gguf", tensors={"rope_freqs.weight": ("F32", np.ones(8, np.float32))})
    model, _ = load(tmp_path / "t.gguf")
    assert model.config.rope_scaling is None


@pytest.mark.parametrize(
    "factors",
    [
        rope_factors(dataclasses.replace(LLAMA3, original_max_position=4096)),
        np.full(8, 0.5, np.float32),
        np.linspace(1.0, 8.0, 8, dtype=np.float32),
    ],
)
def test_other_factors_are_refused(tmp_path, factors):
    write_changed(
        tmp_path / "t.gguf",
        tensors={"rope_freqs.weight": ("F32", factors)},
        metadata={"llama.rope.freq_base": 500000.0},
    )
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight is not the stretch of Llama 3"):
        load(tmp_path / "t.gguf")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (
            {"general.architecture": "mamba"},
            r"architecture 'mamba'; architectures read from GGUF: gemma2, gemma3, gpt2, llama",
        ),
        ({"llama.rope.scaling.type": "ntk"}, r"llama\.rope\.scaling\.type = 'ntk' \(built: 'none', 'linear', 'yarn'"),
        ({"llama.rope.scaling.attn_factor": 2.0}, r"llama\.rope\.scaling\.attn_factor = 2\.0"),
        ({"llama.expert_shared_count": 1}, r"llama\.expert_shared_count = 1"),
        ({"llama.attention.clamp_kqv": 8.0}, r"llama\.attention\.clamp_kqv = 8\.0"),
        ({"llama.logit_scale": 2.0, "llama.swin_norm": True}, r"logit_scale = 2\.0, llama\.swin_norm = True"),
        ({"llama.rope.dimension_count": 18}, r"rotary_dim is 18; allowed are even numbers from 2 to head_dim 16"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"tokenizer.ggml.model": "rwkv"}, r"t\.gguf: tokenizer\.ggml\.model is 'rwkv'"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path, metadata, words):
    write_tiny_gguf(tmp_path / "t.gguf", metadata=metadata)
    with pytest.raises(UnsupportedModel, match=words):
        load(tmp_path / "t.gguf")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.block_count": None}, r"llama\.block_count is missing"),
        ({"llama.embedding_length": "wide"}, r"llama\.embedding_length is 'wide'; it must be a whole number"),
        ({"llama.attention.head_count": [4, 4]}, r"llama\.attention\.head_count is \[4, 4\]"),
        ({"llama.context_length": 0}, r"llama\.context_length is 0"),
        ({"llama.rope.freq_base": float("nan")}, r"llama\.rope\.freq_base is nan; it must be a number above 0"),
        ({"llama.vocab_size": 7}, r"llama\.vocab_size is 7"),
        ({"llama.expert_count": 8}, r"llama\.expert_used_count is missing"),
        ({"llama.block_count": 2_000_000_000}, r"block_count is 2000000000; it must be a whole number from 1 to 1024"),
        (
            {"llama.expert_count": 4097, "llama.expert_used_count": 2},
            r"expert_count is 4097; it must be a whole number from 1 to 4096",
        ),
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, r"expert_used_count is 9, of 8 experts"),
        ({"llama.rope.scaling.type": "longrope"}, r"longrope, and there are no tensors rope_factors_long\.weight"),
        (
            {"llama.attention.layer_norm_rms_epsilon": None, "llama.block_count": 0},
            r"block_count is 0.*epsilon is miss",
        ),
    ],
)
def test_wrong_settings_are_named(tmp_path, metadata, words):
    write_tiny_gguf(tmp_path / "t.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=words) as error:
        load(tmp_path / "t.gguf")
    assert error.type is CheckpointError


def test_everything_that_does_not_fit_is_named_at_once(tmp_path):
    write_changed(
        tmp_path / "t.gguf",
        tensors={
            "blk.1.ffn_up.weight": ("F32", np.ones((63, 32), np.float32)),
            "blk.0.attn_q.bias": ("F32", np.ones(64, np.float32)),
        },
        drop=("blk.0.attn_norm.weight",),
    )
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "t.gguf")
    assert error.value.message.splitlines() == [
        f"{tmp_path}/t.gguf does not fit its settings:",
        "  layers.0.attn_norm: wanted [32] in tensor blk.0.attn_norm.weight, it is missing",
        "  layers.1.up: wanted [64, 32] in tensor blk.1.ffn_up.weight, found [63, 32]",
        "  tensor blk.0.attn_q.bias [64] float32 belongs to no parameter",
    ]


def test_block_types_that_are_not_read_are_named_with_those_that_are(tmp_path):
    blocks = np.zeros((64, 18), np.uint8)
    write_changed(tmp_path / "t.gguf", tensors={"blk.0.ffn_up.weight": ("IQ4_NL", blocks)})
    with pytest.raises(
        UnsupportedModel, match=r"IQ4_NL \(as in blk\.0\.ffn_up\.weight\); types that are read: F32, F16"
    ):
        load(tmp_path / "t.gguf")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(tmp_path, value):
    rows = np.ones((64, 32), np.float32)
    rows[3, 4] = value
    write_changed(tmp_path / "t.gguf", tensors={"blk.1.ffn_up.weight": ("F32", rows)})
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_up\.weight holds values that are not finite"):
        load(tmp_path / "t.gguf")


def test_more_tokens_than_rows(tmp_path):
    tokens = [*TINY_TOKENS, "extra"]
    types = [3] * 3 + [1] * (len(tokens) - 3)
    write_tiny_gguf(tmp_path / "t.gguf", metadata={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    with pytest.raises(CheckpointError, match=re.escape("273 tokens do not fit the embedding table of 272 rows")):
        load(tmp_path / "t.gguf")


def test_sampling_defaults_and_template(tmp_path):
    write_tiny_gguf(
        tmp_path / "t.gguf",
        metadata={
            "general.sampling.temp": 0.5,
            "general.sampling.top_k": 20,
            "general.sampling.top_p": 0.75,
            "general.sampling.penalty_repeat": 2.0,
            "general.sampling.mirostat": 0,
            "tokenizer.chat_template": None,
        },
    )
    model, _ = load(tmp_path / "t.gguf")
    assert model.generation == {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "penalty_repeat": 2.0}
    assert model.chat_template is None


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "warm"])
def test_a_sampling_default_that_jserve_json_cannot_hold_is_refused_by_its_key(tmp_path, value):
    write_tiny_gguf(tmp_path / "t.gguf", metadata={"general.sampling.temp": value})
    with pytest.raises(CheckpointError, match=rf"t\.gguf: general\.sampling\.temp is {value!r}; it must be a finite"):
        load(tmp_path / "t.gguf")
