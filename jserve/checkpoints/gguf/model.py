"""A GGUF file as a model of ours: family, configuration, and each parameter as something still to be read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from jserve.checkpoints.arrays import LazyArray
from jserve.checkpoints.gguf import llama
from jserve.checkpoints.gguf.file import GgufFile, GgufTensor
from jserve.checkpoints.gguf.llama import Entry
from jserve.checkpoints.gguf.tensors import READABLE, read_tensor, stored_dtype
from jserve.checkpoints.tree import flatten
from jserve.errors import CheckpointError, UnsupportedModel
from jserve.models.registry import build_abstract, family
from jserve.text.from_gguf import tokenizer_from_gguf
from jserve.text.tokenizer import Tokenizer

__all__ = ["Architecture", "GgufModel", "architecture", "load_model"]

_MAX_LISTED = 40


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one value of ``general.architecture`` is read."""

    family: str
    config: Callable[[GgufFile], Any]
    key_map: tuple[Entry, ...]
    settings: frozenset[str]
    """Tensors that are read into the configuration and are no parameters."""


_ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        family="llama",
        config=llama.llama_config,
        key_map=llama.KEY_MAP,
        settings=frozenset({llama.ROPE_FACTORS}),
    )
}

_SAMPLING: Mapping[str, str] = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
}


@dataclass(frozen=True, kw_only=True)
class GgufModel:
    """What a file holds, with the file still open: ``leaves`` read from it."""

    family: str
    config: Any
    leaves: dict[tuple[str, ...], LazyArray]
    """Parameters by their path. Reading one raises CheckpointError where values are not finite."""
    tokenizer: Tokenizer
    generation: dict[str, int | float]
    """Sampling defaults that the file names."""
    chat_template: str | None


def architecture(file: GgufFile) -> Architecture:
    """The architecture that ``file`` names. Raises UnsupportedModel with the known ones."""
    name = file.metadata.get("general.architecture")
    parts = file.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModel(
            f"{file.path} is one of {parts} parts; models in parts are not read",
            fix="join the parts into one file with llama-gguf-split --merge",
        )
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise UnsupportedModel(f"{file.path} has the architecture {name!r}; architectures read from GGUF: {known}")
    return _ARCHITECTURES[name]


def load_model(file: GgufFile) -> GgufModel:
    """Read settings and plan the parameters of ``file``; no tensor's values are read yet.

    Raises UnsupportedModel for what is not built, and CheckpointError that lists every parameter whose tensor is
    missing or has another shape, and every tensor that is left over.
    """
    kind = architecture(file)
    config = kind.config(file)
    tokenizer = _tokenizer(file)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{file.path}: {tokenizer.vocab_size} tokens do not fit the embedding table of {config.vocab_size} rows"
        )
    _, state = build_abstract(family(kind.family), config, np.dtype(np.float32))
    leaves = _plan(file, kind, {path: leaf.shape for path, leaf in flatten(state).items()})
    template = file.metadata.get("tokenizer.chat_template")
    return GgufModel(
        family=kind.family,
        config=config,
        leaves=leaves,
        tokenizer=tokenizer,
        generation=_generation(file.metadata),
        chat_template=template if isinstance(template, str) else None,
    )


def _tokenizer(file: GgufFile) -> Tokenizer:
    try:
        return tokenizer_from_gguf(file.metadata)
    except CheckpointError as error:
        raise type(error)(f"{file.path}: {error.message}", fix=error.fix) from None


def _plan(
    file: GgufFile, kind: Architecture, wanted: Mapping[tuple[str, ...], tuple[int, ...]]
) -> dict[tuple[str, ...], LazyArray]:
    entries = {entry.leaf: entry for entry in kind.key_map}
    left = {name: tensor for name, tensor in file.tensors.items() if name not in kind.settings}
    leaves: dict[tuple[str, ...], LazyArray] = {}
    wrong: list[str] = []
    unreadable: dict[GGMLQuantizationType, str] = {}
    for path, shape in wanted.items():
        layer = next((part for part in path if part.isdigit()), "")
        entry = entries[".".join("{i}" if part.isdigit() else part for part in path)]
        name, stored = entry.tensor.replace("{i}", layer), _stored_shape(shape, entry.merge)
        tensor = left.pop(name, None)
        if tensor is None or tensor.shape != stored:
            found = "it is missing" if tensor is None else f"found {list(tensor.shape)}"
            wrong.append(f"{'.'.join(path)}: wanted {list(stored)} in tensor {name}, {found}")
        elif tensor.kind not in READABLE:
            unreadable.setdefault(tensor.kind, name)
        else:
            leaves[path] = LazyArray(
                shape=shape,
                dtype=stored_dtype(tensor.kind),
                read=partial(_read, file, tensor, entry, shape),
            )
    wrong += [f"tensor {t.name} {list(t.shape)} {t.kind.name} belongs to no parameter" for t in left.values()]
    if wrong:
        more = [f"and {len(wrong) - _MAX_LISTED} more"] if len(wrong) > _MAX_LISTED else []
        raise CheckpointError("\n  ".join([f"{file.path} does not fit its settings:", *wrong[:_MAX_LISTED], *more]))
    if unreadable:
        found = ", ".join(f"{kind.name} (as in {name})" for kind, name in unreadable.items())
        known = ", ".join(kind.name for kind in sorted(READABLE))
        raise UnsupportedModel(f"{file.path} has tensors of type {found}; types that are read: {known}")
    return leaves


def _stored_shape(shape: tuple[int, ...], merge: tuple[int, ...]) -> tuple[int, ...]:
    axes = iter(shape)
    return tuple(math.prod(next(axes) for _ in range(count)) for count in merge)


def _read(file: GgufFile, tensor: GgufTensor, entry: Entry, shape: tuple[int, ...]) -> np.ndarray:
    values = read_tensor(file, tensor)
    if not np.isfinite(values.astype(np.float32, copy=False)).all():
        raise CheckpointError(
            f"{file.path}: tensor {tensor.name} holds values that are not finite numbers",
            fix="fetch the file again",
        )
    values = values.reshape(shape)
    if not entry.interleaved:
        return values
    heads, head_dim, width = shape
    # [N, Dh/2, 2, D]: pairs of neighbours -> [N, 2, Dh/2, D]: first halves, then second halves.
    return np.ascontiguousarray(values.reshape(heads, head_dim // 2, 2, width).swapaxes(1, 2)).reshape(shape)


def _generation(metadata: Mapping[str, Any]) -> dict[str, int | float]:
    found = {name: metadata[key] for key, name in _SAMPLING.items() if key in metadata}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}
