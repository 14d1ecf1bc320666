"""Token ids to text, one by one, as they are made."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jserve.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """Decodes one text incrementally: the pushed parts and the flush, joined, are ``tokenizer.decode`` of all ids.

    A character comes out with the token that completes it. Bytes that can no longer become a character come out
    as U+FFFD at once; ``flush`` gives out what is unfinished at the end. The cost of a token does not depend on
    how many came before.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._pieces = tokenizer.pieces(skip_special=skip_special)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(self._pieces.errors)
        self._unfinished = False
        self._started = False
        self._strip = self._pieces.strip

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; often all of the token's own, "" while a character is unfinished."""
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        if not self._started:
            self._started = True
            piece = self._pieces.first(token_id)
        if isinstance(piece, bytes):
            text = self._utf8.decode(piece)
            self._unfinished = bool(self._utf8.getstate()[0])
        elif self._unfinished:
            text = self._utf8.decode(b"", final=True) + (piece or "")
            self._unfinished = False
        else:
            text = piece or ""
        return self._strip_start(text) if self._strip else text

    def flush(self) -> str:
        """The rest: U+FFFD for a character that never became whole. Call it once, after the last token."""
        self._unfinished = False
        text = self._utf8.decode(b"", final=True)
        return self._strip_start(text) if self._strip else text

    def _strip_start(self, text: str) -> str:
        while text and self._strip:
            if text[0] != self._strip[0]:
                self._strip = ""
            else:
                text, self._strip = text[1:], self._strip[1:]
        return text
