"""A tree's parameters, whatever they are wrapped in, and every difference from what a module wants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from saving import assert_same, flat, save_standard, shapes, stacked, train_state

from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.orbax.fit import fit_tree
from jserve.checkpoints.orbax.peel import peel
from jserve.checkpoints.orbax.saved import open_saved
from jserve.errors import CheckpointError


def lazy(tree):
    """Nested dicts of arrays as a tree still to be read."""
    return {
        path: LazyArray(shape=leaf.shape, dtype=leaf.dtype, read_region=leaf.__getitem__)
        for path, leaf in flat(tree).items()
    }


def test_the_whole_state_of_a_module(tmp_path, tiny, params):
    save_standard(tmp_path / "ck", nnx.state(tiny))
    tree = open_saved(tmp_path / "ck").tree
    assert ("drop", "rngs", "key", "value") in tree
    assert_same(fit_tree(tree, shapes(params), where="ck").leaves, params)
    assert peel(tree).params.keys() == shapes(params).keys()


def test_the_state_of_an_optimizer_and_its_model(tmp_path, tiny, params):
    optax = pytest.importorskip("optax")
    save_standard(tmp_path / "ck", nnx.state(nnx.ModelAndOptimizer(tiny, optax.adam(1e-3), wrt=nnx.Param)))
    fitted = fit_tree(open_saved(tmp_path / "ck").tree, shapes(params), where="ck")
    assert_same(fitted.leaves, params)
    assert fitted.root == ("model",)


@pytest.mark.parametrize(
    ("wrap", "root"),
    [
        (lambda p: p, ()),
        (lambda p: {"params": p, "step": np.ones(())}, ("params",)),
        (lambda p: {"params": {"params": p}, "batch_stats": {"mean": np.ones(2)}}, ("params", "params")),
        (lambda p: {"model": p, "opt_state": {"0": p}}, ("model",)),
        (train_state, ("model", "params")),
        (lambda p: {"target": p, "state": {"step": np.ones(())}}, ("target",)),
        (lambda p: {"state": {"params": p}, "ema_params": p}, ("state", "params")),
    ],
)
def test_wrappings(params, wrap, root):
    fitted = fit_tree(lazy(wrap(params)), shapes(params), where="ck")
    assert_same(fitted.leaves, params)
    assert fitted.root == root
    assert fitted.stacked_axis is None


@pytest.mark.parametrize("axis", [0, 1])
def test_stacked_layers(params, axis):
    fitted = fit_tree(lazy({"params": stacked(params, axis)}), shapes(params), where="ck")
    assert_same(fitted.leaves, params)
    assert fitted.stacked_axis == axis


def test_stacked_layers_whose_axis_the_shapes_do_not_tell():
    layers = {i: {"w": np.full((2, 2), float(i), np.float32)} for i in range(2)}
    tree = lazy({"layers": {"w": np.stack([layers[0]["w"], layers[1]["w"]], 1)}})
    with pytest.raises(CheckpointError, match="layers are stacked on axis 0 or on axis 1 of their arrays: the shapes"):
        fit_tree(tree, shapes({"layers": layers}), where="ck")
    fitted = fit_tree(tree, shapes({"layers": layers}), where="ck", custom={"scan_layers": True})
    assert_same(fitted.leaves, {"layers": layers})


def test_another_number_of_layers_is_no_silent_half(params):
    wanted = shapes(params) | {("layers", "2", "kernel"): (4, 6), ("layers", "2", "bias"): (6,)}
    with pytest.raises(CheckpointError) as error:
        fit_tree(lazy(stacked(params, 0)), wanted, where="ck")
    assert "  layers.2.kernel: wanted [3, 4, 6] (all 3 layers), found [2, 4, 6]" in error.value.message.splitlines()
    with pytest.raises(CheckpointError) as error:
        fit_tree(lazy(params), wanted, where="ck")
    assert error.value.message.splitlines() == [
        "ck does not fit the model:",
        "  layers.2.kernel is missing: wanted [4, 6]",
        "  layers.2.bias is missing: wanted [6]",
    ]


def test_every_missing_and_every_extra_leaf_is_named(params):
    tree = {**params, "norm": {"scale": np.ones(5, np.float32)}, "head": {"kernel": np.ones((4, 8), np.float32)}}
    with pytest.raises(CheckpointError) as error:
        fit_tree(lazy({"params": tree, "opt_state": params}), shapes(params), where="ck")
    assert error.value.message.splitlines() == [
        "ck does not fit the model:",
        "  norm.bias is missing: wanted [4]",
        "  norm.scale: wanted [4], found [5]",
        "  params.head.kernel [4, 8] float32 is not of this model",
    ]


def test_what_a_module_has_besides_may_be_ignored(params):
    tree = lazy({**params, "bias_table": np.ones(3, np.float32)})
    fit_tree(tree, shapes(params), where="ck", ignored=[("bias_table",)])
    with pytest.raises(CheckpointError, match=r"bias_table \[3\] float32 is not of this model"):
        fit_tree(tree, shapes(params), where="ck")


def test_parameters_that_are_there_twice_are_not_guessed(params):
    other = jax.tree.map(np.zeros_like, params)
    with pytest.raises(CheckpointError, match="ck has all parameters more than once, in model and in params"):
        fit_tree(lazy({"params": params, "model": other}), shapes(params), where="ck")


class Mlp(nn.Module):
    def setup(self):
        self.layers = [nn.Dense(4) for _ in range(2)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_list_of_linen_modules_for_one_of_nnx():
    variables = Mlp().init(jax.random.key(0), jnp.ones((1, 4)))
    assert "layers_0" in variables["params"]
    wanted = {("layers", i, leaf): shape for i in "01" for leaf, shape in (("kernel", (4, 4)), ("bias", (4,)))}
    fitted = fit_tree(lazy(variables), wanted, where="ck")
    np.testing.assert_array_equal(
        fitted.leaves["layers", "1", "kernel"].read(), variables["params"]["layers_1"]["kernel"]
    )


@pytest.mark.parametrize(
    "saved", [lambda v: v, lambda v: v["params"], lambda v: {"params": v["params"], "step": np.ones(())}]
)
def test_a_linen_module_wants_its_variables(saved):
    variables = nn.Dense(3).init(jax.random.key(0), jnp.ones((1, 2)))
    assert_same(fit_tree(lazy(saved(variables)), shapes(variables), where="ck").leaves, variables)


def test_peeling_by_names_alone(params):
    peeled = peel(lazy(train_state(params)))
    assert_same(peeled.params, params)
    assert peeled.root == ("model", "params")
    beside = peel(lazy({"model": params, "lm_head": {"kernel": np.ones(2)}}))
    assert beside.root == ()
    assert ("lm_head", "kernel") in beside.params


@pytest.mark.parametrize("name", ["lora", "LoRA_params", "adapters", "delta", "my-lora.0", "textAdapter", "loraA"])
def test_what_changes_the_parameters_is_not_left_away_in_silence(params, name):
    tree = lazy({"params": params, name: {"a": np.ones(2)}, "opt_state": {"mu": np.ones(2)}})
    with pytest.raises(CheckpointError, match=rf"ck holds {name} beside the parameters; served without"):
        fit_tree(tree, shapes(params), where="ck")


@pytest.mark.parametrize("name", ["exploration_rate", "explorationRate", "floral"])
def test_a_name_that_only_has_the_letters_of_an_adapter_is_none(params, name):
    tree = lazy({"params": params, name: {"a": np.ones(2)}})
    assert_same(fit_tree(tree, shapes(params), where="ck").leaves, params)
