"""What generation_config.json says: how tokens are chosen, and the ids that end a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jserve.checkpoints.hf.files import read_json
from jserve.checkpoints.problems import raise_all
from jserve.checkpoints.settings import sampling_default
from jserve.request import DEFAULTABLE
from jserve.text.hf_tokens import configured_ends

__all__ = ["GENERATION_NAME", "NEUTRAL", "named_ends", "read_sampling"]

GENERATION_NAME = "generation_config.json"
NEUTRAL: Mapping[str, int | None] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "repetition_penalty": 1,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "top_h": None,
    "typical_p": 1,
    "watermarking_config": None,
}
"""Settings that change which tokens transformers chooses and that are not built here, with the value that changes none;
null and what is empty change none either."""


def read_sampling(folder: Path) -> dict[str, Any]:
    """The DEFAULTABLE settings that the file in ``folder`` names, and those of ``NEUTRAL`` that are not neutral.

    ``do_sample: false`` means greedy, as it does in transformers; where it is absent, what is named holds, as other
    servers have it. Raises CheckpointError for what is no finite number.
    """
    values = read_json(folder, GENERATION_NAME) or {}
    found: dict[str, Any] = {
        name: sampling_default(values[name], key=name, where=folder / GENERATION_NAME)
        for name in DEFAULTABLE
        if values.get(name) is not None
    }
    if values.get("do_sample") is False:
        found = {"temperature": 0.0}
    return found | {
        name: values[name] for name, neutral in NEUTRAL.items() if values.get(name) not in (None, neutral, [], {})
    }


def named_ends(configured: Mapping[Path, Mapping[str, Any]], *, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a text by the settings of the files ``configured``, where there is no tokenizer to ask.

    Raises CheckpointError that lists what is no id of a vocabulary of ``vocab_size`` tokens.
    """
    named = {str(path): settings for path, settings in configured.items()}
    ids, problems = configured_ends(named, known=lambda token_id: token_id < vocab_size)
    raise_all("what ends a text cannot be told:", [f"{name}: {problem}" for name, problem in problems])
    return tuple(ids)
