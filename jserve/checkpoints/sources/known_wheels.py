"""Wheels whose digests are known beforehand (``wheels.json``): the embedded default's, and those of the tests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

import msgspec

__all__ = ["KnownWheel", "known_wheel"]


class KnownWheel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A wheel whose contents are fixed by this version of jserve."""

    sha256: str
    size: int
    """Bytes."""
    joined: dict[str, str] = {}
    """SHA-256 of the files that are made of parts in what it requires."""


@cache
def _known_wheels() -> Mapping[str, KnownWheel]:
    data = resources.files("jserve.checkpoints.sources").joinpath("wheels.json").read_bytes()
    return msgspec.json.decode(data, type=dict[str, KnownWheel])


def known_wheel(requirement: str) -> KnownWheel | None:
    """The wheel of ``name==version``, where its digest is known beforehand."""
    return _known_wheels().get(requirement)
