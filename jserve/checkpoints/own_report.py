"""What a module of the user's own is, whether it keeps the model contract, and the line that serves it."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jserve.checkpoints.own_folder import OwnArrays, open_arrays, read_own_text
from jserve.checkpoints.own_module import OwnModule, build_own_module
from jserve.models.check import Finding, check_contract
from jserve.models.own import length_of

__all__ = ["OwnReport", "inspect_own"]


@dataclass(frozen=True, kw_only=True)
class OwnReport:
    """Plain values all through, so that ``dataclasses.asdict`` of it is JSON. ``str`` of it is for reading."""

    name: str
    model: str
    """As it was asked for."""
    checkpoint: str | None
    config: str | None
    """The file that the module's config was read from."""
    parameters: int
    arrays: int
    nbytes: int
    max_position: int
    tokenizer: str | None
    vocab_size: int | None
    """Tokens of the tokenizer; None where there is none."""
    eos_ids: list[int]
    findings: list[Finding] | None
    """What the contract checker found, with the checkpoint's parameters or with random ones; None: not checked."""
    serve: str
    """The command that serves it."""

    @property
    def failed(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings or ())

    def __str__(self) -> str:
        values = "the checkpoint's" if self.checkpoint else "random"
        rows = {
            "module": self.model,
            "checkpoint": self.checkpoint or "none given",
            "config": self.config or "the code's",
            "parameters": f"{self.parameters:,} in {self.arrays} arrays, {self.nbytes / 1e6:,.1f} MB",
            "length": f"{self.max_position} tokens",
            "tokenizer": "missing: only token ids are served"
            if self.tokenizer is None
            else f"{self.tokenizer}, {self.vocab_size} tokens, EOS {self.eos_ids}",
            "contract": "not checked (--check runs it on tiny inputs)"
            if self.findings is None
            else f"{self._verdict()}, run with {values} parameters",
        }
        lines = [self.name, *(f"  {key:<14} {value}" for key, value in rows.items())]
        return "\n".join([*lines, *map(str, self.findings or ()), "", self.serve])

    def _verdict(self) -> str:
        counts = {kind: sum(f.severity == kind for f in self.findings or ()) for kind in ("error", "warning")}
        words = [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items() if count]
        return ", ".join(words) or "kept"


def inspect_own(target: str, *, checkpoint: str | None, tokenizer: str | None, check: bool) -> OwnReport:
    """Describe the module ``target`` (``package.module:Class``).

    ``check`` runs the contract checker on it, with the parameters of the folder ``checkpoint``, or with random ones.
    Raises StartError where it cannot be built, or its checkpoint does not fit it.
    """
    arrays = None if checkpoint is None else open_arrays(checkpoint)
    where = () if arrays is None else arrays.where
    own = build_own_module(target, where=where, dtype=jnp.dtype(jnp.float32))
    text, path = read_own_text(tokenizer, where)
    reader = None if text is None else text.tokenizer
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(own.module)))
    findings = None
    if check:
        params = None if arrays is None else _restore(own, arrays)
        findings = check_contract(own.module, params, vocab_size=None if reader is None else reader.vocab_size)
    return OwnReport(
        name=own.name,
        model=target,
        checkpoint=None if arrays is None else arrays.name,
        config=None if own.config_path is None else str(own.config_path),
        parameters=sum(math.prod(leaf.shape) for leaf in leaves),
        arrays=len(leaves),
        nbytes=sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves),
        max_position=length_of(own.module),
        tokenizer=None if path is None else str(path),
        vocab_size=None if reader is None else reader.vocab_size,
        eos_ids=[] if reader is None else list(reader.eos_ids),
        findings=findings,
        serve=shlex.join(["jserve", "serve", target, "--checkpoint", checkpoint or "DIR"])
        + ("" if tokenizer is None else f" --tokenizer {shlex.quote(tokenizer)}"),
    )


def _restore(own: OwnModule, arrays: OwnArrays) -> dict[object, object]:
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first),
        nnx.to_pure_dict(nnx.state(own.module)),
    )
    return arrays.restore(shapes, ignored=own.random)
