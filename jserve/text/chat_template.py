"""A model's own chat template, rendered in a sandbox."""

from __future__ import annotations

from collections.abc import Sequence

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jserve.errors import CheckpointError, TemplateError
from jserve.request import Message

__all__ = ["ChatTemplate"]


class ChatTemplate:
    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template does not parse, line {error.lineno}: {error.message}") from None
        self._context = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._context
            )
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refused the messages: {error}") from None


def _raise_exception(words: str) -> None:
    raise jinja2.TemplateError(words)
