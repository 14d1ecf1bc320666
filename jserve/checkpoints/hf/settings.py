"""The settings of a Hugging Face config.json: which keys matter, and which are known not to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jserve.checkpoints.settings import Settings

__all__ = ["HfSettings", "by_layer", "everywhere"]

_HARMLESS = """
    architectures auto_map dtype model_type name_or_path tokenizer_class torch_dtype transformers_version
    bos_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id unk_token_id
    attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout embd_pdrop hidden_dropout
    hidden_dropout_prob resid_pdrop
    aux_loss_alpha gradient_checkpointing initializer_range output_router_logits pretraining_tp router_aux_loss_coef
    router_jitter_noise
    finetuning_task id2label label2id num_labels problem_type task_specific_params
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    attn_implementation cache_implementation chunk_size_feed_forward output_attentions output_hidden_states prefix
    return_dict torchscript use_bfloat16 use_cache use_return_dict
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
    tf_legacy_loss transformers.js_config unsloth_fixed unsloth_version use_unsloth_gc
"""
_HARMLESS_KEYS = frozenset(_HARMLESS.split())
"""Keys that no forward pass asks for: names, ids, training, other heads, how transformers runs, sampling (its place is
generation_config.json)."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "is_causal": (True,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "is_llama_config": (False, True),
    "lm_head_bias": (False,),
    "mlp_bias": (False,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
}
"""Keys that change the computation unless they have one of these values."""

_FIX = "if you know that none of them changes what the model computes, remove them from config.json"


class HfSettings(Settings):
    """A config.json. A key that is neither asked for, nor known to be harmless, nor null is refused."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values, where="config.json", fix=_FIX)

    def known(self, key: str, value: Any) -> bool:
        # A leading underscore: transformers keeps its own notes so.
        return value is None or key in _HARMLESS_KEYS or key.startswith("_") or value in _NEUTRAL.get(key, ())


def everywhere(window: int | None, num_layers: int) -> tuple[int | None, ...]:
    """One window for all layers; () where there is none."""
    return () if window is None else (window,) * num_layers


def by_layer(settings: Settings, window: int | None, num_layers: int) -> tuple[int | None, ...] | None:
    """Windows as ``layer_types`` has them; None where it is absent."""
    kinds = settings.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, Sequence) or len(kinds) != num_layers:
        settings.miss("layer_types", kinds, f"a list of {num_layers}, one a layer")
        return None
    others = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if others:
        settings.unsupported(f"layer_types with {', '.join(others)} (built: full_attention, sliding_attention)")
    if "sliding_attention" in kinds and window is None:
        settings.wrong("layer_types has sliding_attention, and there is no sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
