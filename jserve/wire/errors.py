"""From an error's code on the wire back to its class."""

from __future__ import annotations

from collections.abc import Iterator

from jserve.errors import JserveError, QueueFull

__all__ = ["error_from_code"]


def error_from_code(code: str, message: str, *, retry_after_s: float | None = None) -> JserveError | None:
    """The error that a server named by its code, or None where this version does not know the code."""
    cls = _CLASSES.get(code)
    if cls is None:
        return None
    if issubclass(cls, QueueFull) and retry_after_s is not None:
        return cls(message, retry_after_s=retry_after_s)
    return cls(message)


def _tree(cls: type[JserveError]) -> Iterator[type[JserveError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _tree(child)


# Parents come before their children, so a class without a code of its own never hides its parent.
_CLASSES: dict[str, type[JserveError]] = {}
for _cls in _tree(JserveError):
    _CLASSES.setdefault(_cls.code, _cls)
