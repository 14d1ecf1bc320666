"""A module run on a few rows with an ``attend`` that only takes notes: what ``jserve.models.check`` looks through.

``attend`` gives fixed answers, so that no row can learn of another through it: whatever a row still knows of others
has gone round it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.models.contract import Step, is_whole

__all__ = ["Asked", "MethodFailed", "Notes", "Rows", "each_method", "first_difference", "probe_step", "run"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One call of ``attend``, with whatever the module gave it."""

    layer: Any
    q: Any
    k: Any
    v: Any
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _ProbeStep(Step):
    """A Step whose ``attend`` takes anything, so that what is wrong can be told."""

    asked: Callable[[Asked], Any]

    def attend(self, i: Any, q: Any, k: Any, v: Any, *more: Any, **options: Any) -> Any:
        if more:
            raise TypeError(
                "attend is given more than i, q, k and v in order; scale and the rest go by name: scale=..."
            )
        return self.asked(Asked(layer=i, q=q, k=k, v=v, options=options))


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a step. ``N`` sequences of ``sequence`` 0 to N - 1; -1 is padding."""

    tokens: np.ndarray
    """int32 [T]."""
    positions: np.ndarray
    """int32 [T]."""
    sequence: np.ndarray
    """int [T]."""
    answers: Callable[[int, tuple[int, ...]], np.ndarray]
    """What ``attend`` gives each row: from layer and shape [T, H, Dh], float32."""

    def take(self, index: np.ndarray) -> Rows:
        """These rows in another order, or some of them."""
        size = len(self.tokens)
        return Rows(
            tokens=self.tokens[index],
            positions=self.positions[index],
            sequence=self.sequence[index],
            answers=lambda layer, shape: self.answers(layer, (size, *shape[1:]))[index],
        )

    def changed(self, where: np.ndarray, *, vocab_size: int, max_position: int, answer: float | None = None) -> Rows:
        """Other tokens, positions and answers (``answer``, where given) in the rows ``where``."""

        def answers(layer: int, shape: tuple[int, ...]) -> np.ndarray:
            old = self.answers(layer, shape)
            return np.where(where[:, None, None], -2 * old + 1 if answer is None else np.float32(answer), old)

        return Rows(
            tokens=np.where(where, (self.tokens + 1) % vocab_size, self.tokens),
            positions=np.where(where, (self.positions + 1) % max_position, self.positions),
            sequence=self.sequence,
            answers=answers,
        )


class MethodFailed(Exception):
    """A method raised; ``error`` is what."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__(where)
        self.where = where
        self.error = error


@dataclass(kw_only=True)
class Notes:
    """What a run brought, in order: a place in the module, and an array that leads with the rows."""

    places: list[tuple[str, Any]] = field(default_factory=list)
    now: str = ""
    """The method that runs."""

    def add(self, place: str, array: Any) -> None:
        self.places.append((place, array))

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        self.now = place
        try:
            yield
        except Exception as error:
            raise MethodFailed(place, error) from error


def run(model: Any, rows: Rows) -> Notes:
    """``model``, which is known to keep the shapes of the contract, on ``rows``. Raises MethodFailed."""
    notes = Notes()

    def asked(asked: Asked) -> Any:
        for name, array in (("q", asked.q), ("k", asked.k), ("v", asked.v)):
            notes.add(f"layer {asked.layer} before attend ({name})", np.asarray(array, np.float32))
        return jnp.asarray(rows.answers(asked.layer, asked.q.shape), asked.q.dtype)

    tokens = jnp.asarray(rows.tokens, jnp.int32)
    step = _ProbeStep(
        positions=jnp.asarray(rows.positions, jnp.int32),
        valid=jnp.asarray(rows.sequence >= 0),
        answer=_no_answer,
        asked=asked,
    )
    each_method(model, tokens, step, notes, seen=lambda place, x: notes.add(place, np.asarray(x, np.float32)))
    return notes


def each_method(model: Any, tokens: Any, step: Step, notes: Notes, *, seen: Callable[[str, Any], None]) -> None:
    """Call each method in the engine's order; ``seen`` hears of each result."""
    if is_whole(model):
        with notes.at("__call__"):
            out = model(tokens, step.positions, step.attend)
        seen("__call__", out)
        return
    with notes.at("embed"):
        x = model.embed(tokens, step)
    seen("embed", x)
    for i in range(model.num_layers):
        with notes.at(f"layer {i}"):
            x = model.layer(i, x, step)
        seen(f"layer {i}", x)
    with notes.at("logits"):
        out = model.logits(x)
    seen("logits", out)


def probe_step(size: int, asked: Callable[[Asked], Any]) -> Step:
    """A Step of ``size`` rows, for a run without values."""
    return _ProbeStep(
        positions=jnp.zeros((size,), jnp.int32),
        valid=jnp.ones((size,), bool),
        answer=_no_answer,
        asked=asked,
    )


def _no_answer(_: Any) -> jax.Array:
    raise ValueError("a module calls step.attend, and not step.answer")


def first_difference(one: Notes, other: Notes, index: np.ndarray, other_index: np.ndarray) -> str | None:
    """The first place where rows ``index`` of one run differ from rows ``other_index`` of the other.

    Sums over other numbers of rows round otherwise: differences under 1e-4 of a place's largest value do not count.
    """
    for (place, a), (_, b) in zip(one.places, other.places, strict=True):
        a, b = a[index], b[other_index]
        scale = float(np.abs(a).max(initial=0.0))
        if not np.allclose(a, b, rtol=0, atol=1e-4 * scale + 1e-30):  # NaN differs from everything
            return place
    return None
