"""`jserve convert`: any checkpoint that jserve reads, as an Orbax checkpoint or as safetensors."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jserve.cli.console import say
from jserve.cli.options import Flag, parse
from jserve.progress import ConsoleProgress

__all__ = ["run"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Convert a checkpoint to Orbax, which any Flax program restores, or to safetensors, as on the Hugging Face Hub.

    A conversion that was interrupted goes on where it stopped when the same line is run again.
    """

    src: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """A .gguf file, a Hugging Face folder, a folder that jserve wrote, or a URI (pypi://, hf://)."""
    dst: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """The folder to write. It must not exist yet."""
    to: Literal["orbax", "safetensors"] = "orbax"
    """What to write. safetensors: a folder that transformers and vLLM load, too."""
    json: Flag = False
    """Print one JSON object: where the checkpoint lies and how long it took."""


def run(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="jserve convert", usage="jserve convert [--to FORM] [--json] SRC DST")
    from jserve.checkpoints.convert import convert

    begun = time.monotonic()
    with ConsoleProgress() as progress:
        convert(options.src, Path(options.dst), to=options.to, progress=progress)
    took = time.monotonic() - begun
    if options.json:
        print(json.dumps({"checkpoint": options.dst, "seconds": round(took, 3)}))
    else:
        say(f"converted in {took:.1f} s; serve it: jserve serve {options.dst}")
    return 0
