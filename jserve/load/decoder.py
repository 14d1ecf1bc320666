"""A decoder: its engine, ready, and what stands in front of it."""

from __future__ import annotations

from jserve.engine.build import EngineModel, build_engine
from jserve.engine.engine import Engine
from jserve.load.loaded import Loaded
from jserve.load.start import Start
from jserve.observe.metrics import Metrics
from jserve.serving.frontend import Frontend

__all__ = ["load_decoder"]


def load_decoder(start: Start) -> Loaded:
    """Raises StartError in words."""
    source = start.source
    engine = build_engine(
        EngineModel(
            graphdef=source.graphdef,
            param_shapes=start.shapes,
            load=start.read_params,
            max_len=source.max_len,
            vocab_size=None if source.tokenizer is None else source.tokenizer.vocab_size,
            built_in=source.built_in,
        ),
        start.config,
        mesh=start.mesh,
        store=start.store,
        compile_progress=start.tell_compiled,
    )
    try:
        return _front(engine, start)
    except BaseException:
        engine.close()
        raise


def _front(engine: Engine, start: Start) -> Loaded:
    """What stands in front of an engine that is ready."""
    source = start.source
    served = start.served(engine.limits, has_chat_template=source.chat_template is not None)
    metrics = Metrics(model_name=source.name, engine=engine)
    frontend = Frontend(
        engine=engine,
        tokenizer=source.tokenizer,
        chat_template=source.chat_template,
        defaults=source.defaults,
        eos_ids=source.eos_ids,
        model=served,
        metrics=metrics,
    )
    return Loaded(engine=engine, frontend=frontend, metrics=metrics, served=served)
