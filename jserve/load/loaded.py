"""What ``load`` gives."""

from __future__ import annotations

from dataclasses import dataclass

from jserve.engine.encoder.engine import VectorEngine
from jserve.engine.engine import Engine
from jserve.observe.metrics import Metrics
from jserve.request import ServedModel
from jserve.serving.frontends import AnyFrontend

__all__ = ["Loaded"]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """An engine that is ready, and what stands in front of it."""

    engine: Engine | VectorEngine
    frontend: AnyFrontend
    metrics: Metrics
    served: ServedModel

    def close(self) -> None:
        """Refuse what is new, then end what runs."""
        self.frontend.close()
        self.engine.close()
