"""Checkpoints as Orbax and Flax write them, of one tiny tree."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx, serialization
from flax.training.train_state import TrainState
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


def save_v1_steps(path, trees):
    with v1.training.Checkpointer(path) as checkpointer:
        for step, tree in trees.items():
            checkpointer.save(step, tree)


def save_msgpack(path, tree, name="flax_model.msgpack"):
    path.mkdir()
    Path(path / name).write_bytes(serialization.to_bytes(tree))


def linen_state(params):
    """As a Linen trainer has it after a step: optax's own states hold more trees like the parameters'."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return TrainState.create(apply_fn=None, params=params, tx=optimizer).replace(step=jnp.asarray(7))


def optimizer_of(module):
    return nnx.Optimizer(module, optax.adamw(1e-3), wrt=nnx.Param)


def stacked(params, axis):
    """``params`` with its layers in one array a kind."""
    layers = [params["layers"][i] for i in sorted(params["layers"])]
    return {**params, "layers": jax.tree.map(lambda *leaves: np.stack(leaves, axis), *layers)}


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
    "v1, steps": lambda path, tree: save_v1_steps(path, {3: jax.tree.map(jnp.zeros_like, tree), 23: tree}),
    "Linen train state": lambda path, tree: save_standard(path, linen_state(tree)),
    "Linen train state, PyTreeCheckpointer": lambda path, tree: save(path, linen_state(tree), use_ocdbt=False),
    "Linen train state, items": lambda path, tree: save_steps(
        path,
        {5: linen_state(tree)},
        items=lambda state: ocp.args.Composite(items=ocp.args.PyTreeSave(state)),
    ),
    "Linen train state, as Flax's guide": lambda path, tree: save_steps(
        path, {1: {"model": linen_state(tree), "config": {"width": 8}, "data": [jnp.ones(3)]}}
    ),
    "msgpack": save_msgpack,
    "msgpack of a train state": lambda path, tree: save_msgpack(path, linen_state(tree), "checkpoint"),
    "params of a train state": lambda path, tree: save(
        path, {"params": {"params": tree}, "step": 3, "rng": jnp.ones(2)}
    ),
}

MODULE_WRITERS = {
    "nnx.state": lambda path, module: save_standard(path, nnx.state(module)),
    "nnx.state, zarr3": lambda path, module: save(path, nnx.state(module), use_zarr3=True),
    "nnx.state, without OCDBT": lambda path, module: save(path, nnx.state(module), use_ocdbt=False),
    "nnx.state, v1": lambda path, module: v1.save(path, nnx.state(module)),
    "pure dict": lambda path, module: save_standard(path, nnx.to_pure_dict(nnx.state(module, nnx.Param))),
    "nnx.Optimizer beside its model": lambda path, module: save_standard(
        path, {"model": nnx.state(module), "optimizer": nnx.state(optimizer_of(module))}
    ),
    "nnx.ModelAndOptimizer": lambda path, module: save_standard(
        path, nnx.state(nnx.ModelAndOptimizer(module, optax.adamw(1e-3), wrt=nnx.Param))
    ),
    "items model and optimizer": lambda path, module: save_steps(
        path,
        {4: module},
        items=lambda module: ocp.args.Composite(
            model=ocp.args.StandardSave(nnx.state(module)),
            optimizer=ocp.args.StandardSave(nnx.state(optimizer_of(module))),
        ),
    ),
    "items state, of steps": lambda path, module: save_steps(
        path,
        {4: module},
        items=lambda module: ocp.args.Composite(state=ocp.args.PyTreeSave({"params": nnx.state(module, nnx.Param)})),
    ),
}
"""The same for what only a module can be saved as."""
