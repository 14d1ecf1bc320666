"""A model's own chat template: messages to the text that the model was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2

from jserve.errors import CheckpointError, TemplateError
from jserve.request import Message
from jserve.text.budget import Budget, OverBudget
from jserve.text.sandbox import BoundedEnvironment

__all__ = ["ChatTemplate"]

MAX_SOURCE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 4 << 20
"""Longest rendered text; also the largest value that a template may build on its way."""
MAX_SECONDS = 1.0
"""CPU time of one rendering."""
MAX_REASON_CHARS = 500
"""A template's own words are cut to this in the error."""


class ChatTemplate:
    """Renders as Hugging Face does: the same whitespace rules, filters, tags and functions. Safe from any thread.

    The template sees ``messages``, ``add_generation_prompt``, ``bos_token``, ``eos_token``, and None for ``tools``
    and ``documents``. It runs in a sandbox, bounded in time, in output and in what it builds on the way.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        max_output_chars: int = MAX_OUTPUT_CHARS,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        """Raises CheckpointError where the template does not compile."""
        self.source = source
        self._max_output = max_output_chars
        self._max_seconds = max_seconds
        self._environment = BoundedEnvironment()
        self._environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self._variables = {"bos_token": bos_token, "eos_token": eos_token, "tools": None, "documents": None}
        if len(source) > MAX_SOURCE_CHARS:
            raise CheckpointError(
                f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are allowed"
            )
        try:
            self._template = self._environment.compile_bounded(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"line {error.lineno} of the chat template: {error.message}") from None
        except (SyntaxError, RecursionError, MemoryError, ValueError, OverflowError) as error:
            raise CheckpointError(f"the chat template cannot be compiled: {type(error).__name__}: {error}") from None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt's text. Raises TemplateError, with the template's own reason where it gave one."""
        variables: dict[str, Any] = {
            **self._variables,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        budget = Budget(max_size=self._max_output, max_seconds=self._max_seconds)
        try:
            with self._environment.budget(budget):
                return self._collect(variables, budget)
        except _Refusal as error:
            raise TemplateError(f"the chat template refused the messages: {_short(error)}") from None
        except Exception as error:  # Whatever a template does wrong fails its own request only.
            raise TemplateError(f"the chat template failed: {_short(error) or type(error).__name__}") from None

    def _collect(self, variables: dict[str, Any], budget: Budget) -> str:
        parts: list[str] = []
        size = 0
        for part in self._template.generate(variables):
            budget.tick()
            size += len(part)
            if size > self._max_output:
                raise OverBudget(f"its output is longer than {self._max_output} characters")
            parts.append(part)
        return "".join(parts)


class _Refusal(jinja2.TemplateError):
    """``raise_exception`` was called."""


def _raise_exception(message: object) -> None:
    raise _Refusal(str(message))


def _strftime_now(format: str) -> str:
    """Today as the template writes it. Widths, which C libraries allow, would make much of little."""
    if len(format) > 100 or any(char.isdigit() for char in format):
        raise _Refusal(f"strftime_now takes a short format without digits, not {format[:100]!r}")
    return datetime.now().strftime(format)


def _short(error: BaseException) -> str:
    words = str(error)
    return words if len(words) <= MAX_REASON_CHARS else words[:MAX_REASON_CHARS] + "..."
