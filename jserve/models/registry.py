"""The model families that jserve knows by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from jserve.errors import UnsupportedModel
from jserve.models.bert import Bert, BertConfig
from jserve.models.config import ModelConfig
from jserve.models.llama import Llama, LlamaConfig

__all__ = ["FAMILIES", "Family", "build_abstract", "family"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A configuration type and the module built from it."""

    name: str
    config_type: type[ModelConfig]
    module_type: type[nnx.Module]


FAMILIES: Mapping[str, Family] = {
    "bert": Family(name="bert", config_type=BertConfig, module_type=Bert),
    "llama": Family(name="llama", config_type=LlamaConfig, module_type=Llama),
}


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
