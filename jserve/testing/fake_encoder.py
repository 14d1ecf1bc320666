"""An encoder's engine without a model: a thread that makes vectors by a fixed rule. For tests of what stands on one."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from jserve.engine.contract import Encoded, EngineLimits, EngineStats, VectorSink
from jserve.errors import Cancelled, DeadlineExceeded, DuplicateRequest, EngineFailed, InvalidRequest, QueueFull
from jserve.request import TextRequest

__all__ = ["FakeEncoder", "fake_vector"]


def fake_vector(token_ids: Sequence[int], dimensions: int) -> NDArray[np.float32]:
    """Number d is the sum of the ids, plus d times their count: [D]."""
    return sum(token_ids) + len(token_ids) * np.arange(dimensions, dtype=np.float32)


class FakeEncoder:
    """An EncoderEngine with a thread of its own. While ``paused`` is set it takes texts and computes none."""

    def __init__(
        self,
        *,
        dimensions: int = 4,
        max_model_len: int = 16,
        vocab_size: int = 258,
        max_queue: int = 1024,
        group: int = 8,
    ) -> None:
        self.limits = EngineLimits(
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            max_num_seqs=group,
            num_pages=0,
            page_size=0,
            max_queue=max_queue,
        )
        self.dimensions = dimensions
        self.computed: list[tuple[int, ...]] = []
        """Token ids of the texts computed, in order."""
        self.submitted = 0
        self.paused = threading.Event()
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, tuple[TextRequest, VectorSink]] = OrderedDict()
        self._failed: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="fake-encoder", daemon=True)
        self._thread.start()

    def submit(self, request: TextRequest, sink: VectorSink) -> None:
        with self._changed:
            if self._failed is not None:
                raise EngineFailed(f"the engine failed ({self._failed})")
            if not request.token_ids:
                raise InvalidRequest("the text has no token; it needs at least 1")
            if request.request_id in self._waiting:
                raise DuplicateRequest(f"request {request.request_id!r} is still running")
            if len(self._waiting) >= self.limits.max_queue:
                raise QueueFull(f"{len(self._waiting)} texts are waiting, as many as are allowed; try again later")
            self._waiting[request.request_id] = (request, sink)
            self.submitted += 1
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        with self._changed:
            _, sink = self._waiting.pop(request_id, (None, None))
        if sink is not None:
            sink(Encoded(vector=None, error=Cancelled("the request was cancelled"), first_scheduled=None))

    def fail(self, words: str) -> None:
        """Fail everything that waits, and refuse what is new."""
        with self._changed:
            self._failed = words
            texts = list(self._waiting.values())
            self._waiting.clear()
        for _, sink in texts:
            sink(Encoded(vector=None, error=EngineFailed(f"the engine failed, {words}"), first_scheduled=None))

    def resume(self) -> None:
        with self._changed:
            self.paused.clear()
            self._changed.notify_all()

    def stats(self) -> EngineStats:
        with self._changed:
            waiting = len(self._waiting)
        return EngineStats(
            waiting=waiting,
            running=0,
            pages_free=0,
            pages_in_use=0,
            prompt_tokens=sum(map(len, self.computed)),
            output_tokens=0,
            dispatches=len(self.computed),
            preemptions=0,
            compilations=0,
            last_progress=time.monotonic(),
            ready=self._failed is None and not self._closed,
            failed=self._failed,
        )

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> FakeEncoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._waiting and not self.paused.is_set()))
                if self._closed:
                    return
                _, (request, sink) = self._waiting.popitem(last=False)
            now = time.monotonic()
            if request.deadline is not None and request.deadline <= now:
                sink(Encoded(vector=None, error=DeadlineExceeded("the deadline passed"), first_scheduled=None))
                continue
            self.computed.append(request.token_ids)
            sink(Encoded(vector=fake_vector(request.token_ids, self.dimensions), error=None, first_scheduled=now))
