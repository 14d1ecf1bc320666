"""What stands beside a checkpoint of arrays: the model's settings, its tokenizer, its defaults for sampling.

Trainers save arrays alone, in a folder of the run or of a step; the rest is looked for there and in the two folders
above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jserve.checkpoints.arrays.key_map import KeyMap
from jserve.checkpoints.hf.families import hf_model
from jserve.checkpoints.hf.files import CONFIG_NAME, read_json
from jserve.checkpoints.hf.generation import GENERATION_NAME, named_ends, read_sampling
from jserve.checkpoints.manifest import MANIFEST_NAME
from jserve.checkpoints.orbax.layout import ITEMS
from jserve.checkpoints.orbax.steps import is_step_name
from jserve.checkpoints.sources.names import resolve_member
from jserve.errors import CheckpointError
from jserve.models.config import ModelConfig
from jserve.models.registry import family
from jserve.text.from_hf import HfText, has_tokenizer, read_hf_tokenizer

__all__ = [
    "Described",
    "find_beside",
    "find_description",
    "places",
    "read_beside_sampling",
    "read_described",
    "read_ends",
    "read_text",
]


@dataclass(frozen=True, kw_only=True)
class Described:
    """What a model is, by the files beside its arrays."""

    family: str
    config: ModelConfig
    values: Mapping[str, Any]
    """config.json; empty where jserve.json describes the model."""
    key_map: KeyMap | None
    """From Hugging Face's names; None where jserve.json describes the model."""
    path: Path
    """The file that says it."""
    is_encoder: bool = False
    """Whether it makes vectors of texts, as the files of sentence-transformers beside ``path`` say."""


class _Manifest(msgspec.Struct):
    """What of ``jserve.json`` describes the model; its files are another checkpoint's."""

    family: str
    config: dict[str, Any]


def places(folder: Path, arrays: Path) -> list[Path]:
    """Where to look, nearest first: from the folder of the arrays up to the run's, and two above it.

    ``folder``, as it was given, may be a step, or an item of one.
    """
    inner = (arrays if arrays.is_dir() else arrays.parent).absolute()
    outer = (folder if folder.is_dir() else folder.parent).absolute()
    if outer.name in ITEMS:
        outer = outer.parent
    if is_step_name(outer.name):
        outer = outer.parent
    found = [inner]
    while found[-1] != outer and outer in found[-1].parents:
        found.append(found[-1].parent)
    return list(dict.fromkeys([*found, *outer.parents[:2]]))


def find_beside(where: Sequence[Path], name: str) -> Path | None:
    """The nearest file called ``name``. Raises SourceError for a link out of its folder."""
    for place in where:
        if (place / name).is_file():
            return resolve_member(place, name)
    return None


def find_description(where: Sequence[Path]) -> Path | None:
    """The nearest config.json or jserve.json, which says what model it is. Raises SourceError for links out.

    In a folder that has both, config.json counts if it names a ``model_type``: others are those of trainers.
    """
    for place in where:
        found = [resolve_member(place, name) for name in (CONFIG_NAME, MANIFEST_NAME) if (place / name).is_file()]
        if len(found) == 2 and not _names_a_model(place):
            return found[1]
        if found:
            return found[0]
    return None


def _names_a_model(place: Path) -> bool:
    try:
        return "model_type" in (read_json(place, CONFIG_NAME) or {})
    except CheckpointError:
        return True  # it is damaged, and whoever reads it says so


def read_described(where: Sequence[Path]) -> Described | None:
    """The model that the nearest description names (see ``find_description``); None where there is none.

    Raises CheckpointError where the file is damaged, UnsupportedModel for what is not built.
    """
    path = find_description(where)
    if path is None:
        return None
    if path.name == CONFIG_NAME:
        values = read_json(path.parent, CONFIG_NAME) or {}
        found, config = hf_model(path, values)
        return Described(
            family=found.family,
            config=config,
            values=values,
            key_map=found.key_map,
            is_encoder=found.is_encoder,
            path=path,
        )
    try:
        manifest = msgspec.convert(read_json(path.parent, MANIFEST_NAME), _Manifest)
        config = family(manifest.family).config_type.from_dict(manifest.config)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    return Described(family=manifest.family, config=config, values={}, key_map=None, path=path)


def read_text(where: Sequence[Path], *, of_encoder: bool = False) -> tuple[HfText, Path] | None:
    """The nearest tokenizer with what it says about chats, and its folder; None where there is none.

    Raises as ``read_hf_tokenizer`` does, and SourceError for links out of that folder.
    """
    place = next((place for place in where if has_tokenizer(place, member=resolve_member)), None)
    if place is None:
        return None
    return read_hf_tokenizer(place, of_encoder=of_encoder, member=resolve_member), place


def read_ends(where: Sequence[Path], described: Described) -> tuple[int, ...]:
    """Ids that end a text, where there is no tokenizer to ask. Raises as ``named_ends`` does."""
    path = find_beside(where, GENERATION_NAME)
    configured = {} if path is None else {path: read_json(path.parent, GENERATION_NAME) or {}}
    return named_ends(configured | {described.path: described.values}, vocab_size=described.config.vocab_size)


def read_beside_sampling(where: Sequence[Path]) -> dict[str, Any]:
    """The nearest settings for sampling (see ``read_sampling``)."""
    path = find_beside(where, GENERATION_NAME)
    return {} if path is None else read_sampling(path.parent)
