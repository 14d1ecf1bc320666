"""A bucket, by the few calls that are made to it: names right inside a folder, what an object is, its bytes."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from jserve.checkpoints.sources.store.access import CONNECT_TIMEOUT_S, find_access
from jserve.checkpoints.sources.uri import StoreSource
from jserve.errors import SourceError

__all__ = ["Bucket", "Children", "StoredObject"]

T = TypeVar("T")
K = TypeVar("K")

_WORKERS = 16
_LIST_TIMEOUT_S = 60.0
_MAX_CHILDREN = 20_000
_RETRY = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
_REQUEST_TIMEOUT_S = 120
_PIECE_BYTES = 16 << 20
"""Of one request, when a large object is copied: each is tried again alone."""
_MAX_NAME = 255
_DENIED = ("PermissionDeniedError", "UnauthenticatedError")
_STATUS = re.compile(r"status code: (\d{3})")
_ROLE = re.compile(r"token request|169\.254\.|metadata\.google|credential", re.IGNORECASE)
"""Of messages on a machine's role that cannot be had."""


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object as it was when it was looked at."""

    key: str
    size: int
    """Bytes."""
    etag: str | None
    """Of these contents; None where the store gives none."""
    written: str
    """When."""

    @property
    def tag(self) -> str:
        """Another one for other contents, as far as the store tells."""
        return self.etag or self.written


@dataclass(frozen=True, kw_only=True)
class Children:
    """What is right inside a folder, by its name."""

    files: Mapping[str, StoredObject]
    folders: tuple[str, ...]


class Bucket:
    """Raises SourceError that says what was asked for, whatever goes wrong."""

    def __init__(self, source: StoreSource) -> None:
        """Asks nothing yet. Raises SourceError without obstore, and as ``find_access`` does."""
        try:
            self._obstore: Any = importlib.import_module("obstore")
            stores: Any = importlib.import_module("obstore.store")
        except ImportError:
            raise SourceError(f"{source} needs obstore, which is not installed", fix="pip install obstore") from None
        self.access = find_access(source, os.environ)
        self.access.set_environment()
        self._root = f"{source.scheme}://{source.bucket}"
        kind = stores.S3Store if source.scheme == "s3" else stores.GCSStore
        client = {
            "allow_http": (self.access.endpoint or "").startswith("http://"),
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
            "timeout": timedelta(seconds=_REQUEST_TIMEOUT_S),
        }
        try:
            self._store = kind(
                source.bucket, config=dict(self.access.options), client_options=client, retry_config=_RETRY
            )
        except Exception as error:  # obstore's classes are not importable without it
            raise self._said(error, "") from None

    def uri(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def children(self, folder: str, *, if_allowed: bool = False) -> Children:
        """What is right inside ``folder``; nothing where it is not there, or with ``if_allowed`` may not be listed."""
        try:
            listed = self._list(folder)
        except Exception as error:
            if if_allowed and _is_denied(error):
                return Children(files={}, folders=())
            raise self._said(error, folder) from None
        start = f"{folder}/" if folder else ""
        found = [self._object(meta) for meta in listed["objects"]]
        files = {stored.key.removeprefix(start): stored for stored in found if stored.key != folder}
        folders = [key.removeprefix(start) for key in listed["common_prefixes"]]
        if (count := len(files) + len(folders)) > _MAX_CHILDREN:
            raise SourceError(
                f"{self.uri(folder)} holds {count} names; at most {_MAX_CHILDREN} are looked through",
                fix="give the folder of one run",
            )
        return Children(
            files={name: stored for name, stored in files.items() if _is_name(name)},
            folders=tuple(sorted(name for name in folders if _is_name(name))),
        )

    def inside(self, folder: str, *, limit: int) -> list[StoredObject]:
        """Every object under ``folder``, however deep; SourceError for more than ``limit``."""

        def listed() -> list[StoredObject]:
            found: list[StoredObject] = []
            for metas in self._obstore.list(self._store, folder, chunk_size=1000):
                found += map(self._object, metas)
                if len(found) > limit:
                    raise SourceError(f"{self.uri(folder)} holds more than {limit} objects")
            return found

        return self._ask(folder, listed)

    def look(self, keys: Iterable[str], *, if_allowed: bool = False) -> dict[str, StoredObject]:
        """Those of ``keys`` that are there; with ``if_allowed`` those that may not be read are as if they were not."""
        found = self._each(lambda key: self._head(key, if_allowed=if_allowed), keys)
        return {key: stored for key, stored in found.items() if stored is not None}

    def read(self, stored: StoredObject) -> bytes:
        """All of a small object. Raises SourceError where it has changed since it was looked at."""
        return bytes(self._ask(stored.key, self._piece, stored, 0, stored.size)) if stored.size else b""

    def copy(self, files: Mapping[StoredObject, Path], advance: Callable[[int], None]) -> None:
        """Copy objects as they were when they were looked at; ``advance`` hears of bytes, from this thread.

        Raises SourceError where one has changed in the meantime.
        """
        for path in files.values():
            path.touch()
        pieces = [
            (stored, path, start, min(start + _PIECE_BYTES, stored.size))
            for stored, path in files.items()
            for start in range(0, stored.size, _PIECE_BYTES)
        ]
        with ThreadPoolExecutor(_WORKERS // 4, thread_name_prefix="copy") as pool:
            futures = [pool.submit(self._copy, *piece) for piece in pieces]
            try:
                for (*_, start, end), future in zip(pieces, futures, strict=True):
                    future.result()
                    advance(end - start)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _copy(self, stored: StoredObject, path: Path, start: int, end: int) -> None:
        data = self._ask(stored.key, self._piece, stored, start, end)
        if len(data) != end - start:
            raise SourceError(f"{self.uri(stored.key)} gave {len(data)} bytes of {end - start}")
        with path.open("r+b") as out:
            out.seek(start)
            out.write(data)

    def _piece(self, stored: StoredObject, start: int, end: int) -> Any:
        # An object that changed under the copy is refused by the store itself, if it gives ETags.
        options = {"range": (start, end), **({"if_match": stored.etag} if stored.etag else {})}
        return self._obstore.get(self._store, stored.key, options=options).bytes()

    def _head(self, key: str, *, if_allowed: bool) -> StoredObject | None:
        try:
            return self._object(self._obstore.head(self._store, key))
        except FileNotFoundError:
            return None
        except Exception as error:
            if if_allowed and _is_denied(error):
                return None
            raise self._said(error, key) from None

    def _list(self, folder: str) -> Any:
        async def listed() -> Any:
            call = self._obstore.list_with_delimiter_async(self._store, folder or None)
            return await asyncio.wait_for(call, _LIST_TIMEOUT_S)

        # A thread of its own: the caller may be inside an event loop.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, listed()).result()

    def _each(self, call: Callable[[K], T], items: Iterable[K]) -> dict[K, T]:
        items = list(items)
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="look") as pool:
            return dict(zip(items, pool.map(call, items), strict=True))

    def _ask(self, key: str, call: Callable[..., T], *arguments: Any) -> T:
        try:
            return call(*arguments)
        except SourceError:
            raise
        except Exception as error:
            raise self._said(error, key) from None

    def _object(self, meta: Mapping[str, Any]) -> StoredObject:
        written = meta["last_modified"].isoformat()
        return StoredObject(key=meta["path"], size=meta["size"], etag=meta["e_tag"] or None, written=written)

    def _said(self, error: Exception, key: str) -> SourceError:
        """What obstore says, in a line, and what can be done."""
        uri, text = self.uri(key), str(error).split("\n\nDebug source", 1)[0]
        kind = type(error).__name__
        code = re.search(r"<Code>(\w+)</Code>", text)
        status = _STATUS.search(text)
        at = f" at {self.access.endpoint}" if self.access.endpoint else ""
        if kind == "InvalidPathError":
            name = re.search(r'Path "([^"]*)"', text)
            return SourceError(
                f"{uri} holds an object whose name is no path inside it: {name[1] if name else text!r}",
                fix="delete or rename it",
            )
        if kind == "PreconditionError":
            return SourceError(f"{uri} changed while it was read", fix="run the command again")
        if code and code[1] == "NoSuchBucket":
            return SourceError(f"{self._root} does not exist{at}", fix="check the bucket's name, and the endpoint")
        if _is_denied(error) or _ROLE.search(text):
            why = code[1] if code else f"HTTP {status[1]}" if status else text.splitlines()[0][:200]
            return SourceError(f"{uri} may not be read by {self.access.identity}: {why}", fix=self._credentials_fix())
        if isinstance(error, TimeoutError | asyncio.TimeoutError) or "error sending request" in text:
            return SourceError(f"{uri} cannot be reached{at}: no answer", fix="check the network and the endpoint")
        if isinstance(error, FileNotFoundError) or (status and status[1] == "404"):
            return SourceError(f"{uri} does not exist{at}", fix="check the name, and the endpoint")
        if status and status[1] in ("301", "307", "400"):
            why = code[1] if code else f"HTTP {status[1]}"
            return SourceError(f"{uri} cannot be read{at}: {why}", fix="set AWS_REGION to the bucket's region")
        return SourceError(f"{uri} cannot be read{at}: {(text.splitlines() or [kind])[0][:300]}")

    def _credentials_fix(self) -> str:
        if self._root.startswith("s3"):
            return (
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or for a public bucket "
                "AWS_SKIP_SIGNATURE=true"
            )
        return "gcloud auth application-default login, or for a public bucket GOOGLE_SKIP_SIGNATURE=true"


def _is_denied(error: Exception) -> bool:
    """Whether the store answered that whoever asks has no right. Of listings obstore has no class for that."""
    status = _STATUS.search(str(error))
    return type(error).__name__ in _DENIED or (status is not None and status[1] in ("401", "403"))


def _is_name(name: str) -> bool:
    """Whether a file on disk may be called so. Others are no part of a checkpoint."""
    return (
        0 < len(name.encode()) <= _MAX_NAME
        and name not in (".", "..")
        and not any(c in "\\/:" or ord(c) < 32 for c in name)
    )
