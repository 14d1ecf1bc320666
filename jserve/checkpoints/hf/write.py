"""A checkpoint as a folder that transformers, sentence-transformers and vLLM load: settings, safetensors, tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.processors import Sequence as Processors
from tokenizers.processors import TemplateProcessing

from jserve.checkpoints.arrays.inverse import plan_tensors
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.checkpoint import Checkpoint
from jserve.checkpoints.hf.config_json import config_json
from jserve.checkpoints.hf.families import HF_FAMILIES
from jserve.checkpoints.hf.files import CONFIG_NAME
from jserve.checkpoints.hf.generation import GENERATION_NAME, NEUTRAL
from jserve.checkpoints.hf.safetensors import write_tensor_file
from jserve.checkpoints.hf.sentence_transformer import encoder_files
from jserve.checkpoints.hf.shards import INDEX_NAME, SINGLE_NAME
from jserve.checkpoints.manifest import TOKENIZER_NAME
from jserve.progress import Progress
from jserve.request import DEFAULTABLE
from jserve.text.tokenizer import Tokenizer

__all__ = ["write_hf"]

_SHARD_BYTES = 5_000_000_000
"""Largest file, as transformers has it; more only where one tensor is larger."""
_TOKENIZER_SETTINGS_NAME = "tokenizer_config.json"
_BERT_TOKENS = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}


def write_hf(checkpoint: Checkpoint, folder: Path, *, progress: Progress) -> None:
    """Write ``checkpoint`` into ``folder``: empty, or left by a call with the same checkpoint that was killed.

    Shards that such a call finished are taken as they are; of the model no more than a piece of one tensor is held.
    Raises UnsupportedModel for families and settings that config.json cannot tell, before anything is written, and
    OSError for what the operating system refuses.
    """
    settings = config_json(checkpoint)
    tensors = plan_tensors(HF_FAMILIES[settings["model_type"]].key_map, checkpoint.leaves)
    progress.start(f"convert {checkpoint.path.name}", sum(tensor.nbytes for tensor in tensors.values()), "B")
    shards = list(_shards(tensors))
    names = [_shard_name(i, len(shards)) for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard, progress)
    progress.done()
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        size = sum(tensor.nbytes for tensor in tensors.values())
        _write_json(folder / INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": weight_map})
    _write_json(folder / CONFIG_NAME, settings)
    if checkpoint.encoder is None:
        _write_json(folder / GENERATION_NAME, _generation(checkpoint))
    else:
        for name, values in encoder_files(checkpoint.encoder, dimensions=checkpoint.config.hidden_size).items():
            (folder / name).parent.mkdir(exist_ok=True)
            _write_json(folder / name, values)
    if checkpoint.tokenizer is not None:
        _write_tokenizer(checkpoint.tokenizer, checkpoint.chat_template, folder)


def _shards(tensors: Mapping[str, LazyArray]) -> Iterator[dict[str, LazyArray]]:
    shard: dict[str, LazyArray] = {}
    held = 0
    for name, tensor in tensors.items():
        if shard and held + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor
        held += tensor.nbytes
    yield shard


def _shard_name(i: int, count: int) -> str:
    return SINGLE_NAME if count == 1 else f"model-{i + 1:05}-of-{count:05}.safetensors"


def _write_shard(path: Path, shard: Mapping[str, LazyArray], progress: Progress) -> None:
    """``path`` is there only when all of it is on the disk."""
    if path.is_file():
        progress.advance(sum(tensor.nbytes for tensor in shard.values()))
        return
    scratch = path.with_name(f"{path.name}.unfinished")
    write_tensor_file(scratch, shard, progress=progress)
    os.replace(scratch, path)


def _generation(checkpoint: Checkpoint) -> dict[str, Any]:
    ids = list(checkpoint.eos_ids)
    bos = None if checkpoint.tokenizer is None else checkpoint.tokenizer.bos_id
    values: dict[str, Any] = {"bos_token_id": bos, "eos_token_id": ids[0] if len(ids) == 1 else ids or None}
    said = checkpoint.generation
    if said.get("temperature") == 0:
        values["do_sample"] = False
    elif defaults := {name: said[name] for name in DEFAULTABLE if name in said}:
        values |= {"do_sample": True, **defaults}
    values |= {name: said[name] for name in NEUTRAL if name in said}
    return {key: value for key, value in values.items() if value is not None}


def _write_tokenizer(tokenizer: Tokenizer, chat_template: str | None, folder: Path) -> None:
    backend = Backend.from_str(tokenizer.to_json())
    bos = tokenizer.token(tokenizer.bos_id)
    if tokenizer.add_bos and tokenizer.bos_id not in backend.encode("a", add_special_tokens=True).ids[:1]:
        # The rule lies in jserve.json; readers of tokenizer.json look for it there.
        template = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B:1", special_tokens=[(bos, tokenizer.bos_id)]
        )
        before = backend.post_processor
        backend.post_processor = template if before is None else Processors([before, template])
    (folder / TOKENIZER_NAME).write_text(backend.to_str(pretty=True), encoding="utf-8")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": bos or None,
        "eos_token": tokenizer.token(tokenizer.eos_ids[0]) if tokenizer.eos_ids else None,
        "chat_template": chat_template,
    }
    # Of BERT's kind: whoever embeds texts in batches pads them.
    settings |= {key: token for key, token in _BERT_TOKENS.items() if backend.token_to_id(token) is not None}
    _write_json(folder / _TOKENIZER_SETTINGS_NAME, {key: value for key, value in settings.items() if value is not None})


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
