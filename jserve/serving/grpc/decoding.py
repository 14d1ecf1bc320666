"""Bytes that are no message of their type: INVALID_ARGUMENT to the client, and no traceback in the log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from jserve.errors import InvalidRequest
from jserve.serving.grpc.status import abort

__all__ = ["DecodingInterceptor"]


@dataclass(frozen=True)
class _Undecodable:
    reason: str


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Covers calls with a single request, whose bytes gRPC decodes before any code of ours runs.

    A streaming call meets the DecodeError where it reads, and Calls.place makes it the same status.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        make, behave = (
            (grpc.unary_stream_rpc_method_handler, handler.unary_stream)
            if handler.response_streaming
            else (grpc.unary_unary_rpc_method_handler, handler.unary_unary)
        )

        def decode(data: bytes) -> Any:
            try:
                return handler.request_deserializer(data)
            except DecodeError as error:
                return _Undecodable(str(error))

        async def run(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            if isinstance(request, _Undecodable):
                await abort(context, InvalidRequest(f"the request cannot be read: {request.reason}"))
            return await behave(request, context)

        return make(run, request_deserializer=decode, response_serializer=handler.response_serializer)
