"""The one path of every door to an encoder, and of ``jserve.LLM``: texts become vectors.

    texts -> checked, tokenized (worker threads) -> TextRequests -> engine -> Embeddings, in the order of the texts

A call may have more texts than the engine's queue takes: it keeps a window of them there and waits for room.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

from jserve.engine.contract import EncoderEngine
from jserve.errors import Draining, EngineFailed, InvalidRequest, RequestError
from jserve.observe.metrics import Metrics
from jserve.request import Embedding, ServedModel
from jserve.serving.base_frontend import BaseFrontend
from jserve.serving.embed_call import EmbedCall
from jserve.serving.embed_texts import MAX_TEXTS, TextIds, TextPreparer, check_text
from jserve.serving.meter import RequestMeter
from jserve.serving.room import until_room

__all__ = ["EmbedFrontend"]

_CHUNK = 64
"""Texts that are tokenized together."""
_GROUPS_AHEAD = 4
"""How many of the engine's largest groups a call keeps there: two run, two gather."""


class EmbedFrontend(BaseFrontend):
    """Runs texts on an encoder's engine. ``preparer`` cuts them off at the engine's ``max_model_len``."""

    def __init__(
        self,
        *,
        engine: EncoderEngine,
        preparer: TextPreparer,
        model: ServedModel,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        workers: int = 2,
    ) -> None:
        super().__init__(model=model, clock=clock, workers=workers)
        self._preparer = preparer
        self._engine = engine
        self._metrics = metrics
        limits = engine.limits
        self._window = min(limits.max_queue, max(_CHUNK, _GROUPS_AHEAD * limits.max_num_seqs))
        self._serial = itertools.count()
        self._calls: set[EmbedCall] = set()

    async def embed(self, texts: Sequence[str], *, model: str = "", deadline: float | None = None) -> list[Embedding]:
        """One vector a text, in their order; the whole call fails with the first text that does.

        ``model``: empty or the served name. ``deadline``: on the frontend's clock; a text past it is not computed.
        Raises a RequestError.
        """
        if len(texts) > MAX_TEXTS:
            raise InvalidRequest(f"the call has {len(texts)} texts; at most {MAX_TEXTS} are taken: make several calls")
        found = []
        for result in await self._embed(texts, model=model, deadline=deadline, patient=False, whole=True):
            if isinstance(result, RequestError):
                raise result
            found.append(result)
        return found

    async def embed_each(
        self, texts: Sequence[str], *, model: str = "", deadline: float | None = None, patient: bool = False
    ) -> list[Embedding | RequestError]:
        """As ``embed``, for any number of texts of which each fails alone.

        What befalls all of them is raised: a wrong model, a shutdown, and QueueFull where not even the first text
        found room; ``patient`` waits for room then too.
        """
        return await self._embed(texts, model=model, deadline=deadline, patient=patient, whole=False)

    async def _embed(
        self, texts: Sequence[str], *, model: str, deadline: float | None, patient: bool, whole: bool
    ) -> list[Embedding | RequestError]:
        """``whole``: one text that cannot be tokenized refuses the call, before anything is computed."""
        self.check_model(model)
        self._check_deadline(deadline)
        with self._lock:
            self._check_open()
            call = EmbedCall(
                self._engine, f"embed-{next(self._serial)}", len(texts), deadline=deadline, clock=self._clock
            )
            self._calls.add(call)
        try:
            await self._run(call, texts, patient=patient, whole=whole)
        finally:
            call.cancel()
            with self._lock:
                self._calls.discard(call)
        return [result or EngineFailed("the text got no answer") for result in call.results]

    async def tokenize(self, text: str) -> list[int]:
        """The token ids that a text would run with: special ones included, and cut off where it is too long."""
        (prepared,) = await self._on_worker(lambda: self._preparer.prepare([check_text(text, what="the text")]))
        return list(prepared.ids)

    @property
    def live(self) -> int:
        with self._lock:
            return len(self._calls)

    def abort_all(self, words: str) -> None:
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.abort(Draining(words))

    async def _run(self, call: EmbedCall, texts: Sequence[str], *, patient: bool, whole: bool) -> None:
        arrival = self._clock()
        prepare: Callable[[Sequence[str]], Sequence[TextIds | RequestError]] = self._prepare_each
        if whole:
            texts, prepare = await self._on_worker(partial(_checked, texts), begun=True), self._preparer.prepare
        for start in range(0, len(texts), _CHUNK):
            prepared = await self._on_worker(partial(prepare, texts[start : start + _CHUNK]), begun=True)
            for index, text in enumerate(prepared, start=start):
                if isinstance(text, RequestError):
                    call.results[index] = text
                    continue
                meter = RequestMeter(self._metrics, arrival=arrival, choices=1)
                try:
                    await self._submit(call, index, text, meter, patient=patient)
                except InvalidRequest as error:
                    call.results[index] = error
                patient = True
        await call.until_open(0)

    def _prepare_each(self, texts: Sequence[str]) -> list[TextIds | RequestError]:
        """Each text's tokens, or why it has none."""
        prepared: list[TextIds | RequestError | None] = []
        good = []
        for text in texts:
            try:
                good.append(check_text(text, what="the text"))
                prepared.append(None)
            except RequestError as error:
                prepared.append(error)
        tokens = iter(self._preparer.prepare(good))
        return [next(tokens) if place is None else place for place in prepared]

    async def _submit(self, call: EmbedCall, index: int, text: TextIds, meter: RequestMeter, *, patient: bool) -> None:
        async def submit() -> None:
            call.submit(index, text, meter)

        await call.until_open(self._window - 1)
        await (until_room(submit, check=lambda: self._check_deadline(call.deadline)) if patient else submit())


def _checked(texts: Sequence[str]) -> list[str]:
    return [check_text(text, what=f"text {i}") for i, text in enumerate(texts)]
