"""From a text to what an encoder reads of it: checked, tokenized, cut off where it is too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

from jserve.errors import ConfigError, InvalidRequest, MessageTooLarge
from jserve.text.tokenizer import Tokenizer

__all__ = ["MAX_TEXTS", "MAX_TEXT_BYTES", "TextIds", "TextPreparer", "check_text"]

MAX_TEXTS = 4096
"""Most texts of one call, where a call is answered as a whole."""
MAX_TEXT_BYTES = 1 << 20
"""Longest text: all of it is tokenized, however little of it the model reads."""


@dataclass(frozen=True, kw_only=True)
class TextIds:
    """A text as its tokens, special ones included."""

    ids: tuple[int, ...]
    truncated: bool


def check_text(text: object, *, what: str) -> str:
    """The text, where it is one that can be tokenized. ``what`` names it, such as "text 3". Raises InvalidRequest."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{what} is of type {type(text).__name__}; it must be text")
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what} has a lone surrogate in it; it must be whole Unicode") from None
    if size > MAX_TEXT_BYTES:
        raise MessageTooLarge(f"{what} has {size} bytes; at most {MAX_TEXT_BYTES} are taken")
    return text


class TextPreparer:
    """Tokenizes for one model. Safe from any thread.

    ``lowercase``: the model wants its texts in lower case, and its tokenizer does not see to it. Raises ConfigError
    where ``max_tokens`` leave no room between the tokenizer's special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_tokens: int, lowercase: bool) -> None:
        self._lowercase = lowercase
        # A copy of its own, for cutting off is a setting of the backend.
        self._backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        special = self._backend.num_special_tokens_to_add(is_pair=False)
        if max_tokens <= special:
            raise ConfigError(
                f"texts may have {max_tokens} tokens and {special} of them are special; none is left for the text",
                fix=f"--max-model-len {special + 1} or more",
            )
        self._backend.no_padding()
        # What is special at the end stays at the end: the text between is cut.
        self._backend.enable_truncation(max_tokens)

    def prepare(self, texts: Sequence[str]) -> list[TextIds]:
        """The tokens of each text that ``check_text`` let through."""
        batch = [text.lower() for text in texts] if self._lowercase else list(texts)
        return [
            TextIds(ids=tuple(encoding.ids), truncated=bool(encoding.overflowing))
            for encoding in self._backend.encode_batch(batch, add_special_tokens=True)
        ]
