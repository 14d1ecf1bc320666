"""Checkpoints as Orbax and Flax write them, of one tiny tree."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint.experimental import v1


class Tiny(nnx.Module):
    """Two layers, a norm, and a generator of random numbers, as modules of users have."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(8, 4, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 6, rngs=rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


def flat(tree, at=()):
    if isinstance(tree, dict):
        return {path: leaf for key, child in tree.items() for path, leaf in flat(child, (*at, str(key))).items()}
    return {at: np.asarray(tree)}


def shapes(tree):
    return {path: leaf.shape for path, leaf in flat(tree).items()}


def assert_same(leaves, tree):
    """``leaves`` (lazy) hold the values of ``tree``."""
    wanted = flat(tree)
    assert leaves.keys() == wanted.keys()
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(leaf.read(), wanted[path], err_msg=".".join(path))


def save(path, tree, **handler):
    """By a PyTreeCheckpointHandler with these options."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**handler)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def save_standard(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def save_steps(path, trees, *, items=None, **options):
    """A step for each of ``trees`` by a CheckpointManager; ``items`` makes the Composite of one."""
    with ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(**options)) as manager:
        for step, tree in trees.items():
            manager.save(step, args=ocp.args.StandardSave(tree) if items is None else items(tree))
        manager.wait_until_finished()


def save_composite(path, trees):
    save_steps(
        path,
        trees,
        items=lambda tree: ocp.args.Composite(
            params=ocp.args.PyTreeSave(tree),
            opt_state=ocp.args.StandardSave({"mu": jax.tree.map(jnp.zeros_like, tree)}),
            info=ocp.args.JsonSave({"loss": 1.5}),
        ),
        step_prefix="step",
        step_format_fixed_length=4,
    )


def train_state(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"model": {"params": params, "opt_state": {"0": {"mu": zeros, "nu": zeros}}, "step": 7}}


WRITERS = {
    "StandardCheckpointer": save_standard,
    "PyTreeCheckpointer": lambda path, tree: save(path, tree, use_ocdbt=True),
    "PyTreeCheckpointer, without OCDBT": lambda path, tree: save(path, tree, use_ocdbt=False),
    "PyTreeCheckpointer, zarr3": lambda path, tree: save(path, tree, use_zarr3=True),
    "PyTreeCheckpointer, zarr3 without OCDBT": lambda path, tree: save(path, tree, use_zarr3=True, use_ocdbt=False),
    "CheckpointManager": lambda path, tree: save_steps(path, {3: jax.tree.map(jnp.zeros_like, tree), 23: tree}),
    "CheckpointManager, items": lambda path, tree: save_composite(path, {9: tree}),
    "v1": v1.save,
    "v1, items": lambda path, tree: v1.save_checkpointables(path, {"model_params": tree, "x": {"a": jnp.ones(3)}}),
    "train state": lambda path, tree: save_standard(path, train_state(tree)),
    "params of a train state": lambda path, tree: save(
        path, {"params": {"params": tree}, "step": 3, "rng": jnp.ones(2)}
    ),
}
