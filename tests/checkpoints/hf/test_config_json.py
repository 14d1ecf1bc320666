"""config.json out of a configuration of ours. (That transformers loads such folders with the logits of the originals
was seen for every family; here it is what it asks for beside the meaning.)"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.checkpoint import Checkpoint
from jserve.checkpoints.hf.config_json import config_json
from jserve.checkpoints.hf.families import HF_FAMILIES
from jserve.errors import UnsupportedModel
from jserve.models.config import ModelConfig
from jserve.models.gemma import GemmaConfig
from jserve.models.gpt2 import Gpt2Config
from jserve.models.llama import LlamaConfig
from jserve.models.moe import ExpertsConfig
from jserve.models.rope import RopeScaling

SIZES = {
    "vocab_size": 24,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 3,
    "num_heads": 4,
    "max_position": 4096,
}
LLAMA = LlamaConfig(**SIZES, num_kv_heads=2, head_dim=16)
EXPERTS = ExpertsConfig(count=6, per_token=2, normalize=True)
GEMMA = {**SIZES, "num_kv_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 24.0, "windows": (512, 512, None)}
SCALINGS = (
    RopeScaling(kind="linear", factor=3.0),
    RopeScaling(kind="dynamic", factor=2.0, original_max_position=2048),
    RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=512),
    RopeScaling(
        kind="yarn", factor=8.0, original_max_position=512, attention_factor=1.07, beta_fast=16.0, truncate=False
    ),
    RopeScaling(
        kind="longrope",
        original_max_position=256,
        attention_factor=1.2,
        short_factors=(1.0,) * 8,
        long_factors=(1.5,) * 8,
    ),
)


def told(family, config):
    weight = LazyArray.of(np.zeros(2, np.float32))
    return config_json(
        Checkpoint(
            name="x",
            path=Path("x"),
            layout="x",
            family=family,
            config=config,
            leaves={("norm",): weight},
            tokenizer=None,
            chat_template=None,
            generation={},
            eos_ids=(2, 3),
            source="x",
            digests="x",
        )
    )


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", LLAMA),
        ("llama", dataclasses.replace(LLAMA, tie_embeddings=True, rope_theta=5e5, rms_norm_eps=1e-6)),
        *(("llama", dataclasses.replace(LLAMA, rope_scaling=scaling)) for scaling in SCALINGS),
        ("mistral", dataclasses.replace(LLAMA, windows=(512,) * 3)),
        ("mistral", LLAMA),
        ("qwen2", dataclasses.replace(LLAMA, qkv_bias=True)),
        ("qwen2", dataclasses.replace(LLAMA, qkv_bias=True, windows=(None, 512, 512))),
        ("qwen3", dataclasses.replace(LLAMA, qk_norm=True)),
        ("phi3", dataclasses.replace(LLAMA, windows=(2047,) * 3, rotary_dim=12)),
        ("mixtral", dataclasses.replace(LLAMA, experts=EXPERTS)),
        ("qwen3_moe", dataclasses.replace(LLAMA, qk_norm=True, experts=EXPERTS)),
        (
            "qwen3_moe",
            dataclasses.replace(LLAMA, qk_norm=True, experts=dataclasses.replace(EXPERTS, normalize=False)),
        ),
        ("gemma2", GemmaConfig(**GEMMA, attn_soft_cap=50.0, final_soft_cap=30.0)),
        ("gemma2", GemmaConfig(**GEMMA)),
        ("gemma3", GemmaConfig(**GEMMA, qk_norm=True, rope_theta=1e6, local_rope_theta=1e4)),
        (
            "gemma3",
            GemmaConfig(**GEMMA, qk_norm=True, rope_theta=1e6, local_rope_theta=1e4, rope_scaling=SCALINGS[0]),
        ),
        ("gpt2", Gpt2Config(**SIZES)),
    ],
)
def test_there_and_back(family, config):
    settings = told(family, config)
    kind = HF_FAMILIES[settings["model_type"]]
    assert (kind.family, kind.config(settings)) == (family, config)
    # transformers has ids of its own for absent ones, which may lie beyond the table.
    assert (settings["pad_token_id"], settings["bos_token_id"], settings["eos_token_id"]) == (None, None, [2, 3])


def test_what_transformers_is_strict_about():
    assert type(told("gemma2", GemmaConfig(**GEMMA))["query_pre_attn_scalar"]) is int
    longrope = told("phi3", dataclasses.replace(LLAMA, rope_scaling=SCALINGS[-1]))
    assert longrope["original_max_position_embeddings"] == 256
    dynamic = told("llama", dataclasses.replace(LLAMA, rope_scaling=SCALINGS[1]))
    assert dynamic["max_position_embeddings"] == 2048


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("llama", dataclasses.replace(LLAMA, qk_norm=True), "the config.json of a llama cannot tell its qk_norm"),
        (
            "llama",
            dataclasses.replace(LLAMA, rotary_dim=12),
            "x: its settings do not go into the config.json of a llama: config.json has settings that are not built: "
            "partial_rotary_factor = 0.75 (built for this family: 1.0); the checkpoint stays as it is",
        ),
        ("mistral", dataclasses.replace(LLAMA, windows=(512, None, 512)), "of a mistral cannot tell its windows"),
        (
            "gemma2",
            GemmaConfig(**{**GEMMA, "query_pre_attn_scalar": 24.5}),
            "of a gemma2 cannot tell its query_pre_attn_scalar",
        ),
        (
            "of_another",
            ModelConfig(vocab_size=3, hidden_size=4),
            "of the family of_another are not written as safetensors",
        ),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(family, config, words):
    with pytest.raises(UnsupportedModel) as error:
        told(family, config)
    assert words in error.value.message
