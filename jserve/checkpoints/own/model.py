"""Models of the user's own: a module named on the command line and its checkpoint, or a module with its parameters."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jserve.checkpoints.arrays.key_map import Path as LeafPath
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.place import differences, place
from jserve.checkpoints.arrays.tree import flatten, nest, unflatten_like
from jserve.checkpoints.orbax.beside import read_beside_sampling
from jserve.checkpoints.own.folder import open_arrays, read_object_text, read_own_text
from jserve.checkpoints.own.module import build_own_module
from jserve.errors import ConfigError
from jserve.models.linen import linen_params
from jserve.models.own import for_serving, leaves_beside_params, random_leaves, type_name
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
    generation: Mapping[str, Any] = field(default_factory=dict)
    """As of a Checkpoint, from generation_config.json beside the arrays."""


def open_own(
    target: str,
    *,
    checkpoint: str | None,
    tokenizer: Any,
    dtype: DTypeLike | None,
    default_dtype: DTypeLike,
    progress: Progress,
) -> OwnModel:
    """``target`` (``package.module:Class``) with the arrays in the folder ``checkpoint``. Nothing is restored yet.

    ``tokenizer`` is one as in ``ModelParts``; None looks in the folder and above it. ``dtype`` is what was asked for;
    where that is None, a module that takes one gets ``default_dtype``, and others keep their own. Raises StartError.
    """
    if checkpoint is None:
        raise ConfigError(f"{target} needs its arrays", fix=f"jserve serve {target} --checkpoint DIR")
    arrays = open_arrays(checkpoint, progress=progress)
    with arrays.in_words():
        own = build_own_module(target, where=arrays.where, dtype=default_dtype if dtype is None else dtype)
        read, chat_template, path = _read_text(tokenizer, arrays.where)
        generation = read_beside_sampling(arrays.where)
    if read is None:
        words = "no tokenizer beside the checkpoint: only token ids are served"
    else:
        words = f"tokenizer from {path}" if path else "the tokenizer that was given"
    progress.note(arrays.said(f"{target}: config from {own.config_path or 'the code'}, {words}"))
    graphdef, state = nnx.split(own.module)
    return OwnModel(
        module=own.module,
        graphdef=graphdef,
        state=state if own.takes_dtype else _cast(state, dtype),
        load=lambda shapes: arrays.restore(shapes, ignored=own.random, unsaved=own.unsaved),
        tokenizer=read,
        chat_template=chat_template,
        generation=generation,
    )


def own_from_parts(parts: ModelParts, *, dtype: DTypeLike | None, progress: Progress = SILENT) -> OwnModel:
    """A module as it is, in its own dtypes or in ``dtype``. Raises ConfigError where the parameters do not fit it in
    names, shapes or kinds of dtype, or the tokenizer is none."""
    module, params, given_tokenizer = parts
    tokenizer, chat_template, _ = _read_text(given_tokenizer)
    if tokenizer is not None and not tokenizer.eos_ids:
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
    else:
        params = _checked(params, linen=not isinstance(module, nnx.Module))
    random = set(random_leaves(module))
    given = {
        path: leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        for path, leaf in flatten(params).items()
        if path not in random
    }
    wrong = differences({path: LazyArray.of(leaf) for path, leaf in given.items()}, flatten(state))
    if wrong:
        absent = [".".join(path) for path in leaves_beside_params(served) if path not in given]
        fix = None
        if len(wrong) == len(absent):
            fix = f"give nnx.state(module): nnx.state(module, nnx.Param) leaves out {', '.join(absent)}"
        raise ConfigError("\n  ".join(["the parameters do not fit the module:", *wrong]), fix=fix)
    return OwnModel(
        module=served,
        graphdef=graphdef,
        state=_cast(state, dtype),
        load=lambda shapes: _place(given, shapes),
        tokenizer=tokenizer,
        chat_template=chat_template,
    )


def _checked(params: Any, *, linen: bool) -> Any:
    """``params`` by the names of the module that is served. Raises ConfigError for what is no mapping of arrays."""
    fix = "what init gives" if linen else "nnx.state(module), or nnx.to_pure_dict of it"
    if not isinstance(params, Mapping):
        raise ConfigError(f"params is a {type(params).__name__}; it must be a mapping of names to arrays", fix=fix)
    params = linen_params(params) if linen else params
    for path, leaf in flatten(params).items():
        if not hasattr(leaf, "shape") and not isinstance(leaf, int | float):
            raise ConfigError(f"params has a {type(leaf).__name__} at {'.'.join(path)}; it must be an array", fix=fix)
    return params


def _read_text(tokenizer: Any, where: Sequence[Path] = ()) -> tuple[Tokenizer | None, str | None, Path | None]:
    """The tokenizer, its chat template, and the path that they were read from.

    ``tokenizer``: as in ``ModelParts``; None takes the nearest of ``where``.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer, None, None
    if tokenizer is None or isinstance(tokenizer, str | os.PathLike):
        text, path = read_own_text(tokenizer, where)
    else:
        text, path = read_object_text(tokenizer), None
    return (None, None, None) if text is None else (text.tokenizer, text.chat_template, path)


def _cast(state: nnx.State, dtype: DTypeLike | None) -> nnx.State:
    """The floats of a module that chose its dtypes itself, in the one asked for. Its plain arrays, such as tables of
    angles, are no parameters and keep theirs."""
    if dtype is None:
        return state

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable):
            return jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, dtype if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype),
                leaf,
            )
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree.map(cast, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _place(given: Mapping[LeafPath, Any], shapes: Any) -> dict[Any, Any]:
    """Parameters onto their devices, in the structure and the dtypes of ``shapes``.

    JAX's arrays that have their dtype already go there straight, and stay where they are if that is the place; of
    others each device's part is copied and cast in bounded pieces. None is put whole onto one device first.
    """
    wanted = flatten(shapes)
    placed = {
        path: jax.device_put(array, wanted[path].sharding)
        for path, array in given.items()
        if isinstance(array, jax.Array) and array.dtype == wanted[path].dtype
    }
    rest = {path: LazyArray.of(array) for path, array in given.items() if path not in placed}
    placed |= flatten(place(rest, nest({path: wanted[path] for path in rest}), where="params"))
    return unflatten_like(shapes, placed)
