"""The one path of every door, and of ``jserve.LLM``: what a caller wrote becomes a running request.

    Prompt + SamplingParams -> checked, templated, tokenized (worker threads) -> Request -> engine -> Stream

A refusal is raised before the stream starts; what happens later is in the stream.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from jserve.engine.contract import TokenEngine
from jserve.errors import Draining, DuplicateRequest, QueueFull
from jserve.observe.metrics import Metrics
from jserve.request import Prompt, Request, SamplingParams, ServedModel
from jserve.serving import limits
from jserve.serving.base_frontend import BaseFrontend
from jserve.serving.choice_text import ChoiceText
from jserve.serving.meter import RequestMeter
from jserve.serving.preparer import Prepared, Preparer
from jserve.serving.stream import Stream
from jserve.text.chat_template import ChatTemplate
from jserve.text.detokenizer import Detokenizer
from jserve.text.stop import StopMatcher, StopStrings
from jserve.text.tokenizer import Tokenizer

__all__ = ["Frontend"]

DEFAULT_OUTBOX_BYTES = 4 * 1024 * 1024


@dataclass(eq=False)
class _Live:
    """A place in the table of live requests."""

    request_id: str
    """The caller's."""
    arrival: float
    deadline: float | None
    stream: Stream | None = None
    """None while the prompt is prepared."""


class Frontend(BaseFrontend):
    """Opens streams on an engine.

    ``defaults`` are the checkpoint's generation defaults (temperature, top_p, top_k and min_p; None where it says
    nothing). ``outbox_bytes`` bounds what may wait unread in each stream. What a checkpoint brings is taken as it is:
    ``jserve.load.source`` has looked at it.
    """

    def __init__(
        self,
        *,
        engine: TokenEngine,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        defaults: SamplingParams,
        eos_ids: tuple[int, ...],
        model: ServedModel,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        workers: int = 2,
        outbox_bytes: int = DEFAULT_OUTBOX_BYTES,
    ) -> None:
        super().__init__(model=model, clock=clock, workers=workers)
        self._engine = engine
        self._limits = engine.limits
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._outbox_bytes = outbox_bytes
        self._preparer = Preparer(
            tokenizer=tokenizer,
            chat_template=chat_template,
            defaults=defaults,
            eos_ids=eos_ids,
            engine_limits=engine.limits,
            model_name=model.name,
        )
        self._serial = itertools.count()
        # By the caller's id.
        self._live: dict[str, _Live] = {}
        self._preparing = 0

    async def open(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str = "",
        model: str = "",
        deadline: float | None = None,
    ) -> Stream:
        """Start a request; the preparing is done on worker threads.

        ``request_id``: chosen here when empty; no two live requests may share one. ``model``: empty or the served
        name. ``deadline``: on the frontend's clock. Raises a RequestError; then nothing was started.
        """
        live = self._reserve(request_id, model=model, deadline=deadline)
        try:
            return self._start(*await self._on_worker(lambda: self._prepare(prompt, params)), live)
        except BaseException:
            self._forget(live)
            raise

    def open_sync(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str = "",
        model: str = "",
        deadline: float | None = None,
    ) -> Stream:
        """``open`` for a caller that has a thread of its own: the preparing is done on it."""
        live = self._reserve(request_id, model=model, deadline=deadline)
        try:
            return self._start(*self._prepare(prompt, params), live)
        except BaseException:
            self._forget(live)
            raise

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """The token ids that a prompt would run with; a chat goes through the template."""
        return list(await self._on_worker(lambda: self._preparer.prompt_ids(prompt)))

    @property
    def max_prompt_bytes(self) -> int:
        """No longer text can fit, so a door may refuse it before it copies it; 0 where there is no tokenizer."""
        return self._preparer.max_prompt_bytes

    @property
    def live(self) -> int:
        with self._lock:
            return len(self._live)

    def abort_all(self, words: str) -> None:
        with self._lock:
            streams = [live.stream for live in self._live.values()]
        for stream in streams:
            if stream is not None:
                stream.abort(Draining(words))

    # Admission

    def _reserve(self, request_id: str, *, model: str, deadline: float | None) -> _Live:
        arrival = self._clock()
        self.check_model(model)
        limits.check_request_id(request_id)
        self._check_deadline(deadline)
        with self._lock:
            self._check_open()
            request_id = request_id or f"req-{secrets.token_hex(12)}"
            if request_id in self._live:
                raise DuplicateRequest(f"request_id {request_id!r} is in use by a live request; choose another")
            if self._preparing >= self._limits.max_queue:
                raise QueueFull(
                    f"{self._preparing} requests are being prepared and {self._limits.max_queue} may; retry later"
                )
            self._preparing += 1
            live = self._live[request_id] = _Live(request_id, arrival, deadline)
        return live

    def _start(self, prepared: Prepared, choices: list[ChoiceText], live: _Live) -> Stream:
        self._check_deadline(live.deadline)
        # The engine's id is never used twice: a late answer to a cancelled request cannot reach its namesake.
        request = Request(
            request_id=f"{live.request_id}#{next(self._serial)}",
            prompt_ids=prepared.prompt_ids,
            sampling=prepared.sampling,
            arrival=live.arrival,
            deadline=live.deadline,
        )
        stream = Stream(
            live.request_id,
            request,
            engine=self._engine,
            choices=choices,
            outbox_bytes=self._outbox_bytes,
            clock=self._clock,
            meter=RequestMeter(self._metrics, arrival=live.arrival, choices=prepared.sampling.n),
            on_released=lambda: self._forget(live),
        )
        with self._lock:
            self._check_open()
            live.stream = stream
            self._preparing -= 1
        self._engine.submit(request, stream.accept)
        if stream.closed:  # Perhaps aborted between the two lines before; a second cancel harms nobody.
            self._engine.cancel(request.request_id)
        return stream

    def _forget(self, live: _Live) -> None:
        with self._lock:
            if self._live.get(live.request_id) is live:
                del self._live[live.request_id]
                self._preparing -= live.stream is None

    # Preparing

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> tuple[Prepared, list[ChoiceText]]:
        prepared = self._preparer.prepare(prompt, params)
        stops = StopStrings(prepared.stop) if prepared.stop else None
        choices = [
            ChoiceText(
                index,
                detokenizer=None if self._tokenizer is None else Detokenizer(self._tokenizer),
                stops=None if stops is None else StopMatcher(stops, include_stop=prepared.include_stop),
                min_tokens=prepared.sampling.min_tokens,
            )
            for index in range(prepared.sampling.n)
        ]
        return prepared, choices
