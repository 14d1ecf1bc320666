"""Role markers that users type stay plain text: only a template's own become special tokens.

Tokenizers look for special tokens in the text itself, before anything else. So every one that stands in a message
is broken up by a *mark*, a Unicode noncharacter (U+FDD0..U+FDEF) that no message contains, before the template is
rendered. What is rendered is encoded by a twin of the tokenizer whose normalizer takes the marks out again, too late
for special tokens: what is left is the exact text, cut as any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import tokenizers
from tokenizers import AddedToken, Encoding, models, normalizers

from jserve.errors import InvalidRequest, UnsupportedModel
from jserve.request import Message
from jserve.text.tokenizer import Tokenizer

__all__ = ["GuardedMessages", "MarkerGuard"]

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True, kw_only=True)
class GuardedMessages:
    """Messages to be rendered, and the mark that is in them; None where nothing had to be guarded."""

    messages: Sequence[Message]
    mark: str | None


class MarkerGuard:
    """Guards the messages of one tokenizer's chats. Safe from any thread.

    Guarded are special tokens of two characters and more: a shorter one cannot be broken up. Added tokens that are
    not special, such as ``</think>``, stay as they are, because templates look for them in messages.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises UnsupportedModel where the twin would give other ids than the tokenizer."""
        self._tokenizer = tokenizer
        backend = tokenizer.backend
        self._added = sorted(backend.get_added_tokens_decoder().items())
        self._special = {i: token.content for i, token in self._added if token.special and len(token.content) > 1}
        starts = (text[:end] for text in self._special.values() for end in range(1, len(text)))
        self._beginnings = {start for start in starts if not start.isspace()}
        self._longest = max(map(len, self._special.values()), default=0)
        self._finder = tokenizers.Tokenizer(models.WordLevel(vocab={"": 0}, unk_token=""))
        found = {*self._special.values(), *self._normalized_forms()}
        self._finder.add_special_tokens([AddedToken(text, normalized=False) for text in sorted(found)])
        self._twin = lru_cache(maxsize=None)(self._make_twin)
        twin = self._twin(_NONCHARACTERS[0])
        if {i: token.content for i, token in twin.get_added_tokens_decoder().items()} != {
            i: token.content for i, token in self._added
        }:
            raise UnsupportedModel("the tokenizer's added tokens change their ids when they are added again in order")

    def protect(self, messages: Sequence[Message]) -> GuardedMessages:
        """Break up the special tokens in contents, and what would become one with the text behind it.

        Roles of words stay as they are, because templates compare them and write markers around them; others, such as
        ``end|><|system``, are broken up between all characters.
        """
        if not any(self._is_risky(message["content"]) or not _is_plain(message["role"]) for message in messages):
            return GuardedMessages(messages=messages, mark=None)
        mark = _unused([text for message in messages for text in message.values()])
        guarded: list[Message] = []
        for message in messages:
            role, content = message["role"], self._broken(message["content"], mark)
            guarded.append(
                {
                    "role": role if _is_plain(role) else mark.join(role),
                    "content": content + mark if self._ends_inside(content) else content,
                }
            )
        return GuardedMessages(messages=guarded, mark=mark)

    def encode(self, text: str, *, mark: str | None) -> list[int]:
        """Token ids of rendered text, with BOS by the tokenizer's rule; ``mark`` is taken out of it."""
        if mark is None:
            return self._tokenizer.encode(text, add_special=True)
        encoding = self._twin(mark).encode(text, add_special_tokens=False)
        return self._tokenizer.with_bos(list(self._plain(encoding, text, mark)))

    def _normalized_forms(self) -> Iterator[str]:
        """What special tokens that are looked for in normalized text look like there."""
        normalizer = self._tokenizer.backend.normalizer
        for _, token in self._added:
            if normalizer is not None and token.special and token.normalized:
                yield normalizer.normalize_str(token.content)

    def _is_risky(self, text: str) -> bool:
        if self._ends_inside(text) or any(self._spans(text)):
            return True
        # Such as fullwidth letters, which normal form KC makes plain ones.
        normalizer = self._tokenizer.backend.normalizer
        return normalizer is not None and any(self._spans(normalizer.normalize_str(text)))

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where special tokens are found: leftmost first, the longest, without overlaps."""
        encoding = self._finder.encode(text, add_special_tokens=False)
        return (span for i, span in zip(encoding.ids, encoding.offsets, strict=True) if i)

    def _ends_inside(self, text: str) -> bool:
        return any(text[-size:] in self._beginnings for size in range(1, min(self._longest, len(text) + 1)))

    def _broken(self, text: str, mark: str) -> str:
        # Again, because one token may have hidden another that overlaps it.
        while starts := [start for start, _ in self._spans(text)]:
            cuts = [0, *(start + 1 for start in starts), len(text)]
            text = mark.join(text[start:end] for start, end in pairwise(cuts))
        return text

    def _plain(self, encoding: Encoding, text: str, mark: str) -> Iterable[int]:
        """The ids, with special tokens that merges made of guarded text taken apart into their characters."""
        backend = self._tokenizer.backend
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            special = self._special.get(token_id)
            if special is None or text[start:end].strip() == special:
                yield token_id
                continue
            span = text[start:end].replace(mark, "")
            if backend.normalizer is not None:
                span = backend.normalizer.normalize_str(span)
            if special not in span:  # The unknown token, for what no other token covers.
                yield token_id
                continue
            for char in special:
                yield from (token.id for token in backend.model.tokenize(char))

    def _make_twin(self, mark: str) -> tokenizers.Tokenizer:
        """The same model, shared, behind a normalizer that deletes ``mark``."""
        backend = self._tokenizer.backend
        twin = tokenizers.Tokenizer(backend.model)
        own = [] if backend.normalizer is None else [backend.normalizer]
        twin.normalizer = normalizers.Sequence([normalizers.Replace(mark, ""), *own])
        if backend.pre_tokenizer is not None:
            twin.pre_tokenizer = backend.pre_tokenizer
        # Special tokens are looked for before the normalizer runs, whatever they say themselves.
        twin.add_tokens([_unnormalized(token) if token.special else token for _, token in self._added])
        return twin


def _is_plain(role: str) -> bool:
    return re.fullmatch(r"[\w -]+", role) is not None


def _unused(texts: Sequence[str]) -> str:
    for mark in _NONCHARACTERS:
        if not any(mark in text for text in texts):
            return mark
    raise InvalidRequest("the messages contain every Unicode noncharacter from U+FDD0 to U+FDEF; leave one of them out")


def _unnormalized(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=True,
    )
