"""A configuration of ours as the config.json of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jserve.checkpoints.arrays.tree import main_dtype
from jserve.checkpoints.checkpoint import Checkpoint
from jserve.checkpoints.hf.families import HF_FAMILIES
from jserve.errors import CheckpointError, UnsupportedModel
from jserve.models.bert import BertConfig
from jserve.models.config import ModelConfig
from jserve.models.gemma import GemmaConfig
from jserve.models.gpt2 import Gpt2Config
from jserve.models.llama import LlamaConfig
from jserve.models.rope import RopeScaling

__all__ = ["config_json"]

_ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertModel",
}
_MODEL_TYPES: Mapping[str, str] = {"gemma3": "gemma3_text"}
"""Where it is not the family's name."""


def config_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """The contents of config.json for ``checkpoint``.

    They are read back before they are returned: UnsupportedModel where a setting was lost, as one does that its
    ``model_type`` has no name for, and for families that safetensors are not written of.
    """
    kind = _MODEL_TYPES.get(checkpoint.family, checkpoint.family)
    if kind not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"checkpoints of the family {checkpoint.family} are not written as safetensors; "
            f"families that are: {', '.join(_ARCHITECTURES)}"
        )
    config = checkpoint.config
    settings = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        **_WRITERS[type(config)](config, kind),  # each writer takes its own kind of configuration
        "torch_dtype": main_dtype(checkpoint.leaves.values()),
        # Null where there is none: transformers has ids of its own for what is absent.
        "pad_token_id": None,
        "bos_token_id": None if checkpoint.tokenizer is None else checkpoint.tokenizer.bos_id,
        "eos_token_id": list(checkpoint.eos_ids) or None,
    }
    try:
        again: ModelConfig = HF_FAMILIES[kind].config(settings)
    except CheckpointError as error:
        raise UnsupportedModel(
            f"{checkpoint.path}: its settings do not go into the config.json of a {kind}: {error.message}; "
            "the checkpoint stays as it is"
        ) from None
    if again != config:
        told = again.to_dict()
        lost = [name for name, value in config.to_dict().items() if told[name] != value]
        raise UnsupportedModel(
            f"{checkpoint.path}: the config.json of a {kind} cannot tell its {', '.join(lost)}; "
            "the checkpoint stays as it is"
        )
    return settings


def _llama(config: LlamaConfig, kind: str) -> dict[str, Any]:
    settings = {
        **_sizes(config),
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        **_rope(config.rope_theta, config.rope_scaling),
    }
    if config.rotary_dim is not None:
        settings["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    windows = set(config.windows) - {None}
    window = next(iter(windows), None)
    if kind in ("mistral", "phi3", "mixtral"):
        settings["sliding_window"] = window
    elif kind in ("qwen2", "qwen3") and window is not None:
        settings |= {"use_sliding_window": True, "sliding_window": window}
        settings |= {"layer_types": _layer_types(config.windows)}
    if config.experts is not None:
        count, per_token = config.experts.count, config.experts.per_token
        settings |= {"num_experts_per_tok": per_token}
        settings |= {"num_local_experts": count} if kind == "mixtral" else {"num_experts": count}
        if kind == "qwen3_moe":
            settings |= {"norm_topk_prob": config.experts.normalize, "moe_intermediate_size": config.intermediate_size}
    return settings


def _gemma(config: GemmaConfig, kind: str) -> dict[str, Any]:
    window = next((window for window in config.windows if window is not None), None)
    settings = {
        **_sizes(config),
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        # transformers takes no other number here.
        "query_pre_attn_scalar": int(config.query_pre_attn_scalar),
        "sliding_window": window or config.max_position,
        "layer_types": _layer_types(config.windows),
        "final_logit_softcapping": config.final_soft_cap,
        **_rope(config.rope_theta, config.rope_scaling),
    }
    if kind == "gemma2":
        return {**settings, "attn_logit_softcapping": config.attn_soft_cap}
    return {**settings, "rope_local_base_freq": config.local_rope_theta}


def _gpt2(config: Gpt2Config, kind: str) -> dict[str, Any]:
    del kind
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_inner": config.intermediate_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_positions": config.max_position,
        "n_ctx": config.max_position,
        "layer_norm_epsilon": config.layer_norm_eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }


def _bert(config: BertConfig, kind: str) -> dict[str, Any]:
    del kind
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.max_position,
        "type_vocab_size": config.type_vocab_size,
        "layer_norm_eps": config.layer_norm_eps,
        "hidden_act": "gelu",
    }


_WRITERS: Mapping[type[ModelConfig], Callable[[Any, str], dict[str, Any]]] = {
    LlamaConfig: _llama,
    GemmaConfig: _gemma,
    Gpt2Config: _gpt2,
    BertConfig: _bert,
}


def _sizes(config: LlamaConfig | GemmaConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
    }


def _layer_types(windows: tuple[int | None, ...]) -> list[str]:
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def _rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """In the older spelling, which every version of transformers and vLLM reads."""
    if scaling is None:
        return {"rope_theta": theta}
    values: dict[str, Any] = {"rope_type": scaling.kind}
    original = scaling.original_max_position
    if scaling.kind != "longrope":
        values["factor"] = scaling.factor
    if scaling.kind == "llama3":
        values |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
    if scaling.kind in ("yarn", "longrope"):
        values["attention_factor"] = scaling.attention_factor
    if scaling.kind == "longrope":
        values |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    if scaling.kind in ("llama3", "yarn", "longrope"):
        values["original_max_position_embeddings"] = original
    if scaling.kind == "dynamic":  # and its context of training has no key of its own
        return {"rope_theta": theta, "rope_scaling": values, "max_position_embeddings": original}
    if scaling.kind == "longrope":  # where Phi-3 looks for it
        return {"rope_theta": theta, "rope_scaling": values, "original_max_position_embeddings": original}
    return {"rope_theta": theta, "rope_scaling": values}
