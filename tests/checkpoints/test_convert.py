"""GGUF -> Orbax: what stands in the folder, that any Orbax user can read it, and that a kill leaves nothing."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jserve.checkpoints.arrays.tree import flatten
from jserve.checkpoints.convert import convert, write_converted
from jserve.checkpoints.digests import file_record
from jserve.checkpoints.manifest import Manifest, read_manifest
from jserve.checkpoints.orbax import write
from jserve.checkpoints.orbax.read import read_tree
from jserve.checkpoints.origin import read_origin
from jserve.checkpoints.sources.local import LocalFile
from jserve.checkpoints.written import open_written
from jserve.errors import CheckpointError, SourceError, UnsupportedModel
from jserve.models.naive import naive_generate
from jserve.progress import SILENT
from jserve.testing.gguf import CHAT_TEMPLATE, TINY_TOKENS, write_tiny_gguf


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    return path


class Recorder:
    def __init__(self):
        self.events = []

    def start(self, task, total, unit):
        self.events.append(["start", task, total, unit])

    def advance(self, n):
        if self.events[-1][0] != "advance":
            self.events.append(["advance", 0])
        self.events[-1][1] += n

    def note(self, message):
        self.events.append(["note", message])

    def done(self):
        self.events.append(["done"])


def test_the_manifest_says_everything(source, tmp_path):
    write_tiny_gguf(source, metadata={"general.sampling.temp": 0.5, "general.sampling.top_k": 7})
    convert(str(source), tmp_path / "ck")
    manifest = read_manifest(tmp_path / "ck")
    assert manifest.name == "tiny"
    assert (manifest.format, manifest.family, manifest.dtype) == (1, "llama", "float32")
    assert manifest.config["hidden_size"] == 32
    assert (manifest.eos_ids, manifest.bos_id, manifest.add_bos) == ([2], 1, False)
    assert manifest.chat_template == CHAT_TEMPLATE
    assert [(k, v, type(v)) for k, v in manifest.generation.items()] == [("temperature", 0.5, float), ("top_k", 7, int)]
    assert (manifest.source, manifest.source_sha256) == (str(source), file_record(source).sha256)
    there = {p.relative_to(tmp_path / "ck").as_posix() for p in (tmp_path / "ck").rglob("*") if p.is_file()}
    assert there == {*manifest.files, "jserve.json"}
    assert {"tokenizer.json", "params/_METADATA", "params/manifest.ocdbt"} <= there
    for name, record in manifest.files.items():
        assert file_record(tmp_path / "ck" / name) == record
    assert json.loads((tmp_path / "ck" / "jserve.json").read_text())["bos_id"] == 1


def test_any_orbax_user_can_read_the_arrays(source, tmp_path):
    wanted = write_tiny_gguf(source)
    convert(str(source), tmp_path / "ck")
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "ck" / "params")
    found = flatten(tree)
    assert found.keys() == wanted.keys()
    for name, leaf in found.items():
        np.testing.assert_array_equal(leaf, wanted[name])


@pytest.mark.parametrize("batch", [1, 20_000, 1 << 30])
def test_batches_do_not_change_what_is_written(source, tmp_path, monkeypatch, batch):
    monkeypatch.setattr(write, "_BATCH_BYTES", batch)
    wanted = write_tiny_gguf(source)
    convert(str(source), tmp_path / "ck")
    found = flatten(restore(tmp_path / "ck", jnp.float32))
    for name, leaf in found.items():
        np.testing.assert_array_equal(leaf, wanted[name])


def restore(path, dtype):
    checkpoint = open_written(path)
    return checkpoint.restore(checkpoint.abstract(dtype)[1])


def test_progress_counts_bytes_to_the_total(source, tmp_path):
    recorder = Recorder()
    convert(str(source), tmp_path / "ck", progress=recorder)
    total = sum(leaf.nbytes for leaf in write_tiny_gguf(source).values())
    assert recorder.events[:3] == [["start", "convert tiny.gguf", total, "B"], ["advance", total], ["done"]]
    files = sum(record.size for record in read_manifest(tmp_path / "ck").files.values())
    assert recorder.events[3:] == [["start", "hash", files, "B"], ["advance", files], ["done"]]


def test_bfloat16_files_stay_bfloat16(tmp_path):
    write_tiny_gguf(tmp_path / "t.gguf", kind="BF16")
    convert(str(tmp_path / "t.gguf"), tmp_path / "ck")
    infos = read_tree(tmp_path / "ck" / "params").arrays
    assert infos["layers", "0", "q"].dtype == jnp.bfloat16
    assert infos["layers", "0", "attn_norm"].dtype == np.float32
    assert read_manifest(tmp_path / "ck").dtype == "bfloat16"


def test_rows_beyond_the_tokenizer_are_kept_and_its_vocabulary_is_the_real_one(tmp_path):
    """The embedding table is padded, the padding tokens are no tokens."""
    write_tiny_gguf(tmp_path / "t.gguf", vocab_size=len(TINY_TOKENS) + 16)
    convert(str(tmp_path / "t.gguf"), tmp_path / "ck")
    checkpoint = open_written(tmp_path / "ck")
    assert checkpoint.tokenizer.vocab_size == len(TINY_TOKENS)
    assert checkpoint.config.vocab_size == len(TINY_TOKENS) + 16


def test_an_existing_destination_is_never_touched(source, tmp_path):
    (tmp_path / "ck").mkdir()
    with pytest.raises(CheckpointError, match="is there already; nothing was written"):
        convert(str(source), tmp_path / "ck")
    assert list((tmp_path / "ck").iterdir()) == []


def test_a_bad_source_leaves_nothing(source, tmp_path):
    rows = source.read_bytes()
    source.write_bytes(rows[:-100])
    with pytest.raises(CheckpointError, match="is cut short"):
        convert(str(source), tmp_path / "ck")
    source.write_bytes(rows[:-8] + b"\xff" * 8)
    with pytest.raises(CheckpointError, match="not finite"):
        convert(str(source), tmp_path / "ck2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.gguf", "xdg"]


def test_a_source_that_changes_is_not_taken_for_what_it_was(source, tmp_path, cache_home):
    found = LocalFile(path=source, sha256=file_record(source).sha256)

    class Meddler(Recorder):
        def start(self, task, total, unit):
            super().start(task, total, unit)
            os.utime(source)

    (tmp_path / "a").mkdir()
    with pytest.raises(SourceError, match="changed while it was converted"):
        write_converted(found, read_origin(found, progress=SILENT), "x", tmp_path / "a", to="orbax", progress=Meddler())
    write_tiny_gguf(source, seed=9)
    with pytest.raises(SourceError, match="is not what it was when it was fetched") as error:
        read_origin(found, progress=SILENT)
    assert error.value.fix == "run the command again"
    copied = cache_home / "jserve" / "downloads" / "tiny.gguf"
    copied.parent.mkdir(parents=True)
    source.rename(copied)
    with pytest.raises(SourceError, match="is not what it was when it was fetched") as error:
        read_origin(LocalFile(path=copied, sha256=found.sha256), progress=SILENT)
    assert error.value.fix == f"delete {copied} and start again"


def test_what_is_converted_already_is_said_so(source, tmp_path):
    convert(str(source), tmp_path / "ck")
    with pytest.raises(UnsupportedModel, match="is an Orbax checkpoint already"):
        convert(str(tmp_path / "ck"), tmp_path / "ck2")


KILLED = """
import sys, time
from pathlib import Path
from jserve.checkpoints.orbax import write
from jserve.checkpoints.open import open_checkpoint

class Slow:
    def start(self, task, total, unit): ...
    def note(self, message): ...
    def done(self): ...
    def advance(self, n):
        print("writing", flush=True)
        time.sleep(float(sys.argv[2]))

write._BATCH_BYTES = 1
print(open_checkpoint(sys.argv[1], progress=Slow()).path)
"""


def test_a_conversion_killed_in_its_middle_leaves_nothing_that_looks_whole(source, cache_home):
    def run(seconds):
        return subprocess.Popen(
            [sys.executable, "-c", KILLED, str(source), str(seconds)],
            env={**os.environ, "XDG_CACHE_HOME": str(cache_home), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )

    process = run(1)
    for _ in range(3):
        assert process.stdout.readline() == "writing\n"
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    folder = cache_home / "jserve" / "checkpoints"
    assert [path.name.startswith(".tiny") for path in folder.iterdir()] == [True, True]  # a lock and half a folder
    process = run(0)
    assert process.communicate(timeout=120)[0].splitlines()[-1] == str(next(folder.glob("tiny-*")))
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 2
    assert names[0].endswith(".lock")
    assert read_manifest(folder / names[1]).name == "tiny"


def test_greedy_ids_are_those_of_the_model_before_it_was_written(source, tmp_path):
    """A wrong order of query or key rows would show here."""
    wanted = write_tiny_gguf(source, seed=3)
    convert(str(source), tmp_path / "ck")
    checkpoint = open_written(tmp_path / "ck")
    graphdef, abstract = checkpoint.abstract(jnp.float32)
    restored = checkpoint.restore(abstract)
    original = jax.tree.map(lambda leaf: leaf, restored)
    for name, leaf in wanted.items():
        node = original
        for part in name[:-1]:
            node = node[int(part) if part.isdigit() else part]
        node[name[-1]] = jnp.asarray(leaf)
    prompt = checkpoint.tokenizer.encode("hello the world 42", add_special=True)
    assert naive_generate(graphdef, restored, prompt, 8) == naive_generate(graphdef, original, prompt, 8)


def test_manifests_of_other_formats_and_damaged_ones(source, tmp_path):
    convert(str(source), tmp_path / "ck")
    path = tmp_path / "ck" / "jserve.json"
    whole = path.read_bytes()
    manifest = msgspec.json.decode(whole, type=Manifest)
    for data, words in [
        (msgspec.json.encode(msgspec.structs.replace(manifest, format=2)), "has format 2; this jserve reads format 1"),
        (whole[:100], "is damaged"),
        (b"{}", "is damaged"),
        (whole.replace(b'"name"', b'"nome"', 1), "is damaged"),
        (whole.replace(b"tokenizer.json", b"../tokenizer.json"), "is not a name inside"),
        (whole.replace(b"tokenizer.json", b"/etc/hosts"), "is not a name inside"),
        (whole.replace(b"tokenizer.json", b"weights.pt"), "is a pickle by its name"),
    ]:
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=words):
            read_manifest(tmp_path / "ck")


PEAK = """
import sys
from pathlib import Path
import jax
from jserve.checkpoints import convert
from jserve.checkpoints.orbax import write

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) >> 10

write._BATCH_BYTES = 8 << 20
jax.devices()
before = peak()
convert.convert(sys.argv[1], Path(sys.argv[2]))
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_whole_model_is_never_held(tmp_path):
    """109 MiB of float32 are written by a process that grows by little more than half of that."""
    big = tmp_path / "big.gguf"
    write_tiny_gguf(big, kind="Q8_0", hidden_size=512, intermediate_size=2048, num_layers=8, head_dim=64)
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(big), str(tmp_path / "ck")],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    stored = sum(info.nbytes for info in read_tree(tmp_path / "ck" / "params").arrays.values())
    assert stored >> 20 == 109
    assert int(run.stdout) < 60


def test_what_the_operating_system_refuses_is_said_in_words_and_leaves_nothing(tmp_path):
    write_tiny_gguf(tmp_path / "t.gguf")
    code = (
        "import resource, sys; from jserve.cli.main import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000));"  # as a disk that fills up
        "sys.exit(main(['convert', *sys.argv[1:]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "t.gguf"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "xdg")},
    )
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-2] == f"error JS-CKP-01: cannot write {tmp_path / 'out'}: File too large"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.gguf", "xdg"]
