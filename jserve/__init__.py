"""jserve: serve JAX models over gRPC and Arrow Flight.

from jserve import LLM, SamplingParams
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jserve.request import SamplingParams

if TYPE_CHECKING:
    from jserve.llm import LLM as LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # LLM brings JAX with it; `import jserve` alone must stay quick for clients and the command line.
    if name == "LLM":
        from jserve.llm import LLM

        return LLM
    raise AttributeError(f"module 'jserve' has no attribute {name!r}")
