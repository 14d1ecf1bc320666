"""From a model and a config to an engine that is ready: the order of a start, in one place.

trace the model abstractly -> plan the memory -> compile || load the weights -> allocate -> warm token -> ready
"""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from jserve.config import ServeConfig
from jserve.engine.buckets import Buckets
from jserve.engine.contract import EngineLimits
from jserve.engine.engine import Engine
from jserve.engine.executor import Executor
from jserve.engine.memory import DEFAULT_PAGE_SIZE, device_bytes, exhaustion_in_words, plan_memory
from jserve.engine.programs import TellCompiled
from jserve.engine.scheduler import SchedulerConfig
from jserve.engine.start import (
    WARM_TIMEOUT_S,
    LoadableModel,
    check_mesh_axes,
    compile_and_load,
    default_num_tokens,
    not_finite,
    started,
)
from jserve.engine.state import CacheLayout
from jserve.engine.store import ProgramStore
from jserve.errors import ConfigError, DeviceError, MeshError, UnsupportedModel
from jserve.models.contract import is_whole, trace_layer_caches
from jserve.models.own import traced_in_words
from jserve.request import FinishReason, Request, ResolvedSampling, TokenDelta

__all__ = ["EngineModel", "build_engine"]

log = logging.getLogger(__name__)

_MAX_STEPS = 32
"""Most steps of a decode dispatch, whatever max_dispatch_ms allows: the size of its output buffers."""


@dataclass(frozen=True, kw_only=True)
class EngineModel(LoadableModel):
    """A decoder as the engine takes it."""

    vocab_size: int | None
    """Real token ids, where the head may be wider; None: the head's width."""


def build_engine(
    model: EngineModel,
    config: ServeConfig,
    *,
    mesh: Mesh,
    store: ProgramStore | None = None,
    compile_progress: TellCompiled | None = None,
) -> Engine:
    """A started engine that has made a real token. Raises ConfigError, MeshError, DeviceError, OutOfMemory,
    UnsupportedModel, and CheckpointError for weights that give no finite numbers."""
    platform = mesh.devices.flat[0].platform
    if mesh.shape["stage"] > 1 and is_whole(nnx.merge(model.graphdef, model.param_shapes)):
        raise MeshError(
            "the model has only __call__(tokens, positions, attend): its layers cannot lie on stages "
            f"(stage={mesh.shape['stage']})",
            fix="a --mesh without stage, or the methods embed, layer and logits (see jserve.models.contract)",
        )
    check_mesh_axes(mesh, of="decoders")

    with _tracing(model):
        layers, width = trace_layer_caches(model.graphdef, model.param_shapes)
    vocab_size = width if model.vocab_size is None else model.vocab_size
    if vocab_size > width:
        raise UnsupportedModel(f"the tokenizer has {vocab_size} ids and the model's head only {width}")
    tensor = mesh.shape["tensor"]
    for i, layer in enumerate(layers):
        for what, heads in (("query heads", layer.num_heads), ("KV heads", layer.num_kv_heads)):
            if heads % tensor:
                works = [n for n in range(1, heads + 1) if layer.num_heads % n == 0 and layer.num_kv_heads % n == 0]
                raise MeshError(
                    f"tensor={tensor} does not divide the {heads} {what} of layer {i}; tensor may be {works}",
                    fix=f'--mesh "tensor={works[-1]}"',
                )

    page_size = config.page_size or DEFAULT_PAGE_SIZE.get(platform, DEFAULT_PAGE_SIZE["gpu"])
    one_page = CacheLayout.build(layers, num_pages=1, page_size=page_size)
    memory = plan_memory(
        config,
        mesh=mesh,
        model_len=model.max_len,
        page_size=page_size,
        page_bytes=one_page.page_bytes // tensor,
        page_rows=one_page.page_rows,
        param_bytes=device_bytes(model.param_shapes),
    )
    num_tokens = config.max_num_tokens or default_num_tokens(platform)
    if num_tokens <= config.max_num_seqs:
        raise ConfigError(
            f"max_num_tokens {num_tokens} must exceed max_num_seqs {config.max_num_seqs}: "
            "a step decodes a token of every running sequence, and needs room for a prompt beside them"
        )
    scheduling = SchedulerConfig(
        max_model_len=memory.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_tokens=num_tokens,
        page_size=page_size,
        num_pages=memory.num_pages,
        max_steps=_MAX_STEPS,
        buckets=Buckets.build(
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=num_tokens,
            # One or two cores compile: half the decode programs there.
            decode_growth=4 if platform == "cpu" else 2,
        ),
    )
    executor = Executor(
        graphdef=model.graphdef,
        param_shapes=model.param_shapes,
        mesh=mesh,
        layout=CacheLayout.build(layers, num_pages=memory.num_pages, page_size=page_size),
        config=scheduling,
        vocab_size=vocab_size,
        built_in=model.built_in,
    )
    with exhaustion_in_words(memory):
        compile_and_load(executor, model.load, store=store, progress=compile_progress)
    limits = EngineLimits(
        max_model_len=memory.max_model_len,
        vocab_size=vocab_size,
        max_num_seqs=config.max_num_seqs,
        num_pages=memory.num_pages,
        page_size=page_size,
        max_queue=config.max_queue,
    )
    engine = Engine(executor, limits=limits, max_dispatch_s=config.max_dispatch_ms / 1000)
    return started(engine, _warm, guard=exhaustion_in_words(memory))


def _tracing(model: EngineModel) -> AbstractContextManager[None]:
    """What code that is not jserve's raises is told in words; what jserve's raises is a fault with a traceback."""
    return nullcontext() if model.built_in else traced_in_words()


def _warm(engine: Engine) -> None:
    """Make real tokens before saying ready: a prefill and a decode."""
    over = threading.Event()
    heard: list[TokenDelta] = []

    def sink(deltas: Any) -> None:
        heard.extend(deltas)
        if deltas[-1].finish_reason is not None:
            over.set()

    sampling = replace(ResolvedSampling.greedy(min(2, engine.limits.max_model_len - 1)), logprobs=0)
    engine.submit(Request(request_id="warm", prompt_ids=(0,), sampling=sampling, arrival=time.monotonic()), sink)
    if not over.wait(WARM_TIMEOUT_S):
        raise DeviceError(f"no token within {WARM_TIMEOUT_S:.0f} s of the first dispatch")
    if heard[-1].finish_reason is not FinishReason.LENGTH:
        raise DeviceError(
            f"the first tokens failed: {heard[-1].error or heard[-1].finish_reason}; the log has the cause"
        ) from engine.fault
    if not all(math.isfinite(entry.logprob) for delta in heard for entry in delta.logprobs or ()):
        raise not_finite("logits")
