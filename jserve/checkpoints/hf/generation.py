"""What generation_config.json says: defaults for sampling, and the ids that end a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jserve.checkpoints.hf.files import read_json
from jserve.errors import CheckpointError

__all__ = ["GENERATION_NAME", "named_ends", "read_sampling"]

GENERATION_NAME = "generation_config.json"


def read_sampling(folder: Path) -> dict[str, int | float]:
    """temperature, top_p, top_k and min_p as the file in ``folder`` names them; absent ones have no default.

    ``do_sample: false`` means greedy, as it does in transformers; where it is absent, what is named holds, as other
    servers have it. Raises CheckpointError for what is no number.
    """
    values = read_json(folder, GENERATION_NAME) or {}
    found: dict[str, int | float] = {}
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value = values.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{folder / GENERATION_NAME}: {name} is {value!r:.60}; it must be a number")
        found[name] = value
    return {"temperature": 0.0} if values.get("do_sample") is False else found


def named_ends(*files: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a text by the ``eos_token_id`` of ``files``, where there is no tokenizer to ask."""
    named = [values.get("eos_token_id") for values in files]
    ids = [i for value in named for i in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and not isinstance(i, bool)))
