"""What generation_config.json says: defaults for sampling, and the ids that end a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jserve.checkpoints.hf.files import read_json
from jserve.checkpoints.problems import raise_all
from jserve.checkpoints.settings import sampling_default
from jserve.text.hf_tokens import configured_ends

__all__ = ["GENERATION_NAME", "named_ends", "read_sampling"]

GENERATION_NAME = "generation_config.json"


def read_sampling(folder: Path) -> dict[str, int | float]:
    """temperature, top_p, top_k and min_p as the file in ``folder`` names them; absent ones have no default.

    ``do_sample: false`` means greedy, as it does in transformers; where it is absent, what is named holds, as other
    servers have it. Raises CheckpointError for what is no finite number.
    """
    values = read_json(folder, GENERATION_NAME) or {}
    found = {
        name: sampling_default(values[name], key=name, where=folder / GENERATION_NAME)
        for name in ("temperature", "top_p", "top_k", "min_p")
        if values.get(name) is not None
    }
    return {"temperature": 0.0} if values.get("do_sample") is False else found


def named_ends(configured: Mapping[Path, Mapping[str, Any]], *, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a text by the settings of the files ``configured``, where there is no tokenizer to ask.

    Raises CheckpointError that lists what is no id of a vocabulary of ``vocab_size`` tokens.
    """
    named = {str(path): settings for path, settings in configured.items()}
    ids, problems = configured_ends(named, known=lambda token_id: token_id < vocab_size)
    raise_all("what ends a text cannot be told:", [f"{name}: {problem}" for name, problem in problems])
    return tuple(ids)
