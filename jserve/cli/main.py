"""The `jserve` command: finds the verb, runs it, and turns every expected error into one line and an exit status.

stdout is data, stderr is talk. Exit statuses: 0 done, 1 a request failed, 2 usage, 3 configuration, 4 checkpoint,
5 device, 130 interrupted. Only the verb that runs is imported, so that help is quick.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence

from jserve import __version__
from jserve.cli.usage import UsageError, did_you_mean
from jserve.errors import JserveError
from jserve.progress import printable

__all__ = ["VERBS", "main"]

GROUPS = {
    "Try it": {"demo": "serve the default model, stream one answer over gRPC and one over Flight, exit"},
    "Serve": {
        "serve": "serve a model over gRPC and Arrow Flight until told to stop",
        "generate": "send one prompt to a running server and stream its answer",
        "bench": "time a running server, or one started for it, under concurrent streams",
    },
    "Checkpoints": {
        "convert": "convert a checkpoint to Orbax, or to safetensors",
        "inspect": "say what a checkpoint holds and how to serve it",
    },
    "About": {"version": "name the versions and devices in use"},
}
VERBS = {verb: line for group in GROUPS.values() for verb, line in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _mend_streams()
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except UsageError as error:
        return _fail(f"error: {error}\nusage: {error.usage}", status=2)
    except JserveError as error:
        fix = f"\n  fix: {error.fix}" if error.fix else ""
        return _fail(f"error {error.code}: {error.message}{fix}", status=error.exit_status)
    except KeyboardInterrupt:
        return _fail("interrupted", status=128 + signal.SIGINT)
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        _drop_output()
        return 1
    except OSError as error:
        if error.errno not in _NO_ROOM or error.filename is not None:
            raise
        _drop_output()
        return _fail(f"error: cannot write the output: {error.strerror}", status=1)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a write to stdout meets on a full disk or a broken device; such an error names no file."""


def _mend_streams() -> None:
    """Have all three streams, whatever we were started with, and no character that an encoding could stumble over."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for the process's life)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """What is still buffered goes nowhere, so that leaving does not fail on it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    if not arguments:
        raise UsageError("no command given; try: jserve demo")
    verb, rest = arguments[0], arguments[1:]
    if verb in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0
    if verb in ("-V", "--version"):
        verb = "version"
    if verb not in VERBS:
        hint = did_you_mean(verb.lstrip("-"), VERBS) or f"; there are: {', '.join(VERBS)}"
        raise UsageError(f"unknown command {verb!r}{hint}")
    status: int = importlib.import_module(f"jserve.cli.{verb}").run(rest)
    return status


def _help() -> str:
    lines = [
        f"jserve {__version__}: serve JAX models over gRPC and Arrow Flight",
        "",
        "usage: jserve COMMAND [options]",
    ]
    for group, verbs in GROUPS.items():
        lines += ["", f"{group}:"] + [f"  {verb:<10} {line}" for verb, line in verbs.items()]
    lines += ["", "jserve COMMAND --help says more. New here: jserve demo"]
    return "\n".join(lines) + "\n"


def _fail(text: str, *, status: int) -> int:
    sys.stderr.write(printable(text) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
