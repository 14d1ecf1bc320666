"""Every family from GGUF and from Hugging Face's names and settings: the same configuration, the same parameters."""

from dataclasses import replace

import numpy as np
import pytest
from families import FAMILY_NAMES
from gguf_files import tiny, write

from jserve.checkpoints.arrays.key_map import plan_leaves
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.tree import flatten
from jserve.checkpoints.gguf import gemma
from jserve.checkpoints.gguf.file import GgufFile
from jserve.checkpoints.gguf.model import gguf_checkpoint
from jserve.checkpoints.hf.families import HF_FAMILIES
from jserve.errors import CheckpointError, UnsupportedModel
from jserve.models.registry import build_abstract, family
from jserve.testing.gguf import TINY_TOKENS, tokenizer_metadata, write_gguf
from jserve.testing.gguf_families import gguf_metadata, gguf_tensors

CASES = [
    "gemma2",
    "gemma3",
    "gpt2",
    "llama2",
    "llama_linear",
    "llama_tied",
    "mistral",
    "mixtral",
    "phi3",
    "phi3_longrope",
    "qwen2",
    "qwen3",
    "qwen3_moe_norm",
]


def verified(case):
    """The case, with its row for the table in docs/models.md."""
    how = "random weights: parameters and settings of safetensors"
    return pytest.param(case, marks=pytest.mark.verifies(FAMILY_NAMES[case], "GGUF", how))


def load(path):
    """The configuration, and every parameter."""
    with GgufFile(path) as file:
        checkpoint = gguf_checkpoint(file, source="t.gguf")
        return checkpoint.family, checkpoint.config, {name: leaf.read() for name, leaf in checkpoint.leaves.items()}


def from_hf(config, weights):
    kind = HF_FAMILIES[config["model_type"]]
    ours = kind.config(config)
    _, state = build_abstract(family(kind.family), ours, np.dtype(np.float32))
    wanted = {path: tuple(leaf.shape) for path, leaf in flatten(state).items()}
    tensors = {name: LazyArray.of(w) for name, w in weights.items()}
    leaves = plan_leaves(kind.key_map, tensors, wanted, where="hf")
    return ours, {path: leaf.read() for path, leaf in leaves.items()}


def rounded(values):
    """A configuration's plain values, floats as the file's float32 has them."""
    if isinstance(values, dict):
        return {name: rounded(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(map(rounded, values))
    return pytest.approx(values, rel=1e-6) if isinstance(values, float) else values


@pytest.mark.parametrize("case", [verified(case) for case in CASES])
def test_the_same_from_gguf_and_from_hugging_face(tmp_path, case):
    config, weights = tiny(case)
    _, found, leaves = load(write(tmp_path / "t.gguf", config, weights))
    wanted, wanted_leaves = from_hf(config, weights)
    assert found.to_dict() == rounded(wanted.to_dict())
    assert leaves.keys() == wanted_leaves.keys()
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(leaf, wanted_leaves[path], err_msg=".".join(path))


def test_a_table_that_is_there_twice_is_a_head(tmp_path):
    """Older converters of GPT-2 wrote it so."""
    config, weights = tiny("gpt2")
    tensors = gguf_tensors(config, weights)
    known = {**gguf_metadata(config), **tokenizer_metadata(len(TINY_TOKENS))}
    write_gguf(tmp_path / "t.gguf", known, {**tensors, "output.weight": tensors["token_embd.weight"]})
    _, found, leaves = load(tmp_path / "t.gguf")
    assert not found.tie_embeddings
    np.testing.assert_array_equal(leaves["head",], leaves["token_embedding", "weight"])


@pytest.mark.parametrize(("case", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_divides_by_width_over_heads(tmp_path, case, layers):
    config, weights = tiny(case)
    path = write(tmp_path / "t.gguf", config, weights, metadata={f"{case}.block_count": layers})
    with GgufFile(path) as file:
        found = {"gemma2": gemma.gemma2, "gemma3": gemma.gemma3}[case](file)
    assert found.query_pre_attn_scalar == config["hidden_size"] / config["num_attention_heads"]


@pytest.mark.parametrize("case", ["gemma2", "gemma3"])
def test_a_stretched_gemma_reaches_as_far_from_either(tmp_path, case):
    config, weights = tiny(case)
    length = config["max_position_embeddings"]
    scaling = {f"{case}.rope.scaling.{key}": value for key, value in {"type": "yarn", "factor": 4.0}.items()}
    _, found, _ = load(write(tmp_path / "t.gguf", config, weights, metadata=scaling))
    config = {key: value for key, value in config.items() if key != "rope_parameters"}
    wanted, _ = from_hf({**config, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, weights)
    assert found.max_position == wanted.max_position == 4 * length
    assert found.rope_scaling == wanted.rope_scaling


def test_yarn_sharpens_attention_by_its_factor(tmp_path):
    config, weights = tiny("qwen3")
    _, found, _ = load(write(tmp_path / "t.gguf", config, weights, metadata={"qwen3.rope.scaling.attn_factor": 0.5}))
    wanted = from_hf(config, weights)[0].rope_scaling
    assert found.rope_scaling == replace(wanted, attention_factor=0.5 * wanted.attention_factor)


@pytest.mark.parametrize(
    ("case", "metadata", "drop", "kind", "words"),
    [
        ("gemma3", {"gemma3.attention.sliding_window": None}, (), CheckpointError, "sliding_window is missing"),
        ("gemma3", {"gemma3.attn_logit_softcapping": 5.0}, (), UnsupportedModel, r"attn_logit_softcapping = 5\.0"),
        ("gemma2", {"gemma2.block_count": 2_000_000_000}, (), CheckpointError, "block_count is 2000000000; it must be"),
        ("gemma2", {"gemma2.attention.sliding_window_pattern": 3}, (), UnsupportedModel, r"pattern = 3 \(built: 2\)"),
        ("gpt2", {"gpt2.attention.layer_norm_epsilon": None}, (), CheckpointError, "layer_norm_epsilon is missing"),
        ("phi3_longrope", {"phi3.rope.scaling.attn_factor": None}, (), CheckpointError, "attn_factor is missing"),
        ("phi3_longrope", {}, ("rope_factors_long.weight",), CheckpointError, "tensor rope_factors_long.weight is mis"),
        (
            "qwen3_moe_norm",
            {"qwen3moe.expert_weights_norm": False},
            (),
            UnsupportedModel,
            "expert_weights_norm = False",
        ),
        (
            "qwen2",
            {},
            ("blk.1.attn_k.bias",),
            CheckpointError,
            r"layers.1.k_bias: wanted \[16\] in tensor blk.1.attn_k",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, case, metadata, drop, kind, words):
    path = write(tmp_path / "t.gguf", *tiny(case), metadata=metadata, drop=drop)
    with pytest.raises(CheckpointError, match=words) as error:
        load(path)
    assert error.type is kind
