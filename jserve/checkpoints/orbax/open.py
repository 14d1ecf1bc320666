"""What Orbax or Flax saved, of a family that jserve knows, as a checkpoint: read as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as FilePath

from jserve.checkpoints.arrays.key_map import KeyMap, Leaves, Path, plan_leaves
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.tree import main_dtype
from jserve.checkpoints.checkpoint import Checkpoint, param_shapes
from jserve.checkpoints.encoder import EncoderSettings
from jserve.checkpoints.hf.files import CONFIG_NAME
from jserve.checkpoints.hf.sentence_transformer import read_encoder_settings
from jserve.checkpoints.manifest import MANIFEST_NAME
from jserve.checkpoints.names import called
from jserve.checkpoints.orbax.beside import (
    Described,
    places,
    read_beside_sampling,
    read_described,
    read_ends,
    read_text,
)
from jserve.checkpoints.orbax.fit import fit_tree, holds
from jserve.checkpoints.orbax.known_trees import recognise
from jserve.checkpoints.orbax.layout import ITEMS
from jserve.checkpoints.orbax.peel import peel, refuse_adapters
from jserve.checkpoints.orbax.read import Kvstore
from jserve.checkpoints.orbax.saved import Saved, open_saved
from jserve.checkpoints.orbax.steps import is_step_name
from jserve.errors import UnsupportedModel
from jserve.progress import SILENT, Progress

__all__ = ["open_orbax", "orbax_checkpoint"]

_NO_NAMES = frozenset({*ITEMS, "step", "steps", "checkpoint", "checkpoints", "ckpt", "ckpts"})
"""Of folders that say nothing of the model."""
_OWN_MODULE = "serve it with a module of your own: jserve serve package.module:Class --checkpoint DIR"


def open_orbax(
    folder: FilePath,
    *,
    source: str,
    base: Kvstore | None = None,
    step: str | None = None,
    progress: Progress = SILENT,
) -> Checkpoint:
    """Open ``folder``; no values are read. ``base`` is where the arrays are, if ``folder`` is a copy without them;
    ``step`` is the one to take (None: the newest).

    Read are trees of jserve's own modules, and of those that ``known_trees`` knows. Raises as ``open_saved`` does;
    CheckpointError that lists every parameter missing or of another shape and every array left over; UnsupportedModel
    for what is not built.
    """
    saved = open_saved(folder, base=base, step=step, progress=progress)
    return orbax_checkpoint(saved, source=source, progress=progress)


def orbax_checkpoint(saved: Saved, *, source: str, progress: Progress = SILENT) -> Checkpoint:
    """``saved`` as a model of a known family. Raises as ``open_orbax`` does for what is not read."""
    folder = saved.layout.folder
    where = places(folder, saved.layout.arrays)
    described = read_described(where)
    if described is None:
        raise UnsupportedModel(
            f"{folder} holds arrays and no word on the model: {CONFIG_NAME} (Hugging Face's) or {MANIFEST_NAME} is "
            f"missing, there and in the folders {', '.join(str(place) for place in where[1:])}",
            fix=f"copy the model's {CONFIG_NAME} there, or {_OWN_MODULE}",
        )
    leaves, kind = _leaves(saved, described)
    found = read_text(where, described=described)
    text = None if found is None else found[0]
    progress.note(f"settings from {described.path}")
    return Checkpoint(
        name=_name(folder),
        path=folder,
        layout=f"{saved.words}, {kind}, {main_dtype(leaves.values())}",
        family=described.family,
        config=described.config,
        leaves=leaves,
        tokenizer=None if text is None else text.tokenizer,
        chat_template=None if text is None else text.chat_template,
        generation=read_beside_sampling(where),
        eos_ids=read_ends(where, described) if text is None else text.tokenizer.eos_ids,
        encoder=_encoder(described),
        source=source,
        digests="not checked; pieces that are missing or damaged are found when they are read",
    )


def _leaves(saved: Saved, described: Described) -> tuple[Leaves, str]:
    """The parameters, and in words what tree they were in."""
    wanted = param_shapes(described.family, described.config)
    where = str(saved.layout.arrays)
    if holds(saved.tree, wanted):
        fitted = fit_tree(saved.tree, wanted, where=where, custom=saved.custom)
        stacked = "" if fitted.stacked_axis is None else f" with layers stacked on axis {fitted.stacked_axis}"
        return fitted.leaves, f"a tree of jserve's {described.family}{stacked}"
    peeled = peel(saved.tree)
    params = peeled.params
    known = None if described.key_map is None else recognise(params, described.key_map)
    if known is None or described.key_map is None:
        raise UnsupportedModel(
            f"{where} is no tree that is known: jserve's own {described.family} ({_some(wanted)}), MaxText's, "
            f"google-deepmind/gemma's, or one with Hugging Face's names of such a model; it has {_some(params)}",
            fix=_OWN_MODULE,
        )
    refuse_adapters(saved.tree, peeled.root, where=where)
    tensors = _under_its_name(known.tensors(params, described.values, where), peeled.root, described.key_map)
    return plan_leaves(described.key_map, tensors, wanted, where=where), f"a tree of {known.name}"


def _encoder(described: Described) -> EncoderSettings | None:
    if described.manifest is not None:
        return described.manifest.encoder
    if not described.is_encoder:
        return None
    return read_encoder_settings(described.path.parent, described.config)


def _under_its_name(tensors: dict[str, LazyArray], root: Path, key_map: KeyMap) -> dict[str, LazyArray]:
    """``model`` may be a wrapper, or the beginning of every tensor's name: what makes more of them known is right."""
    known = {
        prefix + entry.tensor.replace("{i}", "0").replace("{e}", "0")
        for prefix in key_map.prefixes
        for entry in key_map.entries
    }
    starts = ["".join(f"{part}." for part in root[i:]) for i in range(len(root), -1, -1)]
    start = max(starts, key=lambda start: sum(start + name in known for name in tensors))
    return {start + name: tensor for name, tensor in tensors.items()}


def _some(paths: Mapping[Path, object]) -> str:
    names = [".".join(path) for path in paths]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _name(folder: FilePath) -> str:
    """The nearest name of a folder that says something of the model."""
    real = folder.resolve()
    for place in (real, *real.parents):
        if place.name and not is_step_name(place.name) and place.name not in _NO_NAMES:
            return called(place)
    return real.name
