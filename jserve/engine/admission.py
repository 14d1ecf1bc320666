"""What can never run is refused at once. Doors say it better, and sooner; this is the last line."""

from __future__ import annotations

from jserve.engine.contract import EngineLimits
from jserve.errors import InvalidRequest, PromptTooLong
from jserve.request import Request

__all__ = ["check_request"]


def check_request(request: Request, limits: EngineLimits) -> None:
    """Raise InvalidRequest, or PromptTooLong, for a request that the engine could not finish."""
    limit, vocab = limits.max_model_len, limits.vocab_size
    prompt, sampling = request.prompt_ids, request.sampling
    if not prompt:
        raise InvalidRequest("the prompt has no token; it needs at least 1")
    if len(prompt) + sampling.max_tokens > limit:
        raise PromptTooLong(
            f"{len(prompt)} prompt tokens and {sampling.max_tokens} to generate exceed the limit of {limit}"
        )
    if min(prompt) < 0 or max(prompt) >= vocab:
        raise InvalidRequest(f"token ids must be in 0..{vocab - 1}; got {min(prompt)}..{max(prompt)}")
    if sampling.max_tokens < 1 or sampling.n < 1:
        raise InvalidRequest(f"max_tokens {sampling.max_tokens} and n {sampling.n} must be at least 1")
