"""A failed RPC as an error of jserve.errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from jserve.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    InvalidRequest,
    JserveError,
    MessageTooLarge,
    NotFound,
    QueueFull,
    Unreachable,
    Unsupported,
)
from jserve.wire import CODE_KEY
from jserve.wire.errors import error_from_code

__all__ = ["FailedCall", "from_rpc"]

_NO_SUCH_METHOD = "Method not found!"
"""gRPC's words where a server has no such service."""
_CANCELLED_HERE = "Locally cancelled by application!"
"""gRPC's words where the caller cancelled."""
_DETAILS_KEY = "grpc-status-details-bin"

# For statuses that gRPC itself made, on either side, and that therefore carry no code of ours.
_BY_STATUS: dict[grpc.StatusCode, type[JserveError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequest,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.CANCELLED: Cancelled,
}


class FailedCall(Protocol):
    """What grpc.RpcError of a finished call and grpc.aio.AioRpcError have in common."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Sequence[tuple[str, str | bytes]] | None: ...


def from_rpc(failed: FailedCall, *, address: str, timeout: float | None) -> JserveError:
    """The error that the server named in its trailing metadata, else the one that fits the status."""
    status, words = failed.code(), failed.details() or ""
    trailing = dict(failed.trailing_metadata() or ())
    code = trailing.get(CODE_KEY)
    if isinstance(code, str):
        named = error_from_code(code, words, retry_after_s=_retry_after(trailing.get(_DETAILS_KEY)))
        if named is not None:
            return named
    if status is grpc.StatusCode.UNAVAILABLE:
        return Unreachable(
            f"no jserve server answers at {address}; it is not running (jserve serve), or not ready yet ({words})"
        )
    if status is grpc.StatusCode.CANCELLED and words != _CANCELLED_HERE:  # what reaches a server that closes its doors
        return Draining(f"{address} ended the call: it shuts down, or what stands before it does ({words})")
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        limit = "its deadline" if timeout is None else f"{timeout:g} s"
        return DeadlineExceeded(f"the call to {address} did not end within {limit}")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if "message larger than max" in words:
            return MessageTooLarge(f"{words} bytes; max_message_mb of client and server is that limit")
        return QueueFull(words)
    if status is grpc.StatusCode.UNIMPLEMENTED and words == _NO_SUCH_METHOD:
        return Unsupported(f"{address} answers, but not this protocol; gRPC and Arrow Flight have ports of their own")
    return _BY_STATUS.get(status, JserveError)(f"{words or status.name} (from {address})")


def _retry_after(details: str | bytes | None) -> float | None:
    """Seconds of the RetryInfo in a rich status, if there is one."""
    if not isinstance(details, bytes):
        return None
    try:
        status = status_pb2.Status.FromString(details)
    except DecodeError:  # the key is gRPC's, so its content may come from anyone on the way
        return None
    for detail in status.details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            return retry.retry_delay.ToTimedelta().total_seconds()
    return None
