"""Settings that a file holds, read key by key; everything wrong with them is collected and raised at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from jserve.errors import CheckpointError, UnsupportedModel
from jserve.models.config import MAX_EXPERTS, MAX_LAYERS, ModelConfig
from jserve.shown import shown

__all__ = ["Settings", "sampling_default"]

C = TypeVar("C", bound=ModelConfig)


class Settings:
    """Values by key. What is asked for counts as known; ``finish`` refuses the rest, for it may change what the model
    computes.

    Readers give a value that stands in for one that is missing or wrong, so that all can be named; only what
    ``finish`` has passed is a setting of the model.
    """

    def __init__(self, values: Mapping[str, Any], *, where: str, prefix: str = "", fix: str | None = None) -> None:
        """``where`` names the file, ``prefix`` stands before each key in messages, ``fix`` is what to do about
        settings that are not known."""
        self.values = values
        self.where = where
        self.prefix = prefix
        self._fix = fix
        self._asked: set[str] = set()
        self._inside: list[Settings] = []
        self._wrong: list[str] = []
        self._unsupported: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        """The value of any kind; the default where it is absent or null."""
        self._asked.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None, *, most: int = (1 << 31) - 1) -> int:
        """A whole number above 0. To be given ``most`` where something is made for each before a configuration is."""
        value = self.get(key, default)
        if _is_whole(value) and 0 < value <= most:
            return value
        self.miss(key, value, f"a whole number from 1 to {most}")
        return 1

    def layers(self, key: str) -> int:
        """A number of layers."""
        return self.size(key, most=MAX_LAYERS)

    def experts(self, key: str, default: int | None = None) -> int:
        """A number of experts."""
        return self.size(key, default, most=MAX_EXPERTS)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(key, default)
        if _is_positive(value):
            return float(value)
        self.miss(key, value, "a number above 0")
        return 1.0

    def maybe_number(self, key: str) -> float | None:
        """As ``number``; None where it is absent."""
        return None if self.get(key) is None else self.number(key)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers above 0."""
        value = self.get(key)
        if isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_positive, value)):
            return tuple(map(float, value))
        self.miss(key, value, "a list of numbers above 0")
        return ()

    def flag(self, key: str, *, default: bool) -> bool:
        """true or false."""
        value = self.get(key, default)
        if isinstance(value, bool):
            return value
        self.miss(key, value, "true or false")
        return default

    def only(self, key: str, *built: Any) -> None:
        """A setting that may be absent, or have one of the values that are built."""
        value = self.get(key)
        if value is not None and not any(type(value) is type(one) and value == one for one in built):
            self.unsupported(f"{self.prefix}{key} = {shown(value)} (built: {', '.join(map(shown, built))})")

    def inside(self, key: str) -> Settings | None:
        """The settings under ``key``, if there are any; they are finished with these."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.miss(key, value, "a table of settings")
            return None
        child = Settings(value, where=self.where, prefix=f"{self.prefix}{key}.")
        child._wrong, child._unsupported = self._wrong, self._unsupported
        self._inside.append(child)
        return child

    @property
    def has_problems(self) -> bool:
        """Whether ``finish`` would raise for what has been read so far."""
        return bool(self._wrong or self._unsupported)

    def miss(self, key: str, value: Any, wanted: str) -> None:
        """``key`` is not ``wanted``: the file is malformed."""
        what = "is missing" if value is None else f"is {shown(value)}"
        self.wrong(f"{self.prefix}{key} {what}; it must be {wanted}")

    def wrong(self, what: str) -> None:
        """The file is malformed."""
        self._wrong.append(what)

    def unsupported(self, what: str) -> None:
        """The file asks for something that is not built."""
        self._unsupported.append(what)

    def known(self, key: str, value: Any) -> bool:
        """Whether ``key`` may be left unread."""
        return value is None

    def finish(self) -> None:
        """Raise CheckpointError with everything that is malformed, or UnsupportedModel with all that is not built."""
        self.check()
        unread = [
            f"{part.prefix}{key} = {shown(value)}"
            for part in (self, *self._inside)
            for key, value in part.values.items()
            if key not in part._asked and not part.known(key, value)
        ]
        if self._unsupported or unread:
            raise UnsupportedModel(
                f"{self.where} has settings that are not built: {', '.join([*self._unsupported, *unread])}",
                fix=self._fix if unread else None,
            )

    def check(self) -> None:
        """As ``finish``, while there is more to ask for: only CheckpointError."""
        if self._wrong:
            raise CheckpointError(f"{self.where}: {'; '.join(self._wrong)}")

    def build(self, kind: type[C], fields: Mapping[str, Any]) -> C:
        """``finish``, and the configuration made of ``fields``; UnsupportedModel where they do not go together."""
        self.finish()
        try:
            return kind(**fields)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{self.where}: {error.message}", fix=error.fix) from None


def sampling_default(value: Any, *, key: str, where: object) -> int | float:
    """``value``, which the file ``where`` has as a default for sampling under ``key``.

    Raises CheckpointError for what is no finite number: jserve.json holds no other, and every request would fail.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return value
    raise CheckpointError(f"{where}: {key} is {shown(value)}; it must be a finite number")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value <= sys.float_info.max
