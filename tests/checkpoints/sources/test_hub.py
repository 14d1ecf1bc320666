"""hf:// with a stand-in for huggingface_hub: which files are asked for, and what is said of the rest."""

import importlib
import types

import pytest

from jserve.checkpoints.convert import convert
from jserve.checkpoints.open import open_checkpoint
from jserve.errors import SourceError, UnsupportedModel
from jserve.testing.gguf import write_tiny_gguf


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub of one repository, org/name, whose files lie in the folder that is returned."""
    folder = tmp_path / "repo"
    folder.mkdir()

    class HfApi:
        def list_repo_files(self, repo):
            if repo != "org/name":
                raise ConnectionError(f"404: {repo} is not there\nRequest ID: 1")
            return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]

    def download(repo, name):
        if not (folder / name).exists():
            raise FileNotFoundError(f"404: no {name} in {repo}")
        return str(folder / name)

    module = types.SimpleNamespace(HfApi=HfApi, hf_hub_download=download, snapshot_download=lambda repo: str(folder))
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: module if name == "huggingface_hub" else real(name))
    return folder


def test_one_gguf_file(hub):
    write_tiny_gguf(hub / "t.gguf")
    assert open_checkpoint("hf://org/name/t.gguf").source == "hf://org/name/t.gguf"


def test_a_repository_that_is_a_checkpoint(hub, tmp_path):
    write_tiny_gguf(tmp_path / "t.gguf")
    hub.rmdir()
    convert(str(tmp_path / "t.gguf"), hub)
    assert open_checkpoint("hf://org/name").path == hub


def test_a_repository_of_gguf_files(hub):
    for name in ("b.gguf", "a.gguf", "README.md"):
        (hub / name).write_bytes(b"x")
    with pytest.raises(SourceError, match="holds 2 GGUF files; MODEL is one file") as error:
        open_checkpoint("hf://org/name")
    assert error.value.fix == "name it, such as hf://org/name/a.gguf"


def test_a_repository_of_safetensors(hub):
    (hub / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match="reading safetensors is not built yet"):
        open_checkpoint("hf://org/name")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("hf://org/other", "cannot fetch hf://org/other: 404: org/other is not there$"),
        ("hf://org/name/none.gguf", r"cannot fetch hf://org/name: 404: no none\.gguf"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub, model, words):
    with pytest.raises(SourceError, match=words):
        open_checkpoint(model)


def test_without_the_library_the_install_line_is_given(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(SourceError, match="needs huggingface_hub") as error:
        open_checkpoint("hf://org/name")
    assert error.value.fix == "pip install 'jserve[hf]'"
