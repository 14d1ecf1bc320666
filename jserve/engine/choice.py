"""One continuation of a request, as the scheduler sees it. No JAX.

    WAITING --admitted--> PREFILL --last chunk planned--> DECODE --stop, length, cancel--> (gone)
       ^                     |                              |
       +------preempted------+------------------------------+

A *planned* token is one that a dispatched plan may compute; an *applied* one is one whose result the host has
seen. Between the two lie at most the dispatches in flight.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from jserve.request import Request, TokenLogprob

__all__ = ["Choice", "ChoiceState"]


class ChoiceState(enum.Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


@dataclass(eq=False)
class Choice:
    request: Request
    index: int
    state: ChoiceState = ChoiceState.WAITING
    tokens: list[int] = field(default_factory=list)
    """Applied output tokens."""
    slot: int = -1
    """Row of the device state while running, else -1."""
    pages: list[int] = field(default_factory=list)
    prefill_ids: tuple[int, ...] = ()
    """What must be in the cache before the next token: the prompt, and after a preemption the output so far."""
    prefilled: int = 0
    """How many of ``prefill_ids`` are planned."""
    prompt_computed: int = 0
    """Prompt tokens that have been computed, before a preemption or since."""
    in_flight: int = 0
    """Dispatched plans that name this choice and are not applied."""
    planned_tokens: int = 0
    """Most output tokens that the plans in flight may bring."""
    first_scheduled: float | None = None

    @property
    def key(self) -> tuple[str, int]:
        return (self.request.request_id, self.index)

    @property
    def running(self) -> bool:
        return self.state in (ChoiceState.PREFILL, ChoiceState.DECODE)

    @property
    def remaining(self) -> int:
        """Output tokens still allowed, if all plans in flight bring all they may."""
        return self.request.sampling.max_tokens - len(self.tokens) - self.planned_tokens

    def note_prefilled(self, end: int) -> int:
        """Take in that ``prefill_ids[:end]`` is computed; return how many tokens of the prompt are so for the first
        time."""
        new = max(0, min(end, len(self.request.prompt_ids)) - self.prompt_computed)
        self.prompt_computed += new
        return new

    def context_after(self, steps: int) -> int:
        """Most tokens in the cache after ``steps`` more decode steps: the last output token is never cached."""
        prompt, limit = len(self.request.prompt_ids), self.request.sampling.max_tokens
        return prompt + min(len(self.tokens) + self.planned_tokens + steps, limit) - 1


@dataclass(frozen=True, kw_only=True)
class Emitted:
    """What one row brought: the tokens of one choice in one dispatch."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
