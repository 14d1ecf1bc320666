"""Does a module keep the contract of ``jserve.models.contract``? What does not is said in words.

    for finding in check_contract(MyModel(rngs=nnx.Rngs(0))):
        print(finding)

The module runs on a few rows: three ragged sequences packed one after another, one of them from the middle of its
text, with rows of padding. ``attend`` answers each row alone, so what a row still learns of others is a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jserve.errors import JserveError
from jserve.models.check_compiled import check_compiled
from jserve.models.check_shapes import check_axes, check_shapes
from jserve.models.finding import Finding, merged
from jserve.models.own import for_serving, in_words, length_of
from jserve.models.probe import MethodFailed, Notes, Rows, first_difference, run

__all__ = ["Finding", "check_contract"]


def check_contract(module: Any, params: Any = None, *, vocab_size: int | None = None) -> list[Finding]:
    """Every way in which ``module`` does not keep the contract; an empty list where it does.

    ``module``: an NNX or Linen module, or a GraphDef with ``params``. ``params``: its pure dict; where they are absent
    and the module holds none, random ones are made. ``vocab_size``: of the tokenizer, if there is one. The module is
    run eagerly, in float32, with all of its parameters, and traced as programs are. Errors come first.
    """
    try:
        served = nnx.merge(module, params) if isinstance(module, nnx.GraphDef) else for_serving(module)
    except JserveError as error:
        return [_refusal(error)]
    graphdef, state = nnx.split(served)
    if params is not None and not isinstance(module, nnx.GraphDef):
        nnx.replace_by_pure_dict(state, params)
    findings, vocab = check_shapes(graphdef, state, vocab_size=vocab_size)
    findings += check_axes(state)
    try:
        length = length_of(served)
    except JserveError as error:
        return merged([_refusal(error), *findings])
    if length < 2:
        findings.append(Finding(severity="error", where="max_position", what=f"it is {length}", fix="2 or more tokens"))
    elif vocab is not None:
        values, random = _values(state)
        with jax.default_matmul_precision("highest"):
            findings += _Behaviour(graphdef, values, vocab, length, random).findings()
        if not any(finding.severity == "error" for finding in findings):
            findings += check_compiled(graphdef, values)
    return merged(findings)


def _refusal(error: JserveError) -> Finding:
    return _error("module", error.message, error.fix or "see the contract")


def _values(state: nnx.State) -> tuple[dict[Any, Any], bool]:
    """Parameters to run with, floats as float32; and whether they were made up here."""
    random = np.random.default_rng(0)
    pure = nnx.to_pure_dict(state)
    made_up = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(pure))

    def value(leaf: Any) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype) if made_up else jnp.asarray(leaf)
        if not made_up:
            return jnp.asarray(leaf, jnp.float32)
        normal = random.standard_normal(leaf.shape, np.float32)
        # Vectors are mostly scales of norms, which want to be near 1.
        return jnp.asarray(normal * leaf.shape[-1] ** -0.5 if len(leaf.shape) > 1 else 1 + 0.1 * normal, jnp.float32)

    return jax.tree.map(value, pure), made_up


_PADDING = -1


@dataclass(frozen=True)
class _Behaviour:
    """What a module does with values."""

    graphdef: Any
    params: Mapping[Any, Any]
    vocab_size: int
    max_position: int
    random: bool
    """Whether the parameters are made up."""

    def findings(self) -> list[Finding]:
        rows = self._rows()
        try:
            return self._all(rows)
        except MethodFailed as failed:
            return [
                Finding(
                    severity="error",
                    where=failed.where,
                    what=f"it raised {in_words(failed.error)}",
                    fix="it must take any number of rows, any token id below the head's width and any position below "
                    "max_position",
                )
            ]

    def _rows(self) -> Rows:
        """Sequences of 5, 3 and 4 tokens (fewer where the model takes fewer); the second starts in mid-text."""
        lengths = [min(n, self.max_position) for n in (5, 3, 4)]
        starts = [0, max(0, min(6, self.max_position - lengths[1] - 1)), 0]
        positions = [np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
        sequence = [np.full(n, i) for i, n in enumerate(lengths)]
        padding = np.zeros(3, int)
        where = np.concatenate([*sequence, padding + _PADDING])
        tokens = np.random.default_rng(1).integers(0, self.vocab_size, len(where))

        def answers(layer: int, shape: tuple[int, ...]) -> np.ndarray:
            normal = np.random.default_rng([2, layer]).standard_normal(shape, np.float32)
            return np.where((where == _PADDING)[:, None, None], np.float32(0), normal)

        return Rows(
            tokens=np.where(where == _PADDING, 0, tokens),
            positions=np.concatenate([*positions, padding]),
            sequence=where,
            answers=answers,
        )

    def _run(self, rows: Rows) -> Notes:
        return run(nnx.merge(self.graphdef, self.params), rows)

    def _all(self, rows: Rows) -> list[Finding]:
        model = nnx.merge(self.graphdef, self.params)
        base = run(model, rows)
        findings = self._changes(model)
        if place := self._not_finite(rows, base):
            made_up = ", with random parameters" if self.random else ""
            what = f"its result is not finite (NaN or infinity){made_up}"
            return [*findings, _error(place, what, "look for a division by 0, or a log or root of what is not > 0")]
        every = np.arange(len(rows.sequence))
        if place := first_difference(base, self._run(rows), every, every):
            what = "the same input gives another result when it runs again (a counter, a global, a random number)"
            findings.append(_error(place, what, "compute everything from the arguments and the parameters"))
        if findings:
            return findings  # what changes from call to call cannot be compared
        findings += self._mixing(rows, base)
        findings += self._place(rows, base, {finding.where for finding in findings})
        return findings or self._positions(rows, base)

    def _not_finite(self, rows: Rows, base: Notes) -> str | None:
        real = rows.sequence != _PADDING
        return next((place for place, array in base.places if not np.isfinite(array[real]).all()), None)

    def _changes(self, model: Any) -> list[Finding]:
        """What ``model``, which has run, changed of itself."""
        graphdef, state = nnx.split(model)
        before, after = (jax.tree.leaves_with_path(tree) for tree in (self.params, nnx.to_pure_dict(state)))
        names = [
            jax.tree_util.keystr(path, simple=True, separator=".")
            for (path, old), (_, new) in zip(before, after, strict=False)
            if not np.array_equal(old, new, equal_nan=True)
        ]
        if not names and graphdef == self.graphdef and len(before) == len(after):
            return []
        changed = f"variables {', '.join(names)}" if names else "attributes"
        what = f"running it changes its {changed}: the compiled program keeps none of that"
        fix = "compute everything from the arguments and the parameters; attend keeps K and V"
        return [_error("module", what, fix)]

    def _changed(self, rows: Rows, where: np.ndarray, answer: float | None = None) -> Notes:
        return self._run(rows.changed(where, vocab_size=self.vocab_size, max_position=self.max_position, answer=answer))

    def _mixing(self, rows: Rows, base: Notes) -> list[Finding]:
        """Rows that hear of others round ``attend``: change some, look at the rest."""
        alone = "treat each row alone; only step.attend may look at others"
        findings = []
        padding = rows.sequence == _PADDING
        for answer in (None, np.nan):
            if place := self._touched(base, self._changed(rows, padding, answer), ~padding):
                what = "real rows depend on " + ("what stands in" if answer is None else "NaN in") + " rows of padding"
                findings.append(_error(place, what, f"{alone}, and least of all at padding (step.valid False)"))
                break
        second = rows.sequence == 1
        if place := self._touched(base, self._changed(rows, second), ~second & ~padding):
            what = "rows of one sequence depend on those of another, which is another user's text"
            return [*findings, _error(place, what, alone)]
        index = np.arange(len(rows.sequence))
        one, first = index == 1, rows.sequence == 0
        changed = self._changed(rows, one)
        if place := self._touched(base, changed, first & (index < 1)):
            what = (
                "tokens depend on those that come after them (attention that is not causal); when a token is generated "
                "there are none yet"
            )
            findings.append(_error(place, what, alone))
        elif place := self._touched(base, changed, first & ~one):
            what = (
                "tokens of a sequence depend on each other without attend: in the next step, where the earlier ones "
                "are only in the cache, that is lost"
            )
            findings.append(_error(place, what, alone))
        return findings

    def _touched(self, base: Notes, other: Notes, rows: np.ndarray) -> str | None:
        index = np.flatnonzero(rows)
        return first_difference(base, other, index, index)

    def _place(self, rows: Rows, base: Notes, known: set[str]) -> list[Finding]:
        """The same rows in another order, and fewer of them."""
        size = len(rows.sequence)
        order = np.concatenate([np.flatnonzero(rows.sequence == i) for i in (2, _PADDING, 1, 0)])
        place = first_difference(base, self._run(rows.take(order)), order, np.arange(size))
        if place is not None:
            what = "a row's result depends on where it stands in the step"
            fix = "take positions from step.positions, not from the index in the array"
            return [] if place in known else [_error(place, what, fix)]
        for index in (np.flatnonzero(rows.sequence == 0), np.array([1])):
            if place := first_difference(base, self._run(rows.take(index)), index, np.arange(len(index))):
                what = f"a row's result depends on how many rows there are ({size} or {len(index)})"
                return [] if place in known else [_error(place, what, "do not use the number of rows, T, in sums")]
        return []

    def _positions(self, rows: Rows, base: Notes) -> list[Finding]:
        other = Rows(
            tokens=rows.tokens,
            positions=(2 * rows.positions + 1) % self.max_position,
            sequence=rows.sequence,
            answers=rows.answers,
        )
        every = np.arange(len(rows.sequence))
        if first_difference(base, self._run(other), every, every) is not None:
            return []
        what = "step.positions changes nothing: the model cannot tell the order of tokens but by what attend hides"
        fix = "if it is not meant so, rotate q and k by step.positions, or add an embedding of them"
        return [Finding(severity="warning", where="module", what=what, fix=fix)]


def _error(where: str, what: str, fix: str) -> Finding:
    severity: Literal["error"] = "error"
    return Finding(severity=severity, where=where, what=what, fix=fix)
