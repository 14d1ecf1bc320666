"""Hugging Face -> Orbax -> Hugging Face, and GGUF -> safetensors: what stands in the folders, byte for byte."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jserve.checkpoints.arrays.tree import flatten
from jserve.checkpoints.convert import convert
from jserve.checkpoints.gguf.file import GgufFile
from jserve.checkpoints.gguf.model import gguf_checkpoint
from jserve.checkpoints.hf import write
from jserve.checkpoints.hf.folder import open_hf
from jserve.checkpoints.open import open_checkpoint
from jserve.checkpoints.written import open_written
from jserve.cli.main import main
from jserve.errors import CheckpointError, SourceError, UnsupportedModel
from jserve.testing.gguf import CHAT_TEMPLATE, write_tiny_gguf
from jserve.testing.hf import write_tiny_hf

DATA = Path(__file__).parents[2] / "oracle" / "data"


SAMPLING = {"temperature": 0.5, "top_k": 9, "repetition_penalty": 1.1, "suppress_tokens": [3]}


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("xdg")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_there_and_back_is_byte_for_byte(tmp_path, dtype, shards):
    leaves = write_tiny_hf(tmp_path / "a", dtype=dtype, shards=shards, generation=SAMPLING)
    convert(str(tmp_path / "a"), tmp_path / "b")
    middle = open_written(tmp_path / "b")
    assert middle.leaves.keys() == leaves.keys()
    for path, leaf in middle.leaves.items():
        assert leaf.dtype == leaves[path].dtype
        assert leaf.read().tobytes() == leaves[path].tobytes()
    convert(str(tmp_path / "b"), tmp_path / "c", to="safetensors")
    first, last = open_hf(tmp_path / "a", source="x"), open_hf(tmp_path / "c", source="x")
    assert (last.config, last.family, last.generation, last.eos_ids) == (
        first.config,
        first.family,
        first.generation,
        first.eos_ids,
    )
    assert last.chat_template == first.chat_template == CHAT_TEMPLATE
    assert last.tokenizer.encode("hello the world", add_special=True) == first.tokenizer.encode(
        "hello the world", add_special=True
    )
    if shards == 1:
        assert (tmp_path / "c" / "model.safetensors").read_bytes() == (
            tmp_path / "a" / "model.safetensors"
        ).read_bytes()
    else:
        whole = load_file(tmp_path / "c" / "model.safetensors")
        for path in (tmp_path / "a").glob("*.safetensors"):
            for name, tensor in load_file(path).items():
                assert whole.pop(name).tobytes() == tensor.tobytes()
        assert whole == {}


def test_the_manifest_names_the_source(tmp_path):
    write_tiny_hf(tmp_path / "a")
    convert(str(tmp_path / "a"), tmp_path / "b")
    checkpoint = open_checkpoint(str(tmp_path / "b"))
    assert (checkpoint.name, checkpoint.source) == ("a", str(tmp_path / "a"))
    params = checkpoint.restore(checkpoint.abstract(jnp.float32)[1])
    assert len(flatten(params)) == len(checkpoint.leaves)


def test_many_shards_and_their_index(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "_SHARD_BYTES", 20_000)
    write_tiny_hf(tmp_path / "a", dtype="bfloat16")
    convert(str(tmp_path / "a"), tmp_path / "b")
    convert(str(tmp_path / "b"), tmp_path / "c", to="safetensors")
    names = sorted(path.name for path in (tmp_path / "c").glob("*.safetensors"))
    assert len(names) > 3
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert all((tmp_path / "c" / name).stat().st_size < 20_000 for name in names)
    wanted = load_file(tmp_path / "a" / "model.safetensors")
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    assert index["weight_map"].keys() == wanted.keys()
    for name, shard in index["weight_map"].items():
        assert load_file(tmp_path / "c" / shard)[name].tobytes() == wanted[name].tobytes()
    assert open_hf(tmp_path / "c", source="x").leaves.keys() == open_hf(tmp_path / "a", source="x").leaves.keys()


def test_gguf_to_safetensors(tmp_path):
    wanted = write_tiny_gguf(tmp_path / "t.gguf", kind="BF16", metadata={"tokenizer.ggml.add_bos_token": True})
    convert(str(tmp_path / "t.gguf"), tmp_path / "c", to="safetensors")
    checkpoint = open_hf(tmp_path / "c", source="x")
    assert json.loads((tmp_path / "c" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    for path, leaf in checkpoint.leaves.items():
        kind = np.float32 if leaf.dtype == np.float32 else ml_dtypes.bfloat16
        np.testing.assert_array_equal(leaf.read(), wanted[path].astype(kind))
    tokenizer = checkpoint.tokenizer
    assert (tokenizer.bos_id, tokenizer.add_bos) == (1, True)
    assert tokenizer.encode("hello", add_special=True)[0] == 1
    assert tokenizer.backend.encode("hello", add_special_tokens=True).ids[0] == 1


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokenizer.ggml.pre": "smollm"},
        {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_space_prefix": True},
        {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": None},
        {"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_bos_token": True},
    ],
)
@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_the_tokenizer_of_a_gguf_goes_with_it(tmp_path, metadata, to):
    write_tiny_gguf(tmp_path / "t.gguf", metadata=metadata)
    with GgufFile(tmp_path / "t.gguf") as file:
        wanted = gguf_checkpoint(file, source="t").tokenizer
    convert(str(tmp_path / "t.gguf"), tmp_path / "c", to=to)
    found = open_checkpoint(str(tmp_path / "c")).tokenizer
    for text in json.loads((DATA / "smollm2_tokenize.json").read_text(encoding="utf-8"))["cases"]:
        for add in (True, False):
            ids = wanted.encode(text["text"], add_special=add)
            assert found.encode(text["text"], add_special=add) == ids, text["text"]
            assert found.decode(ids) == wanted.decode(ids)


def test_what_is_in_the_form_asked_for_is_not_converted(tmp_path):
    write_tiny_hf(tmp_path / "a")
    with pytest.raises(UnsupportedModel, match="is a folder of safetensors already") as error:
        convert(str(tmp_path / "a"), tmp_path / "c", to="safetensors")
    assert error.value.fix == f"serve it as it is: jserve serve {tmp_path / 'a'}; or --to orbax"


def test_values_that_are_not_finite_are_never_written(tmp_path):
    write_tiny_hf(tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = np.inf
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="norm holds values that are not finite numbers") as error:
        convert(str(tmp_path / "a"), tmp_path / "b")
    assert error.value.fix == f"see all that do: jserve inspect --check {tmp_path / 'a'}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


class Meddler:
    """Touches a file once the conversion has begun."""

    def __init__(self, path):
        self.path = path

    def start(self, task, total, unit):
        if task.startswith("convert "):
            os.utime(self.path)

    def advance(self, n): ...

    def note(self, message): ...

    def done(self): ...


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "config.json", "tokenizer.json"])
def test_a_source_that_changes_meanwhile_is_not_taken(tmp_path, name):
    write_tiny_hf(tmp_path / "a", shards=3)
    # Whoever sees it first says so: a read of the file, or the look before the end.
    with pytest.raises((CheckpointError, SourceError), match=rf"{name} (has changed since|changed while it was conv)"):
        convert(str(tmp_path / "a"), tmp_path / "b", progress=Meddler(tmp_path / "a" / name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_destination_that_is_there_is_left_alone_before_anything_is_read(tmp_path):
    write_tiny_hf(tmp_path / "a")
    (tmp_path / "b").write_text("mine")
    with pytest.raises(CheckpointError, match="is there already; nothing was written"):
        convert(str(tmp_path / "a"), tmp_path / "b")
    assert (tmp_path / "b").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_destination_that_cannot_be_written(tmp_path):
    write_tiny_hf(tmp_path / "a")
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(CheckpointError, match=r"cannot write .*: Permission denied"):
        convert(str(tmp_path / "a"), tmp_path / "locked" / "b")


def test_the_command_line(tmp_path, capsys):
    write_tiny_hf(tmp_path / "a")
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert main(["convert", "--to", "safetensors", "--json", str(tmp_path / "b"), str(tmp_path / "c")]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == str(tmp_path / "c")
    assert open_hf(tmp_path / "c", source="x").name == "c"
    assert main(["convert", "--to", "safetensors", str(tmp_path / "c"), str(tmp_path / "d")]) == 4
    assert "is a folder of safetensors already" in capsys.readouterr().err
    assert main(["convert", "--to", "pickle", str(tmp_path / "c"), str(tmp_path / "d")]) == 2


PEAK = """
import sys
from pathlib import Path
import jax
from jserve.checkpoints import convert
from jserve.checkpoints.hf import safetensors
from jserve.checkpoints.orbax import write

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) >> 10

write._BATCH_BYTES = safetensors._PIECE_BYTES = 4 << 20
jax.devices()
convert.convert(sys.argv[1], Path(sys.argv[2]))  # imports, too
before = peak()
convert.convert(sys.argv[3], Path(sys.argv[4]), to=sys.argv[5])
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_the_whole_model_is_never_held(tmp_path, to):
    """109 MiB of float32 are written by a process that grows by a part of that."""
    write_tiny_hf(tmp_path / "small")
    write_tiny_hf(tmp_path / "big", hidden_size=512, intermediate_size=2048, num_layers=8, head_dim=64)
    source = tmp_path / "big"
    if to == "safetensors":
        convert(str(tmp_path / "big"), tmp_path / "orbax")
        source = tmp_path / "orbax"
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            PEAK,
            str(tmp_path / "small"),
            str(tmp_path / "s"),
            str(source),
            str(tmp_path / "b"),
            to,
        ],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sum(leaf.nbytes for leaf in open_checkpoint(str(tmp_path / "b")).leaves.values()) >> 20 == 109
    assert int(run.stdout) < 55


def test_a_full_disk_is_said_in_words_and_leaves_nothing(tmp_path):
    write_tiny_hf(tmp_path / "a")
    convert(str(tmp_path / "a"), tmp_path / "o")
    code = (
        "import resource, sys; from jserve.cli.main import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000));"
        "sys.exit(main(['convert', '--to', 'safetensors', *sys.argv[1:]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "o"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    assert f"error JS-CKP-01: cannot write {tmp_path / 'out'}: File too large" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "o"]
