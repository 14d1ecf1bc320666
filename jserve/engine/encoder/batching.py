"""Which of the texts that wait run together. No clock, no threads, no JAX."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from jserve.engine.encoder.buckets import EncoderBuckets

__all__ = ["Group", "WaitingTexts"]


class Waiting(Protocol):
    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...


Text = TypeVar("Text", bound=Waiting)


@dataclass(frozen=True, kw_only=True)
class Group(Generic[Text]):
    """Texts that run together, and the shape that they run in."""

    texts: tuple[Text, ...]
    num_rows: int
    """S: the texts, and rows of padding."""
    length: int
    """L."""


class WaitingTexts(Generic[Text]):
    """Texts in the order of their coming, apart by the bucket of their length."""

    def __init__(self, buckets: EncoderBuckets) -> None:
        self._buckets = buckets
        self._lines: list[OrderedDict[str, tuple[int, Text]]] = [OrderedDict() for _ in buckets.by_length]
        self._came = 0

    def __len__(self) -> int:
        return sum(map(len, self._lines))

    def __iter__(self) -> Iterator[Text]:
        return (text for line in self._lines for _, text in line.values())

    def add(self, text: Text) -> None:
        self._lines[self._buckets.length_for(text.num_tokens)][text.request_id] = (self._came, text)
        self._came += 1

    def remove(self, text: Text) -> None:
        """Forget a text; one that does not wait is no error."""
        self._lines[self._buckets.length_for(text.num_tokens)].pop(text.request_id, None)

    def take(self) -> Group[Text] | None:
        """The next texts to run; None where none wait.

        The oldest text decides the length, so that nothing waits for ever. Those of its bucket come with it, in
        order: as many as fill a shape, or more than half of the next one. Rows that are still free go to shorter
        texts, the longest of them first.
        """
        heads = [(next(iter(line.values()))[0], i) for i, line in enumerate(self._lines) if line]
        if not heads:
            return None
        _, at = min(heads)
        length, steps = self._buckets.by_length[at]
        there = len(self._lines[at])
        rows = next((step for step in steps if step >= there), steps[-1])
        if there <= rows // 2:
            rows = max(step for step in steps if step <= there)
        texts: list[Text] = []
        for line in reversed(self._lines[: at + 1]):
            while line and len(texts) < rows:
                texts.append(line.popitem(last=False)[1][1])
        return Group(texts=tuple(texts), num_rows=rows, length=length)
