"""Runs groups of texts on the devices. ``dispatch`` returns at once; ``fetch`` waits for one dispatch's vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled
from numpy.typing import NDArray

from jserve.engine import fingerprint
from jserve.engine.encoder.batching import Group, Waiting
from jserve.engine.encoder.buckets import EncoderBuckets
from jserve.engine.encoder.program import EncoderProgram
from jserve.engine.programs import ProgramSource, TellCompiled
from jserve.engine.store import ProgramStore

__all__ = ["EncoderExecutor", "RunningGroup"]

Text = TypeVar("Text", bound=Waiting)


@dataclass(frozen=True, kw_only=True)
class RunningGroup(Generic[Text]):
    """A dispatch whose vectors are on their way."""

    group: Group[Text]
    vectors: jax.Array
    """[S, D]."""


class EncoderExecutor:
    """Owns the devices' memory for one encoder. Used by one thread at a time."""

    def __init__(
        self, *, program: EncoderProgram, param_shapes: Any, mesh: Mesh, buckets: EncoderBuckets, built_in: bool
    ) -> None:
        self.buckets = buckets
        self._mesh = mesh
        self._program = program
        self._param_shapes = param_shapes
        self._params: Any = None
        self._built_in = built_in
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._programs: dict[tuple[int, int], Compiled] = {}

    def compile(self, *, store: ProgramStore | None, progress: TellCompiled | None = None) -> None:
        """Have every program ready."""
        source = ProgramSource(
            lower=self._lower, key=self._key, built_in=self._built_in, devices=list(self._mesh.devices.flat)
        )
        self._programs = source.ready(self.buckets.shapes, store=store, progress=progress)

    def allocate(self, params: Any) -> None:
        """Take the weights."""
        self._params = params

    def dispatch(self, group: Group[Text], token_ids: Sequence[tuple[int, ...]]) -> RunningGroup[Text]:
        """Queue a group behind those dispatched before it. ``token_ids`` of each of its texts."""
        tokens = np.zeros((group.num_rows, group.length), np.int32)
        lengths = np.zeros(group.num_rows, np.int32)
        for row, ids in enumerate(token_ids):
            tokens[row, : len(ids)] = ids
            lengths[row] = len(ids)
        vectors = self._programs[group.num_rows, group.length](self._params, tokens, lengths)
        vectors.copy_to_host_async()
        return RunningGroup(group=group, vectors=vectors)

    def fetch(self, running: RunningGroup[Any]) -> NDArray[np.float32]:
        """Wait for a dispatch; [n, D] of the n texts of its group."""
        return np.asarray(running.vectors)[: len(running.group.texts)]

    def _lower(self, shape: tuple[int, int]) -> Any:
        num_rows = shape[0]
        function = jax.jit(self._program, out_shardings=self._whole)
        return function.lower(
            self._param_shapes,
            jax.ShapeDtypeStruct(shape, np.int32, sharding=self._whole),
            jax.ShapeDtypeStruct((num_rows,), np.int32, sharding=self._whole),
        )

    def _key(self) -> str:
        parts = [
            "encoder",
            fingerprint.environment(self._mesh),
            repr(self._program),
            fingerprint.tree_text(self._param_shapes),
        ]
        return "|".join(parts)
