"""The tokenizer of a Hugging Face folder, its chat template, and what ends a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jserve.checkpoints.names import resolve_member
from jserve.errors import CheckpointError
from jserve.text.tokenizer import Tokenizer

__all__ = ["HfText", "read_text"]


@dataclass(frozen=True, kw_only=True)
class HfText:
    tokenizer: Tokenizer | None
    chat_template: str | None
    eos_ids: tuple[int, ...]


def read_text(folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any]) -> HfText:
    """Stand-in until ``jserve.text.from_hf`` is merged: tokenizer.json and the ids of config.json."""
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    path, template = resolve_member(folder, "tokenizer.json"), None
    options = resolve_member(folder, "tokenizer_config.json")
    values = msgspec.json.decode(options.read_bytes()) if options.is_file() else {}
    template = values.get("chat_template")
    if not path.is_file():
        return HfText(tokenizer=None, chat_template=template, eos_ids=eos_ids)
    bos = generation.get("bos_token_id", config.get("bos_token_id"))
    try:
        tokenizer = Tokenizer.from_json(
            path.read_text("utf-8"), eos_ids=eos_ids, bos_id=bos, add_bos=values.get("add_bos_token") or False
        )
    except ValueError as error:
        raise CheckpointError(f"cannot read the tokenizer {path}: {error}") from None
    return HfText(tokenizer=tokenizer, chat_template=template, eos_ids=eos_ids)
