"""The ways in which byte-level tokenizers cut text before they merge, by the names that GGUF files give them.

The patterns are those of the models' own ``tokenizer.json`` files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

__all__ = ["PRE_TOKENIZERS", "PreTokenizer"]

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _camel(ending: str, digits: str) -> str:
    """Words end where a capital follows a small letter."""
    head = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{head}{_UPPER}*{_LOWER}+{ending}|{head}{_UPPER}+{_LOWER}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


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

    def put_on(self, backend: tokenizers.Tokenizer, *, add_prefix_space: bool) -> None:
        """Give a byte-level ``backend`` its normalizer, pre-tokenizer and decoder."""
        if self.nfc:
            backend.normalizer = normalizers.NFC()
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits_apart:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.splits]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=not self.splits))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        backend.decoder = decoders.ByteLevel()


_GPT2_KIND = PreTokenizer()
_LLAMA3 = PreTokenizer(splits=(rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}",), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(splits=(rf"{_WORD}|\p{{N}}|{_REST}",), nfc=True)
_QWEN35 = PreTokenizer(
    splits=(
        rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    nfc=True,
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_KIND,
    "phi-2": _GPT2_KIND,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "dbrx": PreTokenizer(splits=_LLAMA3.splits),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "gpt-4o": PreTokenizer(splits=(_camel(f"{_ENDING}?", r"\p{N}{1,3}"),)),
    "tekken": PreTokenizer(splits=(_camel("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "smollm": PreTokenizer(digits_apart=True),
}
"""The kinds that are built."""
