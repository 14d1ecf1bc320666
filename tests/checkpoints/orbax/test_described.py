"""A run whose model jserve.json describes is served with all that jserve.json says: BOS, ends, template, defaults."""

import json
import shutil
from pathlib import Path

import pytest
from saving import save_steps
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from jserve.checkpoints.arrays.tree import nest
from jserve.checkpoints.convert import convert
from jserve.checkpoints.encoder import EncoderSettings
from jserve.checkpoints.manifest import read_manifest
from jserve.checkpoints.orbax.open import open_orbax
from jserve.checkpoints.own.folder import read_own_text
from jserve.checkpoints.written import open_written
from jserve.errors import CheckpointError, UnsupportedModel
from jserve.testing.gguf import CHAT_TEMPLATE, TINY_TOKENS, write_tiny_gguf

TINY_BERT = Path(__file__).parents[2] / "oracle" / "data" / "tiny_bert"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A GGUF file as ``jserve convert`` wrote it, and a step of a trainer in ``steps``."""
    base = tmp_path_factory.mktemp("run")
    metadata = {"tokenizer.ggml.add_bos_token": True, "general.sampling.temp": 0.5}
    leaves = write_tiny_gguf(base / "t.gguf", metadata=metadata)
    convert(str(base / "t.gguf"), base / "DST")
    save_steps(base / "DST" / "steps", {100: nest(leaves)})
    return base / "DST"


@pytest.fixture
def copy(run, tmp_path):
    shutil.copytree(run, tmp_path / "DST")
    return tmp_path / "DST"


def said(checkpoint):
    tokenizer = checkpoint.tokenizer
    return {
        "bos": None if tokenizer is None else (tokenizer.bos_id, tokenizer.add_bos),
        "eos": (checkpoint.eos_ids, checkpoint.eos_ids if tokenizer is None else tokenizer.eos_ids),
        "template": checkpoint.chat_template,
        "generation": checkpoint.generation,
    }


SAID = {"bos": (1, True), "eos": ((2,), (2,)), "template": CHAT_TEMPLATE, "generation": {"temperature": 0.5}}


def test_steps_of_a_converted_model_say_what_it_says(run):
    checkpoint = open_orbax(run / "steps", source="x")
    assert said(checkpoint) == said(open_written(run)) == SAID
    assert checkpoint.tokenizer.encode("hello", add_special=True)[0] == 1


def test_a_module_of_ones_own_has_the_tokenizer_as_the_manifest_tells(run):
    for named, where in ((None, [run / "steps", run]), (run, ()), (run / "tokenizer.json", ())):
        text, _ = read_own_text(named, where)
        tokenizer = text.tokenizer
        assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids, text.chat_template) == (
            1,
            True,
            (2,),
            CHAT_TEMPLATE,
        )


def test_files_beside_it_are_heard_first(copy):
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": TINY_TOKENS[1]}))
    (copy / "chat_template.jinja").write_text("mine")
    (copy / "steps" / "generation_config.json").write_text('{"top_k": 3}')
    assert said(open_orbax(copy / "steps", source="x")) == {
        "bos": (1, True),
        "eos": ((1,), (1,)),
        "template": "mine",
        "generation": {"top_k": 3},
    }


def test_defaults_of_other_models_in_the_folder_above_are_not_taken(copy):
    (copy.parent / "generation_config.json").write_text('{"top_k": 3}')
    assert open_orbax(copy / "steps", source="x").generation == {"temperature": 0.5}


def test_a_tokenizer_that_lies_with_the_steps(copy):
    shutil.move(copy / "tokenizer.json", copy / "steps" / "tokenizer.json")
    assert said(open_orbax(copy / "steps", source="x")) == SAID


def test_without_a_tokenizer_the_ends_are_those_of_the_manifest(copy):
    (copy / "tokenizer.json").unlink()
    assert open_orbax(copy / "steps", source="x").eos_ids == (2,)


def test_a_tokenizer_without_the_ids_that_the_manifest_names_is_refused(copy):
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    (copy / "tokenizer.json").write_text(backend.to_str())
    with pytest.raises(CheckpointError, match=r"DST/jserve.json does not fit the tokenizer in .*DST: .* name \[2, 1\]"):
        open_orbax(copy / "steps", source="x")


def test_an_encoder_has_its_settings_from_the_manifest(tmp_path):
    convert(str(TINY_BERT), tmp_path / "DST")
    leaves = {path: leaf.read() for path, leaf in open_written(tmp_path / "DST").leaves.items()}
    save_steps(tmp_path / "DST" / "steps", {100: nest(leaves)})
    encoder = read_manifest(tmp_path / "DST").encoder
    assert isinstance(encoder, EncoderSettings)
    assert open_orbax(tmp_path / "DST" / "steps", source="x").encoder == encoder


def rewrite(folder, **values):
    path = folder / "jserve.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"config": {"width": 3}}, r"LlamaConfig has unknown \['width'\]"),
        ({"family": "none"}, "model family 'none' is not built"),
    ],
)
@pytest.mark.parametrize("read", [lambda f: open_orbax(f / "steps", source="x"), open_written], ids=["steps", "itself"])
def test_a_model_that_is_not_built_is_refused_with_the_file_that_names_it(copy, read, values, words):
    rewrite(copy, **values)
    with pytest.raises(UnsupportedModel, match=f"^{copy}/jserve.json: {words}"):
        read(copy)


def test_a_manifest_of_another_format_is_refused(copy):
    rewrite(copy, format=2)
    with pytest.raises(CheckpointError, match=f"{copy}/jserve.json has format 2"):
        open_orbax(copy / "steps", source="x")
