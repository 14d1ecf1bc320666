"""A server in a process of its own, for whoever measures or tests one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["server_process"]

_STOP_S = 60.0
"""Seconds that a server gets to drain before it is killed."""


@contextmanager
def server_process(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run `jserve serve` with ``arguments`` on free ports; give the object that it prints once it is ready.

    ``pid`` is added to it. What the server says goes to our stderr. SystemExit with its status where it
    does not start.
    """
    doors = ("--grpc-address", "127.0.0.1:0", "--flight-address", "127.0.0.1:0", "--metrics-address", "127.0.0.1:0")
    command = [sys.executable, "-m", "jserve.cli.main", "serve", "--json", *doors, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise SystemExit(process.wait())
        yield json.loads(line) | {"pid": process.pid}
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
