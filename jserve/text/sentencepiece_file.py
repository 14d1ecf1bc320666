"""A SentencePiece model file, such as ``tokenizer.model``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from google.protobuf.message import DecodeError

from jserve.errors import CheckpointError, UnsupportedModel
from jserve.text.sentencepiece import Piece, PieceKind, SentencePieceModel
from jserve.text.sentencepiece_model_pb2 import SentencePieceModelFile

__all__ = ["SentencePieceFile", "parse_sentencepiece"]

_MODELS: Mapping[int, Literal["bpe", "unigram"]] = {1: "unigram", 2: "bpe"}


@dataclass(frozen=True, kw_only=True)
class SentencePieceFile:
    """The model of a file, and the ids that it names beside it."""

    model: SentencePieceModel
    bos_id: int | None
    eos_id: int | None


def parse_sentencepiece(data: bytes, *, prefix: Literal["every_part", "first_part"]) -> SentencePieceFile:
    """``prefix`` says where the space in front goes, if the model has one: the file does not.

    Raises CheckpointError for bytes that are no such file, UnsupportedModel for options that are not built.
    """
    file = SentencePieceModelFile()
    try:
        file.ParseFromString(data)
    except DecodeError as error:
        raise CheckpointError(f"not a SentencePiece model: {error}") from None
    trainer, normalizer = file.trainer_spec, file.normalizer_spec
    if not file.HasField("trainer_spec") or not file.pieces:
        raise CheckpointError("not a SentencePiece model: it has no pieces or does not say how it was trained")
    if trainer.model_type not in _MODELS:
        raise UnsupportedModel(
            f"the SentencePiece model is of type {trainer.model_type}; read are 1 (unigram), 2 (BPE)"
        )
    if trainer.treat_whitespace_as_suffix:
        raise UnsupportedModel("the SentencePiece model marks spaces behind words, which is not built")
    if not normalizer.escape_whitespaces:
        raise UnsupportedModel("the SentencePiece model leaves spaces unmarked, which is not built")
    kinds = {kind.value for kind in PieceKind}
    if strange := [(i, piece.type) for i, piece in enumerate(file.pieces) if piece.type not in kinds]:
        raise CheckpointError(f"piece {strange[0][0]} of the SentencePiece model is of unknown type {strange[0][1]}")
    count = len(file.pieces)
    bos, eos = (None if i < 0 or i >= count else i for i in (trainer.bos_id, trainer.eos_id))
    model = SentencePieceModel(
        kind=_MODELS[trainer.model_type],
        pieces=[Piece(text=p.piece, score=p.score, kind=PieceKind(p.type)) for p in file.pieces],
        unk_id=None if trainer.unk_id < 0 else trainer.unk_id,
        byte_fallback=trainer.byte_fallback,
        prefix=prefix if normalizer.add_dummy_prefix else "none",
        clean_spaces=normalizer.remove_extra_whitespaces,
        charsmap=normalizer.precompiled_charsmap,
    )
    return SentencePieceFile(model=model, bos_id=bos, eos_id=eos)
