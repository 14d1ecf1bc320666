"""What an engine of either kind starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jserve.config import ServeConfig
from jserve.engine.programs import TellCompiled
from jserve.engine.store import ProgramStore
from jserve.load.source import Source

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

    def read_params(self) -> Any:
        """The parameters, on the devices."""
        return self.source.load(self.shapes)
