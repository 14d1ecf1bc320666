"""Parameters as tensors again: what plan_leaves takes apart, plan_tensors puts together."""

import dataclasses

import numpy as np
import pytest

from jserve.checkpoints.arrays.inverse import plan_tensors
from jserve.checkpoints.arrays.key_map import Entry, KeyMap, plan_leaves
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.tree import flatten
from jserve.checkpoints.hf import gpt2, llama
from jserve.models.gpt2 import Gpt2Config
from jserve.models.llama import LlamaConfig
from jserve.models.moe import ExpertsConfig
from jserve.models.registry import build_abstract, family

SIZES = {
    "vocab_size": 24,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_layers": 2,
    "num_heads": 4,
}
LLAMA = LlamaConfig(**SIZES, num_kv_heads=2, head_dim=6)
MOE = dataclasses.replace(LLAMA, experts=ExpertsConfig(count=3, per_token=2, normalize=True), qk_norm=True)


def lazy(values):
    return LazyArray.of(values)


def random_leaves(name, config):
    _, state = build_abstract(family(name), config, np.dtype(np.float32))
    rng = np.random.default_rng(0)
    return {path: rng.standard_normal(leaf.shape).astype(np.float32) for path, leaf in flatten(state).items()}


@pytest.mark.parametrize(
    ("name", "config", "key_map"),
    [
        ("llama", LLAMA, llama.KEY_MAP),
        ("llama", dataclasses.replace(LLAMA, tie_embeddings=True), llama.KEY_MAP),
        ("qwen2", dataclasses.replace(LLAMA, qkv_bias=True), llama.KEY_MAP),
        ("phi3", LLAMA, llama.PHI3_KEY_MAP),
        ("mixtral", dataclasses.replace(MOE, qk_norm=False), llama.MIXTRAL_KEY_MAP),
        ("qwen3_moe", MOE, llama.QWEN3_MOE_KEY_MAP),
        ("gpt2", Gpt2Config(**SIZES), gpt2.KEY_MAP),
    ],
)
def test_there_and_back(name, config, key_map):
    leaves = random_leaves(name, config)
    tensors = plan_tensors(key_map, {path: lazy(leaf) for path, leaf in leaves.items()})
    wanted = {path: leaf.shape for path, leaf in leaves.items()}
    again = plan_leaves(key_map, tensors, wanted, where="x")  # which refuses tensors too few and too many
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(again[path].read(), leaf, err_msg=str(path))


def test_known_values():
    """By hand: heads merged, axes swapped, parts fused."""
    key_map = KeyMap(
        entries=(
            Entry(tensor="b.{i}", leaf="layers.{i}.x", how="H Dh D <- D (H Dh)", fused_axis=1),
            Entry(tensor="b.{i}", leaf="layers.{i}.y", how="F D <- D F", fused_axis=1),
            Entry(tensor="n", leaf="norm"),
        ),
        prefixes=("m.", ""),
    )
    x, y = np.arange(12).reshape(2, 2, 3), 100 + np.arange(6).reshape(2, 3)
    tensors = plan_tensors(
        key_map, {("layers", "0", "x"): lazy(x), ("layers", "0", "y"): lazy(y), ("norm",): lazy(np.array([1.5, 3.0]))}
    )
    assert list(tensors) == ["m.n", "m.b.0"]
    np.testing.assert_array_equal(tensors["m.n"].read(), [1.5, 3.0])
    np.testing.assert_array_equal(
        tensors["m.b.0"].read(), [[0, 3, 6, 9, 100, 103], [1, 4, 7, 10, 101, 104], [2, 5, 8, 11, 102, 105]]
    )
    np.testing.assert_array_equal(tensors["m.b.0"].read((slice(1, 3), slice(3, 5))), [[10, 101], [11, 102]])
