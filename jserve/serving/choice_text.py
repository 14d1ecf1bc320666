"""One choice of a request on its way from token ids to text."""

from __future__ import annotations

from jserve.errors import RequestError
from jserve.request import Delta, FinishReason, TokenDelta, TokenLogprob
from jserve.text.detokenizer import Detokenizer
from jserve.text.stop import StopMatcher

__all__ = ["ChoiceText"]


class ChoiceText:
    """Takes the engine's deltas of one choice, gives out the caller's.

    Text that the first ``min_tokens`` tokens complete is never looked at for stop strings. Without a detokenizer
    there is no text. Used by one thread at a time.
    """

    def __init__(
        self, index: int, *, detokenizer: Detokenizer | None, stops: StopMatcher | None, min_tokens: int
    ) -> None:
        self.index = index
        self.num_tokens = 0
        """Tokens taken so far, up to and with the one that completed a stop string."""
        self.finish: FinishReason | None = None
        self.error: RequestError | None = None
        """Set where ``finish`` is cancelled, deadline or error."""
        self.met_stop_string = False
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] | None = None

    def take(self, delta: TokenDelta) -> None:
        """Add the tokens that the engine made, up to one that completes a stop string. Its finish is the caller's to
        act on, with ``end``."""
        for i, token_id in enumerate(delta.token_ids):
            if self.finish is not None:
                return
            self._ids.append(token_id)
            self.num_tokens += 1
            if delta.logprobs is not None:
                self._logprobs = self._logprobs or []
                self._logprobs.append(delta.logprobs[i])
            if self._detokenizer is not None:
                self._add_text(self._detokenizer.push(token_id), looked_at=self.num_tokens > self._min_tokens)

    def end(self, reason: FinishReason, error: RequestError | None = None) -> None:
        """Finish the choice, unless it is finished; text held back is let out."""
        if self.finish is not None:
            return
        if self._detokenizer is not None:
            self._add_text(self._detokenizer.flush(), looked_at=self.num_tokens > self._min_tokens)
        if self.finish is not None:  # The flushed text completed a stop string.
            return
        if self._stops is not None:
            self._text.append(self._stops.flush())
        self.finish, self.error = reason, error

    def emit(self, request_id: str) -> Delta:
        """All that was taken since the last call, as one delta."""
        delta = Delta(
            request_id=request_id,
            index=self.index,
            token_ids=tuple(self._ids),
            text="".join(self._text),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            finish_reason=self.finish,
            error=None if self.error is None else self.error.message,
            error_code=None if self.error is None else self.error.code,
        )
        self._ids, self._text, self._logprobs = [], [], None
        return delta

    def _add_text(self, text: str, *, looked_at: bool) -> None:
        if self._stops is None or not looked_at:
            self._text.append(text)
            return
        released, matched = self._stops.push(text)
        self._text.append(released)
        if matched:
            self.finish, self.met_stop_string = FinishReason.STOP, True
