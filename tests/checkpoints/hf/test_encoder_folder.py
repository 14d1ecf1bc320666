"""Folders as sentence-transformers writes them: what is read, and what is refused in words."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jserve.checkpoints.convert import convert
from jserve.checkpoints.encoder import EncoderSettings
from jserve.checkpoints.inspection.inspect import inspect
from jserve.checkpoints.open import open_checkpoint
from jserve.checkpoints.origin import read_origin
from jserve.checkpoints.sources.local import LocalFolder
from jserve.errors import CheckpointError, SourceError, UnsupportedModel
from jserve.models.bert import BertConfig
from jserve.models.pooling import Pooling
from jserve.progress import SILENT
from jserve.serving.embed_texts import TextPreparer

TINY = Path(__file__).parents[2] / "oracle" / "data" / "tiny_bert"
MEAN = Pooling(how="mean", normalize=True)


@pytest.fixture
def folder(tmp_path):
    target = tmp_path / "tiny"
    shutil.copytree(TINY, target)
    return target


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_everything_is_read(folder):
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.name == "tiny"
    assert checkpoint.family == "bert"
    assert checkpoint.config == BertConfig(
        vocab_size=72, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, max_position=40
    )
    assert checkpoint.encoder == EncoderSettings(pooling=MEAN, max_tokens=24)
    assert checkpoint.tokenizer.vocab_size == 65
    tensors = load_file(TINY / "model.safetensors")
    query = tensors["encoder.layer.1.attention.self.query.weight"]
    np.testing.assert_array_equal(checkpoint.leaves["layers", "1", "q"].read(), query.reshape(4, 8, 32))
    out = tensors["encoder.layer.0.attention.output.dense.weight"]
    np.testing.assert_array_equal(checkpoint.leaves["layers", "0", "o"].read(), out.reshape(32, 4, 8))


def test_inspect(folder):
    report = inspect(str(folder), check=True)
    assert report.family == "bert"
    assert report.digests == "all values finite"
    assert report.serve.endswith(f"jserve serve {folder}")


def test_old_names_a_prefix_and_heads_of_other_tasks(folder):
    tensors = load_file(folder / "model.safetensors")
    old = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    old |= {"cls.predictions.bias": np.zeros(72, np.float32), "bert.embeddings.position_ids": np.arange(40)[None]}
    save_file(old, folder / "model.safetensors")
    found, expected = open_checkpoint(str(folder)).leaves, open_checkpoint(str(TINY)).leaves
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(found[path].read(), leaf.read())


@pytest.mark.parametrize(
    ("name", "values", "encoder"),
    [
        ("sentence_bert_config.json", {"max_seq_length": 12}, EncoderSettings(pooling=MEAN, max_tokens=12)),
        (
            "sentence_bert_config.json",
            {"do_lower_case": True},
            EncoderSettings(pooling=MEAN, max_tokens=24, lowercase=True),
        ),
        ("sentence_bert_config.json", {"max_seq_length": None}, EncoderSettings(pooling=MEAN, max_tokens=40)),
        (
            "1_Pooling/config.json",
            {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True},
            EncoderSettings(pooling=Pooling(how="cls", normalize=True), max_tokens=24),
        ),
    ],
)
def test_settings(folder, name, values, encoder):
    change(folder / name, **values)
    assert open_checkpoint(str(folder)).encoder == encoder


def test_without_modules_it_is_pooled_by_mean(folder):
    for name in ("modules.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 30}')
    plain = Pooling(how="mean", normalize=False)
    assert open_checkpoint(str(folder)).encoder == EncoderSettings(pooling=plain, max_tokens=30)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1e30}')
    assert open_checkpoint(str(folder)).encoder == EncoderSettings(pooling=plain, max_tokens=40)


def test_all_that_is_not_built_is_said_at_once(folder):
    change(folder / "config.json", hidden_act="relu", position_embedding_type="relative_key", a_new_thing=3)
    with pytest.raises(UnsupportedModel) as caught:
        open_checkpoint(str(folder))
    for words in (
        "hidden_act = 'relu' (built: 'gelu')",
        "position_embedding_type = 'relative_key' (built: 'absolute')",
        "a_new_thing = 3",
    ):
        assert words in caught.value.message


def test_all_of_the_settings_too(folder):
    change(folder / "1_Pooling" / "config.json", pooling_mode_max_tokens=True, word_embedding_dimension=16)
    change(folder / "sentence_bert_config.json", max_seq_length=41)
    (folder / "config_sentence_transformers.json").write_text('{"default_prompt_name": "query"}')
    with pytest.raises(UnsupportedModel) as caught:
        open_checkpoint(str(folder))
    for words in (
        "pools by pooling_mode_max_tokens, pooling_mode_mean_tokens; built: one of",
        "pools vectors of 16; the model's have 32",
        "max_seq_length of sentence_bert_config.json is 41; the model has positions for 1 to 40 tokens",
        "default prompt 'query'",
    ):
        assert words in caught.value.message


def test_other_modules_are_refused_by_name(folder):
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModel, match=r"'Normalize', 'Dense'\]; built: Transformer, Pooling"):
        open_checkpoint(str(folder))


def test_tensors_that_do_not_fit_are_all_named(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.bias"]
    tensors["embeddings.LayerNorm.bias"] = np.zeros(7, np.float32)
    tensors["stranger"] = np.zeros(1, np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder))
    for words in ("encoder.layer.1.output.dense.bias, it is missing", "found [7]", "tensor stranger [1]"):
        assert words in caught.value.message


def test_pickles_are_never_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(SourceError, match=r"pickles only \(pytorch_model.bin\).* never read"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("tokenizer.json", CheckpointError, "has no tokenizer.json"),
        ("1_Pooling/config.json", CheckpointError, "config.json is missing; modules.json names it"),
        ("model.safetensors", SourceError, "holds no checkpoint: looked for"),
    ],
)
def test_files_that_are_missing(folder, name, error, words):
    (folder / name).unlink()
    with pytest.raises(error, match=words):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "modules.json", "sentence_bert_config.json", "model.safetensors"])
def test_files_that_are_damaged(folder, name):
    (folder / name).write_bytes(b"\x00\x01")
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(str(folder))


def test_a_module_may_not_lead_out(folder):
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = "../1_Pooling"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(SourceError, match="not a name inside"):
        open_checkpoint(str(folder))


def test_the_settings_of_the_modules_belong_to_what_is_converted(folder):
    found = LocalFolder(path=folder, kind="hf")
    origin = read_origin(found, progress=SILENT)
    flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    change(folder / "1_Pooling" / "config.json", **flags)
    with pytest.raises(SourceError, match=r"1_Pooling/config\.json changed while it was converted"):
        origin.check_unchanged()
    assert read_origin(found, progress=SILENT).sha256 != origin.sha256


@pytest.mark.parametrize("pooling", [MEAN, Pooling(how="cls", normalize=False)])
def test_there_and_back_by_orbax(folder, tmp_path, pooling):
    if not pooling.normalize:
        modules = json.loads((folder / "modules.json").read_text())
        (folder / "modules.json").write_text(json.dumps(modules[:2]))
        flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **flags}))
    convert(str(folder), tmp_path / "orbax")
    convert(str(tmp_path / "orbax"), tmp_path / "back", to="safetensors")
    one, *others = (open_checkpoint(str(path)) for path in (folder, tmp_path / "orbax", tmp_path / "back"))
    assert one.encoder.pooling == pooling
    for other in others:
        assert (other.config, other.encoder) == (one.config, one.encoder)
        assert other.leaves.keys() == one.leaves.keys()
        for path, leaf in one.leaves.items():
            np.testing.assert_array_equal(other.leaves[path].read(), leaf.read())
        theirs, ours = (TextPreparer(c.tokenizer, max_tokens=6, lowercase=False) for c in (other, one))
        assert theirs.prepare(["the quick brown fox"]) == ours.prepare(["the quick brown fox"])
    settings = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())
    assert settings["pad_token"] == "[PAD]"


@pytest.mark.parametrize(("mode", "how"), [("mean", "mean"), ("cls", "cls"), ("lasttoken", None)])
def test_the_newer_spelling_of_pooling(folder, mode, how):
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, "pooling_mode": mode})
    )
    if how is None:
        with pytest.raises(UnsupportedModel, match="pools by lasttoken; built: one of"):
            open_checkpoint(str(folder))
    else:
        assert open_checkpoint(str(folder)).encoder.pooling.how == how
