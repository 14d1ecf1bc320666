"""The model families that jserve knows by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from jserve.errors import UnsupportedModel
from jserve.models.config import ModelConfig
from jserve.models.gemma import Gemma, GemmaConfig
from jserve.models.gpt2 import Gpt2, Gpt2Config
from jserve.models.llama import Llama, LlamaConfig

__all__ = ["FAMILIES", "Family", "build_abstract", "family"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A configuration type and the module built from it."""

    name: str
    config_type: type[ModelConfig]
    module_type: type[nnx.Module]


_LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe")
_GEMMAS = ("gemma2", "gemma3")

FAMILIES: Mapping[str, Family] = {
    **{name: Family(name=name, config_type=LlamaConfig, module_type=Llama) for name in _LLAMAS},
    **{name: Family(name=name, config_type=GemmaConfig, module_type=Gemma) for name in _GEMMAS},
    "gpt2": Family(name="gpt2", config_type=Gpt2Config, module_type=Gpt2),
}
"""By family name. What sets the members of a group apart lies in their configurations."""


def family(name: str) -> Family:
    """The family called ``name``. Raises UnsupportedModel with the known names."""
    if name not in FAMILIES:
        raise UnsupportedModel(f"model family {name!r} is not built; built: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def build_abstract(family: Family, config: ModelConfig, dtype: DTypeLike) -> tuple[nnx.GraphDef[Any], nnx.State]:
    """The module's graph and its parameters as ShapeDtypeStructs; nothing is allocated."""
    make: Any = family.module_type
    model = nnx.eval_shape(lambda: make(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    return graphdef, state
