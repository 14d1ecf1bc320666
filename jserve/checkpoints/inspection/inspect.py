"""What a checkpoint holds, and the line that serves it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np

from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.place import compare
from jserve.checkpoints.arrays.tree import flatten
from jserve.checkpoints.checkpoint import Checkpoint
from jserve.checkpoints.digests import file_record, file_records
from jserve.checkpoints.inspection.missing import missing_parts, missing_text
from jserve.checkpoints.inspection.report import (
    EncoderReport,
    InspectReport,
    Missing,
    Problem,
    StepsReport,
    UnfinishedStep,
)
from jserve.checkpoints.inspection.stored import Stored, stored
from jserve.checkpoints.manifest import MANIFEST_NAME, Manifest, read_manifest
from jserve.checkpoints.names import called
from jserve.checkpoints.orbax.beside import find_description, places, read_beside_sampling, read_text
from jserve.checkpoints.orbax.peel import peel
from jserve.checkpoints.orbax.resembles import resembles
from jserve.checkpoints.orbax.saved import Saved
from jserve.checkpoints.orbax.unstack import stacked_axes
from jserve.checkpoints.problems import raise_all
from jserve.checkpoints.sources.fetch import fetch
from jserve.checkpoints.sources.local import LocalFile, LocalFolder
from jserve.checkpoints.sources.uri import parse_source
from jserve.errors import CheckpointError
from jserve.progress import SILENT, Progress
from jserve.request import DEFAULTABLE
from jserve.text.from_hf import HfText
from jserve.text.generating import model_template

__all__ = ["check_values", "inspect", "saved_facts", "text_facts"]

_PIECE_BYTES = 64 << 20
"""Read at once."""
_OWN_MODULE = "serve it with a module of your own (docs/bring_your_own.md), as below"


def inspect(model: str, *, check: bool = False, progress: Progress | None = None) -> InspectReport:
    """Describe the MODEL ``model`` without converting it; a URI is fetched first.

    What is no model that jserve knows is described as well, with ``problem`` and what to do about it. ``check`` reads
    every byte: of a folder that jserve wrote, digests against the manifest; of others, every array, parameters for
    being finite; of a file, its digest too. Raises CheckpointError, SourceError and UnsupportedModel where there is
    nothing to describe, and CheckpointError that names what ``check`` found damaged.
    """
    progress = progress or SILENT
    found = fetch(parse_source(model), progress=progress)
    if found.words is None:
        return _inspect(found, model, check=check, progress=progress)
    with found.words.errors():
        return found.words.said(_inspect(found, model, check=check, progress=found.words.progress(progress)))


def _inspect(found: LocalFile | LocalFolder, model: str, *, check: bool, progress: Progress) -> InspectReport:
    if check and _has_digests(found):
        _check_digests(found.path, read_manifest(found.path), progress)
    with stored(found, model, progress=progress) as files:
        checkpoint, problem = _understood(files)
        digests = _digests(found, files, checkpoint, progress) if check else _unchecked(files, checkpoint)
        return InspectReport(
            name=called(files.path.absolute()) if checkpoint is None else checkpoint.name,
            model=model,
            path=str(files.path) if files.uri is None else files.uri,
            layout=files.layout,
            files=files.files,
            arrays=files.arrays,
            digests=digests,
            problem=problem,
            serve=_serve(files, model, problem),
            **_sizes(files, checkpoint),
            **({} if files.saved is None else saved_facts(files.saved, _layers(checkpoint))),
            **(_text_beside(files) if checkpoint is None else _model_facts(checkpoint)),
        )


def saved_facts(saved: Saved, num_layers: int | None = None) -> dict[str, Any]:
    """Of what Orbax or Flax saved: steps, items, how layers lie and whose names those are."""
    layout, params = saved.layout, peel(saved.tree).params
    where = places(layout.folder, layout.arrays)
    config = find_description(where)
    steps = None
    if layout.step is not None:
        steps = StepsReport(
            taken=layout.step,
            finished=list(layout.finished),
            unfinished=[UnfinishedStep(name=step.name, why=step.why) for step in layout.unfinished],
            damaged=list(layout.damaged),
        )
    return {
        "steps": steps,
        "item": layout.item,
        "items": list(layout.items),
        "config_path": None if config is None else str(config),
        "stacked_axes": stacked_axes(params, num_layers),
        "names": resembles(params),
        "absent": [".".join(path) for path in saved.absent],
    }


def check_values(arrays: Mapping[str, LazyArray], progress: Progress, *, where: str) -> None:
    """Read ``arrays`` piece by piece. CheckpointError that names every one that cannot be read, or that holds values
    that are not finite."""
    progress.start("check values", sum(array.nbytes for array in arrays.values()), "B")
    wrong = []
    for name, array in arrays.items():
        try:
            if not all(_finite(piece) for piece in array.pieces(_PIECE_BYTES)):
                wrong.append(f"{name} holds values that are not finite numbers")
        except CheckpointError as error:
            wrong.append(f"{name}: {error.message}")
        progress.advance(array.nbytes)
    progress.done()
    raise_all(f"{where} is damaged:", wrong)


def _finite(values: np.ndarray) -> bool:
    # jnp's test of a type: numpy does not count bfloat16 among its floats.
    return not jnp.issubdtype(values.dtype, jnp.floating) or bool(np.isfinite(values).all())


def _understood(files: Stored) -> tuple[Checkpoint | None, Problem | None]:
    """The model, or why it is none that is known."""
    try:
        checkpoint = files.understand()
        compare(checkpoint.leaves, flatten(checkpoint.abstract("float32")[1]), where=str(checkpoint.path))
        checkpoint.template()
    except CheckpointError as error:
        if files.is_ours:
            raise
        own = _OWN_MODULE if files.saved is not None else None
        return None, Problem(code=error.code, message=error.message, fix=error.fix or own)
    return checkpoint, None


def _sizes(files: Stored, checkpoint: Checkpoint | None) -> dict[str, Any]:
    others = sum(array.nbytes for array in files.arrays if not array.parameter)
    sizes = [math.prod(array.shape) for array in files.arrays if array.parameter]
    return {
        "parameters": sum(sizes) if checkpoint is None else sum(leaf.size for leaf in checkpoint.leaves.values()),
        "nbytes": sum(array.nbytes for array in files.arrays) - others,
        "other_nbytes": others,
    }


def _layers(checkpoint: Checkpoint | None) -> int | None:
    return None if checkpoint is None else getattr(checkpoint.config, "num_layers", None)


def _model_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    tokenizer, encoder = checkpoint.tokenizer, None
    if (settings := checkpoint.encoder) is not None:
        encoder = EncoderReport(
            pooling=settings.pooling.how,
            normalized=settings.pooling.normalize,
            dimensions=checkpoint.config.hidden_size,
            max_tokens=settings.max_tokens,
            lowercase=settings.lowercase,
        )
    return {
        "source": checkpoint.source,
        "family": checkpoint.family,
        "config": checkpoint.config.to_dict(),
        "max_position": checkpoint.config.max_position,
        "encoder": encoder,
        "vocab_size": None if tokenizer is None else tokenizer.vocab_size,
        "eos_ids": list(checkpoint.eos_ids),
        "bos_id": None if tokenizer is None else tokenizer.bos_id,
        "add_bos": tokenizer is not None and tokenizer.add_bos,
        "chat_template": checkpoint.chat_template is not None,
        **_sampling(checkpoint.generation),
        "missing": missing_parts(checkpoint),
    }


def _text_beside(files: Stored) -> dict[str, Any]:
    """What a module of the user's own would find beside arrays of a model that is not known."""
    if files.saved is None:
        return {}
    where = places(files.path, files.saved.layout.arrays)
    try:
        found = read_text(where)
        if found is not None:
            text = found[0]
            model_template(text.chat_template, text.tokenizer, eos_ids=text.tokenizer.eos_ids)
    except CheckpointError as error:
        broken = Missing(
            what="tokenizer", effect=error.message, fix=error.fix or "mend it, or name another: --tokenizer"
        )
        return {"missing": [broken]}
    return text_facts(found, read_beside_sampling(where), folder=files.path)


def text_facts(
    found: tuple[HfText, FilePath] | None, generation: Mapping[str, Any], *, folder: FilePath | str
) -> dict[str, Any]:
    """Of a tokenizer and where it was found, beside arrays in ``folder``."""
    text, place = (None, None) if found is None else found
    tokenizer = None if text is None else text.tokenizer
    return {
        "tokenizer": None if place is None else str(place),
        "vocab_size": None if tokenizer is None else tokenizer.vocab_size,
        "eos_ids": [] if tokenizer is None else list(tokenizer.eos_ids),
        "bos_id": None if tokenizer is None else tokenizer.bos_id,
        "add_bos": tokenizer is not None and tokenizer.add_bos,
        "chat_template": text is not None and text.chat_template is not None,
        **_sampling(generation),
        "missing": missing_text(
            tokenizer,
            has_template=text is not None and text.chat_template is not None,
            eos_ids=() if tokenizer is None else tokenizer.eos_ids,
            where=f"put into {folder if place is None else place if place.is_dir() else place.parent}",
        ),
    }


def _sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Of a Checkpoint's ``generation`` what is served, and what is not built."""
    return {
        "generation": {name: value for name, value in generation.items() if name in DEFAULTABLE},
        "not_built": {name: value for name, value in generation.items() if name not in DEFAULTABLE},
    }


def _serve(files: Stored, model: str, problem: Problem | None) -> str | None:
    """The command that serves it: arrays that Orbax or Flax saved may be those of a module of the user's own."""
    if problem is None:
        return shlex.join(["jserve", "serve", model])
    if files.saved is not None:
        return f"jserve serve package.module:Class --checkpoint {shlex.quote(model)}"
    return None


def _unchecked(files: Stored, checkpoint: Checkpoint | None) -> str:
    return "not checked (--check reads every byte)" if checkpoint is None else checkpoint.digests


def _digests(
    found: LocalFile | LocalFolder, files: Stored, checkpoint: Checkpoint | None, progress: Progress
) -> str | None:
    """Read everything, and what is known after that."""
    if _has_digests(found):
        return "all files match"
    arrays = dict(files.lazy)
    if isinstance(found, LocalFile):
        if file_record(found.path).sha256 != found.sha256:
            raise CheckpointError(f"{found.path} is not what was fetched", fix="run the command again")
        arrays = {} if checkpoint is None else {".".join(path): leaf for path, leaf in checkpoint.leaves.items()}
    check_values(arrays, progress, where=files.uri or str(files.path))
    words = [f"sha256 {found.sha256}"] if isinstance(found, LocalFile) else []
    return ", ".join([*words, *(["all values finite"] if arrays else [])])


def _has_digests(found: LocalFile | LocalFolder) -> TypeGuard[LocalFolder]:
    """Whether a manifest tells the digests of all files, and they are on this machine."""
    return isinstance(found, LocalFolder) and found.kind == "written" and found.mirror is None


def _check_digests(path: FilePath, manifest: Manifest, progress: Progress) -> None:
    sizes = {name: record.size for name, record in manifest.files.items()}
    found = file_records(path, sizes, progress=progress)
    damaged = [str(path / name) for name, record in manifest.files.items() if found[name].sha256 != record.sha256]
    if damaged:
        raise CheckpointError(
            f"the contents of {', '.join(damaged)} are not those that {path / MANIFEST_NAME} names",
            fix=f"delete {path} and convert it again from {manifest.source}",
        )
