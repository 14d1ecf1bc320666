"""hf:// with a stand-in for huggingface_hub: which files are asked for, and what is said of the rest."""

import fnmatch
import hashlib
import importlib
import json
import shutil
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from saving import save_steps
from trees import LLAMA, hf_weights, nested

from jserve import LLM, SamplingParams
from jserve.checkpoints.convert import convert
from jserve.checkpoints.inspection.inspect import inspect
from jserve.checkpoints.open import open_checkpoint
from jserve.errors import SourceError, UnsupportedModel
from jserve.progress import SILENT
from jserve.testing.gguf import write_tiny_gguf
from jserve.testing.hf import write_tiny_hf
from jserve.testing.tokenizer import ByteTokenizer

TINY_ENCODER = Path(__file__).parents[2] / "oracle" / "data" / "tiny_bert"


class Refused(Exception):
    """What the Hub answers with, and not what the network does."""

    response = 404


def fits(name, patterns):
    return patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class Hub:
    """A Hub of one repository, org/name, whose files lie in ``folder``, and its cache on disk."""

    def __init__(self, root):
        self.folder, self.home = root / "repo", root / "hub"
        self.folder.mkdir()
        self.snapshot = self.home / "models--org--name" / "snapshots" / "0a1b2c"
        self.online = True
        self.calls = 0

    @property
    def fetched(self):
        """Names of all files that came into the cache."""
        paths = self.snapshot.rglob("*") if self.snapshot.is_dir() else ()
        return {path.relative_to(self.snapshot).as_posix() for path in paths if path.is_symlink()}

    def names(self):
        return [path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()]

    def ask(self, repo):
        self.calls += 1
        if not self.online:
            raise ConnectionError("Connection refused\nand more")
        if repo != "org/name":
            raise Refused(f"404: {repo} is not there\nRequest ID: 1")

    def bring(self, name):
        """Into the cache as the library does it: a link to the repository's blobs, which are links to shared ones."""
        data = (self.folder / name).read_bytes()
        digest = hashlib.sha256(name.encode() + data).hexdigest()
        shared, blob, link = (
            self.home / "blobs" / digest,
            self.snapshot.parents[1] / "blobs" / digest,
            self.snapshot / name,
        )
        for path in (shared, blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        shared.write_bytes(data)
        for path, target in ((blob, shared), (link, blob)):
            if not path.is_symlink():
                path.symlink_to(target)
        return str(link)

    def model_info(self, repo, *, timeout):
        assert timeout <= 10
        self.ask(repo)
        return types.SimpleNamespace(siblings=[types.SimpleNamespace(rfilename=name) for name in self.names()])

    def snapshot_download(self, repo, *, allow_patterns=None, ignore_patterns=None, local_files_only=False):
        if local_files_only:
            asked = [name for name in self.names() if fits(name, allow_patterns)]
            if not self.snapshot.is_dir() or not set(asked) <= self.fetched:
                raise FileNotFoundError("not all of it is here")
            return str(self.snapshot)
        self.ask(repo)
        for name in self.names():
            if fits(name, allow_patterns) and not fits(name, ignore_patterns or []):
                self.bring(name)
        return str(self.snapshot)

    def hf_hub_download(self, repo, name):
        self.ask(repo)
        return self.bring(name)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    made = Hub(tmp_path)
    module = types.SimpleNamespace(
        HfApi=lambda: made, hf_hub_download=made.hf_hub_download, snapshot_download=made.snapshot_download
    )
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: module if name == "huggingface_hub" else real(name))
    return made


def fill(hub, folder, inner="."):
    shutil.copytree(folder, hub.folder / inner, dirs_exist_ok=True)


def same_model(found, wanted):
    assert (found.family, found.config) == (wanted.family, wanted.config)
    assert found.leaves.keys() == wanted.leaves.keys()
    for path, leaf in found.leaves.items():
        np.testing.assert_array_equal(leaf.read(), wanted.leaves[path].read(), err_msg=".".join(path))


# --- files and folders that jserve wrote ------------------------------------------------------------------------------


def test_one_gguf_file(hub):
    write_tiny_gguf(hub.folder / "t.gguf")
    (hub.folder / "other.gguf").write_bytes(b"x")
    assert open_checkpoint("hf://org/name/t.gguf").source == "hf://org/name/t.gguf"
    assert hub.fetched == {"t.gguf"}


def test_a_repository_that_is_a_checkpoint(hub, tmp_path):
    write_tiny_gguf(tmp_path / "t.gguf")
    convert(str(tmp_path / "t.gguf"), tmp_path / "ck")
    fill(hub, tmp_path / "ck")
    (hub.folder / "params" / "x.pkl").write_bytes(b"x")
    same_model(open_checkpoint("hf://org/name"), open_checkpoint(str(tmp_path / "ck")))
    assert "params/x.pkl" not in hub.fetched


def test_a_repository_of_gguf_files(hub):
    for name in ("b.gguf", "a.gguf", "README.md"):
        (hub.folder / name).write_bytes(b"x")
    with pytest.raises(SourceError, match="holds 2 GGUF files; MODEL is one file") as error:
        open_checkpoint("hf://org/name")
    assert error.value.fix == "name it, such as hf://org/name/a.gguf"
    assert hub.fetched == set()


# --- safetensors ------------------------------------------------------------------------------------------------------


def test_a_repository_of_safetensors_is_opened_and_served(hub, tmp_path):
    write_tiny_hf(tmp_path / "m", shards=2)
    fill(hub, tmp_path / "m")
    others = (
        "pytorch_model.bin",
        "x.msgpack",
        "onnx/model.onnx",
        "original/consolidated.00.pth",
        "adapter.safetensors",
    )
    for name in (*others, "README.md"):
        (hub.folder / name).parent.mkdir(exist_ok=True)
        (hub.folder / name).write_bytes(b"x")
    checkpoint = open_checkpoint("hf://org/name")
    assert checkpoint.name == "name"
    same_model(checkpoint, open_checkpoint(str(tmp_path / "m")))
    assert hub.fetched == {path.name for path in (tmp_path / "m").iterdir()}
    assert inspect("hf://org/name").serve == "jserve serve hf://org/name"
    small = {"program_store": False, "max_num_seqs": 1, "max_num_tokens": 32, "max_model_len": 64, "num_pages": 16}
    greedy, texts = SamplingParams(temperature=0, max_tokens=4), ["hello the world 42"]
    with LLM("hf://org/name", **small, progress=SILENT) as llm:
        ids = llm.generate(texts, greedy)[0].token_ids
    with LLM(str(tmp_path / "m"), **small, progress=SILENT) as llm:
        assert ids == llm.generate(texts, greedy)[0].token_ids


def test_a_folder_of_a_repository(hub, tmp_path):
    write_tiny_hf(tmp_path / "m")
    fill(hub, tmp_path / "m", "small/m[1].ckpt")
    write_tiny_hf(hub.folder / "large")
    checkpoint = open_checkpoint("hf://org/name/small/m[1].ckpt")
    same_model(checkpoint, open_checkpoint(str(tmp_path / "m")))
    assert hub.fetched == {f"small/m[1].ckpt/{path.name}" for path in (tmp_path / "m").iterdir()}
    with pytest.raises(SourceError, match=r"org/name has no small/config.jso; did you mean hf://org/name/\S+\?"):
        open_checkpoint("hf://org/name/small/config.jso")


def test_an_encoder(hub):
    fill(hub, TINY_ENCODER)
    checkpoint, wanted = open_checkpoint("hf://org/name"), open_checkpoint(str(TINY_ENCODER))
    assert checkpoint.encoder == wanted.encoder
    same_model(checkpoint, wanted)


def test_weights_that_are_pickles_only_are_refused_unfetched(hub):
    (hub.folder / "config.json").write_text("{}")
    (hub.folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"hf://org/name holds its weights as pickles only \(pytorch_model\.bin\)"):
        open_checkpoint("hf://org/name")
    with pytest.raises(SourceError, match=r"pytorch_model\.bin is a pickle by its name"):
        open_checkpoint("hf://org/name/pytorch_model.bin")
    assert hub.fetched == set()


def test_shards_that_are_not_there_are_named(hub):
    write_tiny_hf(hub.folder / "m", shards=2)
    (hub.folder / "m" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SourceError, match=r"hf://org/name/m lacks model-00002-of-00002.safetensors, which model.safe"):
        open_checkpoint("hf://org/name/m")
    index = {"weight_map": {"a": "../../x.safetensors"}}
    (hub.folder / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.rmtree(hub.home)
    with pytest.raises(SourceError, match=r"^hf://org/name/m/model.safetensors.index.json: .* is not a name inside"):
        open_checkpoint("hf://org/name/m")


@pytest.mark.parametrize(
    ("name", "words"), [("a.safetensors", "is a part of a model"), ("config.json", "is not a .gguf file")]
)
def test_files_that_are_no_models(hub, name, words):
    (hub.folder / name).write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match=words):
        open_checkpoint(f"hf://org/name/{name}")
    assert hub.fetched == set()


# --- Orbax ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [".", "runs/first"])
def test_a_run_that_orbax_saved(hub, tmp_path, inner):
    config = LLAMA | {"vocab_size": 260}
    tree = nested(hf_weights(config))
    run = tmp_path / "run"
    save_steps(run / "steps", {1: jax.tree.map(lambda a: a + 1, tree), 3: tree})
    (run / "config.json").write_text(json.dumps(config))
    (run / "tokenizer.json").write_text(ByteTokenizer().to_json())
    fill(hub, run, inner)
    (hub.folder / inner / "steps" / "3" / "default" / "d" / "evil.pkl").write_bytes(b"x")
    (hub.folder / "notes.bin").write_bytes(b"x")
    uri = "hf://org/name/steps" if inner == "." else f"hf://org/name/{inner}/steps"
    checkpoint = open_checkpoint(uri)
    same_model(checkpoint, open_checkpoint(str(run / "steps")))
    assert checkpoint.tokenizer is not None
    assert checkpoint.name == ("name" if inner == "." else "first")
    assert inspect(uri).steps.finished == ["3", "1"]
    assert not {name for name in hub.fetched if "/1/" in name and "/d/" in name}
    assert not {name for name in hub.fetched if name.endswith((".pkl", ".bin"))}
    same_model(open_checkpoint(f"{uri}/3"), checkpoint)


def test_what_is_no_checkpoint(hub):
    (hub.folder / "README.md").write_text("hello")
    with pytest.raises(SourceError, match=r"hf://org/name holds no checkpoint: looked for jserve\.json, \.safetensors"):
        open_checkpoint("hf://org/name")


# --- what cannot be had -----------------------------------------------------------------------------------------------


def test_what_the_hub_refuses_is_one_line(hub):
    with pytest.raises(SourceError, match=r"cannot fetch hf://org/other: 404: org/other is not there$"):
        open_checkpoint("hf://org/other")


def test_without_a_network_the_cache_is_taken(hub, tmp_path):
    write_tiny_hf(tmp_path / "m")
    fill(hub, tmp_path / "m")
    (hub.folder / "pytorch_model.bin").write_bytes(b"x")  # which is never in the cache
    hub.online = False
    for uri in ("hf://org/name", "hf://org/name/t.gguf"):
        with pytest.raises(
            SourceError, match=rf"cannot fetch {uri}: the Hub cannot be reached \(Connection refused\), "
        ):
            open_checkpoint(uri)
    assert hub.calls == 2  # nothing is tried again and again
    hub.online = True
    open_checkpoint("hf://org/name")
    hub.online = False
    same_model(open_checkpoint("hf://org/name"), open_checkpoint(str(tmp_path / "m")))
    with pytest.raises(SourceError, match=r"cannot be reached .*, and it is not in its cache"):
        open_checkpoint("hf://org/name/t.gguf")


def test_without_the_library_the_install_line_is_given(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(SourceError, match="needs huggingface_hub") as error:
        open_checkpoint("hf://org/name")
    assert error.value.fix == "pip install huggingface_hub"
