"""Every example runs, and prints what it says it prints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_server import fake_server

EXAMPLES = Path(__file__).parent.parent / "examples"


def _run(name, *arguments, cache):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
    )


@pytest.fixture(scope="module")
def server():
    with fake_server(FakeEngine(), flight_address="127.0.0.1:0") as server:
        yield server


def test_every_example_is_run_here():
    source = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{path.name}"' in source for path in EXAMPLES.glob("*.py"))


def test_grpc_stream(server, tmp_path):
    done = _run("grpc_stream.py", server.grpc, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[64 tokens, the first after " in done.stdout
    assert "Why is the sky blue?" in done.stdout


def test_flight_table(server, tmp_path):
    done = _run("flight_table.py", server.addresses.flight, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_serve_nnx_checkpoint(tmp_path):
    done = _run("serve_nnx_checkpoint.py", str(tmp_path / "state"), cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Llama is served: gRPC 127.0.0.1:")
    assert "Random weights say" not in done.stdout
    assert len(done.stdout.splitlines()[-1]) > 0
