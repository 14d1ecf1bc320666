"""Errors as Flight clients read them.

A Flight error is a gRPC status whose trailers repeat it in Arrow's terms. pyarrow's clients see our JSON in
``FlightError.extra_info``: code, grpc_status, message and, where trying again makes sense, retry_after_s.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import grpc

from jserve.errors import JserveError, QueueFull
from jserve.serving.incident import public

__all__ = ["abort"]

_MAX_MESSAGE_BYTES = 700
"""The message travels three times in trailers that many clients bound to 8 KiB."""

# Arrow's own status codes, for clients that show them; without one they ignore extra_info.
_ARROW_IO_ERROR = "5"
_ARROW_CODES = {
    "INVALID_ARGUMENT": "4",
    "NOT_FOUND": "2",
    "ALREADY_EXISTS": "45",
    "UNIMPLEMENTED": "10",
    "RESOURCE_EXHAUSTED": "6",
    "CANCELLED": "8",
}


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End the call with the error's status; raises grpc.aio.AbortError."""
    shown = public(error)
    message = shown.message.encode()[:_MAX_MESSAGE_BYTES].decode(errors="ignore")
    trailers = (
        ("x-arrow-status", _ARROW_CODES.get(shown.grpc_status, _ARROW_IO_ERROR)),
        ("x-arrow-status-message-bin", message.encode()),
        ("grpc-status-details-bin", _extra_info(shown, message)),
    )
    await context.abort(_status(shown), message, trailers)
    raise AssertionError("context.abort returned")


def _status(error: JserveError) -> grpc.StatusCode:
    # Arrow's C++ client takes RESOURCE_EXHAUSTED for an invalid argument, so nobody would try again.
    return grpc.StatusCode.UNAVAILABLE if isinstance(error, QueueFull) else grpc.StatusCode[error.grpc_status]


def _extra_info(error: JserveError, message: str) -> bytes:
    info: dict[str, object] = {"code": error.code, "grpc_status": error.grpc_status, "message": message}
    if isinstance(error, QueueFull):
        info["retry_after_s"] = error.retry_after_s
    return json.dumps(info, ensure_ascii=False).encode()
