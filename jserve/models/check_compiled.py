"""Whether a module that runs eagerly can be traced as programs are."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError

from jserve.models.contract import is_whole
from jserve.models.finding import Finding
from jserve.models.own import LOST, in_words, is_transforms
from jserve.models.probe import MethodFailed, Notes, each_method, probe_step

__all__ = ["check_compiled"]


def check_compiled(graphdef: Any, params: Any) -> list[Finding]:
    """What goes wrong where a module, which runs eagerly, is traced as programs are: in a loop, again and again, over
    other numbers of rows, and each layer in a trace of its own."""
    notes = Notes()

    def program(rows: int, params: Any) -> Any:
        def body(at: Any, count: Any) -> Any:
            model, seen = nnx.merge(graphdef, params), []
            step = probe_step(rows, lambda asked: asked.q)
            tokens = jnp.zeros((rows,), jnp.int32) + at
            each_method(model, tokens, step, notes, seen=lambda _, x: seen.append(x))
            for i in range(0 if is_whole(model) else model.num_layers):
                with notes.at(f"layer {i}"):
                    try:
                        jax.eval_shape(partial(_layer, model, i, step), seen[i])
                    except TraceContextError as error:
                        if not is_transforms(error):
                            raise
                        model = nnx.merge(graphdef, params)  # it leaves one in pieces
            return count

        return jax.lax.fori_loop(0, 2, body, jnp.int32(0))

    for rows in (1, 16):
        try:
            jax.eval_shape(partial(program, rows), params)
        except MethodFailed as failed:
            many = "1 row" if rows == 1 else f"{rows} rows"
            fix = "compute everything from the arguments and the parameters, for any number of rows"
            return [
                Finding(
                    severity="error",
                    where=failed.where,
                    what=f"compiled for {many} it raised {in_words(failed.error)}",
                    fix=LOST if isinstance(failed.error, TraceContextError) else fix,
                )
            ]
    return []


def _layer(model: Any, i: int, step: Any, x: Any) -> Any:
    return model.layer(i, x, step)
