"""What a checkpoint of an encoder says besides its model: how texts become vectors."""

from __future__ import annotations

from dataclasses import dataclass

from jserve.models.pooling import Pooling

__all__ = ["EncoderSettings"]


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    pooling: Pooling
    max_tokens: int
    """Most tokens of a text, special ones included; the rest is cut off."""
    lowercase: bool = False
    """Texts are made lower case before the tokenizer has them."""
