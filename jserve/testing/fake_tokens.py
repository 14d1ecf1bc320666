"""The rule by which FakeEngine emits tokens.

Output token ``i`` of choice ``c`` is the byte ``ord("a") + (sum(prompt_ids) + c + i) % 26``: with ``ByteTokenizer`` the
text is the alphabet, from a letter that the prompt and the choice decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from jserve.request import TokenLogprob

__all__ = ["fake_logprob", "fake_text", "fake_token"]


def fake_token(prompt_ids: Sequence[int], choice: int, i: int) -> int:
    """Output token ``i`` of a choice: a lower-case letter's byte."""
    return ord("a") + (sum(prompt_ids) + choice + i) % 26


def fake_text(prompt: str, count: int, *, choice: int = 0) -> str:
    """What a choice says to ``prompt`` in ``count`` tokens, with ByteTokenizer."""
    ids = prompt.encode()
    return "".join(chr(fake_token(ids, choice, i)) for i in range(count))


def fake_logprob(token_id: int, i: int, *, top: int, vocab_size: int) -> TokenLogprob:
    """Logprob of output token ``i``: ``-(i % 8 + 1) / 8``; alternatives are the next ids, each 1 less likely."""
    logprob = -(i % 8 + 1) / 8
    return TokenLogprob(
        token_id=token_id,
        logprob=logprob,
        top=tuple(((token_id + j) % vocab_size, logprob - j) for j in range(top)),
    )
