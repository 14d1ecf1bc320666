"""Clients of a jserve server: ``Client`` and ``AsyncClient`` over gRPC, ``FlightClient`` over Arrow Flight.

Errors come back as the classes of jserve.errors that the server raised; JserveError ``Unreachable`` where there
is no server. Each client is imported when it is first named, for gRPC and Arrow are slow to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jserve.client.aio import AsyncClient
    from jserve.client.flight import FlightClient
    from jserve.client.requests import Cancel, PromptRequest
    from jserve.client.sync import Client

__all__ = ["AsyncClient", "Cancel", "Client", "FlightClient", "PromptRequest"]

_HOMES = {
    "AsyncClient": "aio",
    "Cancel": "requests",
    "Client": "sync",
    "FlightClient": "flight",
    "PromptRequest": "requests",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
