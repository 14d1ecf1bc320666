"""The checkpoint's folder of a user's own module: its arrays, written by Orbax, and the files beside them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jserve.checkpoints.tree import flatten, nest, unflatten_like
from jserve.errors import CheckpointError, SourceError, UnsupportedModel
from jserve.text.tokenizer import Tokenizer

__all__ = ["find_arrays", "find_beside", "find_tokenizer", "read_tokenizer", "restore_into"]

TOKENIZER_NAME = "tokenizer.json"
_NOT_READ = ("tokenizer.model", "spiece.model", "vocab.json")
"""Tokenizers of other kinds, in the order in which they are told of."""
_METADATA = "_METADATA"
_ITEMS = ("params", "model_params", "items", "default", "state", "model")
"""Parts of a step that may hold the parameters, likeliest first."""
_ROOTS: tuple[tuple[str, ...], ...] = ((), ("params",), ("model",), ("params", "params"), ("model", "params"))
"""Where parameters lie in a checkpoint's tree."""
_IN_FLIGHT_BYTES = 512 << 20
"""Host memory that a restore may fill with reads under way; more only where one leaf asks for more."""

LeafPath = tuple[str, ...]


def find_beside(folder: Path, name: str) -> Path | None:
    """The file ``name`` in ``folder`` or, since that may be an item of a step, in the two folders above it."""
    folder = folder.absolute()
    return next((path for place in (folder, *folder.parents[:2]) if (path := place / name).is_file()), None)


# --- tokenizer --------------------------------------------------------------------------------------------------------


def find_tokenizer(folder: Path) -> Path | None:
    """The tokenizer's file for the checkpoint at ``folder``; None where there is none."""
    for name in (TOKENIZER_NAME, *_NOT_READ):
        if (path := find_beside(folder, name)) is not None:
            return path
    return None


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer at ``path``, a ``tokenizer.json`` or its folder.

    Its beginning and end of sequence are what ``tokenizer_config.json`` beside it names (``eos_token``, ``bos_token``,
    ``add_bos_token``), and the ``eos_token_id`` of ``generation_config.json``. Raises SourceError where there is none,
    UnsupportedModel for another kind of file, CheckpointError where it is damaged.
    """
    if path.is_dir():
        path /= TOKENIZER_NAME
    if path.suffix != ".json" or path.name in _NOT_READ:
        raise UnsupportedModel(f"{path}: this kind of tokenizer is not read", fix=f"save it as {TOKENIZER_NAME}")
    try:
        text = path.read_text(encoding="utf-8")
        backend = Tokenizer.from_json(text, eos_ids=(), bos_id=None, add_bos=False).backend
        config = _json(path.with_name("tokenizer_config.json"))
        generation = _json(path.with_name("generation_config.json"))
    except OSError as error:
        raise SourceError(f"cannot read the tokenizer {path}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"cannot read the tokenizer {path}: {error}") from None

    def token_id(key: str) -> int | None:
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            return None
        found: int | None = backend.token_to_id(token)
        if found is None:
            raise CheckpointError(f"tokenizer_config.json names the {key} {token!r}, which {path} does not have")
        return found

    named = generation.get("eos_token_id", [])
    eos_ids = [token_id("eos_token"), *(named if isinstance(named, list) else [named])]
    bos_id = token_id("bos_token")
    return Tokenizer(
        backend,
        eos_ids=dict.fromkeys(i for i in eos_ids if i is not None),
        bos_id=bos_id,
        add_bos=bos_id is not None and bool(config.get("add_bos_token", False)),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return values


# --- arrays -----------------------------------------------------------------------------------------------------------


def find_arrays(folder: Path) -> Path:
    """Where the arrays of ``folder`` lie: in itself, an item of it, or the newest finished step of a CheckpointManager.

    Raises SourceError where Orbax finished nothing there.
    """
    steps = [child for child in folder.iterdir() if child.name.isdigit()] if folder.is_dir() else []
    newest_first = sorted(steps, key=lambda path: int(path.name), reverse=True)
    for place in (folder, *newest_first):
        for arrays in (place, *(place / item for item in _ITEMS)):
            if (arrays / _METADATA).is_file():
                return arrays
    raise SourceError(
        f"{folder} holds no Orbax checkpoint: looked for {_METADATA}, for items ({', '.join(_ITEMS)}) and for "
        "finished steps of a CheckpointManager",
        fix="give the folder that orbax.checkpoint saved to",
    )


@dataclass(frozen=True, kw_only=True)
class _Naming:
    """How a checkpoint names the parameters of a module."""

    root: LeafPath
    """Where they lie in its tree, such as ("params",) in a train state."""
    strip: LeafPath
    """How the module's own names begin and the checkpoint's, below the root, do not: ("params",) for Linen."""
    tail: LeafPath
    """("value",) where a whole ``nnx.State`` was saved."""

    def stored(self, path: LeafPath) -> LeafPath:
        """The checkpoint's name of the module's parameter."""
        return (*self.root, *path[len(self.strip) :], *self.tail)

    def own(self, name: LeafPath) -> LeafPath | None:
        """The inverse; None for what lies outside of the root, such as the state of an optimizer."""
        if name[: len(self.root)] != self.root:
            return None
        inner = name[len(self.root) :]
        return (*self.strip, *(inner[:-1] if self.tail and inner[-1:] == self.tail else inner))


def restore_into(folder: Path, wanted: Any, *, ignored: Collection[LeafPath] = ()) -> dict[Any, Any]:
    """The arrays of ``folder`` as ``wanted`` (a pure dict of ShapeDtypeStructs with shardings) asks for them.

    Read are saves of ``nnx.state(module)``, of its pure dict, and of a train state that has either as ``params`` or
    ``model``, by a StandardCheckpointer, a PyTreeCheckpointer or a CheckpointManager (its newest finished step). Each
    leaf goes straight to its devices, in the dtype asked for. ``ignored`` are leaves that the folder may have besides.
    Raises CheckpointError that lists every leaf that is missing, left over or of another shape.
    """
    import orbax.checkpoint as ocp

    from jserve.checkpoints.arrays import compare_arrays, describe_arrays

    arrays = find_arrays(folder)
    with _quiet():
        leaves, stored = flatten(wanted), describe_arrays(arrays)
    naming = _match(leaves, stored)
    own = {path: info for name, info in stored.items() if (path := naming.own(name)) is not None}
    compare_arrays(arrays, leaves, {path: info for path, info in own.items() if path not in set(ignored)})
    places = {path: naming.stored(path) for path in leaves}
    asked = {
        places[path]: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for path, leaf in leaves.items()
    }
    # Orbax counts whole chunks, and refuses a leaf that counts for more than the limit: up to twice its size an axis.
    sizes = [math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in asked.values()]
    limit = max(_IN_FLIGHT_BYTES, 4 * max(*sizes, *(stored[path].nbytes for path in asked)))
    handler = ocp.PyTreeCheckpointHandler(handler_impl=ocp.BasePyTreeCheckpointHandler(restore_concurrent_bytes=limit))
    tree = nest(asked)
    args = ocp.args.PyTreeRestore(
        item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
    )
    try:
        with _quiet(), ocp.Checkpointer(handler) as checkpointer:
            restored = flatten(jax.block_until_ready(checkpointer.restore(arrays.absolute(), args=args)))
    except jax.errors.JaxRuntimeError:
        raise  # A device without memory, say, is not the checkpoint's fault.
    except Exception as error:  # TensorStore and Orbax raise many kinds over damaged files
        line = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise CheckpointError(f"{arrays} cannot be read as an Orbax checkpoint: {line}") from error
    return unflatten_like(wanted, {path: restored[places[path]] for path in leaves})


@contextmanager
def _quiet() -> Iterator[None]:
    """Orbax warns that an item of a step has no metadata of its own, which is as CheckpointManager writes it."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _match(wanted: Mapping[LeafPath, Any], stored: Mapping[LeafPath, Any]) -> _Naming:
    """The naming under which most of the wanted leaves are there."""
    strips: list[LeafPath] = [("params",), ()] if all(path[0] == "params" for path in wanted) else [()]
    namings = [
        _Naming(root=root, strip=strip, tail=tail) for strip in strips for root in _ROOTS for tail in ((), ("value",))
    ]
    return max(namings, key=lambda naming: sum(naming.stored(path) in stored for path in wanted))
