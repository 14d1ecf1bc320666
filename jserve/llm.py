"""A model inside a Python program, and the assembly that the server shares with it.

llm = LLM("pypi://...", dtype="float32")
out = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=48))
out[0].text, out[0].token_ids, out[0].finish_reason, out[0].usage
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jserve.checkpoints.progress import SILENT, Progress
from jserve.config import ServeConfig, cache_dir, resolve
from jserve.engine.build import EngineModel, build_engine
from jserve.engine.engine import Engine
from jserve.engine.executor import CompileProgress
from jserve.engine.store import ProgramStore
from jserve.errors import ConfigError, JserveError, MeshError, RequestError, Unsupported, UnsupportedModel
from jserve.models.contract import trace_layer_caches
from jserve.observe.metrics import Metrics
from jserve.request import Completion, Delta, FinishReason, Prompt, SamplingParams, TokenLogprob
from jserve.serving.frontend import Frontend, ServedModel
from jserve.serving.stream import Stream
from jserve.text.chat_template import ChatTemplate
from jserve.text.tokenizer import Tokenizer
from sharding import MeshSpec, param_shardings

__all__ = ["LLM", "Loaded", "ModelParts", "load"]

ModelParts = tuple[nnx.Module, Any, Tokenizer | None]
"""(module, params, tokenizer): a module of the contract, its parameters (None: those it carries), a tokenizer."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """An engine that is ready, and what stands in front of it."""

    engine: Engine
    frontend: Frontend
    metrics: Metrics
    served: ServedModel

    def close(self) -> None:
        self.engine.close()
        self.frontend.close()


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


def load(config: ServeConfig, *, progress: Progress = SILENT, model: ModelParts | None = None) -> Loaded:
    """Everything from a config to a ready engine. Raises StartError in words.

    ``model`` takes the place of ``config.model``. ``progress`` hears of downloads, conversions and compilations.
    """
    try:
        spec = MeshSpec.parse(config.mesh)
        _make_cpu_devices(spec.size)
        mesh = spec.build()
    except ValueError as error:
        raise MeshError(str(error), fix='a smaller --mesh, such as --mesh ""') from None
    source = _from_parts(model, config) if model is not None else _from_checkpoint(config, mesh, progress)
    try:
        shardings = param_shardings(source.state, mesh)
    except ValueError as error:
        raise MeshError(f"mesh {spec} does not fit {source.name}: {error}") from None
    shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nnx.to_pure_dict(source.state),
        shardings,
    )
    vocab_size = source.tokenizer.vocab_size if source.tokenizer else _head_width(source.graphdef, shapes)
    engine = build_engine(
        EngineModel(
            graphdef=source.graphdef,
            param_shapes=shapes,
            load=lambda: source.load(shapes),
            max_len=source.max_len,
            vocab_size=vocab_size,
        ),
        config,
        mesh=mesh,
        store=ProgramStore(cache_dir() / "programs") if config.program_store else None,
        compile_progress=_compile_progress(progress),
    )
    limits = engine.limits
    served = ServedModel(
        name=source.name,
        family=source.family,
        dtype=jax.tree.leaves(shapes)[0].dtype.name,
        mesh=str(spec),
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


class LLM:
    """A model to call from Python. Keywords are the fields of ``ServeConfig``."""

    def __init__(self, model: str | ModelParts | None = None, *, progress: Progress = SILENT, **settings: Any) -> None:
        """``model``: a path, a URI, or ``(module, params, tokenizer)``. Raises StartError where it cannot start."""
        if isinstance(model, str):
            settings["model"] = model
        config, _ = resolve(("keyword", settings))
        self._loaded = load(config, progress=progress, model=None if isinstance(model, str) else model)

    @property
    def model(self) -> ServedModel:
        return self._loaded.served

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """One Completion a prompt, in their order. ``params``: one for all, or one a prompt.

        A prompt is raw text (str), chat turns (list of dict) or token ids (list of int). All are submitted before
        the first is waited for. The first invalid one raises its RequestError, and the others are cancelled.
        """
        batch = _as_batch(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(batch)
        if len(params) != len(batch):
            raise ValueError(f"{len(batch)} prompts and {len(params)} SamplingParams; give one for all, or one each")
        streams: list[Stream] = []
        try:
            for prompt, one in zip(batch, params, strict=True):
                streams.append(self._loaded.frontend.open_sync(prompt, one))
            return [_collect(stream, one) for stream, one in zip(streams, params, strict=True)]
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise

    def embed(self, texts: Sequence[str]) -> Any:
        """Not for a decoder: raises Unsupported."""
        raise Unsupported(f"{self.model.name} generates text; embedding models are not built yet")

    def close(self) -> None:
        """Stop the engine and give its memory back."""
        self._loaded.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A lone prompt stands for a list of one: a str, or a list of ints or of chat turns."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int | Mapping)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _collect(stream: Stream, params: SamplingParams) -> Completion:
    """Drain a stream into its first choice, with all choices beside it where there are several."""
    choices = [_Growing() for _ in range(params.n)]
    for deltas in stream:
        for delta in deltas:
            choices[delta.index].take(delta)
    failure = stream.failure
    if isinstance(failure, RequestError):
        raise failure
    last = next(choice.last for choice in choices if choice.last is not None and choice.last.usage is not None)
    done = [choice.completion(index, last) for index, choice in enumerate(choices)]
    if params.n == 1:
        return done[0]
    # Index 0 is what a caller of n=1 would get; it carries all of them.
    return _with_choices(done)


class _Growing:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.reason: FinishReason | None = None
        self.last: Delta | None = None

    def take(self, delta: Delta) -> None:
        self.token_ids.extend(delta.token_ids)
        self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs or ())
        self.reason = delta.finish_reason or self.reason
        self.last = delta

    def completion(self, index: int, last: Delta) -> Completion:
        if self.reason is None:
            raise JserveError(f"choice {index} of request {last.request_id} ended without a reason")
        return Completion(
            request_id=last.request_id,
            index=index,
            token_ids=self.token_ids,
            text="".join(self.text),
            finish_reason=self.reason,
            logprobs=self.logprobs or None,
            usage=last.usage,
            timings=last.timings,
        )


def _with_choices(done: list[Completion]) -> Completion:
    done[0].choices.extend(done)
    return done[0]


def _make_cpu_devices(count: int) -> None:
    """On a CPU a mesh is made of virtual devices, which JAX makes only before its first use."""
    if count > max(1, getattr(jax.config, "jax_num_cpu_devices", 0)):
        with suppress(RuntimeError):  # JAX is in use already: then what is there must do
            jax.config.update("jax_num_cpu_devices", count)


def _from_checkpoint(config: ServeConfig, mesh: Mesh, progress: Progress) -> _Source:
    from jserve.checkpoints.open import open_checkpoint

    if config.checkpoint is not None:
        raise UnsupportedModel(
            f"checkpoint {config.checkpoint}: serving a module by its name is not built yet; "
            "jserve.LLM((module, params, tokenizer)) takes a module from Python"
        )
    checkpoint = open_checkpoint(config.model, progress=progress)
    manifest = checkpoint.manifest
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    auto = jnp.float32 if on_cpu else jnp.bfloat16
    graphdef, state = checkpoint.abstract(auto if config.dtype == "auto" else jnp.dtype(config.dtype))
    tokenizer = checkpoint.tokenizer()
    generation: dict[str, Any] = manifest.generation
    return _Source(
        name=manifest.name,
        family=manifest.family,
        graphdef=graphdef,
        state=state,
        load=checkpoint.restore,
        max_len=int(manifest.config["max_position"]),
        tokenizer=tokenizer,
        chat_template=checkpoint.chat_template(),
        defaults=SamplingParams(
            temperature=generation.get("temperature"),
            top_p=generation.get("top_p"),
            top_k=generation.get("top_k"),
            min_p=generation.get("min_p"),
        ),
        eos_ids=tuple(manifest.eos_ids),
    )


def _from_parts(parts: ModelParts, config: ServeConfig) -> _Source:
    """The module as it is, in its own dtype or in the one that the config names."""
    module, params, tokenizer = parts
    graphdef, state = nnx.split(module)
    if config.dtype != "auto":
        state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, _as(a.dtype, config.dtype)), state)
    if params is None:
        params = nnx.to_pure_dict(state)
    elif isinstance(params, nnx.State):
        params = nnx.to_pure_dict(params)
    return _Source(
        name=type(module).__name__,
        family=type(module).__name__.lower(),
        graphdef=graphdef,
        state=state,
        load=lambda shapes: jax.tree.map(_place, params, shapes),
        max_len=_module_length(module),
        tokenizer=tokenizer,
        chat_template=None,
        defaults=SamplingParams(),
        eos_ids=tokenizer.eos_ids if tokenizer else (),
    )


def _as(old: Any, new: str) -> Any:
    return jnp.dtype(new) if jnp.issubdtype(old, jnp.floating) else old


def _place(array: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
    if array.shape != shape.shape:
        raise ConfigError(f"a parameter has shape {array.shape}; the module wants {shape.shape}")
    return jax.device_put(jnp.asarray(array, shape.dtype), shape.sharding)


def _module_length(module: Any) -> int:
    """A module says how long a sequence may be as ``max_position``, on itself or on its config."""
    for holder in (module, getattr(module, "config", None)):
        length = getattr(holder, "max_position", None)
        if isinstance(length, int):
            return length
    raise ConfigError(f"{type(module).__name__} has no max_position, itself or in its config; add one (an int, tokens)")


def _head_width(graphdef: Any, shapes: Any) -> int:
    return trace_layer_caches(graphdef, shapes)[1]


def _compile_progress(progress: Progress) -> Callable[[CompileProgress], None]:
    """Tell compilations as one task of so many programs."""

    def tell(now: CompileProgress) -> None:
        if now.done == 1:
            progress.start("compile", now.total, "programs")
        if now.stored:
            progress.note(f"{now.stored} from the cache")
        progress.advance(1)
        if now.done == now.total:
            progress.done()

    return tell
