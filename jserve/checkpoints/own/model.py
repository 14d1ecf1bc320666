"""Models of the user's own: a module named on the command line and its checkpoint, or a module with its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jserve.checkpoints.arrays.tree import flatten, nest, unflatten_like
from jserve.checkpoints.orbax.beside import read_beside_sampling
from jserve.checkpoints.own.folder import open_arrays, read_object_text, read_own_text
from jserve.checkpoints.own.module import build_own_module
from jserve.errors import ConfigError
from jserve.models.linen import linen_params
from jserve.models.own import for_serving, random_leaves, type_name
from jserve.progress import SILENT, Progress
from jserve.text.tokenizer import Tokenizer

__all__ = ["ModelParts", "OwnModel", "open_own", "own_from_parts"]

ModelParts = tuple[Any, Any, Any]
"""(module, params, tokenizer): a module of the contract (NNX or Linen), its parameters (None: those it carries), and a
Tokenizer, the path of one's folder or file, or an object of ``tokenizers`` or transformers (None: token ids only)."""


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """A module, where its arrays come from, and what stands beside them."""

    module: nnx.Module
    """As it is served (see ``for_serving``)."""
    graphdef: Any
    state: nnx.State
    """Parameters in the shapes and dtypes that are served."""
    load: Callable[[Any], Any]
    """Takes shapes with shardings, gives the parameters."""
    tokenizer: Tokenizer | None
    chat_template: str | None = None
    """The template's source."""
    generation: Mapping[str, int | float] = field(default_factory=dict)
    """Sampling defaults, where generation_config.json beside the checkpoint names them."""


def open_own(
    target: str,
    *,
    checkpoint: str | None,
    tokenizer: str | None,
    dtype: DTypeLike | None,
    default_dtype: DTypeLike,
    progress: Progress,
) -> OwnModel:
    """``target`` (``package.module:Class``) with the arrays in the folder ``checkpoint``. Nothing is restored yet.

    ``tokenizer`` is a path; None looks in the folder and above it. ``dtype`` is what was asked for; where that is None,
    a module that takes one gets ``default_dtype``, and others keep their own. Raises StartError.
    """
    if checkpoint is None:
        raise ConfigError(f"{target} needs its arrays", fix=f"jserve serve {target} --checkpoint DIR")
    arrays = open_arrays(checkpoint, progress=progress)
    with arrays.in_words():
        own = build_own_module(target, where=arrays.where, dtype=default_dtype if dtype is None else dtype)
        text, path = read_own_text(tokenizer, arrays.where)
    words = f"{target}: config from {own.config_path or 'the code'}, " + (
        f"tokenizer from {path}" if path else "no tokenizer beside the checkpoint: only token ids are served"
    )
    progress.note(arrays.said(words))
    graphdef, state = nnx.split(own.module)
    return OwnModel(
        module=own.module,
        graphdef=graphdef,
        state=state if own.takes_dtype else _cast(state, dtype),
        load=lambda shapes: arrays.restore(shapes, ignored=own.random),
        tokenizer=None if text is None else text.tokenizer,
        chat_template=None if text is None else text.chat_template,
        generation=read_beside_sampling(arrays.where),
    )


def own_from_parts(parts: ModelParts, *, dtype: DTypeLike | None, progress: Progress = SILENT) -> OwnModel:
    """A module as it is, in its own dtypes or in ``dtype``. Raises ConfigError where the parameters do not fit it, or
    the tokenizer is none."""
    module, params, tokenizer = parts
    text = None
    if isinstance(tokenizer, str | Path):
        text, tokenizer = read_own_text(tokenizer)[0], None
    elif tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        text, tokenizer = read_object_text(tokenizer), None
    if text is not None and not text.tokenizer.eos_ids:
        progress.note("the tokenizer names no end of a text: only max_tokens and stop strings or ids end one")
    served = for_serving(module)
    graphdef, state = nnx.split(served)
    if params is None:
        params = nnx.to_pure_dict(state)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            raise ConfigError(
                f"{type_name(module)} was built without values, and params is None; "
                "give (module, params, tokenizer), or a module that holds its parameters"
            )
    elif not isinstance(module, nnx.Module):
        params = linen_params(params)
    random = set(random_leaves(module))
    given = nest({path: leaf for path, leaf in flatten(params).items() if path not in random})
    _check_fit(given, state)
    return OwnModel(
        module=served,
        graphdef=graphdef,
        state=_cast(state, dtype),
        load=lambda shapes: _place(given, shapes),
        tokenizer=tokenizer if text is None else text.tokenizer,
        chat_template=None if text is None else text.chat_template,
    )


def _cast(state: nnx.State, dtype: DTypeLike | None) -> nnx.State:
    """The floats of a module that chose its dtypes itself, in the one asked for."""
    if dtype is None:
        return state
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, dtype if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype), state
    )


def _check_fit(params: Any, wanted: nnx.State) -> None:
    """ConfigError that names every parameter that is missing, left over or of another shape than the module's."""
    leaves = flatten(wanted)
    found = {path: tuple(array.shape) for path, array in flatten(params).items()}
    wrong = [
        f"{'.'.join(path)}: given {found.get(path, 'nothing')}, wanted {tuple(leaf.shape)}"
        for path, leaf in leaves.items()
        if found.get(path) != tuple(leaf.shape)
    ]
    wrong += [f"{'.'.join(path)}: not of this module" for path in found if path not in leaves]
    if wrong:
        raise ConfigError("the parameters do not fit the module: " + "; ".join(wrong))


def _place(params: Any, shapes: Any) -> dict[Any, Any]:
    """Parameters onto their devices, in the structure and the dtypes of ``shapes``."""
    given, wanted = flatten(params), flatten(shapes)
    placed = {
        path: jax.device_put(jnp.asarray(given[path], leaf.dtype), leaf.sharding) for path, leaf in wanted.items()
    }
    return unflatten_like(shapes, placed)
