"""A Hugging Face folder as a checkpoint, read as it is: config.json, safetensors, tokenizer files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jserve.checkpoints.arrays.key_map import plan_leaves
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.tree import main_dtype
from jserve.checkpoints.checkpoint import Checkpoint, param_shapes
from jserve.checkpoints.hf.families import HfFamily, hf_model
from jserve.checkpoints.hf.files import CONFIG_NAME, read_json
from jserve.checkpoints.hf.generation import GENERATION_NAME, named_ends, read_sampling
from jserve.checkpoints.hf.sentence_transformer import read_encoder_settings
from jserve.checkpoints.hf.shards import open_tensors
from jserve.checkpoints.names import called, resolve_member
from jserve.errors import CheckpointError
from jserve.models.config import ModelConfig
from jserve.text.from_hf import HfText, has_tokenizer, read_hf_tokenizer

__all__ = ["TEXT_SUFFIXES", "layout_words", "open_hf"]

TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""Of the files that are read beside the weights."""


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
    kind, config = hf_model(folder / CONFIG_NAME, values)
    tensors = open_tensors(folder)
    leaves = plan_leaves(kind.key_map, tensors, param_shapes(kind.family, config), where=str(folder))
    text = _text(folder, kind)
    return Checkpoint(
        name=called(folder.resolve()),
        path=folder,
        layout=layout_words(leaves.values()),
        family=kind.family,
        config=config,
        leaves=leaves,
        tokenizer=None if text is None else text.tokenizer,
        chat_template=None if text is None else text.chat_template,
        generation=read_sampling(folder),
        eos_ids=_ends(folder, values, config, text),
        encoder=read_encoder_settings(folder, config) if kind.is_encoder else None,
        source=source,
        digests="not checked; sizes match their headers (--check reads every value)",
    )


def layout_words(arrays: Iterable[LazyArray]) -> str:
    """What such a folder is, which holds ``arrays``, at least one."""
    return f"Hugging Face folder (safetensors, {main_dtype(arrays)})"


def _text(folder: Path, kind: HfFamily) -> HfText | None:
    """What the folder says about text; None where it has no tokenizer."""
    if has_tokenizer(folder, member=resolve_member):
        return read_hf_tokenizer(folder, of_encoder=kind.is_encoder, member=resolve_member)
    if kind.is_encoder:
        raise CheckpointError(
            f"{folder} has no tokenizer.json; an encoder's tokenizer is read from there and from no other file",
            fix="write it with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    return None


def _ends(folder: Path, values: Mapping[str, Any], config: ModelConfig, text: HfText | None) -> tuple[int, ...]:
    """The tokenizer knows of all places that may name them."""
    if text is not None:
        return text.tokenizer.eos_ids
    generation = read_json(folder, GENERATION_NAME) or {}
    configured = {folder / GENERATION_NAME: generation, folder / CONFIG_NAME: values}
    return named_ends(configured, vocab_size=config.vocab_size)
