"""What is said of a checkpoint, for people and as JSON, and which damage --check finds."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jserve.checkpoints import digests
from jserve.checkpoints.convert import convert
from jserve.checkpoints.inspection.inspect import inspect
from jserve.cli.main import main
from jserve.errors import CheckpointError, SourceError
from jserve.testing.gguf import write_tiny_gguf
from jserve.testing.hf import write_tiny_hf


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
    assert "  layout         GGUF file (version 3, F32, Q8_0)" in lines
    assert f"  files          my model.gguf, {source.stat().st_size / 1e6:.1f} MB" in lines
    assert "  family         llama" in lines
    assert "  tokenizer      272 tokens, EOS [2], BOS 1 (not added)" in lines
    assert "  chat template  there" in lines
    assert "  defaults       temperature 0.5" in lines
    assert any(line.split() == ["blk.0-1.attn_q.weight", "Q8_0", "[64,", "32]"] for line in lines)
    assert any(line.split() == ["token_embd.weight", "Q8_0", "[272,", "32]"] for line in lines)


def test_a_folder_as_json(folder, source):
    report = json.loads(json.dumps(asdict(inspect(str(folder)))))
    assert report["layout"] == "Orbax checkpoint (OCDBT) with jserve.json"
    assert report["serve"] == f"jserve serve {folder}"
    assert report["source"] == str(source)
    assert report["config"]["num_layers"] == 2
    embed = {
        "name": "token_embedding.weight",
        "shape": [272, 32],
        "dtype": "float32",
        "nbytes": 34816,
        "parameter": True,
    }
    assert embed in report["arrays"]
    assert len(report["arrays"]) == 21
    assert report["parameters"] * 4 == report["nbytes"] == sum(array["nbytes"] for array in report["arrays"])
    assert report["digests"].startswith("not checked")


def test_a_file_and_its_conversion_are_described_alike(folder, source):
    one, other = asdict(inspect(str(source))), asdict(inspect(str(folder)))
    differ = {key for key in one if one[key] != other[key]}
    assert differ == {"model", "path", "layout", "digests", "serve", "files", "arrays", "nbytes"}


def test_check_says_that_all_is_well(folder, source):
    assert inspect(str(folder), check=True).digests.startswith("all ")
    assert inspect(str(source), check=True).digests.endswith("all values finite")


def test_check_finds_a_single_changed_bit_in_any_file(folder, monkeypatch):
    monkeypatch.setattr(digests, "_HASHED_BYTES", 0)
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


def test_a_hugging_face_folder_in_shards(tmp_path):
    write_tiny_hf(tmp_path / "m", dtype="bfloat16", shards=2)
    (tmp_path / "m" / "tokenizer.json").unlink()
    report = inspect(str(tmp_path / "m"), check=True)
    assert report.layout == "Hugging Face folder (safetensors, bfloat16)"
    assert [file.name for file in report.files] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert report.nbytes == 2 * report.parameters
    assert [(part.what, part.effect) for part in report.missing] == [
        ("tokenizer", "only token ids are served, no text")
    ]
    assert not report.failed
    lines = str(report).splitlines()
    assert any(
        line.split() == ["model.layers.0-1.self_attn.q_proj.weight", "bfloat16", "[64,", "32]"] for line in lines
    )
    assert (
        f"  fix: put into {tmp_path / 'm'} its tokenizer.json (or tokenizer.model) and tokenizer_config.json" in lines
    )
    assert lines[-1] == f"jserve serve {tmp_path / 'm'}"


def test_what_is_not_built_is_described_and_fails(tmp_path, capsys):
    write_tiny_hf(tmp_path / "m", settings={"model_type": "mamba"})
    report = inspect(str(tmp_path / "m"))
    assert (report.family, report.serve, report.failed, report.problem.code) == (None, None, True, "JS-CKP-03")
    assert "has the model_type 'mamba'; read from Hugging Face folders: " in report.problem.message
    assert (len(report.arrays), report.parameters * 4) == (21, report.nbytes)
    write_tiny_gguf(tmp_path / "part.gguf", metadata={"split.count": 3, "split.no": 1})
    assert main(["inspect", "--json", "--check", str(tmp_path / "part.gguf")]) == 4
    report = json.loads(capsys.readouterr().out)
    assert report["layout"] == "GGUF file (version 3, F32, part 2 of 3)"
    assert report["problem"]["fix"] == "join the parts into one file with llama-gguf-split --merge"
    assert report["serve"] is None
    assert report["digests"].startswith("sha256 ")


def test_a_part_whose_number_is_none_is_described(tmp_path):
    write_tiny_gguf(tmp_path / "part.gguf", metadata={"split.count": 3, "split.no": "two"})
    assert inspect(str(tmp_path / "part.gguf")).layout == "GGUF file (version 3, F32, part 'two' of 3)"


def test_names_with_braces_stand_beside_those_with_numbers(tmp_path):
    write_tiny_hf(tmp_path / "m", settings={"model_type": "mamba"})
    q = np.zeros((2, 3), np.float32)
    save_file({"layers.{}.q": q, "layers.0.q": q, "layers.1.q": q, "{}": q}, tmp_path / "m" / "model.safetensors")
    lines = str(inspect(str(tmp_path / "m"))).splitlines()
    assert [line.split()[0] for line in lines if "float32 [2, 3]" in line] == ["layers.0-1.q", "layers.{}.q", "{}"]


def test_an_encoder(tmp_path):
    shutil.copytree(Path(__file__).parents[2] / "oracle" / "data" / "tiny_bert", tmp_path / "tiny")
    report = inspect(str(tmp_path / "tiny"))
    assert asdict(report.encoder) == {
        "pooling": "mean",
        "normalized": True,
        "dimensions": 32,
        "max_tokens": report.encoder.max_tokens,
        "lowercase": False,
    }
    lines = str(report).splitlines()
    vectors = f"32 dimensions, mean pooling, normalized; texts of up to {report.encoder.max_tokens} tokens"
    assert f"  vectors        {vectors}" in lines
    assert not [line for line in lines if "chat template" in line]


def test_names_that_a_terminal_would_obey_are_escaped(tmp_path, capsys):
    write_tiny_hf(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    name = "\x1b[2Jmodel\x9b31m\u202e\nerror JS-CKP-01: not from jserve"
    save_file(load_file(path) | {name: np.zeros(3, np.float32)}, path)
    assert main(["inspect", str(tmp_path / "m")]) == 4
    shown = capsys.readouterr()
    assert r"    \x1b[2Jmodel\x9b31m\u202e\nerror JS-CKP-01: not from jserve" in shown.out
    assert main(["convert", str(tmp_path / "m"), str(tmp_path / "out")]) == 4
    refused = capsys.readouterr()
    assert r"\x1b[2Jmodel" in refused.err
    for text in (shown.out, shown.err, refused.err):
        assert not {"\x1b", "\x9b", "\u202e"} & set(text)


def test_a_path_that_is_not_there_has_a_near_one(source, tmp_path):
    with pytest.raises(SourceError, match=r"my modle\.gguf does not exist; did you mean .*my model\.gguf\?"):
        inspect(str(tmp_path / "my modle.gguf"))
