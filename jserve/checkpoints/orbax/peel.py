"""The tree of a checkpoint -> its parameters, as far as names tell.

What Flax users save is seldom the parameters alone: they lie inside a train state, under ``params`` or ``model``, in
the wrapping of ``nnx.State`` (``value``), with layers in one array or in one each, beside an optimizer's state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jserve.checkpoints.arrays.key_map import Path
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.errors import CheckpointError

__all__ = ["KEPT_OUT", "MAX_WRAPPERS", "VALUE", "WRAPPERS", "Peeled", "is_random", "peel", "refuse_adapters"]

WRAPPERS = ("params", "model", "model_params", "target", "state")
"""What parameters may lie inside of."""
KEPT_OUT = frozenset(
    {
        "batch_stats",
        "cache",
        "dropout_rng",
        "dynamic_scale",
        "ema_params",
        "flax_mutables",
        "grads",
        "intermediates",
        "key",
        "metrics",
        "non_trainable",
        "opt_state",
        "optimizer",
        "optimizer_state",
        "param_states",
        "rng",
        "rngs",
        "step",
        "tx",
    }
)
"""Parts of a train state that are no parameters."""
_ADAPTERS = ("adapter", "delta", "lora")
"""How words of names begin that stand for changes of the parameters."""
VALUE = "value"
MAX_WRAPPERS = 3


@dataclass(frozen=True, kw_only=True)
class Peeled:
    """The likely parameters of a tree, by names alone."""

    params: dict[Path, LazyArray]
    root: Path
    """Where in the tree they lie."""


def peel(tree: Mapping[Path, LazyArray]) -> Peeled:
    """Unwrap ``params``, ``params/params``, ``model`` (where ``params`` is in it, or nothing but a train state's parts
    lies beside it) and the trailing ``value`` of an ``nnx.State``."""
    root: Path = ()
    inner = dict(tree)
    while len(root) < MAX_WRAPPERS:
        heads = {path[0] for path in inner if len(path) > 1}
        others = {path[0] for path in inner} - KEPT_OUT
        # What has ``params`` of its own is a train state, whatever else was saved with it.
        states = {path[0] for path in inner if path[1:2] == ("params",)}
        wrapper = next((w for w in WRAPPERS if w in heads and (w == "params" or others == {w} or w in states)), None)
        if wrapper is None:
            break
        inner = {path[1:]: array for path, array in inner.items() if path[0] == wrapper and len(path) > 1}
        root = (*root, wrapper)
    inner = {path: array for path, array in inner.items() if path[0] not in KEPT_OUT and not is_random(path)}
    if inner and all(path[-1] == VALUE for path in inner):
        inner = {path[:-1]: array for path, array in inner.items()}
    return Peeled(params=inner, root=root)


def refuse_adapters(tree: Mapping[Path, LazyArray], root: Path, *, where: str) -> None:
    """Raise CheckpointError where what lies beside the parameters at ``root`` would change them, by its name."""
    beside = {path[i] for i in range(len(root)) for path in tree if path[:i] == root[:i] and path[i] != root[i]}
    found = [name for name in sorted(beside) if any(word.startswith(_ADAPTERS) for word in _words(name))]
    if found:
        raise CheckpointError(
            f"{where} holds {', '.join(found)} beside the parameters; served without, it is another model",
            fix="merge them into the parameters, and save those",
        )


def _words(name: str) -> set[str]:
    """``LoRA_params`` has lora and params, ``textAdapter`` text and adapter, ``exploration`` itself."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return {word for text in (name, parted) for word in re.findall(r"[a-z0-9]+", text.lower())}


def is_random(path: Path) -> bool:
    """The state of a random generator, which ``nnx.state`` has among the parameters."""
    return any(re.fullmatch(r"rngs?|rng_state", part) for part in path[:-1])
