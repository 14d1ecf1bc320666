"""What stands beside a checkpoint of arrays: the model's settings, its tokenizer, its defaults for sampling.

Trainers save arrays alone, in a folder of the run or of a step; the rest is looked for there and in the two folders
above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jserve.checkpoints.arrays.key_map import KeyMap
from jserve.checkpoints.hf.families import hf_model
from jserve.checkpoints.hf.files import CONFIG_NAME, read_json
from jserve.checkpoints.hf.generation import GENERATION_NAME, named_ends, read_sampling
from jserve.checkpoints.manifest import MANIFEST_NAME, Manifest, check_ids, parse_manifest
from jserve.checkpoints.names import resolve_member
from jserve.checkpoints.orbax.layout import ITEMS
from jserve.checkpoints.orbax.steps import is_step_name
from jserve.errors import CheckpointError
from jserve.models.config import ModelConfig
from jserve.text.from_hf import HfText, has_tokenizer, read_hf_tokenizer
from jserve.text.tokenizer import Tokenizer

__all__ = [
    "Described",
    "filled_in",
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
    path: Path
    """The file that says it."""
    values: Mapping[str, Any]
    """config.json; empty where jserve.json describes the model."""
    key_map: KeyMap | None = None
    """From Hugging Face's names; None where jserve.json describes the model."""
    manifest: Manifest | None = None
    """jserve.json, where that describes the model. Its files are another checkpoint's."""
    is_encoder: bool = False
    """Whether it makes vectors of texts, as the files of sentence-transformers beside ``path`` say, or jserve.json."""


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
    manifest = parse_manifest(path)
    return Described(
        family=manifest.family,
        config=manifest.model_config(path),
        values={},
        manifest=manifest,
        is_encoder=manifest.encoder is not None,
        path=path,
    )


def read_text(where: Sequence[Path], *, described: Described | None = None) -> tuple[HfText, Path] | None:
    """The nearest tokenizer with what is said about chats, and its folder; None where there is none.

    What no file beside the tokenizer names (BOS, the ends of a text, the template) is as the jserve.json there says,
    or the one that ``described`` the model. Raises as ``read_hf_tokenizer`` does, SourceError for links out of that
    folder, and CheckpointError where jserve.json names ids that the tokenizer does not have.
    """
    place = next((place for place in where if has_tokenizer(place, member=resolve_member)), None)
    if place is None:
        return None
    of_encoder = described is not None and described.is_encoder
    text = read_hf_tokenizer(place, of_encoder=of_encoder, member=resolve_member)
    return filled_in(text, place, described), place


def filled_in(text: HfText, place: Path, described: Described | None = None) -> HfText:
    """``text``, read from the folder ``place``, with what jserve.json says beside it (see ``read_text``)."""
    path = resolve_member(place, MANIFEST_NAME)
    if path.is_file():
        manifest = parse_manifest(path)
    elif described is not None and described.manifest is not None:
        path, manifest = described.path, described.manifest
    else:
        return text
    tokenizer = text.tokenizer
    eos_ids = tokenizer.eos_ids or manifest.eos_ids
    bos_id, add_bos = tokenizer.bos_id, tokenizer.add_bos
    if bos_id is None:
        bos_id, add_bos = manifest.bos_id, manifest.add_bos
    try:
        check_ids(eos_ids, bos_id, vocab_size=tokenizer.vocab_size)
        tokenizer = Tokenizer(tokenizer.backend, eos_ids=eos_ids, bos_id=bos_id, add_bos=add_bos)
    except ValueError as error:
        raise CheckpointError(
            f"{path} does not fit the tokenizer in {place}: {error}",
            fix=f"name the eos_token and the bos_token in {place / 'tokenizer_config.json'}",
        ) from None
    return HfText(
        tokenizer=tokenizer,
        chat_template=manifest.chat_template if text.chat_template is None else text.chat_template,
    )


def read_ends(where: Sequence[Path], described: Described) -> tuple[int, ...]:
    """Ids that end a text, where there is no tokenizer to ask. Raises as ``named_ends`` does."""
    path = find_beside(where, GENERATION_NAME)
    configured = {} if path is None else {path: read_json(path.parent, GENERATION_NAME) or {}}
    vocab_size = described.config.vocab_size
    ends = named_ends(configured | {described.path: described.values}, vocab_size=vocab_size)
    if ends or described.manifest is None:
        return ends
    return named_ends({described.path: {"eos_token_id": described.manifest.eos_ids}}, vocab_size=vocab_size)


def read_beside_sampling(where: Sequence[Path]) -> dict[str, Any]:
    """The nearest settings for sampling: of generation_config.json (see ``read_sampling``), else of jserve.json."""
    for place in where:
        if (place / GENERATION_NAME).is_file():
            return read_sampling(place)
        if (place / MANIFEST_NAME).is_file():
            return dict(parse_manifest(resolve_member(place, MANIFEST_NAME)).generation)
    return {}
