"""What one request reports to the metrics, each fact once."""

from __future__ import annotations

from jserve.observe.metrics import Metrics
from jserve.request import FinishReason

__all__ = ["RequestMeter"]


class RequestMeter:
    """Times are monotonic seconds. Without metrics it does nothing. Its caller serializes the calls."""

    def __init__(self, metrics: Metrics | None, *, arrival: float, choices: int) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._last: list[float | None] = [None] * choices
        self._open = set(range(choices))

    def tokens(self, choice: int, count: int, now: float) -> None:
        """``count`` tokens of a choice arrived together."""
        if self._metrics is None:
            return
        last, self._last[choice] = self._last[choice], now
        if last is not None:
            self._metrics.inter_token(now - last, tokens=count)
        elif self._last.count(None) == len(self._last) - 1:
            self._metrics.first_token(now - self._arrival)

    def finished(self, choice: int, reason: FinishReason, *, scheduled: float | None, now: float) -> None:
        """A choice ended. A second call for a choice does nothing."""
        if self._metrics is None or choice not in self._open:
            return
        self._open.discard(choice)
        self._metrics.choice_finished(reason)
        if not self._open:
            queue = (now if scheduled is None else scheduled) - self._arrival
            self._metrics.request_finished(total=now - self._arrival, queue=queue)
