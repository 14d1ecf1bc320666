"""The checkpoint's folder of a user's own module: its arrays, and the files beside them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jserve.checkpoints.key_map import Leaves
from jserve.checkpoints.key_map import Path as LeafPath
from jserve.checkpoints.nearby import instead
from jserve.checkpoints.orbax.beside import places, read_text
from jserve.checkpoints.orbax.peel import fit_tree
from jserve.checkpoints.orbax.saved import Saved, open_saved
from jserve.checkpoints.place import place
from jserve.checkpoints.tree import flatten
from jserve.errors import SourceError
from jserve.progress import SILENT, Progress
from jserve.text.from_hf import HfText

__all__ = ["OwnArrays", "open_arrays", "read_own_text"]


@dataclass(frozen=True, kw_only=True)
class OwnArrays:
    """What was saved, and where files beside it are looked for; nothing is read yet."""

    folder: Path
    saved: Saved
    where: Sequence[Path]
    """Nearest first."""

    def fit(self, wanted: Any, *, ignored: Collection[LeafPath] = ()) -> Leaves:
        """The array of each leaf of ``wanted`` (a pure dict of ShapeDtypeStructs), not read yet.

        ``ignored`` are leaves that may be there besides. Raises CheckpointError that lists every leaf that is missing,
        left over or of another shape.
        """
        saved = self.saved
        shapes = {path: tuple(leaf.shape) for path, leaf in flatten(wanted).items()}
        where = str(saved.layout.arrays)
        return fit_tree(saved.tree, shapes, where=where, ignored=ignored, custom=saved.custom).leaves

    def restore(self, wanted: Any, *, ignored: Collection[LeafPath] = ()) -> dict[Any, Any]:
        """The arrays as ``wanted``, whose leaves have shardings, asks for them. Raises as ``fit`` does.

        Each goes straight to its devices, in the dtype asked for.
        """
        return place(self.fit(wanted, ignored=ignored), wanted, where=str(self.saved.layout.arrays))


def open_arrays(checkpoint: str, *, progress: Progress = SILENT) -> OwnArrays:
    """Open the folder that ``--checkpoint`` names. Raises SourceError where it is none, else as ``open_saved`` does."""
    folder = Path(checkpoint).expanduser().absolute()
    if not folder.exists():
        raise SourceError(
            f"checkpoint {folder} does not exist{instead(folder)}", fix="give the folder that Orbax or Flax saved to"
        )
    saved = open_saved(folder, progress=progress)
    return OwnArrays(folder=folder, saved=saved, where=places(folder, saved.layout.arrays))


def read_own_text(tokenizer: Path | str | None, where: Sequence[Path] = ()) -> tuple[HfText | None, Path | None]:
    """The tokenizer that ``tokenizer`` (a folder, or a file in one) names, else the nearest of ``where``; its folder.

    Raises SourceError where a tokenizer was named that is not there, else as ``read_hf_tokenizer`` does.
    """
    if tokenizer is None:
        return read_text(where) or (None, None)
    path = Path(tokenizer).expanduser()
    folder = path if path.is_dir() else path.parent
    found = read_text([folder]) if path.exists() else None
    if found is None:
        raise SourceError(
            f"{path} is no tokenizer: looked for tokenizer.json, tokenizer.model and vocab.json with merges.txt",
            fix="give the folder that the tokenizer was saved to",
        )
    return found
