"""Who owns which page of the KV cache. No JAX: page ids only.

Invariant, at every moment: ``free + in_use == total``, every page in use has exactly one owner, and no page is
in the free list twice. ``check`` proves it; the engine calls it when idle and the tests at every step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

__all__ = ["PageAllocator", "pages_for"]


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold ``num_tokens`` tokens of one sequence."""
    return -(-num_tokens // page_size)


class PageAllocator:
    """Hands out page ids 0..total-1 and takes them back. Not thread-safe: the engine's thread owns it."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"total is {total}; a pool needs at least 1 page")
        self.total = total
        self._free = list(range(total - 1, -1, -1))  # a stack: the page freed last is the warmest
        self._owner: dict[int, Hashable] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def in_use(self) -> int:
        return len(self._owner)

    def allocate(self, count: int, owner: Hashable) -> list[int] | None:
        """``count`` pages for ``owner``, or None (and no change) where there are not so many."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._owner.update(dict.fromkeys(pages, owner))
        return pages

    def release(self, pages: Iterable[int], owner: Hashable) -> None:
        """Take pages back. Raises ValueError for a page that ``owner`` does not hold."""
        for page in pages:
            held = self._owner.get(page)
            if held != owner or page not in self._owner:
                raise ValueError(f"page {page} is released by {owner!r} and held by {held!r}")
            del self._owner[page]
            self._free.append(page)

    def check(self, live: Iterable[tuple[Hashable, Iterable[int]]]) -> None:
        """Prove the invariant against ``live``, pairs of an owner and the pages it says it holds."""
        held: dict[int, Hashable] = {}
        for owner, pages in live:
            for page in pages:
                if page in held:
                    raise RuntimeError(f"page {page} is held by {held[page]!r} and {owner!r}")
                held[page] = owner
        if held != self._owner:
            wrong = sorted(set(held.items()) ^ set(self._owner.items()), key=str)[:8]
            raise RuntimeError(f"pages and owners disagree: {wrong}")
        if len(set(self._free)) != len(self._free) or not set(self._free).isdisjoint(self._owner):
            raise RuntimeError("a page is in the free list twice, or free and in use")
        if self.free + self.in_use != self.total:
            raise RuntimeError(f"free {self.free} + in use {self.in_use} != total {self.total}")
