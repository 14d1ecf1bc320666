"""The texts of one call in an encoder's engine, and what comes of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from jserve.engine.contract import Encoded, EncoderEngine
from jserve.errors import Cancelled, DeadlineExceeded, EngineFailed, JserveError, RequestError
from jserve.request import Embedding, FinishReason, TextRequest
from jserve.serving.embed_texts import TextIds
from jserve.serving.meter import RequestMeter

__all__ = ["EmbedCall"]


class EmbedCall:
    """Belongs to its event loop, but for ``abort``, which any thread may call.

    ``results`` has a place for each of ``count`` texts: its vector, or why it has none; None until that is known.
    """

    def __init__(
        self, engine: EncoderEngine, call_id: str, count: int, *, deadline: float | None, clock: Callable[[], float]
    ) -> None:
        self.results: list[Embedding | RequestError | None] = [None] * count
        self._engine = engine
        self._call_id = call_id
        self.deadline = deadline
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, tuple[TextIds, RequestMeter]] = {}
        self._heard: deque[tuple[int, Encoded]] = deque()
        """From the engine's thread, not looked at yet."""
        self._is_told = False
        self._changed = asyncio.Event()
        self._failure: JserveError | None = None

    def submit(self, index: int, text: TextIds, meter: RequestMeter) -> None:
        """Give a text to the engine. Raises what the engine refuses it for, or what aborted the call."""
        if self._failure is not None:
            raise self._failure
        request = TextRequest(request_id=self._request_id(index), token_ids=text.ids, deadline=self.deadline)
        self._engine.submit(request, lambda encoded: self._hear(index, encoded))
        self._open[index] = (text, meter)

    async def until_open(self, most: int) -> None:
        """Wait until the engine has at most so many of the texts. Raises what aborted the call."""
        while self._failure is None and len(self._open) > most:
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def abort(self, error: JserveError) -> None:
        """End the call with an error."""
        self._failure = error
        self._loop.call_soon_threadsafe(self._changed.set)

    def cancel(self) -> None:
        """Nobody wants what is still open."""
        for index in list(self._open):
            self._engine.cancel(self._request_id(index))

    def _request_id(self, index: int) -> str:
        return f"{self._call_id}#{index}"

    def _hear(self, index: int, encoded: Encoded) -> None:
        """On the engine's thread: one wake-up of the loop for all that comes together."""
        self._heard.append((index, encoded))
        if not self._is_told:
            self._is_told = True
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._is_told = False
        now = self._clock()
        while self._heard:
            index, encoded = self._heard.popleft()
            text, meter = self._open.pop(index)
            meter.finished(0, _reason(encoded.error), scheduled=encoded.first_scheduled, now=now)
            if encoded.vector is None:
                self.results[index] = encoded.error or EngineFailed("the engine gave neither a vector nor an error")
            else:
                self.results[index] = Embedding(
                    values=encoded.vector, prompt_tokens=len(text.ids), truncated=text.truncated
                )
        self._changed.set()


def _reason(error: RequestError | None) -> FinishReason:
    match error:
        case None:
            return FinishReason.STOP
        case Cancelled():
            return FinishReason.CANCELLED
        case DeadlineExceeded():
            return FinishReason.DEADLINE
    return FinishReason.ERROR
