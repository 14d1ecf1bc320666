"""Rotary embedding in config.json: spellings old and new, and how long a sequence may be."""

import math

import pytest
from hf_configs import GEMMA3, read

from jserve.checkpoints.hf.families import HF_FAMILIES
from jserve.errors import UnsupportedModel
from jserve.models.rope import RopeScaling


@pytest.mark.parametrize(
    ("changed", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 1e4, RopeScaling(kind="linear", factor=2.0)),
        (
            {"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}},
            7.0,
            RopeScaling(kind="linear", factor=2.0),
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            1e4,
            RopeScaling(kind="dynamic", factor=2.0, original_max_position=4096),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 1024,
                }
            },
            1e4,
            RopeScaling(kind="llama3", factor=8.0, original_max_position=1024),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
            1e4,
            RopeScaling(
                kind="yarn", factor=4.0, original_max_position=1024, attention_factor=0.1 * math.log(4.0) + 1.0
            ),
        ),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1024, "attention_factor": 0.5}},
            1e4,
            RopeScaling(kind="yarn", factor=4.0, original_max_position=1024, attention_factor=0.5),
        ),
        (
            {
                "original_max_position_embeddings": 512,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 1024,
                    "mscale": 1.0,
                    "mscale_all_dim": 2.0,
                    "beta_fast": 16,
                    "truncate": False,
                },
            },
            1e4,
            RopeScaling(
                kind="yarn",
                factor=8.0,
                original_max_position=512,
                attention_factor=(0.1 * math.log(8.0) + 1.0) / (0.2 * math.log(8.0) + 1.0),
                beta_fast=16.0,
                truncate=False,
            ),
        ),
    ],
)
def test_spellings_of_rope(changed, theta, scaling):
    config = read(**changed)
    assert config.rope_theta == theta
    assert config.rope_scaling == scaling


def test_how_long_a_sequence_may_be():
    """dynamic and yarn files name the context of training; others what they reach."""
    assert read(rope_scaling={"type": "dynamic", "factor": 2.0}).max_position == 8192
    assert read(rope_scaling={"type": "yarn", "factor": 4.0}).max_position == 16384
    assert read(rope_scaling={"type": "linear", "factor": 4.0}).max_position == 4096


@pytest.mark.parametrize(("kind", "reached"), [("dynamic", 131072), ("yarn", 131072), ("linear", 32768)])
@pytest.mark.parametrize("spelling", ["old", "new"])
def test_how_long_a_sequence_of_gemma3_may_be(kind, reached, spelling):
    scaling = {"rope_type": kind, "factor": 4.0}
    rope = {"rope_scaling": scaling} if spelling == "old" else {"rope_parameters": {"full_attention": scaling}}
    config = HF_FAMILIES["gemma3_text"].config({**GEMMA3, "max_position_embeddings": 32768, **rope})
    assert config.max_position == reached


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_longrope_under_all_its_names(kind):
    config = read(
        model_type="phi3",
        original_max_position_embeddings=1024,
        partial_rotary_factor=0.75,
        rope_scaling={"type": kind, "short_factor": [1, 1.5, 2], "long_factor": [2.0, 3.0, 4.0]},
    )
    assert config.rotary_dim == 6
    assert config.rope_scaling == RopeScaling(
        kind="longrope",
        original_max_position=1024,
        attention_factor=math.sqrt(1 + math.log(4) / math.log(1024)),
        short_factors=(1.0, 1.5, 2.0),
        long_factors=(2.0, 3.0, 4.0),
    )
    assert config.for_length(1025).rope_scaling.length == 1025
    assert config.max_position == 4096


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "mixtral"])
def test_a_part_of_the_head_rotates_in_phi_only(kind):
    with pytest.raises(UnsupportedModel, match=r"partial_rotary_factor = 0\.5 \(built for this family: 1\.0\)"):
        read(model_type=kind, partial_rotary_factor=0.5)
