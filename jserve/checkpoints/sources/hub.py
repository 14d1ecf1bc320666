"""Repositories of the Hugging Face Hub, through huggingface_hub where it is installed; its own cache keeps the files.

A repository holds more than a model: the same weights as pickles or for other libraries, other steps. So its files are
listed first, and fetched are those that the readers of its kind would open.
"""

from __future__ import annotations

import difflib
import glob
import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from jserve.checkpoints.hf.folder import CONFIG_NAME, TEXT_SUFFIXES
from jserve.checkpoints.hf.shards import INDEX_NAME, read_index, single_name
from jserve.checkpoints.manifest import ARRAYS_FOLDER, MANIFEST_NAME
from jserve.checkpoints.names import member_path, refuse_pickle
from jserve.checkpoints.orbax.layout import (
    CHECKPOINT_METADATA,
    LOOKED_FOR,
    MARKER,
    find_layouts,
    is_checkpoint,
)
from jserve.checkpoints.orbax.read import METADATA_NAME
from jserve.checkpoints.orbax.steps import COMMITTED
from jserve.checkpoints.sources.local import is_hf
from jserve.checkpoints.sources.uri import HubSource
from jserve.errors import CheckpointError, SourceError, UnsupportedModel
from jserve.progress import Progress

__all__ = ["fetch_from_hub"]

_TIMEOUT_S = 10.0
"""Of the first request, which tells whether the Hub can be reached."""
_MAX_FILES = 100_000
_NOTHING = "//"
"""A pattern that no file's name fits."""
_OF_STEPS = (MARKER, CHECKPOINT_METADATA, METADATA_NAME, COMMITTED)
"""By these steps are told, those too that are not opened."""


def fetch_from_hub(source: HubSource, *, progress: Progress) -> Path:
    """The file or the folder that ``source`` names, on this machine: of a folder what its readers open, no pickles.

    Where the Hub does not answer, what its cache holds is taken. Raises SourceError where that is nothing, where the
    Hub refuses, and where there is no such file or no checkpoint; UnsupportedModel for files that are none.
    """
    return _Repository(source, progress).fetch()


class _Repository:
    """One repository, and what of it is meant."""

    def __init__(self, source: HubSource, progress: Progress) -> None:
        try:
            self._hub: Any = importlib.import_module("huggingface_hub")
        except ImportError:
            raise SourceError(
                f"hf://{source.repo} needs huggingface_hub, which is not installed", fix="pip install huggingface_hub"
            ) from None
        self._repo, self._member, self._progress = source.repo, source.member, progress
        self._uri = f"hf://{source.repo}" + (f"/{source.member}" if source.member else "")
        self._inner = PurePosixPath(source.member or ".")
        self._never: list[str] = []
        """Files that are not fetched, whatever is: pickles, and names that lead out."""

    def fetch(self) -> Path:
        self._progress.note(f"looking into hf://{self._repo} through huggingface_hub")
        try:
            info = self._hub.HfApi().model_info(self._repo, timeout=_TIMEOUT_S)
        except Exception as error:  # The library raises classes of several HTTP clients, which differ by its version.
            if getattr(error, "response", None) is not None:
                raise self._refused(error) from error
            return self._cached(error)
        names = sorted(sibling.rfilename for sibling in info.siblings or ())
        if len(names) > _MAX_FILES:
            raise SourceError(f"hf://{self._repo} holds {len(names)} files; at most {_MAX_FILES} are looked through")
        self._never = [name for name in names if not _is_readable(name)]
        if self._member is not None and self._member in names:
            return self._file(self._member)
        start = "" if self._member is None else f"{self._member}/"
        inside = [name.removeprefix(start) for name in names if name.startswith(start)]
        if not inside:
            near = difflib.get_close_matches(str(self._member), names, n=1)
            hint = f"; did you mean hf://{self._repo}/{near[0]}?" if near else ""
            raise SourceError(f"hf://{self._repo} has no {self._member or 'files'}{hint}")
        return self._folder(inside, names)

    def _cached(self, error: Exception) -> Path:
        """What the Hub's cache holds already."""
        reason = f"the Hub cannot be reached ({_line(error)})"
        try:
            # The library refuses where files that are asked for are missing; which ones matter is for our readers.
            found = self._hub.snapshot_download(self._repo, local_files_only=True, allow_patterns=[_NOTHING])
            path = Path(found) / self._inner
        except Exception:
            path = None
        if path is None or not path.exists():
            raise SourceError(
                f"cannot fetch {self._uri}: {reason}, and it is not in its cache",
                fix="check the network, HF_ENDPOINT and HF_HUB_OFFLINE; or fetch it elsewhere and give the folder",
            ) from error
        self._progress.note(f"{reason}; taking what its cache holds")
        if path.is_file():
            refuse_pickle(path.name)
        return path

    def _file(self, member: str) -> Path:
        refuse_pickle(member)
        suffix = PurePosixPath(member).suffix.lower()
        if suffix in (".safetensors", ".msgpack"):
            folder = self._uri.rpartition("/")[0]
            raise UnsupportedModel(
                f"{self._uri} is a part of a model", fix=f"give the folder that it lies in: {folder}"
            )
        if suffix != ".gguf":
            raise UnsupportedModel(f"{self._uri} is not a .gguf file; of single files no other is read")
        self._progress.note(f"fetching {self._uri}")
        return Path(self._asked(lambda: self._hub.hf_hub_download(self._repo, member)))

    def _folder(self, inside: Sequence[str], names: Sequence[str]) -> Path:
        """The folder that is meant; its files are ``inside``, and those of the whole repository ``names``."""
        top = [name for name in inside if "/" not in name]
        if MANIFEST_NAME in top and any(name.startswith(f"{ARRAYS_FOLDER}/") for name in inside):
            return self._fetch(inside)
        if is_hf(top):
            return self._hf(inside, top)
        if ggufs := [name for name in inside if name.lower().endswith(".gguf")]:
            raise SourceError(
                f"{self._uri} holds {len(ggufs)} GGUF files; MODEL is one file",
                fix=f"name it, such as {self._uri}/{ggufs[0]}",
            )
        return self._orbax(inside, names)

    def _hf(self, inside: Sequence[str], top: Sequence[str]) -> Path:
        """config.json and the like, and the weights that are meant: there may be others beside them."""
        if INDEX_NAME in top:
            folder = self._fetch([INDEX_NAME])
            with self._in_words(folder):
                weights = sorted(set(read_index(folder / INDEX_NAME).values()))
            if missing := sorted(set(weights) - set(inside)):
                raise SourceError(f"{self._uri} lacks {', '.join(missing[:5])}, which {INDEX_NAME} names")
        else:
            weights = [single_name(self._uri, top)]
        return self._fetch([*_texts(inside, {PurePosixPath()}), *weights])

    def _orbax(self, inside: Sequence[str], names: Sequence[str]) -> Path:
        """What Orbax or Flax saved: of several steps the newest finished one, and the texts up to the repository's."""
        inside = [name for name in inside if _is_readable(name)]
        described = [name for name in inside if PurePosixPath(name).name == CHECKPOINT_METADATA]
        folder = self._fetch(described) if described else None
        with tempfile.TemporaryDirectory() as scratch:
            # Readers of layouts ask for names, and for what says which items there are.
            likeness = Path(scratch).resolve()
            for name in inside:
                path = likeness / name
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / name, path) if folder and name in described else path.touch()
            if not is_checkpoint(likeness):
                raise SourceError(
                    f"{self._uri} holds no checkpoint: looked for {MANIFEST_NAME}, .safetensors, .gguf, {LOOKED_FOR}"
                )
            with self._in_words(likeness):
                layout = find_layouts(likeness)[0]
            arrays = layout.arrays.relative_to(likeness)
            is_folder = layout.arrays.is_dir()
        inner = self._inner / arrays.as_posix()
        texts = _texts(names, {inner, *inner.parents})
        steps = [str(self._inner / name) for name in inside if PurePosixPath(name).name in _OF_STEPS]
        found = self._get(
            [*texts, *steps, *([] if is_folder else [str(inner)])], folders=[str(inner)] if is_folder else []
        )
        return found / self._inner

    def _fetch(self, names: Iterable[str]) -> Path:
        """Bring the files ``names`` of the folder that is meant here; that folder."""
        return self._get([str(self._inner / name) for name in names]) / self._inner

    def _get(self, names: Sequence[str], *, folders: Sequence[str] = ()) -> Path:
        """Bring files, and all files of folders, of the repository here; its folder. Never what must not be read."""
        wanted = [glob.escape(name) for name in dict.fromkeys(names)]
        wanted += ["*" if folder == "." else f"{glob.escape(folder)}/*" for folder in folders]
        never = [glob.escape(name) for name in self._never]
        self._progress.note(f"fetching from hf://{self._repo}")
        return Path(
            self._asked(
                lambda: self._hub.snapshot_download(self._repo, allow_patterns=wanted, ignore_patterns=never or None)
            )
        )

    def _asked(self, call: Callable[[], str]) -> str:
        try:
            return call()
        except Exception as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> SourceError:
        return SourceError(f"cannot fetch hf://{self._repo}: {_line(error)}")

    @contextmanager
    def _in_words(self, folder: Path) -> Iterator[None]:
        """Errors that are raised inside name the Hub's files for those of ``folder``."""
        try:
            yield
        except CheckpointError as error:
            fix = None if error.fix is None else error.fix.replace(str(folder), self._uri)
            raise type(error)(error.message.replace(str(folder), self._uri), fix=fix) from None


def _texts(names: Iterable[str], folders: set[PurePosixPath]) -> list[str]:
    """Of ``names`` what may be read beside weights in ``folders``: texts, and settings of modules one folder down."""
    paths = [PurePosixPath(name) for name in names]
    return [
        str(path)
        for path in paths
        if (path.parent in folders and path.suffix in TEXT_SUFFIXES)
        or (path.name == CONFIG_NAME and path.parent.parent in folders)
    ]


def _is_readable(name: str) -> bool:
    try:
        member_path(name, of="the repository")
    except SourceError:
        return False
    return True


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
