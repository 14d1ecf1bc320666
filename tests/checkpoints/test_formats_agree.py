"""One model as GGUF, safetensors and Orbax: where formats have an order or an offset of their own, all agree."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from families import DATA, read_tiny
from flax import nnx
from gguf_files import tiny, write

from jserve.checkpoints.convert import convert
from jserve.checkpoints.open import open_checkpoint
from jserve.models.contract import Step
from jserve.models.naive import naive_logits
from jserve.models.norms import rms_norm_plus_one
from jserve.testing.hf import write_shards

ENTRANCE = np.load(DATA / "gemma.npz")


def in_every_format(folder, case):
    """The same weights, opened: by GGUF in F32, by a Hugging Face folder, and by Orbax converted from that."""
    config, weights = tiny(case)
    write(folder / "t.gguf", config, weights)
    (folder / "hf").mkdir()
    write_shards(folder / "hf", weights, count=1)
    (folder / "hf" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    convert(str(folder / "hf"), folder / "orbax")
    return [open_checkpoint(str(folder / name)) for name in ("t.gguf", "hf", "orbax")]


def logits(checkpoint, tokens):
    graphdef, state = checkpoint.abstract(jnp.float32)
    return np.asarray(naive_logits(graphdef, checkpoint.restore(state), tokens))


@pytest.mark.parametrize("case", ["llama_tied", "qwen2", "gemma2", "gemma3"])
def test_parameters_and_logits_are_identical(tmp_path, case):
    """GGUF has a Llama's query and key rows in another order, not Qwen's, and Gemma's norms with 1 added."""
    first, *others = in_every_format(tmp_path, case)
    tokens = read_tiny(case).prompts[0].ids
    wanted = logits(first, tokens)
    for other in others:
        assert other.leaves.keys() == first.leaves.keys()
        for path, leaf in other.leaves.items():
            np.testing.assert_array_equal(leaf.read(), first.leaves[path].read(), err_msg=".".join(path))
        np.testing.assert_array_equal(logits(other, tokens), wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["gemma2", "gemma3"])
def test_what_enters_a_gemma_is_what_transformers_has(tmp_path, case, dtype):
    """Vectors times their scale, which is rounded to ``dtype``, and the same through the first norm."""
    ids = jnp.asarray(read_tiny(case).prompts[0].ids, jnp.int32)
    step = Step(positions=jnp.arange(8, dtype=jnp.int32), valid=jnp.ones(8, bool), answer=lambda query: query.q)
    for checkpoint in in_every_format(tmp_path, case):
        graphdef, state = checkpoint.abstract(jnp.dtype(dtype))
        model = nnx.merge(graphdef, checkpoint.restore(state))
        x = model.embed(ids, step)
        normed = rms_norm_plus_one(x, model.layers[0].attn_norm[...], checkpoint.config.rms_norm_eps)
        assert x.dtype == normed.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(x.astype(jnp.float32), ENTRANCE[f"{case}/{dtype}/input"])
        near = 1e-6 if dtype == "float32" else 2**-7  # one step of bfloat16
        np.testing.assert_allclose(normed.astype(jnp.float32), ENTRANCE[f"{case}/{dtype}/norm"], rtol=near, atol=1e-6)
