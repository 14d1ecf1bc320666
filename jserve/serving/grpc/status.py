"""Errors as gRPC statuses.

A client reads the status, a message of at most 1,000 bytes, the code of jserve.errors in the trailing metadata
``jserve-code``, and the standard rich status: ErrorInfo, and RetryInfo where trying again later makes sense.
"""

from __future__ import annotations

from typing import NoReturn

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from jserve.errors import QueueFull
from jserve.serving.incident import public
from jserve.wire import CODE_KEY

__all__ = ["abort"]

_MAX_MESSAGE_BYTES = 1000
"""The message travels twice in the trailers, once percent-encoded; clients take 8 KiB of them."""


async def abort(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    """End the call with the error's status; raises grpc.aio.AbortError."""
    shown = public(error)
    status = status_pb2.Status(
        code=grpc.StatusCode[shown.grpc_status].value[0],
        message=shown.message.encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore"),
        details=[_pack(error_details_pb2.ErrorInfo(reason=shown.code, domain="jserve"))],
    )
    if isinstance(shown, QueueFull):
        delay = Duration()
        delay.FromNanoseconds(int(shown.retry_after_s * 1e9))
        status.details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    rich = rpc_status.to_status(status)
    await context.abort(rich.code, rich.details, (*rich.trailing_metadata, (CODE_KEY, shown.code)))
    raise AssertionError("context.abort returned")


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed
