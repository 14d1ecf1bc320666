"""A checkpoint's ``config.json`` as the type that a user's module asks for: a dataclass or a dict."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from jserve.errors import CheckpointError, ConfigError, JserveError

__all__ = ["read_config", "unreadable"]

_UNIONS = (Union, types.UnionType)


def read_config(path: Path, kind: Any) -> Any:
    """The JSON object at ``path`` as ``kind``: a dataclass, or a dict (also Mapping, Any, or nothing said).

    Raises CheckpointError that names every unknown and missing key and every value of a wrong type, with dotted
    names inside nested dataclasses, and ConfigError where ``kind`` is none of these or has annotations that cannot be
    evaluated.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # bad JSON and bad UTF-8 are ValueErrors
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}; it must be one JSON object")
    kind = _named_kind(kind)
    if kind is None:
        return values
    wrong: list[str] = []
    config = _dataclass(kind, values, "", wrong)
    if wrong:
        raise CheckpointError("\n  ".join([f"{path} does not fit {kind.__name__}:", *wrong]))
    return config


def unreadable(of: Any, error: Exception) -> ConfigError:
    """What to raise where the annotations of the class or function ``of`` cannot be evaluated."""
    name = getattr(of, "__qualname__", repr(of))
    return ConfigError(
        f"the annotations of {name} cannot be read: {type(error).__name__}: {error}",
        fix="import what they name in the module itself, and not under TYPE_CHECKING",
    )


def _named_kind(annotation: Any) -> Any:
    """The dataclass that ``annotation`` stands for, None for a dict; ``X | None`` counts as X."""
    if get_origin(annotation) in _UNIONS:
        inner = [kind for kind in get_args(annotation) if kind is not type(None)]
        annotation = inner[0] if len(inner) == 1 else annotation
    if annotation in (Any, None, dict, Mapping) or get_origin(annotation) in (dict, Mapping):
        return None
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return annotation
    raise ConfigError(
        f"config is annotated as {annotation!r}; config.json can be turned into a dataclass or a dict",
        fix="annotate the parameter config with a dataclass, or with dict",
    )


def _dataclass(kind: Any, values: Mapping[str, Any], where: str, wrong: list[str]) -> Any:
    """``kind(**values)``; every problem goes to ``wrong``, and then None comes back."""
    before = len(wrong)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    try:
        hints = get_type_hints(kind)
    except Exception as error:  # whatever evaluating the user's own text raises
        raise unreadable(kind, error) from None
    for name in values.keys() - fields.keys():
        near = difflib.get_close_matches(name, fields, n=1)
        wrong.append(f"{where}{name} is not known" + (f"; did you mean {near[0]}?" if near else ""))
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            wrong.append(f"{where}{name} is missing")
    wrong[before:] = sorted(wrong[before:])
    known = {name: value for name, value in values.items() if name in fields}
    given = {name: _value(hints[name], value, f"{where}{name}", wrong) for name, value in known.items()}
    if len(wrong) > before:
        return None
    try:
        return kind(**given)
    except JserveError as error:
        wrong.append(error.message)
    except Exception as error:  # what the user's __post_init__ refuses
        wrong.append(f"{where or kind.__name__ + ' '}was refused: {type(error).__name__}: {error}")
    return None


def _value(hint: Any, value: Any, where: str, wrong: list[str]) -> Any:
    """``value`` as ``hint``; every problem goes to ``wrong``, and then None comes back."""
    for kind in get_args(hint) if get_origin(hint) in _UNIONS else [hint]:
        origin, args = get_origin(kind), get_args(kind)
        if isinstance(value, dict) and dataclasses.is_dataclass(kind):
            return _dataclass(kind, value, f"{where}.", wrong)
        if isinstance(value, dict) and origin in (dict, Mapping) and _holds_dataclass(kind):
            keys = [_value(args[0], key, f"{where}.{key}", wrong) for key in value]
            return dict(zip(keys, [_value(args[1], value[key], f"{where}.{key}", wrong) for key in value], strict=True))
        if isinstance(value, list) and origin in (list, tuple, Sequence) and _holds_dataclass(kind):
            each = args if origin is tuple and args[-1] is not Ellipsis else args[:1] * len(value)
            if len(each) != len(value):
                wrong.append(f"{where} has {len(value)} values; wanted {len(each)}")
                return None
            read = [_value(each[i], inner, f"{where}[{i}]", wrong) for i, inner in enumerate(value)]
            return tuple(read) if origin is tuple else read
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        wrong.append(f"{where} is {value!r}: {error}")
    except TypeError:  # a type that JSON has no form for, such as a dtype: the dataclass itself may read it
        return value
    return None


def _holds_dataclass(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or any(map(_holds_dataclass, get_args(hint)))
