"""A Hugging Face folder of an encoder, such as sentence-transformers writes, as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from jserve.checkpoints.checkpoint import Checkpoint
from jserve.checkpoints.hf.bert import KEY_MAP, bert_config, with_new_names
from jserve.checkpoints.hf.sentence_transformer import read_encoder_settings, read_json
from jserve.checkpoints.key_map import plan_leaves
from jserve.checkpoints.lazy import LazyArray, Region
from jserve.checkpoints.names import PICKLES, resolve_member
from jserve.checkpoints.tree import flatten
from jserve.errors import CheckpointError, SourceError, UnsupportedModel
from jserve.models.registry import build_abstract, family
from jserve.text.tokenizer import Tokenizer

__all__ = ["is_encoder_folder", "open_encoder_folder"]

_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_WEIGHTS = "model.safetensors"
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32}
"""Of tensors; those of whole numbers are tables of positions, which are not read."""


def is_encoder_folder(folder: Path) -> bool:
    """Whether its config.json can be read and names a family of encoders."""
    try:
        settings = read_json(folder, _CONFIG)
    except CheckpointError:  # what kind of folder it is, and what is wrong with it, others can say better
        return False
    return settings is not None and settings.get("model_type") == "bert"


def open_encoder_folder(folder: Path, *, source: str) -> Checkpoint:
    """Raises UnsupportedModel for what is not built, CheckpointError that lists every parameter whose tensor is missing
    or has another shape, and every tensor that is left over, and SourceError for pickles."""
    where = str(folder / _CONFIG)
    config = bert_config(read_json(folder, _CONFIG) or {}, where=where)
    settings = read_encoder_settings(folder, dimensions=config.hidden_size, max_position=config.max_position)
    tokenizer = _tokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{folder}: {tokenizer.vocab_size} tokens do not fit the embedding table of {config.vocab_size} rows"
        )
    _, state = build_abstract(family("bert"), config, np.dtype(np.float32))
    wanted = {path: tuple(leaf.shape) for path, leaf in flatten(state).items()}
    return Checkpoint(
        name=folder.resolve().name,
        path=folder,
        layout="Hugging Face folder of an encoder (safetensors)",
        family="bert",
        config=config,
        leaves=plan_leaves(KEY_MAP, with_new_names(_tensors(folder)), wanted, where=str(folder)),
        tokenizer=tokenizer,
        chat_template=None,
        generation={},
        eos_ids=(),
        source=source,
        digests="not checked",
        encoder=settings,
    )


def _tokenizer(folder: Path) -> Tokenizer:
    path = resolve_member(folder, _TOKENIZER)
    try:
        return Tokenizer.from_json(path.read_text(encoding="utf-8"), eos_ids=(), bos_id=None, add_bos=False)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; an encoder's tokenizer is read from there and from no other file",
            fix="write it with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the tokenizer {path}: {error}") from None


def _tensors(folder: Path) -> Mapping[str, LazyArray]:
    """Every tensor of the folder's one file of weights, still to be read."""
    path = resolve_member(folder, _WEIGHTS)
    if not path.is_file():
        pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() in PICKLES)
        if pickles:
            raise SourceError(
                f"{folder} has its weights as pickles ({', '.join(pickles)}); those run code when they are loaded and "
                "are never read",
                fix="save the model again as safetensors",
            )
        raise SourceError(f"{path} is missing: the folder has no weights that are read")
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            kinds = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if strange := [f"{name} is {kind}" for name, (_, kind) in kinds.items() if kind not in _DTYPES]:
        raise UnsupportedModel(
            f"{path} has tensors that are not read: {', '.join(strange[:5])}; types that are: {', '.join(_DTYPES)}"
        )
    return {
        name: LazyArray(shape=shape, dtype=np.dtype(_DTYPES[kind]), read_region=partial(_read, path, name))
        for name, (shape, kind) in kinds.items()
    }


def _read(path: Path, name: str, region: Region) -> np.ndarray:
    try:
        with safe_open(path, framework="numpy") as file:
            values: np.ndarray = file.get_slice(name)[region]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from None
    return values
