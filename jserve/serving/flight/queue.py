"""A queue between two tasks of one event loop, bounded in bytes and in items."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["BoundedQueue"]

T = TypeVar("T")


class BoundedQueue(Generic[T]):
    """First in, first out. One item is always let in, however large, so that nothing waits for ever.

    ``taken_at`` is when something was last taken, or the queue stopped being empty: monotonic seconds.
    """

    def __init__(self, *, max_bytes: int, max_items: int, clock: Callable[[], float]) -> None:
        self._max_bytes, self._max_items = max_bytes, max_items
        self._clock = clock
        self._items: deque[tuple[T, int, int]] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = asyncio.Condition()
        self.taken_at = clock()
        self.blocked = 0
        """Puts that wait for room."""

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: T, size: int, *, weight: int | None = None) -> None:
        """Wait for room, then append. After ``close`` the item is dropped: nobody will take it.

        ``size`` counts in the queue's bound, ``weight`` in that of a take; by default it is the size.
        """
        async with self._changed:
            self.blocked += 1
            try:
                await self._changed.wait_for(lambda: self._closed or self._has_room(size))
            finally:
                self.blocked -= 1
            if self._closed:
                return
            if not self._items:
                self.taken_at = self._clock()
            self._items.append((item, size, size if weight is None else weight))
            self._bytes += size
            self._changed.notify_all()

    async def take(self, max_weight: int) -> list[T]:
        """Wait for something, then take as much as fits in ``max_weight``, at least one item; [] after the end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._items)
            taken: list[T] = []
            left = max_weight
            while self._items and (not taken or self._items[0][2] <= left):
                item, size, weight = self._items.popleft()
                taken.append(item)
                left -= weight
                self._bytes -= size
            self.taken_at = self._clock()
            self._changed.notify_all()
            return taken

    async def close(self) -> None:
        """Nothing more comes; what is there may still be taken."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has_room(self, size: int) -> bool:
        return not self._items or (self._bytes + size <= self._max_bytes and len(self._items) < self._max_items)
