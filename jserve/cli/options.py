"""From the words of a command line to a verb's options: tyro over a dataclass, every error one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import re
import types
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar, Union, get_args, get_origin

import tyro

from jserve.cli.usage import UsageError, did_you_mean

__all__ = ["Flag", "named", "parse"]

Options = TypeVar("Options")

Flag: TypeAlias = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""A switch that is off unless given; without a ``--no-`` twin."""


def parse(options: type[Options], arguments: Sequence[str], *, prog: str, usage: str) -> Options:
    """Fill the dataclass ``options``. ``--help`` prints to stdout and exits 0; UsageError where it cannot be done."""
    usage = f"{usage}; see {prog} --help"
    known = _flags(options)
    for name in _names(arguments):
        if name not in known and name != "--help":
            raise UsageError(f"unknown option {name}{did_you_mean(name, known)}", usage=usage)
    heard = io.StringIO()
    try:
        with contextlib.redirect_stderr(heard):
            return tyro.cli(options, prog=prog, args=list(arguments), registry=_REGISTRY)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(_one_line(heard.getvalue()), usage=usage) from None


def named(arguments: Sequence[str]) -> set[str]:
    """The field names of the options that the command line itself gives."""
    return {name.removeprefix("--").removeprefix("no-").replace("-", "_") for name in _names(arguments)}


def _names(arguments: Sequence[str]) -> list[str]:
    """``--name`` of every option up to a bare ``--``, underscores written as dashes."""
    names = []
    for word in arguments:
        if word == "--":
            break
        if word.startswith("--"):
            names.append(word.split("=", 1)[0].replace("_", "-"))
    return names


def _flags(options: type[Any]) -> list[str]:
    names = [field.name.replace("_", "-") for field in dataclasses.fields(options)]
    switches = [field.name.replace("_", "-") for field in dataclasses.fields(options) if field.type in (bool, "bool")]
    return [f"--{name}" for name in names] + [f"--no-{name}" for name in switches]


def _one_line(box: str) -> str:
    """What tyro says in a box, on one line: its first paragraph, in our words where ours are plainer."""
    lines = [_COLOUR.sub("", line).strip("│ ") for line in box.splitlines()]
    below_title = itertools.dropwhile(lambda line: not line.strip("─-"), lines[1:])
    paragraph = list(itertools.takewhile(lambda line: line.strip("─-"), below_title))
    text = " ".join(paragraph)
    if text.startswith("Missing from "):
        return f"{paragraph[1]} is missing"
    if text.startswith("Unrecognized options: "):
        return f"unexpected: {text.partition(': ')[2]}; text with spaces needs quotes"
    text = text.removeprefix("Error parsing ")
    return text[:1].lower() + text[1:]


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

# An option that may be absent shows and refuses values like one that may not: no "{None}|INT".
_REGISTRY = tyro.constructors.ConstructorRegistry()
_READERS: dict[type, tuple[str, Callable[[str], Any], str]] = {
    int: ("N", int, "a whole number"),
    float: ("X", float, "a number"),
    str: ("TEXT", str, "text"),
}


@_REGISTRY.primitive_rule
def _optional(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    kind = _inner(info.type)
    if kind not in _READERS:
        return None
    metavar, read, words = _READERS[kind]

    def construct(values: list[str]) -> Any:
        try:
            return read(values[0])
        except ValueError:
            raise ValueError(f"{values[0]!r} is not {words}") from None

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=construct,
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: ["unset" if value is None else str(value)],
    )


def _inner(annotation: Any) -> Any:
    """``T`` of ``T | None``, else the annotation itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [kind for kind in get_args(annotation) if kind is not type(None)]
        return rest[0] if len(rest) == 1 else None
    return annotation
