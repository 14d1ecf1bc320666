"""The text side of a model that generates: what of it cannot be served is found here, before anything is compiled."""

from __future__ import annotations

from collections.abc import Sequence

from jserve.errors import CheckpointError
from jserve.request import MAX_STOP_TOKENS
from jserve.text.chat_template import ChatTemplate
from jserve.text.marker_guard import MarkerGuard
from jserve.text.tokenizer import Tokenizer

__all__ = ["model_template"]


def model_template(source: str | None, tokenizer: Tokenizer | None, *, eos_ids: Sequence[int]) -> ChatTemplate | None:
    """The template ``source`` with the beginning and the end that ``tokenizer`` knows; None for none.

    Raises CheckpointError where it does not compile or ``eos_ids``, which end a text, are too many or no ids of the
    tokenizer; UnsupportedModel where ids cannot become text one by one, or messages cannot be guarded.
    """
    last = None if tokenizer is None else tokenizer.vocab_size - 1
    if len(eos_ids) > MAX_STOP_TOKENS or any(i < 0 or (last is not None and i > last) for i in eos_ids):
        ids = "ids" if last is None else f"ids of 0..{last}"
        raise CheckpointError(
            f"the ids that end a text are {list(eos_ids)}; allowed are {MAX_STOP_TOKENS} {ids}",
            fix="mend eos_token_id in generation_config.json, or eos_token in tokenizer_config.json",
        )
    if tokenizer is None:
        return None
    tokenizer.pieces(skip_special=True)
    if source is None:
        return None
    MarkerGuard(tokenizer)
    eos = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
    return ChatTemplate(source, bos_token=tokenizer.token(tokenizer.bos_id), eos_token=tokenizer.token(eos))
