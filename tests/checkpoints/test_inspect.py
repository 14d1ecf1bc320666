"""What is said of a checkpoint, for people and as JSON, and which damage --check finds."""

import json
from dataclasses import asdict

import pytest

from jserve.checkpoints import manifest
from jserve.checkpoints.convert import convert
from jserve.checkpoints.inspect import inspect
from jserve.errors import CheckpointError
from jserve.testing.gguf import write_tiny_gguf


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "my model.gguf"
    write_tiny_gguf(path, kind="Q8_0", metadata={"general.sampling.temp": 0.5})
    return path


@pytest.fixture
def folder(source, tmp_path):
    convert(str(source), tmp_path / "ck")
    return tmp_path / "ck"


def test_a_gguf_file_for_reading(source):
    text = str(inspect(str(source)))
    lines = text.splitlines()
    assert lines[0] == "my model"
    assert lines[-1] == f"jserve serve '{source}'"
    assert "  layout         GGUF file (F32, Q8_0)" in lines
    assert "  family         llama" in lines
    assert "  tokenizer      272 tokens, EOS [2], BOS 1 (not added)" in lines
    assert "  chat template  there" in lines
    assert "  defaults       temperature 0.5" in lines
    assert any(line.split() == ["layers.0-1.q", "float32", "[4,", "16,", "32]"] for line in lines)
    assert any(line.split() == ["embed.weight", "float32", "[272,", "32]"] for line in lines)


def test_a_folder_as_json(folder, source):
    report = json.loads(json.dumps(asdict(inspect(str(folder)))))
    assert report["layout"] == "Orbax checkpoint (OCDBT) with jserve.json"
    assert report["serve"] == f"jserve serve {folder}"
    assert report["source"] == str(source)
    assert report["config"]["num_layers"] == 2
    assert report["arrays"][0] == {"name": "embed.weight", "shape": [272, 32], "dtype": "float32", "nbytes": 34816}
    assert len(report["arrays"]) == 21
    assert report["parameters"] * 4 == report["nbytes"] == sum(array["nbytes"] for array in report["arrays"])
    assert report["digests"].startswith("not checked")


def test_a_file_and_its_conversion_are_described_alike(folder, source):
    one, other = asdict(inspect(str(source))), asdict(inspect(str(folder)))
    differ = {key for key in one if one[key] != other[key]}
    assert differ == {"model", "path", "layout", "digests", "serve"}


def test_check_says_that_all_is_well(folder, source):
    assert inspect(str(folder), check=True).digests.startswith("all ")
    assert inspect(str(source), check=True).digests.endswith("all values finite")


def test_check_finds_a_single_changed_bit_in_any_file(folder, monkeypatch):
    monkeypatch.setattr(manifest, "_HASHED_BYTES", 0)
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "jserve.json"):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=f"the contents of {path} are not those"):
            inspect(str(folder), check=True)
        path.write_bytes(whole)


def test_missing_parts_are_named(folder):
    data = json.loads((folder / "jserve.json").read_text())
    del data["files"]["tokenizer.json"]
    data["chat_template"] = None
    (folder / "jserve.json").write_text(json.dumps(data))
    lines = str(inspect(str(folder))).splitlines()
    assert "  tokenizer      missing" in lines
    assert "  chat template  missing" in lines


def test_arrays_that_do_not_fit_the_config_are_named(folder):
    data = json.loads((folder / "jserve.json").read_text())
    data["config"]["num_layers"] = 3
    (folder / "jserve.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"layers\.2\.q is missing: wanted \[4, 16, 32\]"):
        inspect(str(folder))
