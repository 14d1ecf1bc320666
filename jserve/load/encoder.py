"""An encoder: its engine, ready, and what stands in front of it."""

from __future__ import annotations

from jserve.checkpoints.encoder import EncoderSettings
from jserve.engine.encoder.build import EncoderModel, build_encoder
from jserve.errors import CheckpointError
from jserve.load.loaded import Loaded
from jserve.load.start import Start
from jserve.observe.metrics import Metrics
from jserve.serving.embed_frontend import EmbedFrontend
from jserve.serving.embed_texts import TextPreparer

__all__ = ["load_encoder"]


def load_encoder(start: Start, settings: EncoderSettings) -> Loaded:
    """Raises StartError in words."""
    source, tokenizer = start.source, start.source.tokenizer
    if tokenizer is None:
        raise CheckpointError(f"{source.name} has no tokenizer; an encoder needs one")
    # Before the engine: its refusal must not wait for programs and weights.
    preparer = TextPreparer(
        tokenizer, max_tokens=start.config.max_model_len or settings.max_tokens, lowercase=settings.lowercase
    )
    engine = build_encoder(
        EncoderModel(
            graphdef=source.graphdef,
            param_shapes=start.shapes,
            load=start.read_params,
            max_len=settings.max_tokens,
            vocab_size=tokenizer.vocab_size,
            pooling=settings.pooling,
            built_in=source.built_in,
        ),
        start.config,
        mesh=start.mesh,
        store=start.store,
        compile_progress=start.tell_compiled,
    )
    try:
        served = start.served(engine.limits, has_chat_template=False, kind="encoder", dimensions=engine.dimensions)
        metrics = Metrics(model_name=source.name, engine=engine)
        frontend = EmbedFrontend(engine=engine, preparer=preparer, model=served, metrics=metrics)
        return Loaded(engine=engine, frontend=frontend, metrics=metrics, served=served)
    except BaseException:
        engine.close()
        raise
