"""`jserve version`: everything that a report of a fault should name."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from importlib import metadata

from jserve import __version__
from jserve.cli.console import rows
from jserve.cli.options import Flag, parse
from jserve.cli.settings import digest
from jserve.config import ServeConfig

__all__ = ["run"]

PACKAGES = ("jax", "jaxlib", "flax", "orbax-checkpoint", "grpcio", "pyarrow")
ACCELERATORS = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Name the versions of jserve and of what it stands on, the devices, and a digest of the default settings."""

    json: Flag = False
    """Print one JSON object."""


def run(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="jserve version", usage="jserve version [--json]")
    facts = {"jserve": __version__, "python": platform.python_version()}
    facts |= {name: _version(name) or "missing" for name in PACKAGES}
    facts |= {name: found for name in ACCELERATORS if (found := _version(name))}
    facts["devices"] = _devices()
    facts["settings"] = digest(ServeConfig())
    print(json.dumps(facts) if options.json else rows(list(facts.items()), indent=""))
    return 0


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> str:
    import jax

    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts where a platform that is asked for has no plugin
        return f"none: {str(error) or 'the platform in JAX_PLATFORMS is not installed'}"
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
