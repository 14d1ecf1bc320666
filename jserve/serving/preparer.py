"""From what a caller wrote to what an engine takes: checked, templated, tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jserve.engine.contract import EngineLimits
from jserve.errors import InvalidRequest, TemplateError, Unsupported
from jserve.request import Message, Prompt, ResolvedSampling, SamplingParams
from jserve.serving import limits
from jserve.text.chat_template import ChatTemplate
from jserve.text.marker_guard import MarkerGuard
from jserve.text.tokenizer import Tokenizer

__all__ = ["Prepared", "Preparer"]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    prompt_ids: tuple[int, ...]
    sampling: ResolvedSampling
    stop: tuple[str, ...]
    """Stop strings, each once."""
    include_stop: bool


class Preparer:
    """Stateless after construction; safe from any thread. Cheap checks come first, the tokenizer last."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        defaults: SamplingParams,
        eos_ids: Sequence[int],
        engine_limits: EngineLimits,
        model_name: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = chat_template
        self._guard = None if tokenizer is None or chat_template is None else MarkerGuard(tokenizer)
        self._defaults = defaults
        self._eos_ids = tuple(dict.fromkeys(eos_ids))
        self._limits = engine_limits
        self._model_name = model_name
        self.max_prompt_bytes = 0 if tokenizer is None else engine_limits.max_model_len * tokenizer.longest_token_bytes

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Prepared:
        """Raises InvalidRequest or Unsupported, in words for the caller."""
        sampling = self._resolve(params)
        stop = limits.check_stop_strings(params.stop)
        if stop and self._tokenizer is None:
            raise Unsupported(f"model {self._model_name!r} has no tokenizer, so stop strings cannot be found")
        prompt_ids = self.prompt_ids(prompt)
        if not prompt_ids:
            why = "" if self._tokenizer is None or not prompt else " (the tokenizer has none for any of its characters)"
            raise InvalidRequest(f"the prompt has 0 tokens{why}; give at least one")
        sampling = limits.check_max_tokens(
            sampling, params.max_tokens, prompt_tokens=len(prompt_ids), limits=self._limits
        )
        return Prepared(prompt_ids=prompt_ids, sampling=sampling, stop=stop, include_stop=bool(params.include_stop))

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Text: by the tokenizer's own rule for BOS. A chat: through the template. Ids: untouched.

        Special tokens written out are special tokens in text, and plain text in the messages of a chat.
        """
        if isinstance(prompt, str):
            tokenizer = self._need_tokenizer()
            limits.check_text(prompt, max_bytes=self.max_prompt_bytes, limits=self._limits)
            return tuple(tokenizer.encode(prompt, add_special=True))
        indexable = hasattr(prompt, "__len__") and hasattr(prompt, "__getitem__")
        if not indexable or isinstance(prompt, (bytes, bytearray, Mapping)):
            raise InvalidRequest(
                f"the prompt is of type {type(prompt).__name__}; give text, a list of token ids or a list of messages"
            )
        if len(prompt) and isinstance(prompt[0], Mapping):
            self._need_tokenizer()
            return self._chat_ids(prompt)  # type: ignore[arg-type]
        return limits.check_prompt_ids(prompt, limits=self._limits)  # type: ignore[arg-type]

    def _chat_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """At most one BOS whoever writes it, the template or the tokenizer; markers in messages are plain text."""
        if self._template is None or self._guard is None:
            raise TemplateError(f"model {self._model_name!r} has no chat template; send raw text or token ids")
        checked = limits.check_messages(messages, max_bytes=self.max_prompt_bytes, limits=self._limits)
        guarded = self._guard.protect(checked)
        try:
            rendered = self._template.render(guarded.messages)
        except TemplateError as error:
            raise TemplateError(error.message.replace(guarded.mark or "", ""), fix=error.fix) from None
        return tuple(self._guard.encode(rendered, mark=guarded.mark))

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise Unsupported(f"model {self._model_name!r} has no tokenizer; send token ids")
        return self._tokenizer

    def _resolve(self, params: SamplingParams) -> ResolvedSampling:
        return limits.resolve_sampling(
            params,
            defaults=self._defaults,
            eos_ids=self._eos_ids,
            vocab_size=self._limits.vocab_size,
            max_model_len=self._limits.max_model_len,
        )
