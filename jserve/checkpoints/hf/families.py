"""The families that are read from Hugging Face folders, by their ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jserve.checkpoints.arrays.key_map import KeyMap
from jserve.checkpoints.hf import bert, gemma, gpt2, llama
from jserve.errors import CheckpointError, UnsupportedModel
from jserve.models.config import ModelConfig

__all__ = ["HF_FAMILIES", "HfFamily", "hf_model"]


@dataclass(frozen=True, kw_only=True)
class HfFamily:
    """How one ``model_type`` is read."""

    family: str
    """Its name in ``jserve.models.registry``."""
    config: Callable[[Mapping[str, Any]], ModelConfig]
    """From the contents of config.json. Raises CheckpointError for settings that are malformed, and UnsupportedModel
    for those that change the computation and are not built; either names all at once."""
    key_map: KeyMap
    is_encoder: bool = False
    """Whether it makes vectors of texts, as the files of sentence-transformers beside it say."""


HF_FAMILIES: Mapping[str, HfFamily] = {
    "bert": HfFamily(family="bert", config=bert.bert, key_map=bert.KEY_MAP, is_encoder=True),
    "llama": HfFamily(family="llama", config=llama.llama, key_map=llama.KEY_MAP),
    "mistral": HfFamily(family="mistral", config=llama.mistral, key_map=llama.KEY_MAP),
    "qwen2": HfFamily(family="qwen2", config=llama.qwen2, key_map=llama.KEY_MAP),
    "qwen3": HfFamily(family="qwen3", config=llama.qwen3, key_map=llama.KEY_MAP),
    "phi3": HfFamily(family="phi3", config=llama.phi3, key_map=llama.PHI3_KEY_MAP),
    "mixtral": HfFamily(family="mixtral", config=llama.mixtral, key_map=llama.MIXTRAL_KEY_MAP),
    "qwen3_moe": HfFamily(family="qwen3_moe", config=llama.qwen3_moe, key_map=llama.QWEN3_MOE_KEY_MAP),
    "gemma2": HfFamily(family="gemma2", config=gemma.gemma2, key_map=gemma.KEY_MAP),
    "gemma3": HfFamily(family="gemma3", config=gemma.gemma3, key_map=gemma.KEY_MAP),
    "gemma3_text": HfFamily(family="gemma3", config=gemma.gemma3_text, key_map=gemma.KEY_MAP),
    "gpt2": HfFamily(family="gpt2", config=gpt2.gpt2, key_map=gpt2.KEY_MAP),
}


def hf_model(path: Path, values: Mapping[str, Any]) -> tuple[HfFamily, ModelConfig]:
    """The family and the settings of the config.json at ``path``, which holds ``values``.

    Raises UnsupportedModel for other families, with the known ones, for weights that are quantized and for settings
    that are not built; CheckpointError for those that are malformed. All name the file or its folder.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in HF_FAMILIES:
        raise UnsupportedModel(
            f"{path} has the model_type {kind!r}; read from Hugging Face folders: {', '.join(sorted(HF_FAMILIES))}",
            fix="write it as a module of your own, save its parameters with Orbax, and serve that: "
            "jserve serve package.module:Class --checkpoint DIR",
        )
    quantized = values.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise UnsupportedModel(
            f"{path} says that the weights are quantized ({method}); such ones are not read",
            fix="take the model in float32, float16 or bfloat16, or as GGUF",
        )
    found = HF_FAMILIES[kind]
    try:
        return found, found.config(values)
    except CheckpointError as error:
        raise type(error)(f"{path.parent}: {error.message}", fix=error.fix) from None
