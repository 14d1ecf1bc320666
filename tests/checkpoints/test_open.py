"""MODEL -> opened checkpoint: converted once, found again, made anew where the cache is damaged."""

import json
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import msgspec
import pytest

from jserve.checkpoints import digests
from jserve.checkpoints.convert import convert
from jserve.checkpoints.digests import file_record, remembered_sha256
from jserve.checkpoints.open import open_checkpoint
from jserve.config import ServeConfig
from jserve.errors import CheckpointError, SourceError
from jserve.load.mesh import build_mesh
from jserve.load.source import find_source
from jserve.progress import SILENT
from jserve.testing.gguf import write_tiny_gguf


class Talk:
    """Remembers the tasks begun and the notes."""

    def __init__(self):
        self.tasks, self.notes = [], []

    def start(self, task, total, unit):
        self.tasks.append(task)

    def advance(self, n):
        pass

    def note(self, message):
        self.notes.append(message)

    def done(self):
        pass


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "tiny model.gguf"
    write_tiny_gguf(path)
    return path


def test_a_gguf_file_is_converted_once(source, cache_home):
    talk = Talk()
    first = open_checkpoint(str(source), progress=talk)
    second = open_checkpoint(str(source), progress=talk)
    assert talk.tasks == ["convert tiny model.gguf", "hash"]
    assert first.path == second.path
    assert first.path.parent == cache_home / "jserve" / "checkpoints"
    assert first.path.name.startswith("tiny_model-")


def test_an_opened_checkpoint_gives_text_and_arrays(source):
    checkpoint = open_checkpoint(str(source))
    tokenizer = checkpoint.tokenizer
    assert tokenizer.decode(tokenizer.encode("hello the world", add_special=True)) == "hello the world"
    assert checkpoint.tokenizer is tokenizer
    template = checkpoint.template()
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    _, abstract = checkpoint.abstract(jnp.float32)
    assert checkpoint.restore(abstract)["norm"].shape == (32,)


def test_defaults_that_no_request_may_ask_for_are_refused_by_the_name_that_the_user_gave(source):
    write_tiny_gguf(source, metadata={"general.sampling.temp": -1.0})
    words = f"the sampling defaults of {source} are not allowed: temperature is -1; allowed are 0 to 100"
    with pytest.raises(CheckpointError, match=re.escape(words)):
        find_source(ServeConfig(model=str(source)), build_mesh("")[1], model=None, tokenizer=None, progress=SILENT)


def test_changed_contents_are_another_checkpoint(source):
    first = open_checkpoint(str(source))
    write_tiny_gguf(source, seed=1)
    assert open_checkpoint(str(source)).path != first.path


def test_a_folder_is_opened_where_it_lies(source, tmp_path):
    convert(str(source), tmp_path / "ck")
    assert open_checkpoint(str(tmp_path / "ck")).path == tmp_path / "ck"


def damage(folder):
    """Cut the largest file of the arrays; its path."""
    largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(100)
    return largest


def test_a_damaged_folder_of_the_user_is_named_and_left_alone(source, tmp_path):
    convert(str(source), tmp_path / "ck")
    file = damage(tmp_path / "ck")
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(str(tmp_path / "ck"))
    assert error.value.message.startswith(f"{file} has 100 bytes; the manifest says ")
    assert error.value.fix == f"delete {tmp_path / 'ck'} and convert it again from {source}"
    file.unlink()
    with pytest.raises(CheckpointError, match="is missing; the manifest says"):
        open_checkpoint(str(tmp_path / "ck"))


@pytest.mark.parametrize("name", ["tokenizer.json", "params/_METADATA", "params/manifest.ocdbt"])
def test_a_changed_bit_in_a_small_file_is_found_at_open(source, tmp_path, name):
    convert(str(source), tmp_path / "ck")
    path = tmp_path / "ck" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{path} has other contents than the manifest says"):
        open_checkpoint(str(tmp_path / "ck"))


def test_a_damaged_cache_is_made_again(source):
    checkpoint = open_checkpoint(str(source))
    file = damage(checkpoint.path)
    talk = Talk()
    again = open_checkpoint(str(source), progress=talk)
    assert again.path == checkpoint.path
    assert talk.tasks == ["convert tiny model.gguf", "hash"]
    assert talk.notes[0].startswith(f"{file} has 100 bytes;")
    again.restore(again.abstract(jnp.float32)[1])


def test_a_tokenizer_that_is_none_is_named(source, tmp_path):
    convert(str(source), tmp_path / "ck")
    path = tmp_path / "ck" / "tokenizer.json"
    path.write_text("{}")
    manifest = json.loads((tmp_path / "ck" / "jserve.json").read_text())
    manifest["files"]["tokenizer.json"] = msgspec.to_builtins(file_record(path))
    (tmp_path / "ck" / "jserve.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"cannot read the tokenizer .*tokenizer\.json"):
        open_checkpoint(str(tmp_path / "ck"))


def test_a_link_out_of_the_folder_is_refused(source, tmp_path):
    convert(str(source), tmp_path / "ck")
    path = tmp_path / "ck" / "tokenizer.json"
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(SourceError, match="leads out of the checkpoint's folder"):
        open_checkpoint(str(tmp_path / "ck"))


def test_a_warm_open_imports_nothing_heavy(source, cache_home):
    path = open_checkpoint(str(source)).path
    code = (
        "import sys; from jserve.checkpoints.open import open_checkpoint\n"
        "print(open_checkpoint(sys.argv[1]).path)\n"
        "print(sorted({'orbax', 'gguf'} & set(sys.modules)))\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache_home)}
    run = subprocess.run(
        [sys.executable, "-c", code, str(source)], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == [str(path), "[]"]


@pytest.mark.slow
def test_two_processes_convert_once(source, cache_home):
    code = (
        "import sys; from jserve.checkpoints.open import open_checkpoint\n"
        "class Talk:\n"
        "    def start(self, task, total, unit): print(task)\n"
        "    def advance(self, n): ...\n"
        "    def note(self, message): ...\n"
        "    def done(self): ...\n"
        "print(open_checkpoint(sys.argv[1], progress=Talk()).path)\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache_home), "JAX_PLATFORMS": "cpu"}
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(source)], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    lines = sorted(line for process in both for line in process.communicate(timeout=120)[0].splitlines())
    path = str(open_checkpoint(str(source)).path)
    assert lines == [path, path, "convert tiny model.gguf", "hash"]


def test_digests_of_large_files_are_remembered_while_they_stay_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "_REMEMBER_FROM_BYTES", 1)
    path, memory = tmp_path / "f", tmp_path / "memory"
    path.write_bytes(b"one")
    first = remembered_sha256(path, memory)
    assert first == file_record(path).sha256
    monkeypatch.setattr(digests, "file_record", None)
    assert remembered_sha256(path, memory) == first
    monkeypatch.undo()
    monkeypatch.setattr(digests, "_REMEMBER_FROM_BYTES", 1)
    path.write_bytes(b"two")
    assert remembered_sha256(path, memory) == file_record(path).sha256 != first
    next(memory.iterdir()).write_bytes(b"{half")
    assert remembered_sha256(path, memory) == file_record(path).sha256


def test_a_memory_of_digests_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "_REMEMBER_FROM_BYTES", 1)
    path = tmp_path / "f"
    path.write_bytes(b"one")
    assert remembered_sha256(path, path / "under a file") == file_record(path).sha256
