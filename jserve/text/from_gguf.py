"""A tokenizer from the metadata of a GGUF file, equal in its ids to the one that the file was made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from jserve.errors import CheckpointError, UnsupportedModel
from jserve.text.gguf_fields import GgufFields
from jserve.text.pre_tokenizers import PRE_TOKENIZERS
from jserve.text.sentencepiece import SPACE, Piece, PieceKind, SentencePieceModel, build_backend
from jserve.text.tokenizer import Tokenizer

__all__ = ["tokenizer_from_gguf"]

_SPECIAL = (PieceKind.CONTROL, PieceKind.UNKNOWN)


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata (``tokenizer.ggml.*``) describes.

    Raises UnsupportedModel for tokenizer models, pre-tokenizers and flags that are not built, by name, and
    CheckpointError for tables that are missing or contradict each other.
    """
    table = GgufFields(fields)
    model = table.text("model")
    if model not in _BACKENDS:
        known = ", ".join(map(repr, _BACKENDS))
        raise UnsupportedModel(f"tokenizer.ggml.model is {model!r}; tokenizers read from GGUF: {known}")
    if table.flag("add_eos_token", default=False):
        raise UnsupportedModel("tokenizer.ggml.add_eos_token is true; prompts that end with EOS are not built")
    backend, count, default_bos = _BACKENDS[model](table, str(fields.get("general.architecture")))
    add_bos = table.flag("add_bos_token", default=default_bos)
    bos = table.token_id("bos_token_id", count)
    if add_bos and bos is None:
        raise CheckpointError("tokenizer.ggml.add_bos_token is true and tokenizer.ggml.bos_token_id is missing")
    ends = [table.token_id(f"{end}_token_id", count) for end in ("eos", "eot", "eom")]
    return Tokenizer(
        backend, eos_ids=dict.fromkeys(end for end in ends if end is not None), bos_id=bos, add_bos=add_bos
    )


def _byte_level(table: GgufFields, architecture: str) -> tuple[tokenizers.Tokenizer, int, bool]:
    """The backend, how many tokens it has, and the BOS rule of files that state none."""
    name = table.text("pre")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"tokenizer.ggml.pre is {name!r}; pre-tokenizers read from GGUF: {', '.join(PRE_TOKENIZERS)}"
        )
    kind = PRE_TOKENIZERS[name]
    add_prefix_space = table.flag("add_space_prefix", default=False)
    if add_prefix_space and kind.splits:
        raise UnsupportedModel("tokenizer.ggml.add_space_prefix is true, which is not built for this pre-tokenizer")
    tokens, types = table.vocabulary()
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocab=vocab, merges=table.merges(), ignore_merges=kind.ignore_merges)
    except CheckpointError:
        raise
    except Exception as error:  # The backend raises bare Exception, here for merges of tokens that do not exist.
        raise CheckpointError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from None
    backend = tokenizers.Tokenizer(bpe)
    kind.put_on(backend, add_prefix_space=add_prefix_space)
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=type_ in _SPECIAL)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in _SPECIAL or type_ == PieceKind.USER_DEFINED
        ]
    )
    return backend, len(tokens), kind.add_bos


def _sentencepiece(table: GgufFields, architecture: str) -> tuple[tokenizers.Tokenizer, int, bool]:
    """The same for SentencePiece vocabularies: BPE by scores, with bytes for what no piece covers."""
    tokens, types = table.vocabulary()
    kinds = {kind.value for kind in PieceKind}
    if strange := [i for i, type_ in enumerate(types) if type_ not in kinds]:
        raise CheckpointError(f"tokenizer.ggml.token_type[{strange[0]}] is {types[strange[0]]}; types go from 1 to 6")
    pieces = [
        Piece(text=_respelled(token), score=score, kind=PieceKind(type_))
        for token, score, type_ in zip(tokens, table.scores(len(tokens)), types, strict=True)
    ]
    unk = table.token_id("unknown_token_id", len(tokens))
    if unk is None:
        unk = next((i for i, piece in enumerate(pieces) if piece.kind is PieceKind.UNKNOWN), None)
    model = SentencePieceModel(
        kind="bpe",
        pieces=pieces,
        unk_id=unk,
        byte_fallback=any(piece.kind is PieceKind.BYTE for piece in pieces),
        prefix="every_part" if table.flag("add_space_prefix", default=True) else "none",
        clean_spaces=table.flag("remove_extra_whitespaces", default=False),
        user_defined="added",
    )
    backend = build_backend(model)
    if architecture == "phi3":
        backend.add_tokens([_phi3_token(piece) for piece in pieces if piece.kind in _SPECIAL or piece.text == "</s>"])
    return backend, len(tokens), True


def _respelled(token: str) -> str:
    """Converters write user-defined runs of spaces as spaces; the text that is looked up has them marked."""
    return SPACE * len(token) if token and not token.strip(" ") else token


def _phi3_token(piece: Piece) -> AddedToken:
    """Phi-3's markers swallow the whitespace behind them, which GGUF has no key for."""
    plain = piece.text in ("<unk>", "<s>", "<|endoftext|>")
    return AddedToken(piece.text, normalized=False, special=piece.kind in _SPECIAL, rstrip=not plain)


_BACKENDS: Mapping[str, Callable[[GgufFields, str], tuple[tokenizers.Tokenizer, int, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
