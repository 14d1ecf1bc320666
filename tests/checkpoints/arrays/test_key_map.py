"""Tensors to parameters by a map: shapes, layers, experts, shared tensors, and every problem at once."""

import numpy as np
import pytest

from jserve.checkpoints.arrays.key_map import Entry, KeyMap, plan_leaves
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.errors import CheckpointError

RNG = np.random.default_rng(0)


def tensors(**arrays):
    made = {name.replace("__", "."): RNG.standard_normal(shape).astype(np.float32) for name, shape in arrays.items()}
    return made, {name: LazyArray.of(a) for name, a in made.items()}


def test_axes_are_cut_and_turned_as_the_entry_says():
    key_map = KeyMap(
        entries=(
            Entry(tensor="h.{i}.q", leaf="layers.{i}.q", how="H Dh D <- D (H Dh)"),
            Entry(tensor="h.{i}.o", leaf="layers.{i}.o", how="D H Dh <- D (H Dh)", plus=-1.0),
        )
    )
    made, lazy = tensors(h__0__q=(5, 6), h__0__o=(5, 6), h__1__q=(5, 6), h__1__o=(5, 6))
    wanted = {("layers", i, "q"): (2, 3, 5) for i in "01"} | {("layers", i, "o"): (5, 2, 3) for i in "01"}
    leaves = plan_leaves(key_map, lazy, wanted, where="t")
    for i in "01":
        np.testing.assert_array_equal(leaves["layers", i, "q"].read(), made[f"h.{i}.q"].T.reshape(2, 3, 5))
        np.testing.assert_array_equal(leaves["layers", i, "o"].read(), made[f"h.{i}.o"].reshape(5, 2, 3) - 1)


def test_experts_are_stacked():
    key_map = KeyMap(entries=(Entry(tensor="e.{e}.up", leaf="up", how="F D <- D F"),))
    made, lazy = tensors(e__0__up=(4, 6), e__1__up=(4, 6))
    leaf = plan_leaves(key_map, lazy, {("up",): (2, 6, 4)}, where="t")["up",]
    np.testing.assert_array_equal(leaf.read(), np.stack([made["e.0.up"].T, made["e.1.up"].T]))


def test_entries_share_a_tensor_in_their_order():
    key_map = KeyMap(
        entries=(
            Entry(tensor="h.{i}.qkv", leaf="l.{i}.q", how="H Dh D <- (H Dh) D", fused_axis=0),
            Entry(tensor="h.{i}.qkv", leaf="l.{i}.k", how="K Dh D <- (K Dh) D", fused_axis=0),
            Entry(tensor="h.{i}.qkv", leaf="l.{i}.v", how="K Dh D <- (K Dh) D", fused_axis=0),
        )
    )
    made, lazy = tensors(h__0__qkv=(16, 5))
    wanted = {("l", "0", "q"): (4, 2, 5), ("l", "0", "k"): (2, 2, 5), ("l", "0", "v"): (2, 2, 5)}
    leaves = plan_leaves(key_map, lazy, wanted, where="t")
    whole = np.concatenate([leaves["l", "0", name].read().reshape(-1, 5) for name in "qkv"])
    np.testing.assert_array_equal(whole, made["h.0.qkv"])


def test_a_prefix_before_every_name():
    key_map = KeyMap(entries=(Entry(tensor="w", leaf="w"),), prefixes=("", "model."))
    for name in ("w", "model.w"):
        assert plan_leaves(key_map, tensors(**{name.replace(".", "__"): (3,)})[1], {("w",): (3,)}, where="t")


def test_every_problem_is_named_at_once():
    key_map = KeyMap(
        entries=(
            Entry(tensor="a.{i}", leaf="l.{i}.a", how="H Dh <- (H Dh)"),
            Entry(tensor="e.{i}.{e}", leaf="l.{i}.e"),
        ),
        ignored=("*.inv_freq",),
    )
    _, lazy = tensors(a__0=(5,), e__0__0=(3,), extra=(2, 2), rope__inv_freq=(9,))
    wanted = {("l", "0", "a"): (2, 3), ("l", "0", "e"): (2, 3), ("l", "0", "new"): (1,)}
    with pytest.raises(CheckpointError) as error:
        plan_leaves(key_map, lazy, wanted, where="folder")
    assert error.value.message.splitlines() == [
        "folder does not fit its settings:",
        "  l.0.a: wanted [6] in tensor a.0, found [5]",
        "  l.0.e: wanted [3] in tensor e.0.1, it is missing",
        "  l.0.new [1]: no tensor of such files holds it",
        "  tensor extra [2, 2] float32 belongs to no parameter",
    ]


def test_looking_for_problems_ends_somewhere():
    """Settings of a few bytes may want more experts than anybody has time for."""
    key_map = KeyMap(entries=(Entry(tensor="e.{i}.{e}", leaf="l.{i}.e"),))
    with pytest.raises(
        CheckpointError, match=r"\n  l\.0\.e: .* in tensor e\.0\.0, it is missing\n(.*\n)+  and at least"
    ):
        plan_leaves(key_map, {}, {("l", "0", "e"): (1 << 60, 3)}, where="folder")


def test_a_tensor_that_holds_a_parameter_once_more_must_be_the_same():
    key_map = KeyMap(entries=(Entry(tensor="table", leaf="table"),), twins={"*head": "table"})
    made, lazy = tensors(table=(6, 4))
    made["table"][0, 0] = np.nan  # what is the same bit for bit is the same
    wanted = {("table",): (6, 4)}
    for dtype in (np.float32, np.float64):
        twin = LazyArray.of(made["table"].astype(dtype))
        leaf = plan_leaves(key_map, {**lazy, "a.head": twin}, wanted, where="t")["table",]
        np.testing.assert_array_equal(leaf.read((slice(2, 5), slice(None))), made["table"][2:5])
    other = made["table"].copy()
    other[4, 1] += 1
    leaf = plan_leaves(key_map, {**lazy, "a.head": LazyArray.of(other)}, wanted, where="t")["table",]
    leaf.read((slice(0, 4), slice(None)))
    with pytest.raises(CheckpointError, match=r"t: tensor a\.head differs from table") as error:
        leaf.read()
    assert "tie_word_embeddings = false" in error.value.fix
    with pytest.raises(CheckpointError, match=r"tensor a\.head .* belongs to no parameter"):
        plan_leaves(key_map, {**lazy, "a.head": LazyArray.of(other[:2])}, wanted, where="t")
