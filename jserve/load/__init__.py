"""From a config to a ready engine and what stands in front of it: the assembly that server and ``LLM`` share."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jserve.checkpoints.own.model import ModelParts
from jserve.config import ServeConfig, cache_dir
from jserve.engine.programs import CompileProgress, TellCompiled
from jserve.engine.store import ProgramStore
from jserve.errors import MeshError
from jserve.load.decoder import load_decoder
from jserve.load.encoder import load_encoder
from jserve.load.loaded import Loaded
from jserve.load.mesh import build_mesh
from jserve.load.source import find_source
from jserve.load.start import Start
from jserve.progress import SILENT, Progress
from sharding import param_shardings

__all__ = ["Loaded", "ModelParts", "load"]


def load(
    config: ServeConfig, *, progress: Progress = SILENT, model: ModelParts | None = None, tokenizer: Any = None
) -> Loaded:
    """Everything from a config to a ready engine. Raises StartError in words.

    ``model`` takes the place of ``config.model``, and ``tokenizer`` (a path or an object, as in ``ModelParts``) that of
    ``config.tokenizer``. ``progress`` hears of downloads, conversions and compilations.
    """
    spec, mesh = build_mesh(config.mesh)
    source = find_source(config, mesh, model=model, tokenizer=tokenizer, progress=progress)
    try:
        shardings = param_shardings(source.state, mesh)
    except ValueError as error:
        raise MeshError(f"mesh {spec} does not fit {source.name}: {error}") from None
    start = Start(
        source=source,
        shapes=jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            nnx.to_pure_dict(source.state),
            shardings,
        ),
        config=config,
        mesh=mesh,
        mesh_name=str(spec),
        store=ProgramStore.open(cache_dir() / "programs") if config.program_store else None,
        tell_compiled=_compile_progress(progress),
    )
    return load_decoder(start) if source.encoder is None else load_encoder(start, source.encoder)


def _compile_progress(progress: Progress) -> TellCompiled:
    """Tell compilations as one task of so many programs."""

    def tell(now: CompileProgress) -> None:
        if now.done == 0:
            progress.start("compile", now.total, "programs")
            return
        if now.stored:
            progress.note(f"{now.stored} from the cache")
        progress.advance(1)
        if now.done == now.total:
            progress.done()

    return tell
