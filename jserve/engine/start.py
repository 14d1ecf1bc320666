"""What the starts of engines have in common: programs compile while the weights load, and a warm request comes last."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from jax.sharding import Mesh

from jserve.engine.programs import CompileProgress, TellCompiled
from jserve.engine.store import ProgramStore
from jserve.engine.thread import EngineThread
from jserve.errors import CheckpointError, MeshError

__all__ = [
    "WARM_TIMEOUT_S",
    "LoadableModel",
    "check_mesh_axes",
    "compile_and_load",
    "default_num_tokens",
    "not_finite",
    "started",
]

WARM_TIMEOUT_S = 600.0
_E = TypeVar("_E", bound=EngineThread)


@dataclass(frozen=True, kw_only=True)
class LoadableModel:
    """A model as engines take it: its structure, and a way to its parameters."""

    graphdef: Any
    param_shapes: Any
    """Pure dict of ShapeDtypeStructs with shardings on the mesh."""
    load: Callable[[], Any]
    """Gives the parameters, in the shape of ``param_shapes``; called once, while programs compile."""
    max_len: int
    """Most tokens of a sequence; of a text, special ones included."""
    built_in: bool
    """Whether all of the model's code lies in ``jserve.models``, so that its programs are known without lowering."""


class Compiling(Protocol):
    """An executor, as far as a start needs it."""

    def compile(self, *, store: ProgramStore | None, progress: TellCompiled | None) -> None: ...

    def allocate(self, params: Any) -> None: ...


def check_mesh_axes(mesh: Mesh, *, of: str) -> None:
    """MeshError for axes that are longer than 1 and not built."""
    unbuilt = {axis: size for axis, size in mesh.shape.items() if size > 1 and axis != "tensor"}
    if unbuilt:
        raise MeshError(f"mesh axes {unbuilt} are not built for {of}; allowed: tensor", fix='--mesh "tensor=N"')


def default_num_tokens(platform: str) -> int:
    """max_num_tokens where nobody says."""
    return 512 if platform == "cpu" else 2048


def compile_and_load(
    executor: Compiling, load: Callable[[], Any], *, store: ProgramStore | None, progress: TellCompiled | None
) -> None:
    """Compile every program, and give the executor its parameters, which load meanwhile."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load") as pool:
        params = pool.submit(load)

        def tell(now: CompileProgress) -> None:
            if params.done():
                params.result()  # what is wrong with the weights is said now, not after the last program
            if progress is not None:
                progress(now)

        executor.compile(store=store, progress=tell)
        executor.allocate(params.result())


def started(engine: _E, warm: Callable[[_E], None], *, guard: AbstractContextManager[None]) -> _E:
    """``engine``, its loop running and ``warm`` done within ``guard``; closed where that fails."""
    engine.start()
    try:
        with guard:
            warm(engine)
    except BaseException:
        engine.close()
        raise
    engine.mark_ready()
    return engine


def not_finite(what: str) -> CheckpointError:
    """``what`` a model computes is NaN or infinite, from its very first token on."""
    return CheckpointError(
        f"the model's first {what} are not finite numbers: its weights hold such values, or overflow in the dtype that "
        "they are served in",
        fix="see which with jserve inspect --check MODEL; if none do, --dtype float32",
    )
