"""Each token id's share of the text, read off a tokenizer's decoder once, so that decoding can go token by token.

Understood are the decoders of generating models: byte-level (GPT-2 and after), SentencePiece with byte
fallback (``Replace, ByteFallback, Fuse, Strip``), Metaspace, and none. Another is refused by its name.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

from jserve.errors import UnsupportedModel

__all__ = ["BYTE_ALPHABET", "Pieces"]

REPLACE_RUN = "replace"
"""A malformed sequence is one U+FFFD, as UTF-8 decoders do by the Unicode standard."""
REPLACE_EACH_BYTE = "jserve.replace_each_byte"
"""A malformed sequence is one U+FFFD a byte, as SentencePiece does."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH_BYTE, _replace_each_byte)


class Pieces(dict[int, "str | bytes | None"]):
    """Token id -> ``str`` where it is whole text by itself, ``bytes`` where it may be part of a character, None
    where it has no text (a special token that is skipped, an id out of the vocabulary).

    Filled as ids are asked for and shared by all requests; at most one entry an id of the vocabulary.
    """

    errors: str
    """Name of the codec error handler for malformed bytes."""
    strip: str
    """Characters to take off the very start of the text, one by one as far as they match."""

    def __init__(self, backend: tokenizers.Tokenizer, *, skip_special: bool) -> None:
        super().__init__()
        self._backend = backend
        self._skipped = (
            {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
            if skip_special
            else frozenset()
        )
        self.errors = REPLACE_RUN
        self.strip = ""
        self._first: Callable[[str], str] | None = None
        self._convert = self._converter(_decoder_parts(backend))

    def __missing__(self, token_id: int) -> str | bytes | None:
        token = self._token(token_id)
        piece = None if token is None else self._convert(token)
        if isinstance(piece, bytes):
            with contextlib.suppress(UnicodeDecodeError):
                piece = piece.decode("utf-8")
        self[token_id] = piece
        return piece

    def first(self, token_id: int) -> str | bytes | None:
        """The piece where it is the first of the text that is not None."""
        piece = self[token_id]
        token = self._token(token_id)
        return piece if self._first is None or token is None else self._first(token)

    def _token(self, token_id: int) -> str | None:
        token: str | None = self._backend.id_to_token(token_id) if token_id >= 0 else None
        return None if token in self._skipped else token

    def _converter(self, parts: list[dict[str, Any]]) -> Callable[[str], str | bytes]:
        names = [part["type"] for part in parts]
        if not parts:
            self._first = str
            return lambda token: " " + token
        if names == ["ByteLevel"]:
            return _byte_level
        if names == ["Metaspace"]:
            mark = parts[0]["replacement"]
            if parts[0].get("prepend_scheme", "always") != "never":
                self._first = lambda token: token.replace(mark, "")
            return lambda token: token.replace(mark, " ")
        return self._sentencepiece(parts)

    def _sentencepiece(self, parts: list[dict[str, Any]]) -> Callable[[str], str | bytes]:
        """``Replace*, ByteFallback?, Fuse?, Strip?``, in this order."""
        known = ["Replace", "ByteFallback", "Fuse", "Strip"]
        names = [part["type"] for part in parts]
        unknown = [name for name in names if name not in known]
        if unknown or names != sorted(names, key=known.index):
            raise UnsupportedModel(
                f"the tokenizer's decoder is {', '.join(names)}; built are ByteLevel, Metaspace, and "
                f"{', '.join(known)} in this order"
            )
        replaced: list[tuple[str, str]] = []
        for part in parts:
            if part["type"] == "Replace":
                if "String" not in part["pattern"]:
                    raise UnsupportedModel(
                        "the tokenizer's decoder replaces by a regular expression; built is a string"
                    )
                replaced.append((part["pattern"]["String"], part["content"]))
            elif part["type"] == "Strip":
                if part["stop"] or "Fuse" not in names:
                    raise UnsupportedModel("the tokenizer's decoder strips each token; built is the start of the text")
                self.strip = part["content"] * part["start"]
        fallback = "ByteFallback" in names
        if fallback:
            self.errors = REPLACE_EACH_BYTE

        def convert(token: str) -> str | bytes:
            for old, new in replaced:
                token = token.replace(old, new)
            if fallback and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
                return bytes([int(token[3:5], 16)])
            return token

        return convert


def _decoder_parts(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder as the list of its parts; empty where there is none."""
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_alphabet() -> dict[str, int]:
    """Printable Latin-1 bytes stand for themselves; the others take the code points from 256 up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


BYTE_ALPHABET = _byte_alphabet()
"""Byte-level BPE's printable stand-ins: character -> byte."""


def _byte_level(token: str) -> bytes:
    """An added token that is not written in the alphabet stands for its own text."""
    try:
        return bytes([BYTE_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()
