"""Typed reads of a GGUF file's ``tokenizer.ggml.*``, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.errors import CheckpointError, UnsupportedModel
from jserve.shown import shown
from jserve.text.sentencepiece import PieceKind

__all__ = ["GgufFields"]


class GgufFields:
    """``names`` are those after ``tokenizer.ggml.``. What contradicts itself raises CheckpointError."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise UnsupportedModel(f"tokenizer.ggml.{name} is {_shown(value)}; it must name a kind of tokenizer")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"tokenizer.ggml.{name} is {_shown(value)}; it must be true or false")
        return value

    def token_id(self, name: str, count: int) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise CheckpointError(f"tokenizer.ggml.{name} is {_shown(value)}; ids go from 0 to {count - 1}")
        return value

    def vocabulary(self) -> tuple[list[str], list[int]]:
        """Tokens and their types, without the unused ones that only fill up the embedding table at its end."""
        tokens = self._list("tokens", str)
        types = self._list("token_type", int) if self.get("token_type") is not None else [1] * len(tokens)
        if len(types) != len(tokens):
            raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
        while types and types[-1] == PieceKind.UNUSED:
            types.pop()
        del tokens[len(types) :]
        if not tokens:
            raise CheckpointError("tokenizer.ggml.tokens is empty")
        if len(set(tokens)) != len(tokens):
            seen: set[str] = set()
            twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
            raise CheckpointError(f"tokenizer.ggml.tokens has {twice!r} twice")
        return tokens, types

    def merges(self) -> list[tuple[str, str]]:
        merges = []
        for i, merge in enumerate(self._list("merges", str)):
            cut = merge.find(" ", 1)
            if cut < 1 or cut + 1 == len(merge):
                raise CheckpointError(f"tokenizer.ggml.merges[{i}] is {merge!r}; it must be two tokens with a space")
            merges.append((merge[:cut], merge[cut + 1 :]))
        return merges

    def scores(self, count: int) -> list[float]:
        """Scores of the first ``count`` tokens; the file may have more, for tokens that only fill up."""
        scores = self._list("scores", float)
        if len(scores) < count:
            raise CheckpointError(f"tokenizer.ggml.scores has {len(scores)} entries for {count} tokens")
        return scores[:count]

    def get(self, name: str, default: Any = None) -> Any:
        return self._fields.get(f"tokenizer.ggml.{name}", default)

    def _list(self, name: str, kind: type) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise CheckpointError(f"tokenizer.ggml.{name} is {_shown(value)}; it must be a list of {kind.__name__}")
        return list(value)


def _shown(value: Any) -> str:
    return "missing" if value is None else shown(value)
