"""A conversion that was killed goes on where it stopped; one of another source, or another kind, begins anew."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from safetensors.numpy import load_file

from jserve.checkpoints import convert as converting
from jserve.checkpoints.convert import convert
from jserve.checkpoints.hf import write as hf_write
from jserve.checkpoints.hf.folder import open_hf
from jserve.checkpoints.orbax import write as orbax_write
from jserve.checkpoints.written import open_written
from jserve.errors import CheckpointError
from jserve.testing.hf import write_tiny_hf

KILLED = """
import os, signal, sys
from pathlib import Path
from jserve.checkpoints import convert as converting
from jserve.checkpoints.hf import write as hf_write
from jserve.checkpoints.orbax import write as orbax_write

orbax_write._BATCH_BYTES = 9_000
hf_write._SHARD_BYTES = 9_000
src, dst, to, kill_at = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
count = 0
real = converting._finite

def spied(checkpoint):
    def read(name, leaf, region):
        global count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        print(name, flush=True)
        return leaf.read_region(region)
    from dataclasses import replace
    from functools import partial
    return {p: replace(l, read_region=partial(read, ".".join(p), l)) for p, l in real(checkpoint).items()}

converting._finite = spied
converting.convert(src, dst, to=to)
"""


def run(src, dst, to, kill_at):
    """The parameters that were read, and how it ended."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(src), str(dst), to, str(kill_at)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.stdout.split(), done.returncode


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_a_killed_conversion_goes_on_where_it_stopped(tmp_path, to):
    leaves = write_tiny_hf(tmp_path / "a")
    source = tmp_path / "a"
    if to == "safetensors":
        convert(str(tmp_path / "a"), tmp_path / "o")
        source = tmp_path / "o"
    first, status = run(source, tmp_path / "b", to, 16)
    assert (status, len(first)) == (-signal.SIGKILL, 15)
    assert not (tmp_path / "b").exists()
    second, status = run(source, tmp_path / "b", to, 0)
    assert status == 0
    names = {".".join(path) for path in leaves}
    assert set(first) | set(second) == names
    assert len(set(first) & set(second)) < 5, "the batch that was under way, and no other, is read again"
    assert 0 < len(set(second)) < len(names) - 5
    made = open_written(tmp_path / "b") if to == "orbax" else open_hf(tmp_path / "b", source="x")
    for path, leaf in made.leaves.items():
        assert leaf.read().tobytes() == leaves[path].tobytes()
    left = {path.name for path in tmp_path.iterdir()} - {"xdg"}
    assert left == ({"a", "b"} if to == "orbax" else {"a", "b", "o"})
    assert not [path for path in (tmp_path / "b").rglob("*") if "unfinished" in path.name or path.name == ".parts"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(orbax_write, "_BATCH_BYTES", 9_000)
    monkeypatch.setattr(hf_write, "_SHARD_BYTES", 9_000)


def interrupt(monkeypatch, after, error):
    """Let reading fail with ``error`` once ``after`` parameters were read; the names that were read."""
    read, real = [], converting._finite

    def spied(checkpoint):
        def spy(path, leaf):
            def one(region):
                if len(read) == after:
                    raise error
                read.append(".".join(path))
                return leaf.read_region(region)

            return replace(leaf, read_region=one)

        return {path: spy(path, leaf) for path, leaf in real(checkpoint).items()}

    monkeypatch.setattr(converting, "_finite", spied)
    return read


@pytest.mark.parametrize("change", ["nothing", "weights", "settings"])
def test_only_the_same_goes_on(tmp_path, small, change):
    write_tiny_hf(tmp_path / "a")
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 12, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert(str(tmp_path / "a"), tmp_path / "b")
    if change == "weights":
        path = tmp_path / "a" / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    elif change == "settings":
        (tmp_path / "a" / "generation_config.json").write_text('{"eos_token_id": 0}')
    with pytest.MonkeyPatch.context() as patch:
        read = interrupt(patch, -1, KeyboardInterrupt())
        convert(str(tmp_path / "a"), tmp_path / "b")
    total = len(open_hf(tmp_path / "a", source="x").leaves)
    assert len(read) == total if change != "nothing" else 0 < len(read) < total - 5
    assert open_written(tmp_path / "b").eos_ids == ((2, 0) if change == "settings" else (2,))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "xdg") == ["a", "b"]


def test_what_fails_by_itself_leaves_nothing(tmp_path, small, monkeypatch):
    write_tiny_hf(tmp_path / "a")
    interrupt(monkeypatch, 12, CheckpointError("a bad disk"))
    with pytest.raises(CheckpointError, match="a bad disk"):
        convert(str(tmp_path / "a"), tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "xdg") == ["a"]


def test_a_shard_that_a_kill_cut_short_is_written_again(tmp_path, small):
    write_tiny_hf(tmp_path / "a")
    convert(str(tmp_path / "a"), tmp_path / "o")
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 12, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert(str(tmp_path / "o"), tmp_path / "b", to="safetensors")
    scratch = next(tmp_path.glob(".b.scratch-*"))
    assert len(list(scratch.glob("*.unfinished"))) == 1
    convert(str(tmp_path / "o"), tmp_path / "b", to="safetensors")
    found = {name: t for path in (tmp_path / "b").glob("*.safetensors") for name, t in load_file(path).items()}
    wanted = load_file(tmp_path / "a" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


class Interrupted:
    """A Progress at which the user presses Ctrl-C, once ``task`` begins."""

    def __init__(self, task):
        self.task = task

    def start(self, task, total, unit):
        if task == self.task:
            raise KeyboardInterrupt

    def advance(self, n): ...

    def note(self, message): ...

    def done(self): ...


def test_arrays_that_are_written_are_not_written_again(tmp_path, small):
    """While files are hashed, which takes minutes of a large model, all else is done."""
    leaves = write_tiny_hf(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        convert(str(tmp_path / "a"), tmp_path / "b", progress=Interrupted("hash"))
    with pytest.MonkeyPatch.context() as patch:
        read = interrupt(patch, -1, KeyboardInterrupt())
        convert(str(tmp_path / "a"), tmp_path / "b")
    assert read == []
    for path, leaf in open_written(tmp_path / "b").leaves.items():
        assert leaf.read().tobytes() == leaves[path].tobytes()
    names = {"jserve.json", "params", "tokenizer.json"}
    assert {path.name for path in (tmp_path / "b").iterdir()} == names


def test_a_part_that_was_moved_just_before_a_kill_is_written_again(tmp_path, small):
    leaves = write_tiny_hf(tmp_path / "a")
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 12, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert(str(tmp_path / "a"), tmp_path / "b")
    scratch = next(tmp_path.glob(".b.scratch-*"))
    part = next(path for path in (scratch / ".parts").iterdir() if not path.name.endswith(".unfinished"))
    for inner in part.iterdir():
        shutil.rmtree(inner)
    convert(str(tmp_path / "a"), tmp_path / "b")
    for path, leaf in open_written(tmp_path / "b").leaves.items():
        assert leaf.read().tobytes() == leaves[path].tobytes()


def test_arrays_that_a_kill_left_half_written_are_no_checkpoint(tmp_path, small, monkeypatch):
    """Whatever Orbax has put together counts only once the disk has it."""
    write_tiny_hf(tmp_path / "a")
    with pytest.MonkeyPatch.context() as patch:

        def killed(folder):
            if "params" in folder.name:
                raise KeyboardInterrupt

        patch.setattr(orbax_write, "sync_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            convert(str(tmp_path / "a"), tmp_path / "b")
    scratch = next(tmp_path.glob(".b.scratch-*"))
    assert not (scratch / "params").exists()
    convert(str(tmp_path / "a"), tmp_path / "b")
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"jserve.json", "params", "tokenizer.json"}
