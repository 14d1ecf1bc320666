"""The tensors of a family's files: prefixes of their names, a head that may be there, and what is no parameter."""

import json
from pathlib import Path

import numpy as np
import pytest

from jserve.checkpoints.arrays.key_map import plan_leaves
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.tree import flatten
from jserve.checkpoints.hf.families import HF_FAMILIES
from jserve.errors import CheckpointError
from jserve.models.registry import build_abstract, family

DATA = Path(__file__).parents[2] / "oracle" / "data" / "families"


def tensors_of(case):
    found = json.loads((DATA / f"{case}.json").read_text())
    tensors = {name: np.zeros(shape, np.float32) for name, shape in found["shapes"].items()}
    return found["config"], tensors


def plan(values, tensors):
    kind = HF_FAMILIES[values["model_type"]]
    _, state = build_abstract(family(kind.family), kind.config(values), np.dtype(np.float32))
    wanted = {path: tuple(leaf.shape) for path, leaf in flatten(state).items()}
    lazy = {name: LazyArray.of(array) for name, array in tensors.items()}
    return plan_leaves(kind.key_map, lazy, wanted, where="folder"), wanted


def test_a_tied_head_may_be_written_out_and_an_untied_one_must_be():
    values, tensors = tensors_of("llama_tied")
    for extra in ({}, {"lm_head.weight": tensors["model.embed_tokens.weight"]}):
        leaves, wanted = plan(values, {**tensors, **extra})
        assert leaves.keys() == wanted.keys()
        assert ("head",) not in wanted
    with pytest.raises(CheckpointError, match=r"head: wanted \[256, 32\] in tensor lm_head\.weight, it is missing"):
        plan({**values, "tie_word_embeddings": False}, tensors)


@pytest.mark.parametrize(
    ("case", "old", "new", "extra"),
    [
        ("gpt2", "transformer.", "", {"h.0.attn.bias": (1, 1, 64, 64), "h.0.attn.masked_bias": ()}),
        ("gemma3", "model.", "language_model.model.", {"vision_tower.a.weight": (2,), "multi_modal_projector.b": (2,)}),
        ("gemma3", "model.", "model.language_model.", {"model.vision_tower.a.weight": (2,)}),
        ("llama", "model.", "model.", {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}),
    ],
)
def test_prefixes_and_what_is_no_parameter(case, old, new, extra):
    values, tensors = tensors_of(case)
    renamed = {name.replace(old, new, 1) if name.startswith(old) else name: array for name, array in tensors.items()}
    leaves, wanted = plan(values, {**renamed, **{name: np.zeros(shape, np.float32) for name, shape in extra.items()}})
    assert leaves.keys() == wanted.keys()
    with pytest.raises(CheckpointError, match=r"tensor surprise \[2\] float32 belongs to no parameter"):
        plan(values, {**renamed, "surprise": np.zeros(2, np.float32), **{n: np.zeros(s) for n, s in extra.items()}})
