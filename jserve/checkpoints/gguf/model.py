"""A GGUF file as a model of ours: family, configuration, and each parameter as something still to be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from jserve.checkpoints.arrays.key_map import KeyMap, plan_leaves
from jserve.checkpoints.arrays.lazy import LazyArray, Region
from jserve.checkpoints.checkpoint import Checkpoint, param_shapes
from jserve.checkpoints.gguf import gemma, gpt2, llama
from jserve.checkpoints.gguf.file import GgufFile, GgufTensor
from jserve.checkpoints.gguf.tensors import READABLE, read_tensor, stored_dtype
from jserve.checkpoints.settings import sampling_default
from jserve.errors import CheckpointError, UnsupportedModel
from jserve.text.from_gguf import tokenizer_from_gguf
from jserve.text.tokenizer import Tokenizer

__all__ = ["gguf_checkpoint"]


@dataclass(frozen=True, kw_only=True)
class _Architecture:
    """How one value of ``general.architecture`` is read."""

    family: str
    config: Callable[[GgufFile], Any]
    key_map: KeyMap


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture(family="llama", config=llama.llama, key_map=llama.KEY_MAP),
    "qwen2": _Architecture(family="qwen2", config=llama.qwen2, key_map=llama.QWEN_KEY_MAP),
    "qwen3": _Architecture(family="qwen3", config=llama.qwen3, key_map=llama.QWEN_KEY_MAP),
    "qwen3moe": _Architecture(family="qwen3_moe", config=llama.qwen3moe, key_map=llama.QWEN_KEY_MAP),
    "phi3": _Architecture(family="phi3", config=llama.phi3, key_map=llama.PHI3_KEY_MAP),
    "gemma2": _Architecture(family="gemma2", config=gemma.gemma2, key_map=gemma.KEY_MAP),
    "gemma3": _Architecture(family="gemma3", config=gemma.gemma3, key_map=gemma.KEY_MAP),
    "gpt2": _Architecture(family="gpt2", config=gpt2.gpt2, key_map=gpt2.KEY_MAP),
}
"""Mistral and Mixtral are "llama" here, and so is their family."""

_SAMPLING: Mapping[str, str] = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
}
_NEUTRAL: Mapping[str, float] = {
    "general.sampling.mirostat": 0,
    "general.sampling.penalty_repeat": 1,
    "general.sampling.xtc_probability": 0,
}
"""What llama.cpp samples by and is not built here, with the value that changes nothing."""


def _architecture(file: GgufFile) -> _Architecture:
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


def gguf_checkpoint(file: GgufFile, *, source: str) -> Checkpoint:
    """``file`` as a checkpoint that reads from it while it is open; no tensor's values are read yet.

    Reading a parameter raises CheckpointError where its values are not finite. Raises UnsupportedModel for what is
    not built, and CheckpointError for a sampling default that is no finite number, or that lists every parameter whose
    tensor is missing or has another shape, and every tensor that is left over.
    """
    kind = _architecture(file)
    config = kind.config(file)
    tokenizer = _tokenizer(file)
    wanted = param_shapes(kind.family, config)
    template = file.metadata.get("tokenizer.chat_template")
    kinds = sorted({tensor.kind.name for tensor in file.tensors.values()})
    return Checkpoint(
        name=file.path.name.removesuffix(".gguf"),
        path=file.path,
        layout=f"GGUF file ({', '.join(kinds)})",
        family=kind.family,
        config=config,
        leaves=plan_leaves(kind.key_map, _tensors(file), wanted, where=str(file.path)),
        tokenizer=tokenizer,
        chat_template=template if isinstance(template, str) else None,
        generation=_generation(file),
        eos_ids=tokenizer.eos_ids,
        source=source,
        digests="not checked (--check reads every byte)",
    )


def _tokenizer(file: GgufFile) -> Tokenizer:
    try:
        return tokenizer_from_gguf(file.metadata)
    except CheckpointError as error:
        raise type(error)(f"{file.path}: {error.message}", fix=error.fix) from None


def _tensors(file: GgufFile) -> dict[str, LazyArray]:
    """Every tensor as floats still to be read. Raises UnsupportedModel that names each type that is not read."""
    unreadable: dict[GGMLQuantizationType, str] = {}
    for tensor in file.tensors.values():
        if tensor.kind not in READABLE:
            unreadable.setdefault(tensor.kind, tensor.name)
    if unreadable:
        found = ", ".join(f"{kind.name} (as in {name})" for kind, name in unreadable.items())
        known = ", ".join(kind.name for kind in sorted(READABLE))
        raise UnsupportedModel(f"{file.path} has tensors of type {found}; types that are read: {known}")
    return {
        name: LazyArray(shape=tensor.shape, dtype=stored_dtype(tensor.kind), read_region=partial(_read, file, tensor))
        for name, tensor in file.tensors.items()
    }


def _read(file: GgufFile, tensor: GgufTensor, region: Region) -> np.ndarray:
    values = read_tensor(file, tensor, region[0])[(slice(None), *region[1:])]
    if not np.isfinite(values.astype(np.float32, copy=False)).all():
        raise CheckpointError(
            f"{file.path}: tensor {tensor.name} holds values that are not finite numbers",
            fix="fetch the file again",
        )
    return values


def _generation(file: GgufFile) -> dict[str, int | float]:
    metadata = file.metadata
    keys = {key: name for key, name in _SAMPLING.items() if key in metadata}
    keys |= {key: key.rpartition(".")[2] for key, same in _NEUTRAL.items() if metadata.get(key, same) != same}
    return {name: sampling_default(metadata[key], key=key, where=file.path) for key, name in keys.items()}
