"""The checkpoint's folder of a user's own module: its arrays, and the files beside them."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import tokenizers

from jserve.checkpoints.arrays.key_map import Path as LeafPath
from jserve.checkpoints.arrays.place import compare, place
from jserve.checkpoints.arrays.tree import flatten
from jserve.checkpoints.manifest import TOKENIZER_NAME
from jserve.checkpoints.names import resolve_member
from jserve.checkpoints.orbax.beside import filled_in, places, read_text
from jserve.checkpoints.orbax.fit import Fitted, fit_tree
from jserve.checkpoints.orbax.saved import Saved, open_saved
from jserve.checkpoints.sources.nearby import instead
from jserve.checkpoints.sources.uri import StoreSource, parse_store
from jserve.errors import CheckpointError, ConfigError, SourceError
from jserve.progress import SILENT, Progress
from jserve.text.from_hf import HfText, is_vocabulary, read_hf_tokenizer

if TYPE_CHECKING:
    from jserve.checkpoints.sources.store.in_words import InWords

T = TypeVar("T")

__all__ = ["OwnArrays", "open_arrays", "read_object_text", "read_own_text"]


@dataclass(frozen=True, kw_only=True)
class OwnArrays:
    """What was saved, and where files beside it are looked for; nothing is read yet."""

    folder: Path
    saved: Saved
    where: Sequence[Path]
    """Nearest first."""
    uri: str | None = None
    """Of an object store, if ``folder`` is a copy of what is there."""
    words: InWords | None = None
    """What the files of such a copy are called there."""

    @property
    def name(self) -> str:
        """As users write it: the folder, or the URI."""
        return str(self.folder) if self.uri is None else self.uri

    def fit(self, wanted: Any, *, ignored: Collection[LeafPath] = (), unsaved: Collection[LeafPath] = ()) -> Fitted:
        """The array of each leaf of ``wanted`` (a pure dict of ShapeDtypeStructs), not read yet.

        ``ignored`` are leaves that may be there besides, ``unsaved`` those that are no ``nnx.Param``. Raises
        CheckpointError that lists every leaf that is missing, left over, of another shape or of another kind of dtype.
        """
        saved, asked = self.saved, flatten(wanted)
        shapes = {path: tuple(leaf.shape) for path, leaf in asked.items()}
        where = str(saved.layout.arrays)
        with self.in_words():
            fitted = fit_tree(saved.tree, shapes, where=where, ignored=ignored, unsaved=unsaved, custom=saved.custom)
            compare(fitted.leaves, asked, where=where)
            return fitted

    def restore(
        self, wanted: Any, *, ignored: Collection[LeafPath] = (), unsaved: Collection[LeafPath] = ()
    ) -> dict[Any, Any]:
        """The arrays as ``wanted``, whose leaves have shardings, asks for them. Raises as ``fit`` does.

        Each goes straight to its devices, in the dtype asked for.
        """
        with self.in_words():
            leaves = self.fit(wanted, ignored=ignored, unsaved=unsaved).leaves
            return place(leaves, wanted, where=str(self.saved.layout.arrays))

    def in_words(self) -> AbstractContextManager[None]:
        """Errors that are raised inside name the files as users do."""
        return nullcontext() if self.words is None else self.words.errors()

    def said(self, value: T) -> T:
        """``value``, a text or anything plain made of texts, that names the files as users do."""
        return value if self.words is None else self.words.said(value)


def open_arrays(checkpoint: str, *, progress: Progress = SILENT) -> OwnArrays:
    """Open the folder, or the URI of an object store, that ``--checkpoint`` names.

    Raises SourceError where it is none or cannot be had, else as ``open_saved`` does.
    """
    if (source := parse_store(checkpoint)) is not None:
        return _open_in_store(source, progress)
    folder = Path(checkpoint).expanduser().absolute()
    if not folder.exists():
        raise SourceError(
            f"checkpoint {folder} does not exist{instead(folder)}", fix="give the folder that Orbax or Flax saved to"
        )
    saved = open_saved(folder, progress=progress)
    return OwnArrays(folder=folder, saved=saved, where=places(folder, saved.layout.arrays))


def _open_in_store(source: StoreSource, progress: Progress) -> OwnArrays:
    from jserve.checkpoints.sources.store.copy_whole import fetch_checkpoint
    from jserve.checkpoints.sources.store.in_words import InWords

    found = fetch_checkpoint(source, progress=progress)
    folder, base = (found, None) if isinstance(found, Path) else (found.folder, found.base)
    words = InWords.of(source, folder)
    with words.errors():
        saved = open_saved(folder, base=base, progress=words.progress(progress))
    return OwnArrays(
        folder=folder, saved=saved, where=places(folder, saved.layout.arrays), uri=str(source), words=words
    )


def read_own_text(
    tokenizer: os.PathLike[str] | str | None, where: Sequence[Path] = ()
) -> tuple[HfText | None, Path | None]:
    """The tokenizer that ``tokenizer`` names, else the nearest of ``where``; and the folder or the file that it is in.

    ``tokenizer`` is a folder, or a vocabulary's file: a .json of ``tokenizers``, a .model of SentencePiece, or
    ``vocab.json``, with the settings beside it. Raises SourceError where what was named is none or is not there, and
    for links out of its folder, else as ``read_hf_tokenizer`` does.
    """
    if tokenizer is None:
        return read_text(where) or (None, None)
    path = Path(tokenizer).expanduser()
    if path.is_file() and is_vocabulary(path.name):
        text = read_hf_tokenizer(path.parent, vocabulary=path.name, member=resolve_member)
        return filled_in(text, path.parent) if path.name == TOKENIZER_NAME else text, path
    found = read_text([path]) if path.is_dir() else None
    if found is not None:
        return found
    if path.is_dir():
        wrong = "looked for tokenizer.json, tokenizer.model and vocab.json with merges.txt"
    else:
        wrong = "files that are read are a .json of tokenizers and a .model of SentencePiece"
        wrong = wrong if path.exists() else "it does not exist"
    raise SourceError(f"{path} is no tokenizer: {wrong}", fix="give the folder that the tokenizer was saved to")


def read_object_text(tokenizer: Any) -> HfText:
    """What a tokenizer object says: one of ``tokenizers``, or one of transformers with its settings and chat template.

    It is read as the files that it saves would be. Raises ConfigError for any other object, else as
    ``read_hf_tokenizer`` does.
    """
    with TemporaryDirectory() as folder:
        try:
            if isinstance(tokenizer, tokenizers.Tokenizer):
                tokenizer.save(str(Path(folder) / "tokenizer.json"))
            elif callable(getattr(tokenizer, "save_pretrained", None)):
                tokenizer.save_pretrained(folder)
            else:
                raise ConfigError(
                    f"the tokenizer is a {type(tokenizer).__module__}.{type(tokenizer).__name__}; it may be a path, a "
                    "jserve.text.tokenizer.Tokenizer, a tokenizers.Tokenizer, or one of transformers",
                    fix="save it as tokenizer.json and give that path, or give None and prompts as token ids",
                )
            return read_hf_tokenizer(Path(folder))
        except CheckpointError as error:  # the folder is gone when somebody reads its name
            words = error.message.replace(f"{folder}/", "").replace(folder, "what it saves")
            raise type(error)(f"the tokenizer {type(tokenizer).__name__}: {words}", fix=error.fix) from None
