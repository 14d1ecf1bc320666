"""A model from wherever it comes, before anything of it is on the devices."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jserve.checkpoints.encoder import EncoderSettings
from jserve.checkpoints.own.model import ModelParts, OwnModel, open_own, own_from_parts
from jserve.checkpoints.sources.uri import ClassSource, parse_source
from jserve.config import ServeConfig
from jserve.errors import CheckpointError, ConfigError, InvalidRequest
from jserve.models.own import length_of, type_name
from jserve.progress import Progress
from jserve.request import DEFAULTABLE, SamplingParams
from jserve.serving.limits import resolve_sampling
from jserve.shown import shown
from jserve.text.chat_template import ChatTemplate
from jserve.text.generating import model_template
from jserve.text.tokenizer import Tokenizer

__all__ = ["Source", "find_source"]

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
"""A class by its name, but for the colon."""


@dataclass(frozen=True, kw_only=True)
class Source:
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
    built_in: bool
    """See LoadableModel."""
    encoder: EncoderSettings | None = None
    """Of an encoder."""


def find_source(
    config: ServeConfig, mesh: Mesh, *, model: ModelParts | None, tokenizer: Any, progress: Progress
) -> Source:
    """``model``, or else what ``config.model`` names; no parameter's values are read. Raises StartError in words.

    ``tokenizer`` (a path or an object, as in ``ModelParts``) takes the place of ``config.tokenizer``.
    """
    if model is not None:
        return _from_parts(model, config, progress)
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
        return _own_source(own, progress)
    fix = "leave them out"
    if _DOTTED.fullmatch(config.model) and not Path(config.model).exists():
        fix = f"{':'.join(config.model.rsplit('.', 1))}, with a colon, if that is meant; else leave them out"
    _refuse_own_settings(config, tokenizer, f"MODEL is {config.model}, which has its own", fix=fix)
    return _from_checkpoint(config, mesh, progress)


def _from_checkpoint(config: ServeConfig, mesh: Mesh, progress: Progress) -> Source:
    from jserve.checkpoints.open import open_checkpoint

    checkpoint = open_checkpoint(config.model, progress=progress)
    graphdef, state = checkpoint.abstract(_asked_dtype(config) or _auto_dtype(mesh), length=config.max_model_len)
    tokenizer, length = checkpoint.tokenizer, checkpoint.config.max_position
    return Source(
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
            where=config.model,
            progress=progress,
        ),
        eos_ids=checkpoint.eos_ids,
        built_in=True,
        encoder=checkpoint.encoder,
    )


def _defaults(
    generation: Mapping[str, Any],
    *,
    eos_ids: tuple[int, ...],
    vocab_size: int,
    max_len: int,
    where: str,
    progress: Progress,
) -> SamplingParams:
    """What a checkpoint sets for requests that leave it open; what it sets and is not built is told.

    Raises CheckpointError for what no request may ask.
    """
    if not_built := [f"{name} {shown(value)}" for name, value in generation.items() if name not in DEFAULTABLE]:
        progress.note(f"{where} sets {', '.join(not_built)}: not built, so elsewhere other tokens may be chosen")
    given: dict[str, Any] = {name: generation.get(name) for name in DEFAULTABLE}
    defaults = SamplingParams(**given)
    try:
        resolve_sampling(
            SamplingParams(), defaults=defaults, eos_ids=eos_ids, vocab_size=vocab_size, max_model_len=max_len
        )
    except InvalidRequest as error:  # every request that leaves the field out would fail with it
        raise CheckpointError(f"the sampling defaults of {where} are not allowed: {error.message}") from None
    return defaults


def _from_parts(parts: ModelParts, config: ServeConfig, progress: Progress) -> Source:
    _refuse_own_settings(
        config, config.tokenizer, "the model is a module from Python", fix="LLM(module, params, tokenizer)"
    )
    return _own_source(own_from_parts(parts, dtype=_asked_dtype(config), progress=progress), progress)


def _own_source(own: OwnModel, progress: Progress) -> Source:
    """A model of the user's own: nothing is known of it but the module and what lies beside its arrays."""
    tokenizer, length = own.tokenizer, length_of(own.module)
    eos_ids = () if tokenizer is None else tokenizer.eos_ids
    return Source(
        name=type_name(own.module),
        family=type_name(own.module).lower(),
        graphdef=own.graphdef,
        state=own.state,
        load=own.load,
        max_len=length,
        tokenizer=tokenizer,
        chat_template=model_template(own.chat_template, tokenizer, eos_ids=eos_ids),
        # The vocabulary of a model without a tokenizer is known once it was traced; top_k is cut to it in any case.
        defaults=_defaults(
            own.generation,
            eos_ids=eos_ids,
            vocab_size=2**31 - 1 if tokenizer is None else tokenizer.vocab_size,
            max_len=length,
            where=type_name(own.module),
            progress=progress,
        ),
        eos_ids=eos_ids,
        built_in=False,
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
