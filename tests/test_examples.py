"""Every example runs, and prints what it says it prints."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from flax import nnx

from jserve import SamplingParams
from jserve.checkpoints.own.model import open_own
from jserve.checkpoints.own.report import inspect_own
from jserve.cli.child import server_process
from jserve.client import Client
from jserve.models.naive import naive_generate
from jserve.progress import SILENT
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_server import fake_server
from jserve.testing.fake_tokens import fake_text
from sharding import MeshSpec, param_shardings

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
    alone = [path.name for path in EXAMPLES.glob("*.py")]
    folders = [f"{path.parent.name}/{path.name}" for path in EXAMPLES.glob("*/train.py")]
    assert all(f'"{name}"' in source for name in alone + folders)


def test_grpc_stream(server, tmp_path):
    done = _run("grpc_stream.py", server.grpc, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[64 tokens, the first after " in done.stdout
    assert "Why is the sky blue?" in done.stdout


def test_flight_table(server, tmp_path):
    done = _run("flight_table.py", server.addresses.flight, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        f"gravity: {fake_text('Gravity is', 24)!r} [length]",
        f"colours: {fake_text('Three colours are', 16)!r} [length]",
        "nothing: 'exactly one of prompt, token_ids, messages must be set; the row has none' [error]",
    ]
    # Rows of a stream end in any order.
    assert sorted(lines[3:]) == [
        f"row 0: {fake_text('The sky is', 16)!r} [length]",
        f"row 1: {fake_text('The sea is', 16)!r} [length]",
    ]


def test_flight_table_where_every_row_fails(tmp_path):
    with fake_server(FakeEngine(max_model_len=16), flight_address="127.0.0.1:0") as server:
        done = _run("flight_table.py", server.addresses.flight, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["gravity", "colours", "nothing"]
    assert sorted(lines[3:]) == [
        f"row {i}: 'max_tokens is 16; after a prompt of 10 tokens 6 fit in the limit of 16' [error]" for i in range(2)
    ]


def test_flight_table_says_why_flight_refused_it(capsys, monkeypatch):
    spec = importlib.util.spec_from_file_location("flight_table", EXAMPLES / "flight_table.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "whole_table", lambda address: None)
    monkeypatch.setattr("sys.argv", ["flight_table.py", "127.0.0.1:1"])
    assert example.main() == 1
    assert capsys.readouterr().err.startswith("error of Flight: ")
    with fake_server(FakeEngine(), flight_address="127.0.0.1:0") as server:
        server.frontend.refuse("the server is going")
        monkeypatch.setattr("sys.argv", ["flight_table.py", server.addresses.flight])
        assert example.main() == 1
    assert capsys.readouterr().err == "error JS-SRV-01: the server is going\n"


def test_bring_your_own(tmp_path, monkeypatch):
    """As its README says, with a few steps of training; the tokens are those of the naive recompute."""
    folder = EXAMPLES / "bring_your_own"
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]))
    out = tmp_path / "checkpoint"
    trained = _run("bring_your_own/train.py", "--steps", "10", "--out", str(out), cache=tmp_path / "cache")
    assert trained.returncode == 0, trained.stderr
    assert "step    10  loss " in trained.stdout
    assert trained.stdout.endswith(f" of 500 sums that it never saw are right\nsaved {out}\n")

    report = inspect_own("my_model:MyModel", checkpoint=str(out), tokenizer=None, check=True)
    assert report.findings == []
    assert (report.vocab_size, report.eos_ids, report.max_position) == (13, [0], 32)

    own = open_own(
        "my_model:MyModel", checkpoint=str(out), tokenizer=None, dtype=None, default_dtype="float32", progress=SILENT
    )
    shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nnx.to_pure_dict(own.state),
        param_shardings(own.state, MeshSpec().build()),
    )
    prompt = own.tokenizer.encode("17+25=", add_special=True)
    want = naive_generate(own.graphdef, own.load(shapes), prompt, 6)
    small = ["--max-num-seqs", "1", "--max-num-tokens", "8"]
    serve = server_process(["my_model:MyModel", "--checkpoint", str(out), *small])
    with serve as ready, Client(ready["addresses"]["grpc"]) as client:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        got = [token for delta in client.generate("17+25=", params) for token in delta.token_ids]
    assert got == want
