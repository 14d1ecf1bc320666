"""An opened checkpoint: its manifest, tokenizer and template, and the way of its arrays onto a mesh."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jserve.checkpoints.manifest import ARRAYS_FOLDER, TOKENIZER_NAME, Manifest
from jserve.checkpoints.names import resolve_member
from jserve.errors import CheckpointError

if TYPE_CHECKING:
    from flax import nnx
    from jax.typing import DTypeLike

    from jserve.models.llama import LlamaConfig
    from jserve.text.chat_template import ChatTemplate
    from jserve.text.tokenizer import Tokenizer

__all__ = ["Checkpoint"]


class Checkpoint:
    """A folder with ``jserve.json`` and an Orbax checkpoint in it. Opening it reads the manifest and no arrays."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @cached_property
    def config(self) -> LlamaConfig:
        """The family's configuration. Raises UnsupportedModel where the manifest's is not one."""
        from jserve.models.registry import family

        return family(self.manifest.family).config_type.from_dict(self.manifest.config)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the arrays. Raises CheckpointError where there is none or it is damaged."""
        return self._tokenizer

    def chat_template(self) -> ChatTemplate | None:
        """The model's own template, or None where it has none."""
        from jserve.text.chat_template import ChatTemplate

        if self.manifest.chat_template is None:
            return None
        tokenizer = self.tokenizer()
        eos = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
        return ChatTemplate(
            self.manifest.chat_template,
            bos_token=tokenizer.token(tokenizer.bos_id),
            eos_token=tokenizer.token(eos),
        )

    def abstract(self, dtype: DTypeLike) -> tuple[nnx.GraphDef[Any], nnx.State]:
        """The module's graph and its parameters as ShapeDtypeStructs of ``dtype``. Nothing is read."""
        from jserve.models.registry import build_abstract, family

        return build_abstract(family(self.manifest.family), self.config, dtype)

    def restore(self, abstract: Any) -> dict[Any, Any]:
        """Parameters as a pure dict of ``jax.Array``, each straight onto its sharding and in its dtype.

        ``abstract`` is a pure dict or ``nnx.State`` of ShapeDtypeStructs with shardings; those without one go to the
        first device. Raises CheckpointError that lists every parameter missing, left over or of another shape.
        """
        from jserve.checkpoints.arrays import restore_arrays

        return restore_arrays(self.path / ARRAYS_FOLDER, abstract)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from jserve.text.tokenizer import Tokenizer

        path, manifest = resolve_member(self.path, TOKENIZER_NAME), self.manifest
        try:
            tokenizer = Tokenizer.from_json(
                path.read_text(encoding="utf-8"),
                eos_ids=manifest.eos_ids,
                bos_id=manifest.bos_id,
                add_bos=manifest.add_bos,
            )
            named = [*manifest.eos_ids, *([] if manifest.bos_id is None else [manifest.bos_id])]
            if strange := [i for i in named if not 0 <= i < tokenizer.vocab_size]:
                raise ValueError(f"eos_ids or bos_id name {strange}; its ids go from 0 to {tokenizer.vocab_size - 1}")
            return tokenizer
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"cannot read the tokenizer {path}: {error}",
                fix=f"delete {self.path} and convert it again from {self.manifest.source}",
            ) from None
