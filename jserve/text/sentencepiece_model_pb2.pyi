from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SentencePieceModelFile(_message.Message):
    __slots__ = ("pieces", "trainer_spec", "normalizer_spec")
    class Piece(_message.Message):
        __slots__ = ("piece", "score", "type")
        PIECE_FIELD_NUMBER: _ClassVar[int]
        SCORE_FIELD_NUMBER: _ClassVar[int]
        TYPE_FIELD_NUMBER: _ClassVar[int]
        piece: str
        score: float
        type: int
        def __init__(self, piece: _Optional[str] = ..., score: _Optional[float] = ..., type: _Optional[int] = ...) -> None: ...
    class Trainer(_message.Message):
        __slots__ = ("model_type", "treat_whitespace_as_suffix", "byte_fallback", "unk_id", "bos_id", "eos_id")
        MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
        TREAT_WHITESPACE_AS_SUFFIX_FIELD_NUMBER: _ClassVar[int]
        BYTE_FALLBACK_FIELD_NUMBER: _ClassVar[int]
        UNK_ID_FIELD_NUMBER: _ClassVar[int]
        BOS_ID_FIELD_NUMBER: _ClassVar[int]
        EOS_ID_FIELD_NUMBER: _ClassVar[int]
        model_type: int
        treat_whitespace_as_suffix: bool
        byte_fallback: bool
        unk_id: int
        bos_id: int
        eos_id: int
        def __init__(self, model_type: _Optional[int] = ..., treat_whitespace_as_suffix: _Optional[bool] = ..., byte_fallback: _Optional[bool] = ..., unk_id: _Optional[int] = ..., bos_id: _Optional[int] = ..., eos_id: _Optional[int] = ...) -> None: ...
    class Normalizer(_message.Message):
        __slots__ = ("precompiled_charsmap", "add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces")
        PRECOMPILED_CHARSMAP_FIELD_NUMBER: _ClassVar[int]
        ADD_DUMMY_PREFIX_FIELD_NUMBER: _ClassVar[int]
        REMOVE_EXTRA_WHITESPACES_FIELD_NUMBER: _ClassVar[int]
        ESCAPE_WHITESPACES_FIELD_NUMBER: _ClassVar[int]
        precompiled_charsmap: bytes
        add_dummy_prefix: bool
        remove_extra_whitespaces: bool
        escape_whitespaces: bool
        def __init__(self, precompiled_charsmap: _Optional[bytes] = ..., add_dummy_prefix: _Optional[bool] = ..., remove_extra_whitespaces: _Optional[bool] = ..., escape_whitespaces: _Optional[bool] = ...) -> None: ...
    PIECES_FIELD_NUMBER: _ClassVar[int]
    TRAINER_SPEC_FIELD_NUMBER: _ClassVar[int]
    NORMALIZER_SPEC_FIELD_NUMBER: _ClassVar[int]
    pieces: _containers.RepeatedCompositeFieldContainer[SentencePieceModelFile.Piece]
    trainer_spec: SentencePieceModelFile.Trainer
    normalizer_spec: SentencePieceModelFile.Normalizer
    def __init__(self, pieces: _Optional[_Iterable[_Union[SentencePieceModelFile.Piece, _Mapping]]] = ..., trainer_spec: _Optional[_Union[SentencePieceModelFile.Trainer, _Mapping]] = ..., normalizer_spec: _Optional[_Union[SentencePieceModelFile.Normalizer, _Mapping]] = ...) -> None: ...
