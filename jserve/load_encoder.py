"""From an encoder's checkpoint to a ready engine and what stands in front of it. See ``jserve.load``."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from jserve.checkpoints.arrays.tree import main_dtype
from jserve.checkpoints.encoder import EncoderSettings
from jserve.config import ServeConfig
from jserve.engine.encoder.build import EncoderModel, build_encoder
from jserve.engine.encoder.engine import VectorEngine
from jserve.engine.programs import TellCompiled
from jserve.engine.store import ProgramStore
from jserve.observe.metrics import Metrics
from jserve.request import ServedModel
from jserve.serving.embed_frontend import EmbedFrontend
from jserve.text.tokenizer import Tokenizer

__all__ = ["EncoderParts", "load_encoder"]

EncoderParts = tuple[VectorEngine, EmbedFrontend, Metrics]


def load_encoder(
    model: EncoderModel,
    settings: EncoderSettings,
    tokenizer: Tokenizer,
    config: ServeConfig,
    *,
    name: str,
    family: str,
    mesh: Mesh,
    mesh_name: str,
    store: ProgramStore | None,
    compile_progress: TellCompiled,
) -> EncoderParts:
    """Raises StartError in words."""
    engine = build_encoder(model, config, mesh=mesh, store=store, compile_progress=compile_progress)
    try:
        limits = engine.limits
        served = ServedModel(
            name=name,
            family=family,
            dtype=main_dtype(jax.tree.leaves(model.param_shapes)),
            mesh=mesh_name,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            has_chat_template=False,
            kind="encoder",
            dimensions=engine.dimensions,
        )
        metrics = Metrics(model_name=name, engine=engine)
        frontend = EmbedFrontend(
            engine=engine, tokenizer=tokenizer, lowercase=settings.lowercase, model=served, metrics=metrics
        )
    except BaseException:
        engine.close()
        raise
    return engine, frontend, metrics
