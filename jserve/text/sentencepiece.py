"""A SentencePiece vocabulary as a ``tokenizers`` backend that gives SentencePiece's own ids.

SentencePiece knows pieces with scores and no list of merges. For BPE the merges follow from the pieces: two symbols
may be joined where what they make is a piece, the better its score the sooner (Sennrich et al. 2016, arXiv:1508.07909,
with scores in the place of ranks). Unigram models (Kudo 2018, arXiv:1804.10959) are built in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jserve.errors import CheckpointError, UnsupportedModel

__all__ = ["SPACE", "Piece", "PieceKind", "SentencePieceModel", "build_backend"]

SPACE = "\u2581"
"""What stands for a space inside pieces."""


class PieceKind(IntEnum):
    """The numbers of SentencePiece files, and of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    """Always one token, and never a part of another."""
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One entry of the vocabulary; its place in the list is its id."""

    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True, kw_only=True)
class SentencePieceModel:
    """Everything that decides how text is cut."""

    kind: Literal["bpe", "unigram"]
    pieces: Sequence[Piece]
    unk_id: int | None
    """The piece for what no other piece covers."""
    byte_fallback: bool
    """What no piece covers becomes the bytes of its UTF-8, each a piece of its own."""
    prefix: Literal["none", "every_part", "first_part"] = "every_part"
    """Where a space is put in front: nowhere, at the start of the text and after every special token, or at the start
    of the text alone."""
    clean_spaces: bool = False
    """Spaces at both ends go, and runs of them become one."""
    charsmap: bytes = b""
    """SentencePiece's compiled table of replacements; empty: none."""
    user_defined: Literal["text", "added"] = "text"
    """User-defined pieces are found in the text after its spaces were marked, as SentencePiece does; or before
    anything else, as added tokens are, so that what follows one is a part of its own."""


def build_backend(model: SentencePieceModel) -> tokenizers.Tokenizer:
    """Control and unknown pieces become special tokens, found wherever they are written out.

    Raises CheckpointError for pieces that contradict each other, UnsupportedModel for what is not built.
    """
    _check(model)
    backend = tokenizers.Tokenizer(_bpe(model) if model.kind == "bpe" else _unigram(model))
    backend.normalizer = _normalizer(model)
    steps: list[pre_tokenizers.PreTokenizer] = []
    if model.prefix == "first_part":
        steps.append(pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False))
    if apart := _found_in_text(model):
        longest_first = sorted(apart, key=len, reverse=True)
        steps.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), behavior="isolated"))
    if steps:
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    parts: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.prefix != "none":
        parts.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(parts)
    special = (PieceKind.CONTROL, PieceKind.UNKNOWN)
    backend.add_tokens(
        [
            AddedToken(piece.text, normalized=False, special=piece.kind in special)
            for piece in model.pieces
            if piece.kind in special or (piece.kind is PieceKind.USER_DEFINED and model.user_defined == "added")
        ]
    )
    return backend


def _check(model: SentencePieceModel) -> None:
    problems: list[str] = []
    seen: dict[str, int] = {}
    for i, piece in enumerate(model.pieces):
        if not piece.text:
            problems.append(f"piece {i} is empty")
        elif (first := seen.setdefault(piece.text, i)) != i:
            problems.append(f"pieces {first} and {i} are both {piece.text!r}")
        if piece.score != piece.score:
            problems.append(f"the score of piece {i} is not a number")
    if not model.pieces:
        problems.append("there are no pieces")
    if model.unk_id is not None and not 0 <= model.unk_id < len(model.pieces):
        problems.append(f"the unknown piece is {model.unk_id}; ids go from 0 to {len(model.pieces) - 1}")
    if model.byte_fallback and (missing := [i for i in range(256) if f"<0x{i:02X}>" not in seen]):
        problems.append(
            f"text may become bytes, and {len(missing)} of the 256 bytes are no pieces: <0x{missing[0]:02X}>"
        )
    if not model.byte_fallback and model.unk_id is None:
        problems.append("there is neither a piece for the unknown nor one for each byte")
    if problems:
        raise CheckpointError("the SentencePiece vocabulary is damaged: " + "; ".join(problems[:20]))
    if model.kind == "unigram" and any(piece.kind is PieceKind.UNUSED for piece in model.pieces):
        raise UnsupportedModel("the SentencePiece unigram vocabulary has unused pieces, which are not built")


def _bpe(model: SentencePieceModel) -> models.BPE:
    vocab = {piece.text: i for i, piece in enumerate(model.pieces)}
    return models.BPE(
        vocab=vocab,
        merges=_merges(model, vocab),
        unk_token=None if model.unk_id is None else model.pieces[model.unk_id].text,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
        # A user-defined piece stands alone then, and need not be reachable by merges.
        ignore_merges=bool(_found_in_text(model)),
    )


def _merges(model: SentencePieceModel, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Best score first; of one piece's halves, the longer left one first."""
    joined = {PieceKind.NORMAL} if model.user_defined == "text" else {PieceKind.NORMAL, PieceKind.USER_DEFINED}
    symbols = {piece.text for piece in model.pieces if piece.kind in joined}
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for text in symbols:
        piece = model.pieces[vocab[text]]
        # The score of a user-defined piece says nothing: files write 0 or -1000, and it comes before all others.
        cost = -piece.score if piece.kind is PieceKind.NORMAL else 0.0
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in symbols and right in symbols:
                ranked.append((cost, -cut, cut - len(text), vocab[text], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _unigram(model: SentencePieceModel) -> models.Unigram:
    return models.Unigram(
        vocab=[(piece.text, piece.score) for piece in model.pieces],
        unk_id=model.unk_id,
        byte_fallback=model.byte_fallback,
    )


def _normalizer(model: SentencePieceModel) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        try:
            steps.append(normalizers.Precompiled(model.charsmap))
        except Exception as error:  # The backend raises bare Exception for bytes that are no table.
            raise CheckpointError(f"the SentencePiece table of replacements is damaged: {error}") from None
    if model.clean_spaces:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.prefix == "every_part":
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _found_in_text(model: SentencePieceModel) -> list[str]:
    if model.user_defined == "added":
        return []
    return [piece.text for piece in model.pieces if piece.kind is PieceKind.USER_DEFINED]
