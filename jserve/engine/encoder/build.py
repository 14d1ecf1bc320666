"""From an encoder and a config to an engine that is ready.

trace the model abstractly -> see that it fits -> compile || load the weights -> warm text -> ready
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from jserve.config import ServeConfig
from jserve.engine.contract import Encoded, EngineLimits
from jserve.engine.encoder.buckets import EncoderBuckets
from jserve.engine.encoder.engine import VectorEngine
from jserve.engine.encoder.executor import EncoderExecutor
from jserve.engine.encoder.program import EncoderProgram
from jserve.engine.memory import check_weights_fit, device_bytes, weights_exhaustion_in_words
from jserve.engine.programs import TellCompiled
from jserve.engine.start import (
    WARM_TIMEOUT_S,
    LoadableModel,
    check_mesh_axes,
    compile_and_load,
    default_num_tokens,
    not_finite,
    started,
)
from jserve.engine.store import ProgramStore
from jserve.errors import ConfigError, DeviceError
from jserve.models.encoder_contract import trace_encoder
from jserve.models.pooling import Pooling
from jserve.request import TextRequest

__all__ = ["EncoderModel", "build_encoder"]


@dataclass(frozen=True, kw_only=True)
class EncoderModel(LoadableModel):
    """An encoder as the engine takes it."""

    vocab_size: int
    pooling: Pooling


def build_encoder(
    model: EncoderModel,
    config: ServeConfig,
    *,
    mesh: Mesh,
    store: ProgramStore | None = None,
    compile_progress: TellCompiled | None = None,
) -> VectorEngine:
    """A started engine that has made a real vector. Raises ConfigError, MeshError, DeviceError, OutOfMemory or
    UnsupportedModel."""
    check_mesh_axes(mesh, of="encoders")
    _refuse_of_decoders(config)
    dimensions = trace_encoder(model.graphdef, model.param_shapes)
    max_len = _max_len(model, config)
    buckets = EncoderBuckets.build(
        max_length=max_len,
        max_num_tokens=_num_tokens(config, max_len, platform=mesh.devices.flat[0].platform),
        max_num_seqs=config.max_num_seqs,
    )
    param_bytes = device_bytes(model.param_shapes)
    check_weights_fit(config, mesh=mesh, param_bytes=param_bytes)
    executor = EncoderExecutor(
        program=EncoderProgram(graphdef=model.graphdef, pooling=model.pooling),
        param_shapes=model.param_shapes,
        mesh=mesh,
        buckets=buckets,
        built_in=model.built_in,
    )
    with weights_exhaustion_in_words(param_bytes):
        compile_and_load(executor, model.load, store=store, progress=compile_progress)
    limits = EngineLimits(
        max_model_len=max_len,
        vocab_size=model.vocab_size,
        max_num_seqs=max(texts for texts, _ in buckets.shapes),
        num_pages=0,
        page_size=0,
        max_queue=config.max_queue,
    )
    engine = VectorEngine(executor, limits=limits, dimensions=dimensions)
    return started(engine, _warm, guard=weights_exhaustion_in_words(param_bytes))


def _refuse_of_decoders(config: ServeConfig) -> None:
    """Settings that would do nothing are not taken in silence."""
    if config.page_size is not None or config.num_pages is not None:
        raise ConfigError(
            "page_size and num_pages are set, and this model is an encoder, which has no KV cache", fix="leave them out"
        )
    if config.max_dispatch_ms != ServeConfig.max_dispatch_ms:
        raise ConfigError(
            f"max_dispatch_ms is {config.max_dispatch_ms:g}, and this model is an encoder, which runs each text in one "
            "step and decodes none",
            fix="leave it out",
        )


def _max_len(model: EncoderModel, config: ServeConfig) -> int:
    wanted = config.max_model_len
    if wanted is not None and wanted > model.max_len:
        raise ConfigError(
            f"max_model_len {wanted} exceeds the model's limit of {model.max_len} tokens",
            fix=f"--max-model-len {model.max_len} or less",
        )
    return wanted or model.max_len


def _num_tokens(config: ServeConfig, max_len: int, *, platform: str) -> int:
    wanted = config.max_num_tokens
    if wanted is not None and wanted < max_len:
        raise ConfigError(
            f"max_num_tokens {wanted} is less than the {max_len} tokens that one text may have",
            fix=f"--max-num-tokens {max_len} or more, or a smaller --max-model-len",
        )
    return wanted or max(default_num_tokens(platform), max_len)


def _warm(engine: VectorEngine) -> None:
    """Make a real vector before saying ready."""
    over = threading.Event()
    heard: list[Encoded] = []

    def sink(encoded: Encoded) -> None:
        heard.append(encoded)
        over.set()

    # Token 0 is often padding, whose row of the table may hold anything.
    token = min(1, engine.limits.vocab_size - 1)
    engine.submit(TextRequest(request_id="warm", token_ids=(token,)), sink)
    if not over.wait(WARM_TIMEOUT_S):
        raise DeviceError(f"no vector within {WARM_TIMEOUT_S:.0f} s of the first dispatch")
    if heard[0].error is not None:
        raise DeviceError(f"the first vector failed: {heard[0].error}; the log has the cause") from engine.fault
    if heard[0].vector is None or not np.isfinite(heard[0].vector).all():
        raise not_finite("vectors")
