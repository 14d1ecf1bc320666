"""config.json of every family: spellings old and new, defaults, and everything that is wrong or not built at once."""

from pathlib import Path

import pytest
from hf_configs import GEMMA3, LLAMA, read

from jserve.checkpoints.hf.families import HF_FAMILIES, hf_model
from jserve.errors import CheckpointError, UnsupportedModel
from jserve.models.moe import ExpertsConfig
from jserve.models.registry import FAMILIES
from jserve.models.rope import RopeScaling

GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}


def test_every_model_type_is_of_a_family_that_is_built():
    assert {kind.family for kind in HF_FAMILIES.values()} <= FAMILIES.keys()
    with pytest.raises(UnsupportedModel, match=r"model_type 'mamba'; read from Hugging Face folders: bert, gemma2, "):
        hf_model(Path("config.json"), {"model_type": "mamba"})


def test_what_matters_of_a_llama():
    config = read()
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (8, 2, 10000.0)
    assert (config.rms_norm_eps, config.tie_embeddings, config.windows) == (1e-5, False, ())
    assert read(num_key_value_heads=None).num_kv_heads == 4
    assert read(head_dim=24).head_dim == 24


def test_windows():
    assert read(model_type="mistral").windows == ()  # 4,096, which no sequence can leave
    assert read(model_type="mistral", max_position_embeddings=8192).windows == (4096, 4096)
    assert read(model_type="mistral", max_position_embeddings=8192, sliding_window=None).windows == ()
    assert read(model_type="mixtral", max_position_embeddings=8192).windows == ()
    assert read(model_type="qwen2", sliding_window=64, max_window_layers=1).windows == ()
    assert read(model_type="qwen2", sliding_window=64, max_window_layers=1, use_sliding_window=True).windows == (
        None,
        64,
    )
    kinds = ["sliding_attention", "full_attention"]
    assert read(model_type="qwen3", sliding_window=64, use_sliding_window=True, layer_types=kinds).windows == (64, None)
    assert read(model_type="phi3", sliding_window=2047).windows == (2047, 2047)


def test_relatives_of_llama():
    qwen2 = read(model_type="qwen2")
    assert (qwen2.qkv_bias, qwen2.qk_norm) == (True, False)
    qwen3 = read(model_type="qwen3")
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    mixtral = read(model_type="mixtral", num_local_experts=4, num_experts_per_tok=3)
    assert mixtral.experts == ExpertsConfig(count=4, per_token=3, normalize=True)
    assert mixtral.rope_theta == 1e6
    moe = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": []}
    qwen3_moe = read(model_type="qwen3_moe", norm_topk_prob=True, decoder_sparse_step=1, **moe)
    assert qwen3_moe.experts == ExpertsConfig(count=6, per_token=2, normalize=True)
    assert qwen3_moe.intermediate_size == 24
    assert read(model_type="qwen3_moe", **moe).experts.normalize is False


def test_gemma3_as_google_writes_it():
    """Heads and vocabulary are not there, nor are they in the files of the largest."""
    text = {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = HF_FAMILIES["gemma3"].config({"model_type": "gemma3", "text_config": text, "vision_config": {"a": 1}})
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert config.query_pre_attn_scalar == 256
    assert config.windows == tuple(None if i % 6 == 5 else 1024 for i in range(34))
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert config.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert config.max_position == 131072


def test_gemma3_of_newer_files():
    kinds = ["full_attention", "sliding_attention"] * 17
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
    config = HF_FAMILIES["gemma3_text"].config({**GEMMA3, "layer_types": kinds, "rope_parameters": ropes})
    assert config.windows == (None, 1024) * 17
    assert (config.rope_theta, config.local_rope_theta) == (5e5, 3e4)
    assert config.rope_scaling == RopeScaling(kind="linear", factor=4.0)


def test_gemma2():
    values = {**LLAMA, "model_type": "gemma2", "head_dim": 16, "sliding_window": 64}
    config = HF_FAMILIES["gemma2"].config(values)
    assert (config.attn_soft_cap, config.final_soft_cap, config.windows) == (50.0, 30.0, (64, None))
    config = HF_FAMILIES["gemma2"].config({**values, "attn_logit_softcapping": None, "final_logit_softcapping": 5})
    assert (config.attn_soft_cap, config.final_soft_cap, config.local_rope_theta) == (None, 5.0, None)


def test_gpt2():
    config = HF_FAMILIES["gpt2"].config({**GPT2, "n_ctx": 64, "n_inner": None, "task_specific_params": {"a": 1}})
    assert (config.hidden_size, config.intermediate_size, config.num_heads, config.max_position) == (32, 128, 4, 64)


def test_what_is_known_to_change_nothing_may_be_there():
    """SmolLM2's own file, but for its sizes, and notes of training tools."""
    notes = {
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "is_llama_config": True,
        "mlp_bias": False,
        "pretraining_tp": 2,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "unsloth_fixed": True,
        "_attn_implementation_autoset": True,
        "something_new": None,
    }
    assert read(**notes) == read()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"quantization_config": {"bits": 4}}, r"quantization_config = {'bits': 4}"),
        (
            {"attention_bias": True, "hidden_act": "gelu"},
            r"attention_bias = True \(built: False\), hidden_act = 'gelu'",
        ),
        ({"mlp_bias": True, "residual_multiplier": 0.2}, r"mlp_bias = True, residual_multiplier = 0.2"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2}}, r"kind 'ntk' \(built: default, linear, dynamic, yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}}, r"rope_scaling\.beta = 1"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, r"rope_scaling\.mrope_section = \[1\]"),
        ({"num_key_value_heads": 3}, r"config\.json: num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 8, "mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 8, "decoder_sparse_step": 2}, r"decoder_sparse_step = 2"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "linear_attention"]}, "layer_types with linear_att"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 5.0}, r"attn_logit_softcapping = 5\.0"),
        ({"model_type": "gemma3_text", "tie_word_embeddings": False}, r"tie_word_embeddings = False \(built: True\)"),
    ],
)
def test_what_changes_the_computation_and_is_not_built_is_refused(changed, words):
    with pytest.raises(UnsupportedModel, match=words):
        read(**changed)


def test_gpt2_variants_are_refused():
    with pytest.raises(UnsupportedModel, match=r"'relu' .*scale_attn_by_inverse_layer_idx = True"):
        HF_FAMILIES["gpt2"].config({**GPT2, "activation_function": "relu", "scale_attn_by_inverse_layer_idx": True})


def test_an_unknown_key_says_what_to_do():
    with pytest.raises(UnsupportedModel) as error:
        read(brand_new=1)
    assert (
        error.value.fix == "if you know that none of them changes what the model computes, remove them from config.json"
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden_size": None, "vocab_size": "many"}, r"hidden_size is missing.*vocab_size is 'many'; it must be a wh"),
        (
            {"rms_norm_eps": 0.0, "tie_word_embeddings": 1},
            r"rms_norm_eps is 0\.0.*tie_word_embeddings is 1; it must be t",
        ),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing; it must be a number above 0"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; it must be a table of settings"),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1.0}}, "are both there"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types is .*; it must be a list of 2"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "and there is no sliding_window"),
        ({"model_type": "gemma3"}, "text_config is missing"),
    ],
)
def test_everything_malformed_is_named_at_once(changed, words):
    with pytest.raises(CheckpointError, match=words) as error:
        read(**changed)
    assert error.type is CheckpointError


HUGE = 2_000_000_000
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1e300] * 4}


@pytest.mark.parametrize("kind", sorted({*HF_FAMILIES} - {"gemma3"}))
def test_nothing_is_made_for_layers_that_no_model_has(kind):
    """A few bytes of a file must not cost memory."""
    values = {**LLAMA, "model_type": kind, "num_hidden_layers": HUGE, "n_layer": HUGE, "sliding_window": 16}
    with pytest.raises(CheckpointError, match=r"(num_hidden_layers|n_layer) is 2000000000; it must .* from 1 to 1024"):
        HF_FAMILIES[values["model_type"]].config(values)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_that_no_model_has(kind):
    with pytest.raises(CheckpointError, match=r"num_local_experts is 4097; it must be a whole number from 1 to 4096"):
        read(model_type=kind, moe_intermediate_size=8, num_local_experts=4097)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_theta 1.0, stretched by yarn scalin",
        ),
        ({"rope_theta": 1e-30}, "rope_theta 1e-30 gives 8 rotary dimensions no finite angles"),
        ({"rope_theta": 1e300}, r"rope_theta is 1e\+300; allowed are 1.18e-38 to 3.4e\+38"),
        ({"rope_theta": 10**400}, "rope_theta is 1000.* it must be a number above 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e300}}, r"factor of rope scaling is 1e\+300"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e38}}, "max_position is 2147483648"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1e300}},
            r"beta_fast of rope scaling is 1e\+300",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 1e-300}}, r"factor of rope scaling is 1e-300"),
        ({"rope_scaling": LONG}, r"a factor of longrope scaling is 1e\+300"),
        ({"partial_rotary_factor": 1e308, "model_type": "phi3"}, r"partial_rotary_factor is 1e\+308; .* at most 1"),
        ({"rms_norm_eps": 1e300}, r"rms_norm_eps is 1e\+300; allowed are"),
    ],
)
def test_numbers_that_cannot_be_computed_with(changed, words):
    """In words, not as an error of arithmetic."""
    with pytest.raises(CheckpointError, match=words):
        read(**changed)


@pytest.mark.parametrize("name", ["query_pre_attn_scalar", "rope_local_base_freq", "final_logit_softcapping"])
@pytest.mark.parametrize("value", [1e-300, 1e300])
def test_numbers_of_a_gemma_that_cannot_be_computed_with(name, value):
    with pytest.raises(UnsupportedModel, match=r"; allowed are 1\.18e-38 to"):
        HF_FAMILIES["gemma3_text"].config({**GEMMA3, name: value})
