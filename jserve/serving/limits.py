"""Bounds of a request: every field is checked here, once, for every door, before anything is spent on it.

A refusal is an InvalidRequest that names the field, what was given and what is allowed.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jserve.engine.contract import EngineLimits
from jserve.errors import InvalidRequest, PromptTooLong
from jserve.request import (
    DEFAULTABLE,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    Message,
    ResolvedSampling,
    SamplingParams,
)

__all__ = [
    "MAX_MESSAGES",
    "MAX_REQUEST_ID_BYTES",
    "MAX_TEMPERATURE",
    "check_max_tokens",
    "check_messages",
    "check_prompt_ids",
    "check_request_id",
    "check_stop_strings",
    "check_text",
    "resolve_sampling",
]

MAX_TEMPERATURE = 100.0
MAX_MESSAGES = 1024
"""Most messages of one chat prompt."""
MAX_REQUEST_ID_BYTES = 128

_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def resolve_sampling(
    params: SamplingParams, *, defaults: SamplingParams, eos_ids: Sequence[int], vocab_size: int, max_model_len: int
) -> ResolvedSampling:
    """Fill what is absent and check every bound that does not depend on the prompt.

    ``max_tokens`` of the result is the caller's, or ``max_model_len`` where absent: ``check_max_tokens`` fits it
    to the prompt. An absent seed is drawn.
    """
    given = {name: _first(getattr(params, name), getattr(defaults, name), _NEUTRAL[name]) for name in DEFAULTABLE}
    top_k = _integer("top_k", given["top_k"])
    max_tokens = max_model_len if params.max_tokens is None else _integer("max_tokens", params.max_tokens)
    if max_tokens < 1:
        raise InvalidRequest(
            f"max_tokens is {max_tokens}; it must be 1 or more (leave it out to generate up to the model's limit)"
        )
    logprobs = params.logprobs
    if logprobs is not None:
        logprobs = _within("logprobs", logprobs, 0, min(MAX_LOGPROBS, vocab_size))
    return ResolvedSampling(
        temperature=_real("temperature", given["temperature"], 0.0, MAX_TEMPERATURE),
        top_p=_real("top_p", given["top_p"], 0.0, 1.0),
        top_k=top_k if 0 < top_k < vocab_size else 0,
        min_p=_real("min_p", given["min_p"], 0.0, 1.0),
        seed=secrets.randbits(64) if params.seed is None else _within("seed", params.seed, 0, 2**64 - 1),
        n=_within("n", params.n, 1, MAX_CHOICES),
        max_tokens=max_tokens,
        min_tokens=_within("min_tokens", params.min_tokens, 0, max_tokens),
        stop_ids=_stop_ids(params, eos_ids, vocab_size),
        logprobs=logprobs,
    )


def check_max_tokens(
    sampling: ResolvedSampling, asked: int | None, *, prompt_tokens: int, limits: EngineLimits
) -> ResolvedSampling:
    """Fit ``max_tokens`` to the room that the prompt leaves; ``asked`` is what the caller wrote."""
    limit = limits.max_model_len
    room = limit - prompt_tokens
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {prompt_tokens} tokens; prompt and output together may have {limit}, so a prompt may have "
            f"{limit - 1}"
        )
    if asked is not None and asked > room:
        raise InvalidRequest(
            f"max_tokens is {asked}; after a prompt of {prompt_tokens} tokens {room} fit in the limit of {limit}"
        )
    max_tokens = room if asked is None else sampling.max_tokens
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}; after a prompt of {prompt_tokens} tokens {room} fit in the limit "
            f"of {limit}"
        )
    return dataclasses.replace(sampling, max_tokens=max_tokens)


def check_stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    """The stop strings, each once."""
    if isinstance(stop, str) or not isinstance(stop, Sequence):
        raise InvalidRequest(f"stop is {_show(stop)}; it must be a list of strings")
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
    for i, text in enumerate(stop):
        size = _utf8_size(f"stop[{i}]", text)
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            raise InvalidRequest(f"stop[{i}] has {size} bytes; allowed are 1 to {MAX_STOP_STRING_BYTES}")
    return tuple(dict.fromkeys(stop))


def check_prompt_ids(ids: Sequence[int], *, limits: EngineLimits) -> tuple[int, ...]:
    """The ids as a tuple of ints of the vocabulary. Length is checked first, so that a huge list costs nothing."""
    if len(ids) >= limits.max_model_len:
        raise PromptTooLong(
            f"the prompt has {len(ids)} tokens; prompt and output together may have {limits.max_model_len}, so a "
            f"prompt may have {limits.max_model_len - 1}"
        )
    out = tuple(_integer("a prompt token id", token) for token in ids)
    if out and (min(out) < 0 or max(out) >= limits.vocab_size):
        i = next(i for i, token in enumerate(out) if not 0 <= token < limits.vocab_size)
        raise InvalidRequest(f"prompt token id {out[i]} at position {i} is not in 0..{limits.vocab_size - 1}")
    return out


def check_text(text: str, *, max_bytes: int, limits: EngineLimits) -> None:
    """Refuse text that cannot fit before it is tokenized: ``max_bytes`` are the most that the limit can hold."""
    size = _utf8_size("the prompt", text)
    if size > max_bytes:
        raise PromptTooLong(
            f"the prompt has {size} bytes; the limit of {limits.max_model_len} tokens holds at most {max_bytes}"
        )


def check_messages(messages: Sequence[Message], *, max_bytes: int, limits: EngineLimits) -> list[dict[str, str]]:
    """Chat messages as plain dicts of exactly ``role`` and ``content``, both text."""
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"the prompt has {len(messages)} messages; at most {MAX_MESSAGES} are allowed")
    total = 0
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"message {i} is {_show(message)}; it must have a role and a content")
        if set(message) != {"role", "content"}:
            raise InvalidRequest(
                f"message {i} has the keys {_show(sorted(map(str, message)))}; it must have exactly role and content"
            )
        total += sum(_utf8_size(f"message {i}'s {key}", message[key]) for key in ("role", "content"))
        if not message["role"]:
            raise InvalidRequest(f"message {i}'s role is empty; say who speaks, such as user")
    if total > max_bytes:
        raise PromptTooLong(
            f"the messages have {total} bytes; the limit of {limits.max_model_len} tokens holds at most {max_bytes}"
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def check_request_id(request_id: str) -> None:
    size = _utf8_size("request_id", request_id)
    if size > MAX_REQUEST_ID_BYTES:
        raise InvalidRequest(f"request_id has {size} bytes; at most {MAX_REQUEST_ID_BYTES} are allowed")


def _stop_ids(params: SamplingParams, eos_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """EOS ids, unless ignored, then the caller's, each once."""
    asked = params.stop_token_ids
    if isinstance(asked, str) or not isinstance(asked, Sequence):
        raise InvalidRequest(f"stop_token_ids is {_show(asked)}; it must be a list of token ids")
    if len(asked) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"stop_token_ids has {len(asked)} ids; at most {MAX_STOP_TOKENS} are allowed")
    own = () if params.ignore_eos else tuple(eos_ids)
    ids = dict.fromkeys(own)
    ids.update(dict.fromkeys(_within("a stop token id", token, 0, vocab_size - 1) for token in asked))
    if len(ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"stop_token_ids has {len(ids) - len(own)} ids besides the model's {len(own)} end-of-text ids; together "
            f"at most {MAX_STOP_TOKENS} are allowed"
        )
    return tuple(ids)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return int(operator.index(value))
    except TypeError:
        raise InvalidRequest(f"{name} is {_show(value)}; it must be a whole number") from None


def _within(name: str, value: Any, low: int, high: int) -> int:
    number = _integer(name, value)
    if not low <= number <= high:
        raise InvalidRequest(f"{name} is {number}; allowed are {low} to {high}")
    return number


def _real(name: str, value: Any, low: float, high: float) -> float:
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest(f"{name} is {_show(value)}; it must be a number") from None
    if not math.isfinite(number) or not low <= number <= high:
        raise InvalidRequest(f"{name} is {number:g}; allowed are {low:g} to {high:g}")
    return number


def _utf8_size(name: str, text: Any) -> int:
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} is {_show(text)}; it must be text")
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} is not valid Unicode: a lone surrogate at character {error.start}; send whole characters"
        ) from None


def _show(value: Any) -> str:
    """A value for an error message, short whatever it is."""
    shown = repr(value) if isinstance(value, (str, int, float, bool, type(None), list, tuple)) else type(value).__name__
    return shown if len(shown) <= 60 else shown[:57] + "..."
