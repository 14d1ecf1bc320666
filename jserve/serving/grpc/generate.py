"""What Generate and GenerateStream share: from a request message to a Stream, and from a Stream to responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from jserve.request import Prompt
from jserve.serving.frontend import Frontend
from jserve.serving.limits import MAX_MESSAGES
from jserve.serving.stream import Stream
from jserve.v1 import inference_pb2 as pb
from jserve.wire import convert

__all__ = ["Write", "open_stream", "prompt_of", "pump"]

Write = Callable[[pb.GenerateResponse], Awaitable[None]]
"""Writes one response; waits while the client is far behind."""


def prompt_of(frontend: Frontend, request: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt:
    return convert.prompt_from_proto(request, max_tokens=frontend.model.max_model_len, max_messages=MAX_MESSAGES)


async def open_stream(frontend: Frontend, request: pb.GenerateRequest, *, deadline: float | None) -> Stream:
    """Submit a request. Raises what its fields, the template or the engine refuse it for."""
    return await frontend.open(
        prompt_of(frontend, request),
        convert.sampling_from_proto(request.sampling),
        request_id=request.request_id,
        model=request.model,
        deadline=deadline,
    )


async def pump(stream: Stream, write: Write) -> None:
    """Write all of a stream's deltas, one response a choice and pull. Leaving early cancels the request."""
    try:
        async for deltas in stream:
            for delta in deltas:
                for response in convert.split_response(convert.delta_to_proto(delta)):
                    await write(response)
    finally:
        stream.cancel()
