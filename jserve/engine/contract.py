"""What serving may ask of an engine. The engine knows token ids only: never text, sockets or protobuf.

Every method may be called from any thread. Sinks are called on the engine's thread and must not block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from jserve.errors import RequestError
from jserve.request import FinishReason, Request, TextRequest, TokenDelta

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Encoded", "EncoderEngine", "EngineLimits", "EngineStats", "Sink", "TokenEngine", "VectorSink", "Watched"]

Sink = Callable[[Sequence[TokenDelta]], None]
"""Takes one request's deltas of one dispatch, all choices together. After the last choice's finish_reason it is
never called again."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What became of one text."""

    vector: NDArray[np.float32] | None
    """[D], its own; None where there is an error."""
    error: RequestError | None
    """Cancelled, DeadlineExceeded or EngineFailed."""
    first_scheduled: float | None
    """Monotonic seconds at which its batch was dispatched, if it was."""


VectorSink: TypeAlias = Callable[[Encoded], None]
"""Hears once of one text."""


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    num_pages: int
    """0 of an encoder, as page_size is."""
    page_size: int
    max_queue: int


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot. Token counters only ever grow. An encoder's choices are its texts."""

    waiting: int
    """Choices accepted and not yet running."""
    running: int
    pages_free: int
    pages_in_use: int
    prompt_tokens: int
    """Prompt tokens computed, each once: what is computed anew after a preemption does not count."""
    output_tokens: int
    dispatches: int
    preemptions: int
    compilations: int
    """Compilations of this process since the engine was ready; 0 is right."""
    last_progress: float
    """Monotonic seconds of the newest sign of life: an idle loop came round, a dispatch ended; now, while the dispatch
    that runs has not taken longer than it may."""
    ready: bool
    failed: str | None
    """What brought the engine down, or None."""


class Watched(Protocol):
    """What any engine tells of itself."""

    @property
    def limits(self) -> EngineLimits: ...

    def stats(self) -> EngineStats: ...


class TokenEngine(Watched, Protocol):
    def submit(self, request: Request, sink: Sink) -> None:
        """Take a request, or raise at once: QueueFull, DuplicateRequest, PromptTooLong, Draining, EngineFailed.

        On success the sink hears of every choice until its one finish_reason, whatever happens.
        """
        ...

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End all choices of a request; pages are free within two dispatches. An unknown id is no error.

        The sink still gets each unfinished choice's last delta, with ``reason``.
        """
        ...

    def end_choice(self, request_id: str, choice: int) -> None:
        """End one choice quietly (its text met a stop string): it gets no further delta at all."""
        ...


class EncoderEngine(Watched, Protocol):
    @property
    def dimensions(self) -> int:
        """D of every vector."""
        ...

    def submit(self, request: TextRequest, sink: VectorSink) -> None:
        """Take a text, or raise at once: InvalidRequest, PromptTooLong, QueueFull, DuplicateRequest, Draining,
        EngineFailed. On success the sink hears of it once, whatever happens."""
        ...

    def cancel(self, request_id: str) -> None:
        """The text is not computed, where it has not begun; its sink hears Cancelled. An unknown id is no error."""
        ...
