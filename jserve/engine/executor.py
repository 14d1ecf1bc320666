"""Runs plans on the devices: the compiled programs, the caches and the slot state.

``dispatch`` returns at once; ``fetch`` waits for one dispatch's results. Plans run in the order of their dispatch.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from jserve.engine import fingerprint
from jserve.engine.choice import Emitted
from jserve.engine.plan import StepPlan, decode_arrays, mixed_arrays
from jserve.engine.programs import ProgramSource, TellCompiled
from jserve.engine.scheduler import SchedulerConfig
from jserve.engine.state import CacheLayout, new_pools, new_state, state_shapes
from jserve.engine.step import Outputs, Programs
from jserve.engine.store import ProgramStore
from jserve.models.own import traced_in_words
from jserve.request import TokenLogprob

__all__ = ["Executor", "Running"]


@dataclass(frozen=True, kw_only=True)
class Running:
    """A dispatch whose results are on their way."""

    plan: StepPlan
    outputs: Outputs

    @property
    def done(self) -> bool:
        """Whether the device is through with it, so that ``fetch`` would not wait."""
        emitted: Any = self.outputs.emitted
        return bool(emitted.is_ready())


class Executor:
    """Owns the devices' memory for one model. Used by one thread at a time."""

    def __init__(
        self,
        *,
        graphdef: Any,
        param_shapes: Any,
        mesh: Mesh,
        layout: CacheLayout,
        config: SchedulerConfig,
        vocab_size: int,
        built_in: bool,
    ) -> None:
        self.mesh = mesh
        self.config = config
        self.layout = layout
        self._param_shapes = param_shapes
        self._params: Any = None
        self._graphdef = graphdef
        self._built_in = built_in
        self._tracing = nullcontext if built_in else traced_in_words
        self._builder = Programs(
            graphdef=graphdef, layout=layout, mesh=mesh, vocab_size=vocab_size, max_steps=config.max_steps
        )
        self._programs: dict[tuple[str, int], Compiled] = {}
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._pools: list[jax.Array] = []
        self._state: Any = None

    # --- start ----------------------------------------------------------------------------------------------------

    def compile(self, *, store: ProgramStore | None, progress: TellCompiled | None = None) -> None:
        """Have every program ready."""
        wanted = [("decode", n) for n in self.config.buckets.decode]
        wanted += [("mixed", n) for n in self.config.buckets.mixed]
        source = ProgramSource(
            lower=self._lower, key=self._key, built_in=self._built_in, devices=list(self.mesh.devices.flat)
        )
        self._programs = source.ready(wanted, store=store, progress=progress)

    def _lower(self, shape: tuple[str, int]) -> Any:
        kind, size = shape
        function = jax.jit(self._builder.function(kind), donate_argnums=(1, 2))
        pools, state = self.layout.pool_shapes(self.mesh), state_shapes(self.config.max_num_seqs, self.mesh)
        with self._tracing():
            return function.lower(self._param_shapes, pools, state, self._plan_shapes(kind, size))

    def _plan_shapes(self, kind: str, size: int) -> Any:
        config, num_slots = self.config, self.config.max_num_seqs
        arrays: Any
        if kind == "mixed":
            arrays = mixed_arrays([], bucket=size, size=num_slots, width=config.table_width, num_slots=num_slots)
        else:
            arrays = decode_arrays(
                [], size=size, width=config.table_width, num_slots=num_slots, steps=1, leave_early=False
            )
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._replicated), arrays)

    def _key(self) -> str:
        parts = [
            fingerprint.environment(self.mesh),
            # Of others' modules it may hold addresses, such as those of an nnx.Linear's functions, which no second
            # process has. What it says is in their lowering too.
            repr(self._graphdef) if self._built_in else "",
            fingerprint.tree_text(self._param_shapes),
            repr((self.layout, self.config, self._builder.vocab_size)),
        ]
        return "|".join(parts)

    def allocate(self, params: Any) -> None:
        """Take the weights; make the caches and the slot state on the devices."""
        self._params = params
        self._pools = new_pools(self.layout, self.mesh)
        self._state = new_state(self.config.max_num_seqs, self.mesh)

    # --- run ------------------------------------------------------------------------------------------------------

    def dispatch(self, plan: StepPlan) -> Running:
        """Queue a plan behind those dispatched before it."""
        program = self._programs[plan.kind, plan.bucket]
        # As numpy: the call puts them on the devices in a third of the time that device_put takes.
        self._pools, self._state, outputs = program(self._params, self._pools, self._state, plan.arrays)
        for part in outputs if plan.wants_logprobs else outputs[:2]:
            part.copy_to_host_async()
        return Running(plan=plan, outputs=outputs)

    def fetch(self, running: Running) -> list[Emitted]:
        """Wait for a dispatch and read its results, one a row of its plan."""
        outputs = running.outputs
        counts, tokens = np.asarray(outputs.emitted), np.asarray(outputs.token)
        lists = [np.asarray(part) for part in outputs[2:]] if running.plan.wants_logprobs else None
        emitted = []
        for r, row in enumerate(running.plan.rows):
            count = int(counts[r])
            wanted = row.choice.request.sampling.logprobs
            logprobs = None
            if lists is not None and wanted is not None:
                logprobs = tuple(_logprob(tokens, lists, step, r, wanted) for step in range(count))
            emitted.append(Emitted(tokens=tuple(tokens[:count, r].tolist()), logprobs=logprobs))
        return emitted


def _logprob(tokens: np.ndarray, lists: list[np.ndarray], step: int, row: int, wanted: int) -> TokenLogprob:
    logprob, ids, values = lists
    pairs = zip(ids[step, row, :wanted].tolist(), values[step, row, :wanted].tolist(), strict=True)
    return TokenLogprob(
        token_id=int(tokens[step, row]),
        logprob=float(logprob[step, row]),
        top=tuple((token, value) for token, value in pairs if token >= 0),
    )
