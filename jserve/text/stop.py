"""Stop strings in a stream of text: nothing of a stop is let out, nothing else is held longer than needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["StopMatcher", "StopStrings"]


class StopStrings:
    """A set of stop strings, compiled into an Aho-Corasick automaton. Immutable; shared by a request's choices.

    State 0 is the start; a state is the longest end of the text that begins some stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty; give at least one character")
        self.stops = tuple(stops)
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        """Characters that a state stands for."""
        self.matched = [0]
        """Length of the longest stop string that ends in a state; 0: none does."""
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        """The state after one more character; amortized constant time."""
        following = self._next
        while char not in following[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return following[state][char]

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.matched.append(0)
            state = self._next[state][char]
        self.matched[state] = len(stop)

    def _link(self) -> None:
        """Point every state to the longest of its proper ends that is a state, nearest states first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self.matched[state] = self.matched[state] or self.matched[self._fail[state]]
            for char, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                queue.append(child)


class StopMatcher:
    """Watches one text for stop strings, across any split into parts.

    The match that *ends* first ends the text; of several that end at the same character the longest counts. So
    the result does not depend on how the text is split. What might still become a stop string is held back, and
    let out in full when it does not. ``include_stop`` leaves the matched stop string in the text.
    """

    def __init__(self, stops: Sequence[str] | StopStrings, *, include_stop: bool) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._include = include_stop
        self._state = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What of the text is let out now, and whether a stop string is complete. After a match push no more."""
        stops, state = self._stops, self._state
        for i, char in enumerate(text):
            state = stops.step(state, char)
            length = stops.matched[state]
            if length:
                whole = self._held + text[: i + 1]
                self._held, self._state = "", 0
                return (whole if self._include else whole[: len(whole) - length]), True
        whole = self._held + text
        cut = len(whole) - stops.depth[state]
        self._held, self._state = whole[cut:], state
        return whole[:cut], False

    def flush(self) -> str:
        """What is held back, at the end of a text that met no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
