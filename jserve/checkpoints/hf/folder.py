"""A Hugging Face folder as a checkpoint, read as it is: config.json, safetensors, tokenizer files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jserve.checkpoints.checkpoint import Checkpoint
from jserve.checkpoints.hf.families import HF_FAMILIES, HfFamily, hf_family
from jserve.checkpoints.hf.shards import open_tensors
from jserve.checkpoints.key_map import Leaves, plan_leaves
from jserve.checkpoints.names import resolve_member
from jserve.checkpoints.tree import flatten, main_dtype
from jserve.errors import CheckpointError, UnsupportedModel
from jserve.models.config import ModelConfig
from jserve.models.registry import build_abstract, family
from jserve.text.from_hf import HfText, has_tokenizer, read_hf_tokenizer

__all__ = ["CONFIG_NAME", "GENERATION_NAME", "TEXT_SUFFIXES", "open_hf", "read_json"]

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""Of the files that are read beside the weights."""
_MAX_JSON_BYTES = 16 << 20
_READABLE = ("float64", "float32", "float16", "bfloat16")


def open_hf(folder: Path, *, source: str) -> Checkpoint:
    """Open ``folder``. Headers are read and held against the files' sizes; no tensor's values are.

    Values are taken as they are: looking for ones that are not finite would read everything before a start, and is
    what ``inspect --check`` and ``convert`` do. Raises CheckpointError that lists all that is wrong with the weights,
    or every parameter whose tensor is missing or has another shape and every tensor that is left over; SourceError
    for names that lead out of the folder and for weights that are pickles; UnsupportedModel for what is not built.
    """
    values = read_json(folder, CONFIG_NAME)
    if values is None:
        raise CheckpointError(f"{folder} holds no {CONFIG_NAME}; it says what the weights are", fix="fetch it too")
    kind, config = _family(folder, values)
    tensors = open_tensors(folder)
    _, state = build_abstract(family(kind.family), config, np.dtype(np.float32))
    wanted = {path: tuple(leaf.shape) for path, leaf in flatten(state).items()}
    leaves = plan_leaves(kind.key_map, tensors, wanted, where=str(folder))
    _check_types(folder, leaves)
    generation = read_json(folder, GENERATION_NAME) or {}
    text = _text(folder)
    _check_vocabulary(folder, text, config)
    return Checkpoint(
        name=_name(folder),
        path=folder,
        layout=f"Hugging Face folder (safetensors, {main_dtype(leaves.values())})",
        family=kind.family,
        config=config,
        leaves=leaves,
        tokenizer=None if text is None else text.tokenizer,
        chat_template=None if text is None else text.chat_template,
        generation=_sampling(folder, generation),
        eos_ids=_ends(generation, values) if text is None else text.tokenizer.eos_ids,
        source=source,
        digests="not checked; sizes match their headers (--check reads every value)",
    )


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """The object in the file ``name`` of ``folder``; None where there is no such file. Raises CheckpointError."""
    path = resolve_member(folder, name)
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_JSON_BYTES} bytes")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link to a file that is not there", fix="fetch it again") from None
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def _family(folder: Path, values: Mapping[str, Any]) -> tuple[HfFamily, ModelConfig]:
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in HF_FAMILIES:
        raise UnsupportedModel(
            f"{folder / CONFIG_NAME} has the model_type {kind!r}; read from Hugging Face folders: "
            f"{', '.join(sorted(HF_FAMILIES))}",
            fix="serve it with a module of your own: jserve serve package.module:Class --checkpoint DIR",
        )
    quantized = values.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise UnsupportedModel(
            f"{folder / CONFIG_NAME} says that the weights are quantized ({method}); such ones are not read",
            fix="take the model in float32, float16 or bfloat16, or as GGUF",
        )
    try:
        found = hf_family(values)
        return found, found.config(values)
    except CheckpointError as error:
        raise type(error)(f"{folder}: {error.message}", fix=error.fix) from None


def _check_types(folder: Path, leaves: Leaves) -> None:
    strange = {leaf.dtype.name: ".".join(path) for path, leaf in leaves.items() if leaf.dtype.name not in _READABLE}
    if strange:
        found = ", ".join(f"{dtype} (as in {path})" for dtype, path in strange.items())
        raise UnsupportedModel(f"{folder} stores parameters as {found}; types that are read: {', '.join(_READABLE)}")


def _text(folder: Path) -> HfText | None:
    """What the folder says about text; None where it has no tokenizer."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and path.suffix in TEXT_SUFFIXES:
            resolve_member(folder, path.name)
    return read_hf_tokenizer(folder) if has_tokenizer(folder) else None


def _ends(generation: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a text, where there is no tokenizer to ask."""
    named = [part.get("eos_token_id") for part in (generation, values)]
    ids = [i for value in named for i in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and not isinstance(i, bool)))


def _check_vocabulary(folder: Path, text: HfText | None, config: ModelConfig) -> None:
    size = 0 if text is None else text.tokenizer.vocab_size
    if size > config.vocab_size:
        raise CheckpointError(
            f"{folder}: {size} tokens of the tokenizer do not fit the embedding table of {config.vocab_size} rows"
        )


def _sampling(folder: Path, generation: Mapping[str, Any]) -> dict[str, int | float]:
    """temperature, top_p, top_k and min_p as generation_config.json names them; absent ones have no default.

    ``do_sample: false`` means greedy, as it does in transformers; where it is absent, what is named holds, as other
    servers have it.
    """
    found: dict[str, int | float] = {}
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{folder / GENERATION_NAME}: {name} is {value!r:.60}; it must be a number")
        found[name] = value
    return {"temperature": 0.0} if generation.get("do_sample") is False else found


def _name(folder: Path) -> str:
    """The repository's name, where the folder is a snapshot in the Hub's cache."""
    home = folder.resolve()
    if home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--"):
        return home.parent.parent.name.split("--")[-1]
    return home.name
