"""Which objects of a bucket a checkpoint's readers look at before they read arrays: a few small files, and names.

The readers ask a folder on disk. What is planned here becomes such a folder: files with their contents, files that only
have to be there, and folders. Arrays are never among them, nor anything of steps that nobody will open. Which step and
which item is taken, ``orbax/layout.py`` says of that folder. What it will want to look into is told beforehand here, by
the same rules: where those change, this must change with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import msgspec

from jserve.checkpoints.hf.folder import TEXT_SUFFIXES
from jserve.checkpoints.hf.sentence_transformer import MODULES_NAME, SETTINGS_NAMES, module_settings
from jserve.checkpoints.names import member_path
from jserve.checkpoints.orbax.layout import CHECKPOINT_METADATA, ITEMS, MARKER, MSGPACK
from jserve.checkpoints.orbax.read import METADATA_NAME, OCDBT_MANIFEST
from jserve.checkpoints.orbax.steps import COMMITTED, TEMPORARY, is_step_name, step_number, step_prefix
from jserve.checkpoints.sources.store.bucket import Bucket, Children, StoredObject
from jserve.errors import SourceError

__all__ = ["Plan", "make_plan"]

_COPIED = frozenset({MARKER, CHECKPOINT_METADATA, METADATA_NAME})
_ARRAY = (".zarray", "zarr.json")
_SEEN = frozenset({COMMITTED, OCDBT_MANIFEST, *_ARRAY, *MSGPACK})
"""Files that need only be there."""
_SEEN_SUFFIXES = (".safetensors", ".gguf", ".bin", ".ckpt", ".pt", ".pth")
_TEXTS = (
    "config.json",
    "generation_config.json",
    "jserve.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    *SETTINGS_NAMES,
)
"""Asked for by name in folders that are not listed."""
_MAX_FILE_BYTES = 200 << 20
_MAX_BYTES = 1 << 30
_MAX_STEPS = 2_000
_OPENED_STEPS = 4
"""The newest finished ones: an older one is opened where the newest cannot be."""


@dataclass(kw_only=True)
class Plan:
    """Keys of the bucket."""

    copied: dict[str, StoredObject] = field(default_factory=dict)
    seen: dict[str, StoredObject] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def take(self, key: str, stored: StoredObject) -> None:
        """``stored``, which is at ``key``, if readers would look at it."""
        path = PurePosixPath(key)
        if path.name in _SEEN or path.suffix in _SEEN_SUFFIXES or step_number(path.name) is not None:
            self.seen[key] = stored
        elif path.name in _COPIED or path.suffix in TEXT_SUFFIXES:
            self.copied[key] = stored

    def check_bounds(self, bucket: Bucket) -> None:
        for key, stored in self.copied.items():
            if stored.size > _MAX_FILE_BYTES:
                raise SourceError(
                    f"{bucket.uri(key)} has {stored.size} bytes; it is none of a checkpoint's small files"
                )
        total = sum(stored.size for stored in self.copied.values())
        if total > _MAX_BYTES:
            raise SourceError(f"the small files to copy have {total} bytes together; at most {_MAX_BYTES} are taken")


def make_plan(bucket: Bucket, path: str, top: Children) -> Plan:
    """What is looked at of the checkpoint ``path``, in which is ``top``. Raises SourceError as ``Bucket`` does."""
    plan = Plan(folders={path} if path else set())
    whole = _look(bucket, plan, path, top)
    # Steps come before other arrays beside them, as layout.py has it.
    is_tree = any(name in top.files for name in (METADATA_NAME, MARKER, CHECKPOINT_METADATA))
    if not whole or (not is_tree and any(is_step_name(name) for name in top.folders)):
        _look_at_steps(bucket, plan, path, top)
    _look_beside(bucket, plan, path, top)
    _look_above(bucket, plan, path)
    plan.check_bounds(bucket)
    _look_at_modules(bucket, plan, path)
    plan.check_bounds(bucket)
    return plan


def _look(bucket: Bucket, plan: Plan, folder: str, inside: Children) -> bool:
    """Files of ``folder`` and of the items in it. Returns whether it is a checkpoint, and no folder of steps."""
    for name, stored in inside.files.items():
        plan.take(_join(folder, name), stored)
    plan.folders |= {_join(folder, name) for name in inside.folders}
    if METADATA_NAME in inside.files:
        return True
    others = [name for name in inside.folders if step_number(name) is None and not _temporary(name)]
    asked = bucket.look(
        _join(folder, name, file) for name in others for file in (METADATA_NAME, *_ARRAY) if not name.startswith(".")
    )
    for key, stored in asked.items():
        plan.take(key, stored)
    found = {PurePosixPath(key).parent.name for key in asked}
    for name in others:
        item = _join(folder, name)
        if _join(item, METADATA_NAME) in asked or (name in ITEMS and name not in found):
            children = bucket.children(item)
            for file, stored in children.files.items():
                plan.take(_join(item, file), stored)
            if _join(item, METADATA_NAME) not in asked:
                arrays = bucket.look(_join(item, array, file) for array in children.folders for file in _ARRAY)
                for key, stored in arrays.items():
                    plan.take(key, stored)
                found |= {name} if arrays else set()
    return bool(found) or any(name in inside.files for name in (MARKER, *MSGPACK))


def _look_at_steps(bucket: Bucket, plan: Plan, folder: str, inside: Children) -> None:
    numbers = {name: step_number(name) for name in (*inside.folders, *inside.files)}
    # Steps of usual names come first, as layout.py has it, and the newest of them.
    steps = sorted(
        (name for name, n in numbers.items() if n is not None),
        key=lambda name: (not is_step_name(name), -(numbers[name] or 0)),
    )
    if len(steps) > _MAX_STEPS:
        raise SourceError(
            f"{bucket.uri(folder)} holds {len(steps)} steps; at most {_MAX_STEPS} are looked through",
            fix=f"name the step, such as {bucket.uri(_join(folder, steps[0]))}",
        )
    folders = [name for name in steps if name in inside.folders]
    committed = bucket.look(_join(folder, name, COMMITTED) for name in folders)
    for key, stored in committed.items():
        plan.take(key, stored)
    done = {name for name in folders if _join(folder, name, COMMITTED) in committed}
    marked = {step_prefix(name) for name in done}
    finished = [name for name in folders if name in done or step_prefix(name) not in marked]
    # The newest of each usual name too: where several are there, layout.py takes none.
    rivals = {step_prefix(name): name for name in reversed(finished) if is_step_name(name)}
    opened = list(dict.fromkeys([*finished[:_OPENED_STEPS], *rivals.values()]))
    for name in opened:
        step = _join(folder, name)
        _look(bucket, plan, step, bucket.children(step))
    if len(finished) > len(opened):
        plan.notes.append(
            f"{bucket.uri(folder)} has {len(finished)} finished steps; the newest {len(opened)} are looked into"
        )
        plan.folders -= {_join(folder, name) for name in finished if name not in opened}


def _look_beside(bucket: Bucket, plan: Plan, path: str, top: Children) -> None:
    """Whether the step that was named, or an item of it, and others like it have the file of finished ones.

    A right may end at ``path``: then nothing is known of others, and the step counts as finished.
    """
    step = PurePosixPath(path) if step_prefix(PurePosixPath(path).name) is not None else PurePosixPath(path).parent
    prefix = step_prefix(step.name)
    if prefix is None or (str(step) == path and COMMITTED in top.files):
        return
    run = _key(step.parent)
    like = [name for name in bucket.children(run, if_allowed=True).folders if step_prefix(name) == prefix]
    keys = {_join(run, name, COMMITTED) for name in (step.name, *like[-_MAX_STEPS:])}
    for key, stored in bucket.look(keys, if_allowed=True).items():
        plan.take(key, stored)


def _look_above(bucket: Bucket, plan: Plan, path: str) -> None:
    """Texts of the folders that ``orbax/beside.py`` looks into above ``path``; a right may end at ``path``."""
    above = [_key(parent) for parent in PurePosixPath(path).parents if path]
    depth = 2
    name = PurePosixPath(path).name
    if name in ITEMS:
        depth, name = depth + 1, PurePosixPath(path).parent.name
    if is_step_name(name):
        depth += 1
    keys = [_join(parent, text) for parent in above[:depth] for text in _TEXTS]
    for key, stored in bucket.look(keys, if_allowed=True).items():
        plan.take(key, stored)


def _look_at_modules(bucket: Bucket, plan: Plan, path: str) -> None:
    """Settings that each modules.json names, in folders below it. What is wrong with one, its reader says."""
    found = [(key, stored) for key, stored in plan.copied.items() if PurePosixPath(key).name == MODULES_NAME]
    for key, stored in found:
        folder = PurePosixPath(key).parent
        keys = [str(folder / name) for name in _named_modules(bucket.read(stored))]
        for inner, settings in bucket.look(keys, if_allowed=not folder.is_relative_to(path)).items():
            plan.take(inner, settings)


def _named_modules(data: bytes) -> list[str]:
    try:
        names = module_settings(msgspec.json.decode(data, type=list[dict[str, Any]]))
        return [str(member_path(name, of=MODULES_NAME)) for name in names]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, SourceError):
        return []


def _key(path: PurePosixPath) -> str:
    return "" if path == PurePosixPath() else str(path)


def _temporary(name: str) -> bool:
    return TEMPORARY in name


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)
