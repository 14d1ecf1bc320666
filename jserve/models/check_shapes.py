"""What can be seen of a module without values: methods, shapes, dtypes, calls of ``attend``, logical axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.tracers import TraceState
from jax.errors import ConcretizationTypeError

from jserve.models.contract import METHODS, is_whole, only_decoders
from jserve.models.finding import Finding
from jserve.models.own import in_words
from jserve.models.probe import Asked, MethodFailed, Notes, each_method, probe_step
from sharding import LOGICAL_AXES, param_axes

__all__ = ["check_axes", "check_shapes"]

_ROWS = 7


def check_shapes(graphdef: Any, state: nnx.State, *, vocab_size: int | None) -> tuple[list[Finding], int | None]:
    """Run the module abstractly; also the width of its logits, None where an error keeps it from being run."""
    model = nnx.merge(graphdef, state)
    if missing := _missing(model):
        return [missing], None
    shapes = _Shapes(vocab_size=vocab_size)
    pure = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.to_pure_dict(state))
    try:
        jax.eval_shape(lambda params, tokens: shapes.run(nnx.merge(graphdef, params), tokens), pure, _tokens())
    except _Stop:
        pass
    except MethodFailed as failed:
        shapes.failed(failed)
    usable = not any(finding.severity == "error" for finding in shapes.findings)
    return shapes.findings, shapes.width if usable else None


def _tokens() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((_ROWS,), jnp.int32)


def _missing(model: Any) -> Finding | None:
    if is_whole(model):
        return None
    absent = [name for name in METHODS if not callable(getattr(model, name, None))]
    layers = getattr(model, "num_layers", None)
    if not isinstance(layers, int) or layers < 1:
        absent.append("num_layers (an int, 1 or more)")
    if not absent:
        return None
    return Finding(
        severity="error",
        where="module",
        what=f"it has no {', '.join(absent)}, and no __call__(tokens, positions, attend) with just these parameters"
        + only_decoders(absent),
        fix="embed(tokens, step), layer(i, x, step), logits(x) and num_layers; or one "
        "__call__(tokens, positions, attend)",
    )


class _Stop(Exception):
    """What follows cannot be run."""


class _Shapes:
    def __init__(self, *, vocab_size: int | None) -> None:
        self.findings: list[Finding] = []
        self.width: int | None = None
        self._vocab_size = vocab_size
        self._notes = Notes()
        self._asked: list[Asked] = []
        self._whole = False
        self._trace: TraceState | None = None
        self._stream: Any = None

    def run(self, model: Any, tokens: Any) -> Any:
        self._whole, self._trace = is_whole(model), TraceState()
        each_method(model, tokens, probe_step(_ROWS, self._attend), self._notes, seen=self._seen)
        if self._whole:
            return None
        for rows in (1, 3):  # the engine asks for the rows it needs
            with self._notes.at("logits"):
                out = model.logits(self._stream[:rows])
            self._check_logits(out, rows)
        return None

    def failed(self, failed: MethodFailed) -> None:
        error = failed.error
        if isinstance(error, _Stop):
            return
        fix = "see the shapes of the contract: embed [T] -> [T, D], layer [T, D] -> [T, D], logits [R, D] -> [R, V]"
        if isinstance(error, ConcretizationTypeError):
            fix = "no Python if, for or float() over values: use jnp.where and the like"
        self._error(failed.where, f"it raised {in_words(error)}", fix)

    def _error(self, where: str, what: str, fix: str) -> None:
        self.findings.append(Finding(severity="error", where=where, what=what, fix=fix))

    # --- attend -------------------------------------------------------------------------------------------------------

    def _attend(self, asked: Asked) -> Any:
        now = self._notes.now
        if now in ("embed", "logits"):
            self._error(now, "it calls attend", "only layers call attend, each once")
        layer = f"layer {asked.layer}" if self._whole else now
        if self._trace is not None and not self._trace.is_valid():
            self._error(
                layer,
                "it calls attend inside of jax.jit, jax.checkpoint, jax.lax.scan, jax.vmap or the like",
                "call it outside of them: attend writes the cache, which such a function cannot hand out",
            )
            raise _Stop
        if isinstance(asked.layer, bool) or not isinstance(asked.layer, int):
            self._error(now, "attend's first argument is no Python int", "give it the number of the layer")
            raise _Stop
        self._check_arrays(layer, asked)
        for name, value in asked.options.items():
            if name not in ("scale", "window", "soft_cap", "sinks"):
                self._error(layer, f"attend is given {name}", "attend takes scale, window, soft_cap and sinks")
            elif name != "sinks" and value is not None and not isinstance(value, int | float):
                self._error(layer, f"attend's {name} is a {type(value).__name__}", "give it a Python number")
        if "scale" not in asked.options:
            self._error(layer, "attend is not given scale", "scale=head_dim**-0.5, as a rule")
        self._asked.append(asked)
        return asked.q

    def _check_arrays(self, layer: str, asked: Asked) -> None:
        q, k, v = asked.q, asked.k, asked.v
        if k is None or v is None:
            self._error(layer, "attend is given no k or v", "reading another layer's cache is not built: give both")
            raise _Stop
        before = len(self.findings)
        for name, array in (("q", q), ("k", k), ("v", v)):
            shape = tuple(array.shape)
            if len(shape) != 3 or shape[0] != _ROWS:
                self._error(
                    layer,
                    f"attend's {name} has the shape {_shape(shape)}",
                    f"{name} is [T, {'heads' if name == 'q' else 'KV heads'}, head_dim]",
                )
            elif not jnp.issubdtype(array.dtype, jnp.floating):
                self._error(layer, f"attend's {name} is {array.dtype}", "q, k and v are floats")
        if len(self.findings) > before:
            raise _Stop
        if k.shape != v.shape or k.dtype != v.dtype:
            what = f"attend's k is {k.dtype} {_shape(k.shape)} and v {v.dtype} {_shape(v.shape)}"
            self._error(layer, what, "both are [T, KV heads, head_dim], of one dtype")
        if q.shape[2] != k.shape[2]:
            what = f"attend's q has head_dim {q.shape[2]} and k {k.shape[2]}"
            self._error(layer, what, "q and k have one head_dim")
        if q.shape[1] % k.shape[1]:
            self._error(
                layer,
                f"{q.shape[1]} query heads cannot share {k.shape[1]} KV heads evenly",
                "the KV heads must divide the query heads",
            )

    # --- results ------------------------------------------------------------------------------------------------------

    def _seen(self, place: str, x: Any) -> None:
        asked, self._asked = self._asked, []
        if place in ("logits", "__call__"):
            self._check_logits(x, _ROWS)
            if self._whole:
                self._numbers(place, [one.layer for one in asked])
            return
        shape = tuple(getattr(x, "shape", ()))
        if len(shape) != 2 or shape[0] != _ROWS or not jnp.issubdtype(x.dtype, jnp.floating):
            got = f"{getattr(x, 'dtype', type(x).__name__)} {_shape(shape)}"
            self._error(place, f"it gives {got}", "it gives floats [T, D], a row for each token")
            raise _Stop
        if place != "embed":
            self._number(place, [one.layer for one in asked])
            if (x.shape, x.dtype) != (self._stream.shape, self._stream.dtype):
                old, new = self._stream, x
                self._error(
                    place,
                    f"it takes {old.dtype} {_shape(old.shape)} and gives {new.dtype} {_shape(new.shape)}",
                    "a layer gives what it takes, in shape and dtype",
                )
                raise _Stop
        self._stream = x

    def _number(self, place: str, layers: Sequence[int]) -> None:
        fix = "call step.attend(i, ...) exactly once, with the layer's own number i"
        if len(layers) != 1:
            self._error(place, f"it calls attend {len(layers)} times", fix)
        elif f"layer {layers[0]}" != place:
            self._error(place, f"it calls attend with the number {layers[0]}", fix)

    def _numbers(self, place: str, layers: Sequence[int]) -> None:
        if sorted(layers) != list(range(len(layers))) or not layers:
            self._error(
                place,
                f"it calls attend with the numbers {list(layers)}",
                "call attend(i, ...) exactly once for each layer, numbered from 0",
            )

    def _check_logits(self, out: Any, rows: int) -> None:
        place = "__call__" if self._whole else "logits"
        shape = tuple(getattr(out, "shape", ()))
        if len(shape) != 2 or shape[0] != rows or not jnp.issubdtype(out.dtype, jnp.floating):
            got = f"{getattr(out, 'dtype', type(out).__name__)} {_shape(shape)}"
            self._error(place, f"of {rows} rows it gives {got}", "it gives floats [rows, vocabulary]")
            raise _Stop
        first = self.width is None
        self.width = shape[1]
        if first and out.dtype != jnp.float32:
            what = f"logits are {out.dtype}: near ties are decided by rounding"
            fix = "compute the last product with preferred_element_type=jnp.float32, or cast"
            self.findings.append(Finding(severity="warning", where=place, what=what, fix=fix))
        if first and self._vocab_size is not None and self._vocab_size > self.width:
            self._error(
                place,
                f"they are {self.width} wide and the tokenizer has {self._vocab_size} ids",
                "the vocabulary must cover the tokenizer",
            )


def _shape(shape: Sequence[int]) -> str:
    """With T where a dimension is the number of rows that the check ran with."""
    return "[" + ", ".join("T" if size == _ROWS and at == 0 else str(size) for at, size in enumerate(shape)) + "]"


def check_axes(state: nnx.State) -> list[Finding]:
    """Parameters without logical axes, and axes that are not known or do not fit."""
    leaves: list[tuple[str, tuple[str | None, ...], Any]] = []

    def note(axes: Any, arrays: Any, path: str) -> None:
        if isinstance(axes, dict):
            for name in axes:
                note(axes[name], arrays[name], f"{path}.{name}" if path else str(name))
        else:
            leaves.append((path, axes, arrays))

    note(param_axes(state), nnx.to_pure_dict(state), "")
    findings = []
    for path, axes, leaf in leaves:
        unknown = [axis for axis in axes if axis is not None and axis not in LOGICAL_AXES]
        if unknown:
            findings.append(
                Finding(
                    severity="error",
                    where=path,
                    what=f"its logical axes {axes} are not all known: {', '.join(map(str, unknown))}",
                    fix=f"use {', '.join(LOGICAL_AXES)}, or None for a dimension that is not cut",
                )
            )
        elif axes and len(axes) != len(leaf.shape):
            what = f"it has {len(leaf.shape)} dimensions and the {len(axes)} logical axes {axes}"
            findings.append(Finding(severity="error", where=path, what=what, fix="one axis (or None) a dimension"))
    bare = [(path, leaf) for path, axes, leaf in leaves if not axes and leaf.shape]
    if bare:
        size = sum(leaf.size * leaf.dtype.itemsize for _, leaf in bare)
        findings.append(
            Finding(
                severity="warning",
                where="parameters",
                what=f"{len(bare)} of {len(leaves)} declare no logical axes, {size / 1e6:,.1f} MB that every device of "
                f"a mesh holds whole: {', '.join(path for path, _ in bare)}",
                fix="declare them, such as nnx.Param(value, out_sharding=('mlp', 'embed'), eager_sharding=False) or "
                "nnx.with_partitioning(init, ('embed', 'mlp'), eager_sharding=False); "
                f"known: {', '.join(LOGICAL_AXES)}",
            )
        )
    return findings
