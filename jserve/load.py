"""From a config to a ready engine and what stands in front of it: the assembly that server and ``LLM`` share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jserve.checkpoints.arrays.tree import main_dtype
from jserve.checkpoints.encoder import EncoderSettings
from jserve.checkpoints.own.model import ModelParts, OwnModel, open_own, own_from_parts
from jserve.checkpoints.sources.uri import ClassSource, parse_source
from jserve.config import ServeConfig, cache_dir
from jserve.engine.build import EngineModel, build_engine
from jserve.engine.encoder.build import EncoderModel
from jserve.engine.encoder.engine import VectorEngine
from jserve.engine.engine import Engine
from jserve.engine.programs import CompileProgress, TellCompiled
from jserve.engine.store import ProgramStore
from jserve.errors import CheckpointError, ConfigError, DeviceError, InvalidRequest, MeshError
from jserve.load_encoder import load_encoder
from jserve.models.own import length_of, type_name
from jserve.observe.metrics import Metrics
from jserve.progress import SILENT, Progress
from jserve.request import SamplingParams, ServedModel
from jserve.serving.frontend import Frontend
from jserve.serving.frontends import AnyFrontend
from jserve.serving.limits import DEFAULTABLE, resolve_sampling
from jserve.text.chat_template import ChatTemplate, model_template
from jserve.text.tokenizer import Tokenizer
from sharding import MeshSpec, param_shardings

__all__ = ["Loaded", "ModelParts", "load"]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """An engine that is ready, and what stands in front of it."""

    engine: Engine | VectorEngine
    frontend: AnyFrontend
    metrics: Metrics
    served: ServedModel

    def close(self) -> None:
        """Refuse what is new, then end what runs."""
        self.frontend.close()
        self.engine.close()


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A model from wherever it came, not on the devices yet."""

    name: str
    family: str
    graphdef: Any
    state: nnx.State
    load: Callable[[Any], Any]
    """Takes shapes with shardings, gives the parameters."""
    max_len: int
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    defaults: SamplingParams
    eos_ids: tuple[int, ...]
    own_code: bool
    """See EngineModel."""
    encoder: EncoderSettings | None = None
    """Of an encoder."""


def load(
    config: ServeConfig, *, progress: Progress = SILENT, model: ModelParts | None = None, tokenizer: Any = None
) -> Loaded:
    """Everything from a config to a ready engine. Raises StartError in words.

    ``model`` takes the place of ``config.model``, and ``tokenizer`` (a path or an object, as in ``ModelParts``) that of
    ``config.tokenizer``. ``progress`` hears of downloads, conversions and compilations.
    """
    try:
        spec = MeshSpec.parse(config.mesh)
    except ValueError as error:
        raise MeshError(str(error)) from None
    try:
        _make_cpu_devices(spec.size)
        mesh = spec.build()
    except ValueError as error:
        raise MeshError(str(error), fix='a smaller --mesh, such as --mesh ""') from None
    except (RuntimeError, AssertionError) as error:  # what JAX raises where the platform asked for cannot be had
        raise DeviceError(
            f"JAX finds no device: {error}", fix="JAX_PLATFORMS=cpu, or the gpu or tpu extra of jserve"
        ) from None
    source = _find(config, tokenizer, mesh, progress) if model is None else _from_parts(model, config, progress)
    try:
        shardings = param_shardings(source.state, mesh)
    except ValueError as error:
        raise MeshError(f"mesh {spec} does not fit {source.name}: {error}") from None
    shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nnx.to_pure_dict(source.state),
        shardings,
    )
    store = ProgramStore.open(cache_dir() / "programs") if config.program_store else None
    if source.encoder is not None:
        if source.tokenizer is None:
            raise CheckpointError(f"{source.name} has no tokenizer; an encoder needs one")
        encoder, embedder, metrics = load_encoder(
            EncoderModel(
                graphdef=source.graphdef,
                param_shapes=shapes,
                load=lambda: source.load(shapes),
                max_len=source.encoder.max_tokens,
                vocab_size=source.tokenizer.vocab_size,
                pooling=source.encoder.pooling,
                own_code=source.own_code,
            ),
            source.encoder,
            source.tokenizer,
            config,
            name=source.name,
            family=source.family,
            mesh=mesh,
            mesh_name=str(spec),
            store=store,
            compile_progress=_compile_progress(progress),
        )
        return Loaded(engine=encoder, frontend=embedder, metrics=metrics, served=embedder.model)
    engine = build_engine(
        EngineModel(
            graphdef=source.graphdef,
            param_shapes=shapes,
            load=lambda: source.load(shapes),
            max_len=source.max_len,
            vocab_size=None if source.tokenizer is None else source.tokenizer.vocab_size,
            own_code=source.own_code,
        ),
        config,
        mesh=mesh,
        store=store,
        compile_progress=_compile_progress(progress),
    )
    try:
        return _front(engine, source, dtype=main_dtype(jax.tree.leaves(shapes)), mesh=str(spec))
    except BaseException:
        engine.close()
        raise


def _front(engine: Engine, source: _Source, *, dtype: str, mesh: str) -> Loaded:
    """What stands in front of an engine that is ready."""
    limits = engine.limits
    served = ServedModel(
        name=source.name,
        family=source.family,
        dtype=dtype,
        mesh=mesh,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        has_chat_template=source.chat_template is not None,
    )
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


_MOST_CPU_DEVICES = 64
"""Each virtual device costs threads and memory; a bigger mesh on a CPU is a slip of the finger."""


def _make_cpu_devices(count: int) -> None:
    """On a CPU a mesh is made of virtual devices, which JAX makes only before its first use."""
    count = min(count, _MOST_CPU_DEVICES)
    if count > max(1, getattr(jax.config, "jax_num_cpu_devices", 0)):
        with suppress(RuntimeError):  # JAX is in use already: then what is there must do
            jax.config.update("jax_num_cpu_devices", count)


def _find(config: ServeConfig, tokenizer: Any, mesh: Mesh, progress: Progress) -> _Source:
    source = parse_source(config.model)
    tokenizer = config.tokenizer if tokenizer is None else tokenizer
    if isinstance(source, ClassSource):
        own = open_own(
            source.target,
            checkpoint=config.checkpoint,
            tokenizer=tokenizer,
            dtype=_asked_dtype(config),
            default_dtype=_auto_dtype(mesh),
            progress=progress,
        )
        return _own_source(own)
    _refuse_own_settings(config, tokenizer, f"MODEL is {config.model}, which has its own", fix="leave them out")
    return _from_checkpoint(config, mesh, progress)


def _from_checkpoint(config: ServeConfig, mesh: Mesh, progress: Progress) -> _Source:
    from jserve.checkpoints.open import open_checkpoint

    checkpoint = open_checkpoint(config.model, progress=progress)
    graphdef, state = checkpoint.abstract(_asked_dtype(config) or _auto_dtype(mesh), length=config.max_model_len)
    tokenizer, length = checkpoint.tokenizer, checkpoint.config.max_position
    return _Source(
        name=checkpoint.name,
        family=checkpoint.family,
        graphdef=graphdef,
        state=state,
        load=checkpoint.restore,
        max_len=length,
        tokenizer=tokenizer,
        chat_template=checkpoint.template(),
        defaults=_defaults(
            checkpoint.generation,
            eos_ids=checkpoint.eos_ids,
            vocab_size=checkpoint.config.vocab_size if tokenizer is None else tokenizer.vocab_size,
            max_len=length,
            where=checkpoint.path,
        ),
        eos_ids=checkpoint.eos_ids,
        own_code=True,
        encoder=checkpoint.encoder,
    )


def _defaults(
    generation: Mapping[str, int | float], *, eos_ids: tuple[int, ...], vocab_size: int, max_len: int, where: object
) -> SamplingParams:
    """What a checkpoint sets for requests that leave it open. Raises CheckpointError for what no request may ask."""
    given: dict[str, Any] = {name: generation.get(name) for name in DEFAULTABLE}
    defaults = SamplingParams(**given)
    try:
        resolve_sampling(
            SamplingParams(), defaults=defaults, eos_ids=eos_ids, vocab_size=vocab_size, max_model_len=max_len
        )
    except InvalidRequest as error:  # every request that leaves the field out would fail with it
        raise CheckpointError(f"the sampling defaults of {where} are not allowed: {error.message}") from None
    return defaults


def _from_parts(parts: ModelParts, config: ServeConfig, progress: Progress) -> _Source:
    _refuse_own_settings(
        config, config.tokenizer, "the model is a module from Python", fix="LLM(module, params, tokenizer)"
    )
    return _own_source(own_from_parts(parts, dtype=_asked_dtype(config), progress=progress))


def _own_source(own: OwnModel) -> _Source:
    """A model of the user's own: nothing is known of it but the module and what lies beside its arrays."""
    tokenizer, length = own.tokenizer, length_of(own.module)
    eos_ids = () if tokenizer is None else tokenizer.eos_ids
    return _Source(
        name=type_name(own.module),
        family=type_name(own.module).lower(),
        graphdef=own.graphdef,
        state=own.state,
        load=own.load,
        max_len=length,
        tokenizer=tokenizer,
        chat_template=None if tokenizer is None else model_template(own.chat_template, tokenizer),
        # The vocabulary of a model without a tokenizer is known once it was traced; top_k is cut to it in any case.
        defaults=_defaults(
            own.generation,
            eos_ids=eos_ids,
            vocab_size=2**31 - 1 if tokenizer is None else tokenizer.vocab_size,
            max_len=length,
            where=type_name(own.module),
        ),
        eos_ids=eos_ids,
        own_code=False,
    )


def _refuse_own_settings(config: ServeConfig, tokenizer: Any, model: str, *, fix: str) -> None:
    """``checkpoint`` and ``tokenizer`` are of models by the name of their class only."""
    if tokenizer is not None and not isinstance(tokenizer, str | os.PathLike):
        tokenizer = type(tokenizer).__name__
    settings = {"checkpoint": config.checkpoint, "tokenizer": tokenizer}
    given = [f"{name} {value}" for name, value in settings.items() if value is not None]
    if given:
        raise ConfigError(f"{', '.join(given)}: for a MODEL of the form package.module:Class; {model}", fix=fix)


def _asked_dtype(config: ServeConfig) -> Any:
    return None if config.dtype == "auto" else jnp.dtype(config.dtype)


def _auto_dtype(mesh: Mesh) -> Any:
    return jnp.dtype(jnp.float32 if mesh.devices.flat[0].platform == "cpu" else jnp.bfloat16)


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
