"""A Hugging Face folder is served as it is: values, settings, text, and what is refused before a start."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jserve import LLM, SamplingParams
from jserve.checkpoints.arrays.tree import flatten
from jserve.checkpoints.hf.folder import open_hf
from jserve.checkpoints.hf.generation import named_ends
from jserve.checkpoints.inspection.inspect import inspect
from jserve.checkpoints.open import open_checkpoint
from jserve.config import ServeConfig
from jserve.errors import CheckpointError, SourceError, UnsupportedModel
from jserve.load.mesh import build_mesh
from jserve.load.source import find_source
from jserve.models.naive import naive_generate
from jserve.testing.gguf import CHAT_TEMPLATE, TINY_TOKENS
from jserve.testing.hf import write_tiny_hf
from sharding.mesh import MeshSpec
from sharding.rules import param_shardings


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("xdg")))


SMALL = {"program_store": False, "max_num_seqs": 1, "max_num_tokens": 32, "max_model_len": 64, "num_pages": 16}


def opened(folder):
    return open_hf(folder, source="x")


class Told:
    """Progress that keeps its notes."""

    def __init__(self):
        self.notes = []

    def note(self, message):
        self.notes.append(message)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("mesh", ["", "tensor=2", "data=2,tensor=2"])
@pytest.mark.parametrize(("stored", "dtype"), [("float32", jnp.float32), ("bfloat16", jnp.float32)])
def test_straight_onto_a_mesh(tmp_path, shards, mesh, stored, dtype):
    leaves = write_tiny_hf(tmp_path / "m", dtype=stored, shards=shards)
    checkpoint = open_checkpoint(str(tmp_path / "m"))
    assert checkpoint.path == tmp_path / "m"
    _, state = checkpoint.abstract(dtype)
    shardings = param_shardings(state, MeshSpec.parse(mesh).build())
    asked = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nnx.to_pure_dict(state),
        shardings,
    )
    wanted, found = flatten(asked), flatten(checkpoint.restore(asked))
    assert found.keys() == leaves.keys()
    for name, leaf in found.items():
        assert leaf.sharding == wanted[name].sharding
        np.testing.assert_array_equal(np.asarray(leaf), leaves[name].astype(dtype), err_msg=str(name))


def test_generate_equals_the_naive_model(tmp_path):
    write_tiny_hf(tmp_path / "m", dtype="bfloat16", seed=5)
    checkpoint = opened(tmp_path / "m")
    graphdef, abstract = checkpoint.abstract(jnp.float32)
    prompt = checkpoint.tokenizer.encode("hello the world 42", add_special=True)
    naive = naive_generate(graphdef, checkpoint.restore(abstract), prompt, 12)
    assert 2 not in naive  # EOS
    with LLM(str(tmp_path / "m"), mesh="tensor=2", **SMALL) as llm:
        out = llm.generate(["hello the world 42"], SamplingParams(temperature=0, max_tokens=12))
    assert list(out[0].token_ids) == naive


def test_what_the_files_say(tmp_path):
    write_tiny_hf(tmp_path / "m", generation={"temperature": 0.7, "top_k": 5, "top_p": None, "eos_token_id": [2, 0]})
    checkpoint = opened(tmp_path / "m")
    assert (checkpoint.name, checkpoint.family) == ("m", "llama")
    assert checkpoint.layout == "Hugging Face folder (safetensors, float32)"
    assert checkpoint.generation == {"temperature": 0.7, "top_k": 5}
    assert checkpoint.eos_ids == (2, 0)
    assert checkpoint.chat_template == CHAT_TEMPLATE
    assert checkpoint.tokenizer.vocab_size == len(TINY_TOKENS)
    assert checkpoint.template().render([{"role": "user", "content": "hi"}]).startswith("<|im_start|>user\nhi")


@pytest.mark.parametrize(
    ("generation", "wanted"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"min_p": 0.1, "top_k": 3}, {"min_p": 0.1, "top_k": 3}),
        ({}, {}),
    ],
)
def test_sampling_defaults(tmp_path, generation, wanted):
    write_tiny_hf(tmp_path / "m", generation=generation)
    assert opened(tmp_path / "m").generation == wanted


@pytest.mark.parametrize("do_sample", [True, False])
def test_sampling_that_is_not_built_is_told_at_the_start_and_by_inspect(tmp_path, do_sample):
    """transformers goes by these in greedy decoding too, so its ids differ."""
    said = {"repetition_penalty": 1.1, "suppress_tokens": [3, 4]}
    neutral = {"no_repeat_ngram_size": 0, "num_beams": 1, "typical_p": None, "bad_words_ids": [], "use_cache": True}
    write_tiny_hf(tmp_path / "m", generation={"do_sample": do_sample, "temperature": 0.5, **said, **neutral})
    report = inspect(str(tmp_path / "m"))
    assert report.generation == {"temperature": 0.5 if do_sample else 0.0}
    assert report.not_built == said
    words = "repetition_penalty 1.1, suppress_tokens [3, 4]"
    assert f"  not built      {words}; elsewhere other tokens may be chosen" in str(report).splitlines()
    told = Told()
    config = ServeConfig(model=str(tmp_path / "m"))
    source = find_source(config, build_mesh("")[1], model=None, tokenizer=None, progress=told)
    assert source.defaults.temperature == report.generation["temperature"]
    assert told.notes.count(f"{config.model} sets {words}: not built, so elsewhere other tokens may be chosen") == 1


def test_sampling_that_is_neutral_is_not_told(tmp_path):
    write_tiny_hf(tmp_path / "m", generation={"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "top_k": 5})
    report = inspect(str(tmp_path / "m"))
    assert (report.generation, report.not_built) == ({"top_k": 5}, {})
    assert "not built" not in str(report)


@pytest.mark.parametrize("value", ["warm", True, 10**400])
def test_sampling_defaults_of_a_wrong_kind(tmp_path, value):
    write_tiny_hf(tmp_path / "m", generation={"temperature": value})
    with pytest.raises(CheckpointError, match=r"temperature is .*; it must be a finite number"):
        opened(tmp_path / "m")


def test_ends_without_a_tokenizer(tmp_path):
    write_tiny_hf(tmp_path / "m", generation={"eos_token_id": [5, 2]})
    (tmp_path / "m" / "tokenizer.json").unlink()
    assert opened(tmp_path / "m").eos_ids[:2] == (5, 2)
    of_a_part = {"eos_token_id": 5, "text_config": {"eos_token_id": [7, 5]}}
    assert named_ends({Path("generation_config.json"): {}, Path("config.json"): of_a_part}, vocab_size=8) == (5, 7)


@pytest.mark.parametrize("end", [-1, 100_000, "</s>", True])
def test_ends_that_are_no_ids_are_refused_without_a_tokenizer_too(tmp_path, end):
    write_tiny_hf(tmp_path / "m", generation={"eos_token_id": [2, end]})
    (tmp_path / "m" / "tokenizer.json").unlink()
    words = rf"{tmp_path}/m/generation_config.json: eos_token_id names .*, which is no token id of the vocabulary"
    with pytest.raises(CheckpointError, match=words):
        opened(tmp_path / "m")


@pytest.mark.parametrize("head", [True, False])
def test_a_tied_head_may_be_written_out_or_not(tmp_path, head):
    leaves = write_tiny_hf(tmp_path / "m", tie_embeddings=True)
    assert ("head",) not in leaves
    if head:
        path = tmp_path / "m" / "model.safetensors"
        tensors = load_file(path)
        save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, path)
    assert opened(tmp_path / "m").leaves.keys() == leaves.keys()


def test_an_untied_head_that_is_absent_is_refused_and_all_that_is_wrong_is_told(tmp_path):
    write_tiny_hf(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    tensors["model.norm.weight"] = np.zeros(7, np.float32)
    tensors["model.extra"] = np.zeros(3, np.float32)
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as error:
        opened(tmp_path / "m")
    assert sorted(line.strip() for line in error.value.message.splitlines()[1:]) == [
        "head: wanted [272, 32] in tensor lm_head.weight, it is missing",
        "norm: wanted [32] in tensor model.norm.weight, found [7]",
        "tensor model.extra [3] float32 belongs to no parameter",
    ]


def test_rows_beyond_the_tokenizer_are_never_chosen(tmp_path):
    """Their logits are made the highest by far."""
    leaves = write_tiny_hf(tmp_path / "m", vocab_size=len(TINY_TOKENS) + 16)
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][len(TINY_TOKENS) :] = 100 * tensors["lm_head.weight"][5]
    save_file(tensors, path)
    checkpoint = opened(tmp_path / "m")
    assert checkpoint.config.vocab_size == len(TINY_TOKENS) + 16 == leaves["head",].shape[0]
    assert checkpoint.tokenizer.vocab_size == len(TINY_TOKENS)
    prompts = ["hello", "a tall", "0", "hello"]
    params = [SamplingParams(temperature=t, seed=i, max_tokens=30, logprobs=5) for i, t in enumerate((0, 0, 1, 5))]
    with LLM(str(tmp_path / "m"), **SMALL) as llm:
        out = llm.generate(prompts, params)
    for one in out:
        assert one.token_ids
        assert max(one.token_ids) < len(TINY_TOKENS)
        assert [entry.token_id for entry in one.logprobs] == one.token_ids
        assert all(token < len(TINY_TOKENS) for entry in one.logprobs for token, _ in entry.top)
        assert all(len(entry.top) == 5 for entry in one.logprobs)
        # They share all of the probability: what is padding has none.
        assert all(np.exp([logprob for _, logprob in entry.top]).sum() > 0.02 for entry in one.logprobs)


def test_more_tokens_than_rows_are_refused(tmp_path):
    write_tiny_hf(tmp_path / "m", vocab_size=len(TINY_TOKENS) - 1)
    with pytest.raises(CheckpointError, match="the tokenizer's 272 tokens do not fit the embedding table of 271 rows"):
        opened(tmp_path / "m")


@pytest.mark.parametrize("kind", ["nothing_known", None, 3])
def test_an_unknown_model_type_names_the_known_and_the_way_out(tmp_path, kind):
    write_tiny_hf(tmp_path / "m", settings={"model_type": kind})
    with pytest.raises(UnsupportedModel, match=r"read from Hugging Face folders: .*llama") as error:
        opened(tmp_path / "m")
    assert error.value.fix.startswith(
        "write it as a module of your own, save its parameters with Orbax, and serve that"
    )


def test_quantized_weights_are_refused_by_name(tmp_path):
    write_tiny_hf(tmp_path / "m", settings={"quantization_config": {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(UnsupportedModel, match=r"the weights are quantized \(gptq\)"):
        opened(tmp_path / "m")


def test_parameters_of_types_that_are_not_read_are_named(tmp_path):
    write_tiny_hf(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, path)
    with pytest.raises(UnsupportedModel, match=r"int8 \(as in norm\); types that are read: float64, float32"):
        opened(tmp_path / "m")


def test_a_folder_without_a_config(tmp_path):
    write_tiny_hf(tmp_path / "m")
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        opened(tmp_path / "m")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_damaged_json_is_named(tmp_path, name):
    write_tiny_hf(tmp_path / "m")
    (tmp_path / "m" / name).write_bytes(b'{"a": ')
    with pytest.raises(CheckpointError, match=rf"{name}(:| is)"):
        opened(tmp_path / "m")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_links_out_of_the_folder_are_refused(tmp_path, name):
    write_tiny_hf(tmp_path / "m")
    (tmp_path / "m" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "m" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match="leads out of the checkpoint's folder"):
        opened(tmp_path / "m")


def test_a_snapshot_of_the_hub_has_the_repositorys_name(tmp_path):
    snapshot = tmp_path / "models--org--some-model" / "snapshots" / "0123"
    write_tiny_hf(snapshot)
    (tmp_path / "models--org--some-model" / "blobs").mkdir()
    assert opened(snapshot).name == "some-model"


def test_values_that_are_not_finite_are_found_by_check_only(tmp_path):
    write_tiny_hf(tmp_path / "m", dtype="bfloat16")
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = np.nan
    tensors["lm_head.weight"][3, 2] = np.inf
    save_file(tensors, path)
    report = inspect(str(tmp_path / "m"))
    assert report.digests == "not checked; sizes match their headers (--check reads every value)"
    with pytest.raises(CheckpointError) as error:
        inspect(str(tmp_path / "m"), check=True)
    assert error.value.message.splitlines() == [
        f"{tmp_path / 'm'} is damaged:",
        "  lm_head.weight holds values that are not finite numbers",
        "  model.norm.weight holds values that are not finite numbers",
    ]


def test_inspect_reads_every_value(tmp_path):
    write_tiny_hf(tmp_path / "m")
    report = inspect(str(tmp_path / "m"), check=True)
    assert report.digests == "all values finite"
    assert report.serve == f"jserve serve {tmp_path / 'm'}"
    assert json.loads(json.dumps(report.config))["hidden_size"] == 32
