"""What an engine of either kind starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jserve.checkpoints.arrays.tree import main_dtype
from jserve.config import ServeConfig
from jserve.engine.contract import EngineLimits
from jserve.engine.programs import TellCompiled
from jserve.engine.store import ProgramStore
from jserve.load.source import Source
from jserve.request import ServedModel

__all__ = ["Start"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """A model, and where and how it is to run."""

    source: Source
    shapes: Any
    """Its parameters, as ShapeDtypeStructs with shardings."""
    config: ServeConfig
    mesh: Mesh
    mesh_name: str
    store: ProgramStore | None
    tell_compiled: TellCompiled

    def served(self, limits: EngineLimits, *, has_chat_template: bool, **of_encoder: Any) -> ServedModel:
        """What the doors say of the model, once an engine of ``limits`` is ready."""
        return ServedModel(
            name=self.source.name,
            family=self.source.family,
            dtype=main_dtype(jax.tree.leaves(self.shapes)),
            mesh=self.mesh_name,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            has_chat_template=has_chat_template,
            has_tokenizer=self.source.tokenizer is not None,
            **of_encoder,
        )

    def read_params(self) -> Any:
        """The parameters, on the devices."""
        return self.source.load(self.shapes)
