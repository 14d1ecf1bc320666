"""The typed messages that pass between the rooms. No JAX, no sockets, no protobuf.

Three stages of one request:

    Prompt + SamplingParams     what a caller wrote            (any door, ``jserve.LLM``)
    Request                     token ids, everything resolved (frontend -> engine)
    TokenDelta -> Delta         ids from the engine -> ids and text for the caller

A *choice* is one of the ``n`` continuations of a request. An encoder makes none: a text becomes a TextRequest, and then
an Embedding.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "DEFAULTABLE",
    "MAX_CHOICES",
    "MAX_LOGPROBS",
    "MAX_STOP_STRINGS",
    "MAX_STOP_STRING_BYTES",
    "MAX_STOP_TOKENS",
    "Completion",
    "Delta",
    "Embedding",
    "Embeddings",
    "FinishReason",
    "Message",
    "Prompt",
    "Request",
    "ResolvedSampling",
    "SamplingParams",
    "ServedModel",
    "TextRequest",
    "Timings",
    "TokenDelta",
    "TokenLogprob",
    "Usage",
]

MAX_CHOICES = 16
"""Most choices (``n``) of one request."""
MAX_LOGPROBS = 20
"""Most alternatives listed beside each chosen token."""
MAX_STOP_TOKENS = 16
"""Most stop token ids of one request, the model's own EOS ids included."""
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256

DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p")
"""Fields of SamplingParams for which a checkpoint may have a default."""

Message: TypeAlias = Mapping[str, str]
"""One chat turn: ``{"role": ..., "content": ...}``."""
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""``str``: raw text. ``list[int]``: token ids, used untouched. ``list[dict]``: chat turns."""


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a caller may ask for. ``None`` means absent: the checkpoint's default, else the neutral value.

    Neutral: temperature 1, top_p 1, top_k 0 (off; negative and >= vocabulary mean off too), min_p 0,
    max_tokens to the model's limit.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    """64-bit; absent: drawn on arrival."""
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    """No EOS and no stop id is chosen, and no stop string looked for, before so many tokens."""
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    """Leave the stop string that ended the text in the text."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """``None``: none. 0..MAX_LOGPROBS: the chosen token's logprob and that many most likely ones,
    of the raw distribution (log-softmax of the logits before any option is applied)."""


@dataclass(frozen=True, kw_only=True)
class ResolvedSampling:
    """SamplingParams after defaults and bounds: every field has its value, in the engine's terms."""

    temperature: float
    top_p: float
    top_k: int
    """0: off; else 1..V-1."""
    min_p: float
    seed: int
    """0 <= seed < 2**64."""
    n: int
    max_tokens: int
    """>= 1; prompt + max_tokens <= max_model_len."""
    min_tokens: int
    stop_ids: tuple[int, ...]
    """EOS ids (unless ignored) and the caller's stop ids, at most MAX_STOP_TOKENS."""
    logprobs: int | None

    @classmethod
    def greedy(cls, max_tokens: int) -> ResolvedSampling:
        """The likeliest token each time, exactly ``max_tokens`` of them."""
        return cls(
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=0,
            n=1,
            max_tokens=max_tokens,
            min_tokens=0,
            stop_ids=(),
            logprobs=None,
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as the engine takes it: token ids only."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: ResolvedSampling
    arrival: float
    """Monotonic seconds (``time.monotonic``)."""
    deadline: float | None = None
    """Monotonic seconds; past it the request is dropped before it costs a prefill."""


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """One text as an encoder's engine takes it: token ids only."""

    request_id: str
    token_ids: tuple[int, ...]
    deadline: float | None = None
    """Monotonic seconds; past it the text is dropped before it is computed."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """One chosen token's logprob (natural log, raw distribution) and the most likely alternatives.

    ``top`` is sorted, most likely first; it need not contain the chosen token.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Usage:
    prompt_tokens: int
    """Counted once, however many choices."""
    output_tokens: int
    """Over all choices; tokens past a stop string are not counted."""
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds. ``queue``: arrival to first scheduled, or to the end if it never was; ``ttft``: arrival to first
    token, 0 without one; ``total``."""

    queue: float
    ttft: float
    total: float


@dataclass(frozen=True, kw_only=True)
class TokenDelta:
    """What the engine says of one choice after a dispatch. The last one of a choice has ``finish_reason``.

    A stop token that ended the choice is in ``token_ids``. ``error`` is set with FinishReason.ERROR only.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    first_scheduled: float | None = None
    """Monotonic seconds at which the request was first scheduled; on a choice's first delta."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """One streamed piece of one choice, as a caller sees it.

    Joined over a choice, ``text`` equals the whole decode and ``token_ids`` all tokens up to the stop.
    ``text`` may lag behind ``token_ids``: unfinished UTF-8 and possible stop strings are held back.
    ``usage`` and ``timings`` come with the request's very last delta only.
    """

    request_id: str
    index: int
    """The choice, 0..n-1."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished choice, whole. What ``LLM.generate`` returns."""

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    choices: list[Completion] = field(default_factory=list)
    """With n > 1: every choice, index 0 (this one) included, each with no ``choices`` of its own; else empty."""


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """The vector of one text."""

    values: NDArray[np.float32]
    """[D]."""
    prompt_tokens: int
    """Tokens that were read, special ones too."""
    truncated: bool
    """The text is longer than the model reads: its end was cut off."""


@dataclass(frozen=True, kw_only=True)
class Embeddings:
    """The vectors of several texts, in their order. ``numpy.asarray`` of it is ``values``."""

    values: NDArray[np.float32]
    """[n, D]."""
    prompt_tokens: tuple[int, ...]
    """Of each text, as in Embedding."""
    truncated: tuple[bool, ...]
    """Of each text, as in Embedding."""

    def __len__(self) -> int:
        return len(self.values)

    def __array__(
        self, dtype: np.typing.DTypeLike | None = None, *, copy: bool | None = None
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        import numpy as np

        return np.array(self.values, dtype=dtype, copy=copy)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What a server says of its model to whoever asks."""

    name: str
    family: str
    dtype: str
    mesh: str
    """Such as "tensor=2" or "1 device"."""
    max_model_len: int
    """Most tokens of prompt and output together; of an encoder, those that it reads of a text."""
    vocab_size: int
    num_pages: int
    """0 of an encoder: it has no KV cache."""
    page_size: int
    """Tokens of one KV cache page."""
    has_chat_template: bool
    has_tokenizer: bool
    """Without one only token ids are taken and given."""
    kind: Literal["decoder", "encoder"] = "decoder"
    """A decoder generates, an encoder embeds."""
    dimensions: int = 0
    """D of an encoder's vectors."""
