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

from jserve.checkpoints.hf.families import hf_family
from jserve.checkpoints.key_map import KeyMap
from jserve.checkpoints.manifest import MANIFEST_NAME
from jserve.checkpoints.names import resolve_member
from jserve.checkpoints.orbax.layout import ITEMS, is_step_name
from jserve.errors import CheckpointError
from jserve.models.config import ModelConfig
from jserve.models.registry import family

__all__ = ["CONFIG_NAME", "Described", "find_beside", "places", "read_described", "read_sampling"]

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_MAX_JSON_BYTES = 16 << 20


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


def read_described(where: Sequence[Path]) -> Described | None:
    """The model that ``config.json`` or ``jserve.json`` names; None where there is neither.

    Raises CheckpointError where the file is damaged, UnsupportedModel for what is not built.
    """
    path = find_beside(where, CONFIG_NAME)
    if path is not None:
        values = _read_json(path)
        try:
            found = hf_family(values)
            config = found.config(values)
        except CheckpointError as error:
            raise type(error)(f"{path.parent}: {error.message}", fix=error.fix) from None
        return Described(family=found.family, config=config, values=values, key_map=found.key_map, path=path)
    path = find_beside(where, MANIFEST_NAME)
    if path is None:
        return None
    try:
        manifest = msgspec.convert(_read_json(path), _Manifest)
        config = family(manifest.family).config_type.from_dict(manifest.config)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    return Described(family=manifest.family, config=config, values={}, key_map=None, path=path)


def read_sampling(where: Sequence[Path]) -> dict[str, int | float]:
    """temperature, top_p, top_k and min_p as ``generation_config.json`` names them. ``do_sample: false`` is greedy."""
    path = find_beside(where, GENERATION_NAME)
    values = {} if path is None else _read_json(path)
    if values.get("do_sample") is False:
        return {"temperature": 0.0}
    found: dict[str, int | float] = {}
    for name in _SAMPLING:
        value = values.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{path}: {name} is {value!r:.60}; it must be a number")
        found[name] = value
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_JSON_BYTES} bytes")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
