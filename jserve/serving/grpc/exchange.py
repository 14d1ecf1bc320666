"""One GenerateStream call: many requests by id over one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from dataclasses import dataclass, field

import grpc

from jserve.errors import DuplicateRequest, InvalidRequest, JserveError, QueueFull
from jserve.request import FinishReason
from jserve.serving.calls import Place
from jserve.serving.frontend import Frontend
from jserve.serving.grpc.generate import Write, open_stream, pump
from jserve.serving.incident import public
from jserve.serving.stream import Stream
from jserve.v1 import inference_pb2 as pb

__all__ = ["MAX_LIVE", "Exchange"]

MAX_LIVE = 256
"""Most unfinished requests of one call; one more is refused in the stream."""


@dataclass(eq=False)
class _Live:
    """A request from its message until its last response is written."""

    before: _Live | None
    """The cancelled request that had the same id, until its last response is written."""
    stream: Stream | None = None
    cancelled: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def cancel(self) -> None:
        self.cancelled = True
        if self.stream is not None:
            self.stream.cancel()


class Exchange:
    """Reads requests until the client half-closes; each runs as a task of its own and fails alone.

    The tasks share the call's writer through a lock. A task pulls from its Stream only when what it pulled
    before is written, so what a slow reader leaves unread waits in each Stream's bounded outbox. The id of a
    cancelled request may be used again at once: its namesake starts when the last response of it is written.
    """

    def __init__(self, frontend: Frontend, place: Place, write: Write, *, deadline: float | None) -> None:
        self._frontend = frontend
        self._place = place
        self._call_write = write
        self._writing = asyncio.Lock()
        self._deadline = deadline
        self._live: dict[str, _Live] = {}
        self._unfinished = 0
        self._reading = False

    async def run(self, messages: AsyncIterable[pb.GenerateStreamRequest]) -> None:
        """Ends after the half-close and the last response. Leaving it early cancels every request."""
        try:
            await self._read(messages)
        except ExceptionGroup as group:
            # Requests fail in the stream; what comes here broke the call as a whole.
            raise group.exceptions[0] from None

    async def _read(self, messages: AsyncIterable[pb.GenerateStreamRequest]) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._note(reading=True)
            async for message in messages:
                if message.WhichOneof("message") == "cancel":
                    if message.cancel in self._live:
                        self._live[message.cancel].cancel()
                    continue
                request_id = message.generate.request_id
                refusal = self._refusal(message)
                if refusal is not None:
                    # Written here, not in a task: a client that only sends is not read any further.
                    await self._write(_last_response(request_id, refusal))
                    continue
                live = self._live[request_id] = _Live(before=self._live.get(request_id))
                self._note(unfinished=1)
                tasks.create_task(self._serve(message.generate, live))
            self._note(reading=False)

    def _note(self, *, reading: bool | None = None, unfinished: int = 0) -> None:
        """Tell a drain whether this call waits for nothing but its client."""
        self._reading = self._reading if reading is None else reading
        self._unfinished += unfinished
        self._place.resting = self._reading and not self._unfinished

    def _refusal(self, message: pb.GenerateStreamRequest) -> JserveError | None:
        request_id = message.generate.request_id
        if not message.HasField("generate"):
            return InvalidRequest("the message is empty; set generate or cancel")
        if not request_id:
            return InvalidRequest("requests of a stream are told apart by request_id; this one has none")
        if request_id in self._live and not self._live[request_id].cancelled:
            return DuplicateRequest(f"request id {request_id!r} is in use by a live request of this stream")
        if self._unfinished >= MAX_LIVE:
            return QueueFull(f"{MAX_LIVE} requests of this stream are unfinished and no more may be; try again later")
        return None

    async def _serve(self, request: pb.GenerateRequest, live: _Live) -> None:
        try:
            if live.before is not None:
                await live.before.ended.wait()
                live.before = None
            live.stream = await open_stream(self._frontend, request, deadline=self._deadline)
            if live.cancelled:
                live.stream.cancel()
            await pump(live.stream, self._write)
        except grpc.aio.BaseError:
            raise  # the call is broken, not this request
        except Exception as error:
            await self._write(_last_response(request.request_id, public(error)))
        finally:
            if self._live[request.request_id] is live:
                del self._live[request.request_id]
            live.ended.set()
            self._note(unfinished=-1)

    async def _write(self, response: pb.GenerateResponse) -> None:
        async with self._writing:
            await self._call_write(response)


def _last_response(request_id: str, error: JserveError) -> pb.GenerateResponse:
    """The one and last response of a request that made no delta."""
    response = pb.GenerateResponse(
        request_id=request_id, finish_reason=FinishReason.ERROR, error=error.message, error_code=error.code
    )
    response.usage.SetInParent()
    response.timings.SetInParent()
    return response
