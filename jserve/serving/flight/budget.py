"""What the results of all tables may take in memory together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

__all__ = ["ResultsBudget"]


class ResultsBudget:
    """Counts bytes; it is the tables that begin no more rows while it is ``full``. Belongs to its event loop.

    What is begun is still made, so that more than ``max_bytes`` may be held by the rows in flight.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._waiting: set[Callable[[], Awaitable[None]]] = set()
        self.held = 0
        """Bytes held now."""

    @property
    def full(self) -> bool:
        return self.held >= self._max_bytes

    def wait(self, wake: Callable[[], Awaitable[None]]) -> None:
        """Call ``wake`` once when there is room again."""
        self._waiting.add(wake)

    async def add(self, size: int) -> None:
        """Hold ``size`` bytes more; less where it is negative."""
        self.held += size
        # One by one, for this may be cancelled in between: who was not woken is by the next change.
        while self._waiting and not self.full:
            await self._waiting.pop()()
