"""A checkpoint, whatever it is stored as: what it describes, and its parameters, still to be read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jserve.checkpoints.arrays.key_map import Leaves
from jserve.checkpoints.arrays.key_map import Path as LeafPath
from jserve.checkpoints.encoder import EncoderSettings
from jserve.errors import CheckpointError, UnsupportedModel
from jserve.models.config import ModelConfig
from jserve.text.chat_template import ChatTemplate
from jserve.text.generating import model_template
from jserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from flax import nnx
    from jax.typing import DTypeLike

    from jserve.checkpoints.sources.store.in_words import InWords

__all__ = ["Checkpoint", "param_shapes"]

_READABLE = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint of a known family. Its files were looked at, and none of its parameters read.

    Made of parameters that are no floats, it raises UnsupportedModel; CheckpointError of a tokenizer with more ids than
    the model.
    """

    name: str
    path: Path
    layout: str
    """What it is stored as, in words."""
    family: str
    config: ModelConfig
    leaves: Leaves
    """Every parameter by its path, in the shape that the family wants."""
    tokenizer: Tokenizer | None
    chat_template: str | None
    """The template's source."""
    generation: Mapping[str, Any]
    """What the checkpoint says of sampling: defaults for DEFAULTABLE fields, which are served, and settings that change
    the tokens chosen and are not built, by the names that its format has for them."""
    eos_ids: tuple[int, ...]
    source: str
    """The MODEL that it came from first."""
    digests: str
    """What is known of the files' contents, in words."""
    encoder: EncoderSettings | None = None
    """Of an encoder; None of a model that generates."""
    words: InWords | None = None
    """Of a copy of one in an object store: what its files are called there."""

    def __post_init__(self) -> None:
        strange = {leaf.dtype.name: path for path, leaf in self.leaves.items() if leaf.dtype.name not in _READABLE}
        if strange:
            found = ", ".join(f"{dtype} (as in {'.'.join(path)})" for dtype, path in strange.items())
            raise UnsupportedModel(
                f"{self.path} stores parameters as {found}; types that are read: {', '.join(_READABLE)}"
            )
        ids = 0 if self.tokenizer is None else self.tokenizer.vocab_size
        if ids > self.config.vocab_size:
            raise CheckpointError(
                f"{self.path}: the tokenizer's {ids} tokens do not fit the embedding table of "
                f"{self.config.vocab_size} rows"
            )

    @property
    def where(self) -> str:
        """``path``, as users know it."""
        return str(self.path) if self.words is None else self.words.said(str(self.path))

    def template(self) -> ChatTemplate | None:
        """The model's own template, or None where it has none, there is no tokenizer, or it is an encoder. Raises as
        ``model_template`` does, of what a decoder has for text."""
        if self.encoder is not None:
            return None
        return model_template(self.chat_template, self.tokenizer, eos_ids=self.eos_ids)

    def abstract(self, dtype: DTypeLike, *, length: int | None = None) -> tuple[nnx.GraphDef[Any], nnx.State]:
        """The module's graph and its parameters as ShapeDtypeStructs of ``dtype``, for sequences of at most ``length``
        tokens (None: as many as the model was made for). Nothing is read."""
        from jserve.models.registry import build_abstract, family

        config = self.config.for_length(length or self.config.max_position)
        return build_abstract(family(self.family), config, dtype)

    def restore(self, abstract: Any) -> dict[Any, Any]:
        """Parameters as a pure dict of ``jax.Array``, each straight onto its sharding and in its dtype.

        ``abstract`` is a pure dict or ``nnx.State`` of ShapeDtypeStructs with shardings; those without one go to the
        first device. Raises CheckpointError that lists every parameter missing, left over or of another shape.
        """
        from jserve.checkpoints.arrays.place import place

        with nullcontext() if self.words is None else self.words.errors():
            return place(self.leaves, abstract, where=str(self.path))


def param_shapes(name: str, config: ModelConfig) -> dict[LeafPath, tuple[int, ...]]:
    """The shape of every parameter of the family ``name``, by its path."""
    from jserve.checkpoints.arrays.tree import flatten
    from jserve.models.registry import build_abstract, family

    _, state = build_abstract(family(name), config, "float32")
    return {path: tuple(leaf.shape) for path, leaf in flatten(state).items()}
