"""The command line as a user runs it: in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jserve.testing.gguf import write_tiny_gguf

Result = subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def jserve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """``jserve("generate", "--json", "hi", stdin="")``: run it to its end; with a cache of the session's own."""
    cache = tmp_path_factory.mktemp("cache")

    def run(*arguments: str, stdin: str = "", **environment: str) -> Result:
        return subprocess.run(
            [sys.executable, "-m", "jserve.cli.main", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=200,
            env=os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONIOENCODING": "utf-8"} | environment,
        )

    return run


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path)
    return path
