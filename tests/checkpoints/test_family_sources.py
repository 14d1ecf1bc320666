"""Every family, of random weights, from each kind of folder: the same parameters, and ids as transformers'."""

import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from families import CASES, FAMILY_NAMES, lengths, read_tiny
from safetensors.numpy import load_file

from jserve import LLM, SamplingParams
from jserve.checkpoints.arrays.key_map import plan_leaves
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.tree import flatten, unflatten_like
from jserve.checkpoints.convert import convert
from jserve.checkpoints.hf.families import HF_FAMILIES
from jserve.checkpoints.open import open_checkpoint
from jserve.errors import CheckpointError
from jserve.models.naive import naive_logits
from jserve.models.registry import build_abstract, family

ONE_EACH = sorted({FAMILY_NAMES[case]: case for case in reversed(CASES)}.values())
"""A case of each family: programs take long to compile."""
TINY_BERT = Path(__file__).parents[1] / "oracle" / "data" / "tiny_bert"


def verified(case, how):
    """The case, with its row for the table in docs/models.md."""
    return pytest.param(case, marks=pytest.mark.verifies(FAMILY_NAMES[case], "Orbax", f"random weights, {how}"))


def verified_by_convert(case):
    by_convert = f"written by jserve convert: greedy ids of transformers at {lengths(read_tiny(case).prompts[:2])}"
    return verified(case, by_convert)


def read(checkpoint):
    return {path: np.asarray(leaf.read()) for path, leaf in checkpoint.leaves.items()}


def assert_same(checkpoint, wanted):
    """Family, settings and parameters."""
    assert (checkpoint.family, checkpoint.config) == (wanted.family, wanted.config)
    found, leaves = read(checkpoint), read(wanted)
    assert found.keys() == leaves.keys()
    for path, leaf in found.items():
        np.testing.assert_array_equal(leaf, leaves[path], err_msg=".".join(path))


def assert_greedy(checkpoint, tiny):
    """The ids that transformers chooses after 8 tokens."""
    prompt = tiny.prompts[0]
    graphdef, state = checkpoint.abstract(jnp.float32, length=tiny.length)
    logits = naive_logits(graphdef, checkpoint.restore(state), prompt.ids + prompt.greedy[:-1])
    assert logits[len(prompt.ids) - 1 :].argmax(-1).tolist() == prompt.greedy


@pytest.mark.parametrize("case", CASES)
def test_one_file_or_several(tmp_path, case):
    tiny = read_tiny(case)
    whole = open_checkpoint(str(tiny.write(tmp_path / "whole")))
    sharded = open_checkpoint(str(tiny.write(tmp_path / "sharded", shards=3)))
    assert len(list(sharded.path.glob("*.safetensors"))) == 3
    assert_same(sharded, whole)


@pytest.mark.slow
@pytest.mark.parametrize("case", [verified_by_convert(case) for case in ONE_EACH])
def test_orbax_by_convert_through_the_engine(tmp_path, case):
    tiny = read_tiny(case)
    convert(str(tiny.write(tmp_path / "whole")), tmp_path / "orbax")
    settings = {"dtype": "float32", "max_num_seqs": 1, "max_num_tokens": 32, "program_store": False}
    with LLM(str(tmp_path / "orbax"), max_model_len=tiny.length, **settings) as llm:
        for prompt in tiny.prompts[:2]:
            (out,) = llm.generate(prompt.ids, SamplingParams(temperature=0, max_tokens=len(prompt.greedy)))
            assert out.token_ids == prompt.greedy, len(prompt.ids)


@pytest.mark.parametrize("case", CASES)
def test_orbax_by_convert_and_back(tmp_path, case):
    tiny = read_tiny(case)
    whole = open_checkpoint(str(tiny.write(tmp_path / "whole")))
    convert(str(tmp_path / "whole"), tmp_path / "orbax")
    converted = open_checkpoint(str(tmp_path / "orbax"))
    assert_same(converted, whole)
    assert_greedy(converted, tiny)
    convert(str(tmp_path / "orbax"), tmp_path / "back", to="safetensors")
    assert_same(open_checkpoint(str(tmp_path / "back")), whole)
    tensors = load_file(tmp_path / "back" / "model.safetensors")
    assert tensors.keys() == tiny.weights().keys()
    for name, values in tiny.weights().items():
        np.testing.assert_array_equal(tensors[name], values, err_msg=name)


@pytest.mark.parametrize(
    "case", [verified(case, "saved by StandardCheckpointer: parameters of safetensors") for case in CASES]
)
def test_orbax_as_flax_users_save_it(tmp_path, case):
    """The state of jserve's own module, with config.json beside it."""
    tiny = read_tiny(case)
    whole = open_checkpoint(str(tiny.write(tmp_path / "whole")))
    _, state = whole.abstract(jnp.float32)
    values = unflatten_like(state, {path: jnp.asarray(leaf) for path, leaf in read(whole).items()})
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved" / "ck", values)
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "saved")
    saved = open_checkpoint(str(tmp_path / "saved" / "ck"))
    assert_same(saved, whole)


@pytest.mark.verifies("BERT", "Orbax", "random weights, written by jserve convert: parameters of safetensors")
def test_an_encoder_by_convert(tmp_path):
    whole = open_checkpoint(str(TINY_BERT))
    convert(str(TINY_BERT), tmp_path / "orbax")
    converted = open_checkpoint(str(tmp_path / "orbax"))
    assert_same(converted, whole)
    assert converted.encoder == whole.encoder


@pytest.mark.parametrize("case", CASES)
def test_a_parameter_that_is_absent_is_never_made_up(case):
    """Whichever it is, the refusal names its tensor."""
    tiny = read_tiny(case)
    kind = HF_FAMILIES[tiny.config["model_type"]]
    _, state = build_abstract(family(kind.family), kind.config(tiny.config), np.float32)
    wanted = {path: tuple(leaf.shape) for path, leaf in flatten(state).items()}
    tensors = {
        name: LazyArray(shape=tuple(shape), dtype=np.dtype(np.float32), read_region=lambda region: pytest.fail("read"))
        for name, shape in tiny.shapes.items()
    }
    assert plan_leaves(kind.key_map, tensors, wanted, where="all").keys() == wanted.keys()
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        with pytest.raises(CheckpointError, match=rf"in tensor {re.escape(name)}, it is missing"):
            plan_leaves(kind.key_map, rest, wanted, where="all but one")


@pytest.mark.parametrize("case", ["llama", "llama_dynamic", "llama_linear", "llama_yarn", "phi3_longrope", "qwen3"])
def test_scalings_in_their_old_spelling(case):
    """``type``, and the rotary base beside it."""
    config = read_tiny(case).config
    values = dict(config["rope_parameters"])
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    old["rope_theta"] = values.pop("rope_theta")
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        if case == "phi3_longrope":
            old[key] = values.pop(key)
    old["rope_scaling"] = {"type": values.pop("rope_type"), **values}
    kind = HF_FAMILIES[config["model_type"]]
    assert kind.config(old) == kind.config(config)
    assert kind.config(old).rope_scaling is not None
