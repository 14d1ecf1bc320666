"""What lies on this machine: the file or the folder of a model, by its kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jserve.checkpoints.digests import remembered_sha256
from jserve.checkpoints.manifest import ARRAYS_FOLDER, MANIFEST_NAME
from jserve.checkpoints.orbax.layout import LOOKED_FOR, is_checkpoint
from jserve.checkpoints.sources.nearby import instead
from jserve.checkpoints.sources.uri import FORMS
from jserve.config import cache_dir
from jserve.errors import SourceError, UnsupportedModel

if TYPE_CHECKING:
    from jserve.checkpoints.sources.store.in_words import InWords
    from jserve.checkpoints.sources.store.mirror import Mirror

__all__ = ["LocalFile", "LocalFolder", "is_hf", "local"]


@dataclass(frozen=True, kw_only=True)
class LocalFile:
    """A GGUF file."""

    path: Path
    sha256: str
    words: InWords | None = None
    """Of a copy of one in an object store: what it is called there."""


@dataclass(frozen=True, kw_only=True)
class LocalFolder:
    """A checkpoint that is a folder."""

    path: Path
    kind: Literal["written", "hf", "orbax"]
    """By jserve, with ``jserve.json`` in it; as on the Hugging Face Hub; as Orbax or Flax saved it."""
    mirror: Mirror | None = None
    """Where the arrays are, if the folder is a copy of one in an object store and they are not in it."""
    words: InWords | None = None
    """Of a copy of one in an object store: what its files are called there."""
    step: str | None = None
    """Of what a trainer saved: the step that is meant, however many are saved after it. None: the newest."""


def local(path: Path) -> LocalFile | LocalFolder:
    """A file or folder that is there already."""
    try:
        if path.is_dir():
            return _folder(path)
        if not path.is_file():
            if path.exists():
                raise SourceError(f"{path} is neither a file nor a folder", fix=f"MODEL may be {FORMS}")
            raise SourceError(f"{path} does not exist{instead(path)}", fix=f"MODEL may be {FORMS}")
        if path.suffix in (".safetensors", ".msgpack"):
            raise UnsupportedModel(
                f"{path} is a part of a model", fix=f"give the folder that it lies in: {path.parent}"
            )
        if path.suffix.lower() != ".gguf":
            raise UnsupportedModel(f"{path} is not a .gguf file; MODEL may be {FORMS}")
        return LocalFile(path=path, sha256=remembered_sha256(path, cache_dir() / "digests"))
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from None


def _folder(path: Path) -> LocalFolder:
    names = sorted(entry.name for entry in path.iterdir())
    # Beside a trainer's steps the manifest only says what the model is.
    if MANIFEST_NAME in names and (ARRAYS_FOLDER in names or not is_checkpoint(path)):
        return LocalFolder(path=path, kind="written")
    if is_hf(names):
        return LocalFolder(path=path, kind="hf")
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if ggufs:
        raise SourceError(
            f"{path} is a folder with {len(ggufs)} GGUF file(s); MODEL is one file",
            fix=f"give the file: {path / ggufs[0]}",
        )
    if is_checkpoint(path):
        return LocalFolder(path=path, kind="orbax")
    raise SourceError(f"{path} holds no checkpoint: looked for {MANIFEST_NAME}, .safetensors, .gguf, {LOOKED_FOR}")


def is_hf(names: Sequence[str]) -> bool:
    """Whether the files of a folder are those of a Hugging Face model. One whose weights are pickles is one, too:
    whoever opens it says so."""
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return True
    return "config.json" in names and any(name.startswith("pytorch_model") for name in names)
