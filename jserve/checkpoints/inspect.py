"""What a checkpoint holds, and the line that serves it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from jserve.checkpoints.checkpoint import Checkpoint
from jserve.checkpoints.digests import file_record, file_records
from jserve.checkpoints.fetch import LocalFile, LocalFolder, fetch
from jserve.checkpoints.key_map import Path, raise_all
from jserve.checkpoints.manifest import MANIFEST_NAME, Manifest, read_manifest
from jserve.checkpoints.open import as_it_is
from jserve.checkpoints.place import compare
from jserve.checkpoints.tree import flatten
from jserve.checkpoints.uri import parse_source
from jserve.errors import CheckpointError
from jserve.progress import SILENT, Progress

__all__ = ["ArrayReport", "InspectReport", "inspect"]


@dataclass(frozen=True, kw_only=True)
class ArrayReport:
    """One parameter."""

    name: str
    shape: list[int]
    dtype: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class InspectReport:
    """Plain values all through, so that ``dataclasses.asdict`` of it is JSON. ``str`` of it is for reading."""

    name: str
    model: str
    """As it was asked for."""
    path: str
    layout: str
    family: str
    config: dict[str, Any]
    parameters: int
    nbytes: int
    """Of all arrays, as they are stored (GGUF: as they will be)."""
    arrays: list[ArrayReport]
    vocab_size: int | None
    """Tokens of the tokenizer; None where there is none."""
    eos_ids: list[int]
    bos_id: int | None
    add_bos: bool
    chat_template: bool
    generation: dict[str, int | float]
    source: str
    digests: str
    """What is known of the files' contents."""
    serve: str
    """The command that serves it."""

    def __str__(self) -> str:
        tokenizer = "missing" if self.vocab_size is None else f"{self.vocab_size} tokens, EOS {self.eos_ids}"
        bos = "no BOS" if self.bos_id is None else f"BOS {self.bos_id} ({'' if self.add_bos else 'not '}added)"
        rows = {
            "layout": self.layout,
            "path": self.path,
            "source": self.source,
            "family": self.family,
            "config": ", ".join(f"{key} {value}" for key, value in self.config.items()),
            "parameters": f"{self.parameters:,} in {len(self.arrays)} arrays, {self.nbytes / 1e6:,.1f} MB",
            "tokenizer": tokenizer if self.vocab_size is None else f"{tokenizer}, {bos}",
            "chat template": "there" if self.chat_template else "missing",
            "defaults": ", ".join(f"{key} {value}" for key, value in self.generation.items()) or "none",
            "digests": self.digests,
        }
        lines = [self.name, *(f"  {key:<14} {value}" for key, value in rows.items()), "  arrays"]
        return "\n".join([*lines, *_tree(self.arrays), "", self.serve])


def inspect(model: str, *, check: bool = False, progress: Progress | None = None) -> InspectReport:
    """Describe the MODEL ``model`` without converting it; a URI is fetched first.

    ``check`` reads every byte: of a folder that jserve wrote, digests against the manifest; of others, values for
    being finite; of a file, its digest too. Raises CheckpointError that names what is damaged, SourceError and
    UnsupportedModel.
    """
    progress = progress or SILENT
    found = fetch(parse_source(model), progress=progress)
    has_digests = isinstance(found, LocalFolder) and found.kind == "written" and found.mirror is None
    if check and has_digests:
        _check_digests(found.path, read_manifest(found.path), progress)
    with as_it_is(found, model, progress=progress) as checkpoint:
        compare(checkpoint.leaves, _wanted(checkpoint), where=str(checkpoint.path))
        digests = checkpoint.digests
        if isinstance(found, LocalFile):
            if check:
                _check_file(found)
                _check_values(checkpoint, progress)
            digests = f"sha256 {found.sha256}" + (", all values finite" if check else "")
        elif check and has_digests:
            digests = "all files match"
        elif check:
            _check_values(checkpoint, progress)
            digests = "all values finite"
        return _report(checkpoint, model, digests)


def _wanted(checkpoint: Checkpoint) -> dict[Path, tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in flatten(checkpoint.abstract("float32")[1]).items()}


def _report(checkpoint: Checkpoint, model: str, digests: str) -> InspectReport:
    arrays, tokenizer = checkpoint.leaves, checkpoint.tokenizer
    return InspectReport(
        name=checkpoint.name,
        model=model,
        path=str(checkpoint.path),
        layout=checkpoint.layout,
        family=checkpoint.family,
        config=checkpoint.config.to_dict(),
        parameters=sum(a.size for a in arrays.values()),
        nbytes=sum(a.nbytes for a in arrays.values()),
        arrays=[
            ArrayReport(name=".".join(name), shape=list(a.shape), dtype=a.dtype.name, nbytes=a.nbytes)
            for name, a in sorted(arrays.items(), key=lambda item: _order(item[0]))
        ],
        vocab_size=None if tokenizer is None else tokenizer.vocab_size,
        eos_ids=list(checkpoint.eos_ids),
        bos_id=None if tokenizer is None else tokenizer.bos_id,
        add_bos=tokenizer is not None and tokenizer.add_bos,
        chat_template=checkpoint.chat_template is not None,
        generation=dict(checkpoint.generation),
        source=checkpoint.source,
        digests=digests,
        serve=shlex.join(["jserve", "serve", model]),
    )


def _order(path: tuple[str, ...]) -> list[tuple[int, str]]:
    """Layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path]


def _check_digests(path: FilePath, manifest: Manifest, progress: Progress) -> None:
    sizes = {name: record.size for name, record in manifest.files.items()}
    found = file_records(path, sizes, progress=progress)
    damaged = [str(path / name) for name, record in manifest.files.items() if found[name].sha256 != record.sha256]
    if damaged:
        raise CheckpointError(
            f"the contents of {', '.join(damaged)} are not those that {path / MANIFEST_NAME} names",
            fix=f"delete {path} and convert it again from {manifest.source}",
        )


def _check_file(found: LocalFile) -> None:
    if file_record(found.path).sha256 != found.sha256:
        raise CheckpointError(f"{found.path} is not what was fetched", fix=f"delete {found.path.parent}")


def _check_values(checkpoint: Checkpoint, progress: Progress) -> None:
    """Read everything; CheckpointError that names every parameter with values that are not finite."""
    progress.start("check values", sum(leaf.nbytes for leaf in checkpoint.leaves.values()), "B")
    wrong = []
    for path, leaf in checkpoint.leaves.items():
        if not np.isfinite(leaf.read()).all():
            wrong.append(".".join(path))
        progress.advance(leaf.nbytes)
    progress.done()
    raise_all(f"{checkpoint.path} holds values that are not finite numbers, in:", wrong)


def _tree(arrays: list[ArrayReport]) -> list[str]:
    """One line an array; layers that are alike share one."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for array in arrays:
        layer = re.search(r"\.(\d+)\.", array.name)
        name = array.name if layer is None else array.name.replace(layer[0], ".{}.", 1)
        key = (name, array.dtype, str(array.shape))
        groups.setdefault(key, []).extend([] if layer is None else [int(layer[1])])
    lines = []
    width = max(len(name) for name, _, _ in groups) + 8
    for (name, dtype, shape), layers in groups.items():
        span = "" if not layers else str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
        shown = name.replace("{}", span)
        lines.append(f"    {shown:<{width}} {dtype} {shape}")
    return lines
