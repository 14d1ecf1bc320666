"""The one path of every door, and of ``jserve.LLM``: what a caller wrote becomes a running request.

    Prompt + SamplingParams -> checked, templated, tokenized (worker threads) -> Request -> engine -> Stream

A refusal is raised before the stream starts; what happens later is in the stream.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import TypeVar

from jserve.engine.contract import TokenEngine
from jserve.errors import (
    ConfigError,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    InvalidRequest,
    NotFound,
    QueueFull,
    TemplateError,
    Unsupported,
)
from jserve.observe.metrics import Metrics
from jserve.request import (
    MAX_STOP_TOKENS,
    Message,
    Prompt,
    Request,
    ResolvedSampling,
    SamplingParams,
    ServedModel,
)
from jserve.serving import limits
from jserve.serving.choice import Choice
from jserve.serving.meter import RequestMeter
from jserve.serving.stream import Stream
from jserve.text.chat_template import ChatTemplate
from jserve.text.detokenizer import Detokenizer
from jserve.text.stop import StopMatcher, StopStrings
from jserve.text.tokenizer import Tokenizer

__all__ = ["Frontend", "ServedModel"]

DEFAULT_OUTBOX_BYTES = 4 * 1024 * 1024

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    prompt_ids: tuple[int, ...]
    sampling: ResolvedSampling
    stop: tuple[str, ...]
    include_stop: bool


class Frontend:
    """Opens streams on an engine. Safe from any thread.

    ``defaults`` are the checkpoint's generation defaults (temperature, top_p, top_k and min_p; None where it says
    nothing). ``clock`` is monotonic seconds, the engine's own. ``outbox_bytes`` bounds what may wait unread in
    each stream. Raises ConfigError where the defaults or the EOS ids cannot be served.
    """

    model: ServedModel

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
        self.model = model
        self._engine = engine
        self._limits = engine.limits
        self._tokenizer = tokenizer
        self._template = chat_template
        self._defaults = defaults
        self._eos_ids = tuple(dict.fromkeys(eos_ids))
        self._metrics = metrics
        self._clock = clock
        self._outbox_bytes = outbox_bytes
        self._check_checkpoint()
        self._max_prompt_bytes = 0 if tokenizer is None else self._limits.max_model_len * tokenizer.longest_token_bytes
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="jserve-text")
        self._serial = itertools.count()
        self._lock = threading.Lock()
        # Requests by the caller's id; None while one is prepared.
        self._live: dict[str, Stream | None] = {}
        self._refusal: str | None = None

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
        arrival = self._clock()
        request_id = self._reserve(request_id, model=model, deadline=deadline)
        try:
            prepared = await self._on_worker(lambda: self._prepare(prompt, params))
            return self._start(prepared, request_id=request_id, arrival=arrival, deadline=deadline)
        except BaseException:
            self._forget(request_id)
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
        arrival = self._clock()
        request_id = self._reserve(request_id, model=model, deadline=deadline)
        try:
            prepared = self._prepare(prompt, params)
            return self._start(prepared, request_id=request_id, arrival=arrival, deadline=deadline)
        except BaseException:
            self._forget(request_id)
            raise

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """The token ids that a prompt would run with; a chat goes through the template."""
        return list(await self._on_worker(lambda: self._prompt_ids(prompt)))

    def tokenize_sync(self, prompt: Prompt) -> list[int]:
        return list(self._prompt_ids(prompt))

    def check_model(self, name: str) -> None:
        """Raise NotFound unless the name is empty or the served one."""
        if name and name != self.model.name:
            raise NotFound(f"model {name!r} is not served here; served is {self.model.name!r}")

    @property
    def max_prompt_bytes(self) -> int:
        """No longer text can fit, so a door may refuse it before it copies it; 0 where there is no tokenizer."""
        return self._max_prompt_bytes

    @property
    def live(self) -> int:
        """Requests that are prepared, wait or run, and are not cancelled."""
        with self._lock:
            return len(self._live)

    def refuse(self, words: str) -> None:
        """From now on every new request is refused with Draining, in these words; live ones go on."""
        with self._lock:
            self._refusal = words

    def abort_all(self, words: str) -> None:
        """End every live stream with Draining, in these words."""
        with self._lock:
            streams = [stream for stream in self._live.values() if stream is not None]
        for stream in streams:
            stream.abort(Draining(words))

    def close(self) -> None:
        """Refuse new requests and stop the workers; live streams are the engine's to end."""
        self.refuse("the server is shutting down; send the request elsewhere")
        self._workers.shutdown()

    # Admission

    def _reserve(self, request_id: str, *, model: str, deadline: float | None) -> str:
        self.check_model(model)
        limits.check_request_id(request_id)
        self._check_deadline(deadline)
        with self._lock:
            self._check_open()
            request_id = request_id or f"req-{secrets.token_hex(12)}"
            if request_id in self._live:
                raise DuplicateRequest(f"request_id {request_id!r} is in use by a live request; choose another")
            preparing = sum(stream is None for stream in self._live.values())
            if preparing >= self._limits.max_queue:
                raise QueueFull(
                    f"{preparing} requests are being prepared and {self._limits.max_queue} may; retry later"
                )
            self._live[request_id] = None
        return request_id

    def _start(self, prepared: _Prepared, *, request_id: str, arrival: float, deadline: float | None) -> Stream:
        self._check_deadline(deadline)
        sampling = prepared.sampling
        # The engine's id is never used twice: a late answer to a cancelled request cannot reach its namesake.
        request = Request(
            request_id=f"{request_id}#{next(self._serial)}",
            prompt_ids=prepared.prompt_ids,
            sampling=sampling,
            arrival=arrival,
            deadline=deadline,
        )
        stream = Stream(
            request_id,
            request,
            engine=self._engine,
            choices=self._choices(prepared),
            outbox_bytes=self._outbox_bytes,
            clock=self._clock,
            meter=RequestMeter(self._metrics, arrival=arrival, choices=sampling.n),
            on_released=lambda: self._forget(request_id),
        )
        with self._lock:
            self._check_open()
            self._live[request_id] = stream
        self._engine.submit(request, stream.accept)
        if stream.closed:  # Aborted between the two lines before; ids are unique, so a second cancel harms nobody.
            self._engine.cancel(request.request_id)
        return stream

    def _choices(self, prepared: _Prepared) -> list[Choice]:
        stops = StopStrings(prepared.stop) if prepared.stop else None
        return [
            Choice(
                index,
                detokenizer=None if self._tokenizer is None else Detokenizer(self._tokenizer),
                stops=None if stops is None else StopMatcher(stops, include_stop=prepared.include_stop),
                min_tokens=prepared.sampling.min_tokens,
            )
            for index in range(prepared.sampling.n)
        ]

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._live.pop(request_id, None)

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise Draining(self._refusal)

    def _check_deadline(self, deadline: float | None) -> None:
        if deadline is not None and self._clock() >= deadline:
            raise DeadlineExceeded("the request's deadline passed before it was started")

    # Preparing

    async def _on_worker(self, work: Callable[[], T]) -> T:
        def run() -> T:
            self._check_open()
            return work()

        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._workers, run)

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> _Prepared:
        """Check the cheap things first; the prompt is tokenized only for a request that could run."""
        sampling = self._resolve(params)
        stop = limits.check_stop_strings(params.stop)
        if stop and self._tokenizer is None:
            raise Unsupported(f"model {self.model.name!r} has no tokenizer, so stop strings cannot be found")
        prompt_ids = self._prompt_ids(prompt)
        if not prompt_ids:
            raise InvalidRequest("the prompt has 0 tokens; give at least one")
        sampling = limits.check_max_tokens(
            sampling, params.max_tokens, prompt_tokens=len(prompt_ids), limits=self._limits
        )
        return _Prepared(prompt_ids=prompt_ids, sampling=sampling, stop=stop, include_stop=bool(params.include_stop))

    def _resolve(self, params: SamplingParams) -> ResolvedSampling:
        return limits.resolve_sampling(
            params,
            defaults=self._defaults,
            eos_ids=self._eos_ids,
            vocab_size=self._limits.vocab_size,
            max_model_len=self._limits.max_model_len,
        )

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            tokenizer = self._need_tokenizer()
            limits.check_text(prompt, max_bytes=self._max_prompt_bytes, limits=self._limits)
            return tuple(tokenizer.encode(prompt, add_special=True))
        if isinstance(prompt, (bytes, bytearray, Mapping)) or not hasattr(prompt, "__len__"):
            raise InvalidRequest(
                f"the prompt is of type {type(prompt).__name__}; give text, a list of token ids or a list of messages"
            )
        if len(prompt) and isinstance(prompt[0], Mapping):
            tokenizer = self._need_tokenizer()
            # At most one BOS whoever writes it: the template, or the tokenizer where the model wants one.
            return tuple(tokenizer.encode(self._render(prompt), add_special=True))  # type: ignore[arg-type]
        return limits.check_prompt_ids(prompt, limits=self._limits)  # type: ignore[arg-type]

    def _render(self, messages: Sequence[Message]) -> str:
        if self._template is None:
            raise TemplateError(f"model {self.model.name!r} has no chat template; send raw text or token ids")
        checked = limits.check_messages(messages, max_bytes=self._max_prompt_bytes, limits=self._limits)
        return self._template.render(checked)

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise Unsupported(f"model {self.model.name!r} has no tokenizer; send token ids")
        return self._tokenizer

    def _check_checkpoint(self) -> None:
        """The checkpoint's own defaults pass the same bounds as a request's, once, at start."""
        extra = [
            field.name
            for field in fields(SamplingParams)
            if field.name not in limits.DEFAULTABLE and getattr(self._defaults, field.name) != field.default
        ]
        if extra:
            raise ConfigError(
                f"{', '.join(extra)} cannot be a generation default; allowed: {', '.join(limits.DEFAULTABLE)}"
            )
        bad = [token for token in self._eos_ids if not 0 <= token < self._limits.vocab_size]
        if bad or len(self._eos_ids) > MAX_STOP_TOKENS:
            raise ConfigError(
                f"the checkpoint's EOS ids are {list(self._eos_ids)}; allowed are {MAX_STOP_TOKENS} ids of "
                f"0..{self._limits.vocab_size - 1}"
            )
        try:
            self._resolve(SamplingParams())
        except InvalidRequest as error:
            raise ConfigError(f"the checkpoint's generation defaults cannot be served: {error}") from None
