"""Compiled programs, all ready before the first request: in parallel, from the store where it has them."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
from jax.stages import Compiled

from jserve.engine.store import ProgramStore

__all__ = ["CompileProgress", "ProgramSource", "TellCompiled"]


@dataclass(frozen=True, kw_only=True)
class CompileProgress:
    """Told once before the first program, then after each."""

    done: int
    total: int
    stored: int
    """Of those done, how many came from the store."""


TellCompiled = Callable[[CompileProgress], None]

Shape = TypeVar("Shape", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class ProgramSource(Generic[Shape]):
    """Where the programs of one engine come from."""

    lower: Callable[[Shape], Any]
    """A shape's program as ``jax.stages.Lowered``."""
    key: Callable[[], str]
    """All that the programs depend on but their shape; see ``jserve.engine.fingerprint``."""
    built_in: bool
    """Whether ``key`` covers the model's code too. Where it does not, a program's lowering does, which takes time."""
    devices: Sequence[jax.Device]

    def ready(
        self, shapes: Sequence[Shape], *, store: ProgramStore | None, progress: TellCompiled | None = None
    ) -> dict[Shape, Compiled]:
        """Every shape's program. The last shapes begin first: put the costliest there, so that it keeps nobody
        waiting at the end."""
        base = self.key() if store else ""
        programs: dict[Shape, Compiled] = {}
        stored = 0

        def tell(done: int) -> None:
            if progress is not None:
                progress(CompileProgress(done=done, total=len(shapes), stored=stored))

        def build(shape: Shape) -> bool:
            programs[shape], was_stored = self._build(shape, store, base)
            return was_stored

        tell(0)
        with ThreadPoolExecutor(max_workers=max(2, (os.cpu_count() or 2)), thread_name_prefix="compile") as pool:
            tasks = [pool.submit(build, shape) for shape in reversed(shapes)]
            try:
                for done, task in enumerate(as_completed(tasks), start=1):
                    stored += task.result()
                    tell(done)
            except BaseException:  # an interrupt too: what has not begun need not
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return programs

    def _build(self, shape: Shape, store: ProgramStore | None, base: str) -> tuple[Compiled, bool]:
        lowered = None
        key = f"{base}|{shape}"
        if store is not None and not self.built_in:  # no digest of sources covers it: its lowering does
            lowered = self.lower(shape)
            key += lowered.as_text()
        if store is not None:
            program = store.load(key, list(self.devices))
            if program is not None:
                return program, True
        program = (lowered or self.lower(shape)).compile()
        if store is not None:
            store.save(key, program)
        return program, False
