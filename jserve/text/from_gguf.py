"""A tokenizer from the metadata of a GGUF file, equal in its ids to the one that the file was made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jserve.errors import CheckpointError, UnsupportedModel
from jserve.text.tokenizer import Tokenizer

__all__ = ["PRE_TOKENIZERS", "PreTokenizer", "tokenizer_from_gguf"]

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
"""Values of ``tokenizer.ggml.token_type``; every other one is an ordinary token."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How text is cut before merges: one value of ``tokenizer.ggml.pre``."""

    splits: tuple[str, ...] = ()
    """Each cuts what the one before it left, keeping its matches whole. None: GPT-2's own cut."""
    digits_apart: bool = False
    """Every digit is a piece of its own, before anything else."""
    nfc: bool = False
    """Text is brought to normal form C first."""
    ignore_merges: bool = False
    """A piece that is itself a token is that token, whatever its merges say."""
    add_bos: bool = False
    """The BOS rule of files that do not state one."""


_LLAMA3 = PreTokenizer(splits=(rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}",), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer(),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": PreTokenizer(splits=(rf"{_WORD}|\p{{N}}|{_REST}",), nfc=True),
    "smollm": PreTokenizer(digits_apart=True),
}
"""The kinds that are built."""


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata (``tokenizer.ggml.*``) describes.

    Raises UnsupportedModel for tokenizer models, pre-tokenizers and flags that are not built, by name, and
    CheckpointError for tables that are missing or contradict each other.
    """
    table = _Fields(fields)
    model = table.text("model")
    if model != "gpt2":
        raise UnsupportedModel(f"tokenizer.ggml.model is {model!r}; tokenizers read from GGUF: 'gpt2'")
    name = table.text("pre")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"tokenizer.ggml.pre is {name!r}; pre-tokenizers read from GGUF: {', '.join(PRE_TOKENIZERS)}"
        )
    if table.flag("add_eos_token", default=False):
        raise UnsupportedModel("tokenizer.ggml.add_eos_token is true; prompts that end with EOS are not built")
    kind = PRE_TOKENIZERS[name]
    tokens, types = table.vocabulary()
    add_bos = table.flag("add_bos_token", default=kind.add_bos)
    bos = table.token_id("bos_token_id", len(tokens))
    if add_bos and bos is None:
        raise CheckpointError("tokenizer.ggml.add_bos_token is true and tokenizer.ggml.bos_token_id is missing")
    ends = [table.token_id(f"{end}_token_id", len(tokens)) for end in ("eos", "eot", "eom")]
    return Tokenizer(
        _backend(kind, tokens, types, table.merges(), add_prefix_space=table.flag("add_space_prefix", default=False)),
        eos_ids=dict.fromkeys(end for end in ends if end is not None),
        bos_id=bos,
        add_bos=add_bos,
    )


def _backend(
    kind: PreTokenizer,
    tokens: list[str],
    types: list[int],
    merges: list[tuple[str, str]],
    *,
    add_prefix_space: bool,
) -> tokenizers.Tokenizer:
    if add_prefix_space and kind.splits:
        raise UnsupportedModel("tokenizer.ggml.add_space_prefix is true, which is not built for this pre-tokenizer")
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.ignore_merges)
    except Exception as error:  # The backend raises bare Exception, here for merges of tokens that do not exist.
        raise CheckpointError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from None
    backend = tokenizers.Tokenizer(bpe)
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if kind.digits_apart:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in kind.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=not kind.splits))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    special = (_CONTROL, _UNKNOWN)
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=type_ in special)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in special or type_ == _USER_DEFINED
        ]
    )
    return backend


class _Fields:
    """Typed reads of ``tokenizer.ggml.*``."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise UnsupportedModel(f"tokenizer.ggml.{name} is {_shown(value)}; it must name a kind of tokenizer")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"tokenizer.ggml.{name} is {_shown(value)}; it must be true or false")
        return value

    def token_id(self, name: str, count: int) -> int | None:
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < count:
            raise CheckpointError(f"tokenizer.ggml.{name} is {_shown(value)}; ids go from 0 to {count - 1}")
        return value

    def vocabulary(self) -> tuple[list[str], list[int]]:
        """Tokens and their types, without the unused ones that only fill up the embedding table at its end."""
        tokens = self._list("tokens", str)
        types = self._list("token_type", int) if self._get("token_type") is not None else [1] * len(tokens)
        if len(types) != len(tokens):
            raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
        while types and types[-1] == _UNUSED:
            types.pop()
        del tokens[len(types) :]
        if not tokens:
            raise CheckpointError("tokenizer.ggml.tokens is empty")
        if len(set(tokens)) != len(tokens):
            twice = next(token for i, token in enumerate(tokens) if token in tokens[:i])
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

    def _list(self, name: str, kind: type) -> list[Any]:
        value = self._get(name)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise CheckpointError(f"tokenizer.ggml.{name} is {_shown(value)}; it must be a list of {kind.__name__}")
        return list(value)

    def _get(self, name: str, default: Any = None) -> Any:
        return self._fields.get(f"tokenizer.ggml.{name}", default)


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
