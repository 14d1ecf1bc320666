"""What a module of the user's own is, whether it keeps the model contract, and the line that serves it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jserve.checkpoints.arrays.key_map import Path
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.tree import flatten
from jserve.checkpoints.inspection.inspect import check_values, saved_facts, text_facts
from jserve.checkpoints.inspection.report import ArrayReport, InspectReport, Problem
from jserve.checkpoints.inspection.stored import saved_arrays
from jserve.checkpoints.orbax.beside import read_beside_sampling
from jserve.checkpoints.own.folder import OwnArrays, open_arrays, read_own_text
from jserve.checkpoints.own.module import OwnModule, build_own_module
from jserve.errors import CheckpointError
from jserve.models.check import check_contract
from jserve.models.own import length_if_known
from jserve.progress import SILENT, Progress
from jserve.text.from_hf import HfText
from jserve.text.generating import model_template

__all__ = ["inspect_own"]


def inspect_own(
    target: str, *, checkpoint: str | None, tokenizer: str | None, check: bool, progress: Progress | None = None
) -> InspectReport:
    """Describe the module ``target`` (``package.module:Class``), and the folder ``checkpoint`` if there is one.

    ``check`` runs the contract checker on it, with the parameters of that folder, all of which is read, or with random
    ones. Where the folder's arrays do not fit the module, or its text cannot be served, ``problem`` says it. Raises
    StartError where there is nothing to describe: it cannot be built, or the folder holds no checkpoint.
    """
    progress = progress or SILENT
    serve = _serve(target, checkpoint, tokenizer)
    if checkpoint is None:
        return _described(target, None, tokenizer=tokenizer, check=check, serve=serve, progress=progress)
    arrays = open_arrays(checkpoint, progress=progress)
    with arrays.in_words():
        return arrays.said(_described(target, arrays, tokenizer=tokenizer, check=check, serve=serve, progress=progress))


def _described(
    target: str, arrays: OwnArrays | None, *, tokenizer: str | None, check: bool, serve: str, progress: Progress
) -> InspectReport:
    where = () if arrays is None else arrays.where
    own = build_own_module(target, where=where, dtype=jnp.dtype(jnp.float32))
    text, path = read_own_text(tokenizer, where)
    leaves = flatten(nnx.state(own.module))
    problem, params, stored = (None, None, None) if arrays is None else _fit(own, arrays, restore=check)
    facts: dict[str, Any] = {}
    if arrays is not None:
        facts = {**saved_facts(arrays.saved), "digests": "not checked (--check reads every byte)"}
    if arrays is not None and check:
        restored = {path: LazyArray.of(leaf) for path, leaf in flatten(params or {}).items()}
        unread = {path: array for path, array in arrays.saved.tree.items() if path not in (stored or ())}
        every = {".".join(path): array for path, array in (*restored.items(), *unread.items())}
        check_values(every, progress, where=arrays.name)
        facts["digests"] = "all values finite"
    facts |= text_facts(
        None if text is None or path is None else (text, path),
        read_beside_sampling(where),
        folder="DIR of --checkpoint" if arrays is None else arrays.name,
    )
    findings = None
    if check and problem is None:
        findings = check_contract(own.module, params, vocab_size=facts["vocab_size"])
    if problem is None and text is not None:
        problem = _unserved(text)
    served = problem is None and not any(finding.severity == "error" for finding in findings or ())
    shown = _parameters(leaves) if arrays is None else saved_arrays(arrays.saved, stored)
    return InspectReport(
        name=own.name,
        model=target,
        own=True,
        path=None if arrays is None else arrays.name,
        layout="none" if arrays is None else f"{arrays.saved.layout.writer}, {arrays.saved.form}",
        parameters=sum(math.prod(leaf.shape) for leaf in leaves.values()),
        nbytes=sum(array.nbytes for array in shown if array.parameter),
        other_nbytes=sum(array.nbytes for array in shown if not array.parameter),
        arrays=shown,
        max_position=length_if_known(own.module),
        findings=findings,
        problem=problem,
        serve=serve if served else None,
        **{**facts, "config_path": None if own.config_path is None else str(own.config_path)},
    )


def _unserved(text: HfText) -> Problem | None:
    """Why a tokenizer or its chat template is not served."""
    try:
        model_template(text.chat_template, text.tokenizer, eos_ids=text.tokenizer.eos_ids)
    except CheckpointError as error:
        return Problem(code=error.code, message=error.message, fix=error.fix)
    return None


def _serve(target: str, checkpoint: str | None, tokenizer: str | None) -> str:
    line = shlex.join(["jserve", "serve", target, "--checkpoint", checkpoint or "DIR"])
    return line if tokenizer is None else f"{line} --tokenizer {shlex.quote(tokenizer)}"


def _parameters(leaves: dict[tuple[str, ...], Any]) -> list[ArrayReport]:
    """Those of a module without a checkpoint."""
    return [
        ArrayReport(
            name=".".join(path),
            shape=list(leaf.shape),
            dtype=jnp.dtype(leaf.dtype).name,
            nbytes=math.prod(leaf.shape) * leaf.dtype.itemsize,
        )
        for path, leaf in leaves.items()
    ]


def _fit(
    own: OwnModule, arrays: OwnArrays, *, restore: bool
) -> tuple[Problem | None, dict[Any, Any] | None, Collection[Path] | None]:
    """How the arrays do not fit the module; else its parameters, if they are to be read, and which arrays they are."""
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first),
        nnx.to_pure_dict(nnx.state(own.module)),
    )
    try:
        stored = arrays.fit(shapes, ignored=own.random, unsaved=own.unsaved).stored
        params = arrays.restore(shapes, ignored=own.random, unsaved=own.unsaved) if restore else None
    except CheckpointError as error:
        return Problem(code=error.code, message=error.message, fix=error.fix), None, None
    return None, params, stored
