"""A Jinja sandbox in which nothing runs, grows or nests without a bound.

Jinja's own sandbox keeps a template away from the interpreter; it does not keep it from running forever or from
filling the memory. Here every loop turn, macro, call, filter and test *ticks* the budget of its render, every
operation that could make something big says so before it does, and what is not needed by chat templates is absent.
No single operation can take long, because everything it could work on is bounded; so ticks bound the time.
"""

from __future__ import annotations

import functools
import json
import operator
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from string import Formatter
from typing import Any

import jinja2
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jserve.text.budget import Budget, OverBudget, check_bits, check_width, is_sized, weight
from jserve.text.template_tree import AddTicks, Generation

__all__ = ["BoundedEnvironment"]


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


FILTER_NAMES = _names(
    "abs capitalize count d default dictsort e escape first float format groupby indent int items join last length "
    "list lower map max min reject rejectattr replace reverse round safe select selectattr sort string striptags sum "
    "title trim truncate unique upper urlencode wordcount"
)
METHOD_NAMES: dict[type, frozenset[str]] = {
    str: _names(
        "capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit islower "
        "isnumeric isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex "
        "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
    ),
    dict: _names("copy get items keys values"),
    list: _names("count index"),
    tuple: _names("count index"),
}
"""What may be called on plain values; numbers have nothing."""
PLAIN = (str, bytes, dict, list, tuple, int, float, complex)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compile with ``compile_bounded``; render inside ``with budget(...)``."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", Generation],
            # Folding constants would run operations at compile time, outside any budget.
            optimized=False,
        )
        self._local = threading.local()
        self.concat = self.concatenated_list  # type: ignore[method-assign]
        self.filters = {name: self._ticking(FILTERS[name]) for name in FILTER_NAMES}
        own: dict[str, Any] = {
            "format": self._format,
            "indent": self._indent,
            "join": self._join,
            "replace": self._replace,
            "sum": self._sum,
            "tojson": self._tojson,
        }
        self.filters.update({name: self._ticking(function) for name, function in own.items()})
        self.tests = {name: self._ticking(function) for name, function in self.tests.items()}
        self.globals = {"range": self.globals["range"], "dict": _dict, "namespace": _Namespace}

    def compile_bounded(self, source: str) -> jinja2.Template:
        tree = AddTicks().visit(self.parse(source))
        tree.set_environment(self)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    @contextmanager
    def budget(self, budget: Budget) -> Iterator[None]:
        """The budget of what this thread renders in the meantime."""
        self._local.budget = budget
        try:
            yield
        finally:
            del self._local.budget

    @property
    def spent(self) -> Budget:
        """The budget of this thread's render."""
        budget: Budget = self._local.budget
        return budget

    # What compiled templates call

    def tick(self) -> str:
        self.spent.tick()
        return ""

    def weigh(self, value: Any) -> Any:
        return self.spent.weigh(value)

    def concatenated(self, *parts: Any) -> str:
        """``a ~ b``."""
        return self.concatenated_list([str(part) for part in parts])

    def concatenated_list(self, parts: Iterable[str]) -> str:
        """Joins the output of a macro, a block or a ``~``."""
        parts = list(parts)
        self.spent.spend(sum(map(len, parts)))
        return "".join(parts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if __obj == __self.tick or __obj == __self.weigh or __obj == __self.concatenated:
            return __obj(*args)
        __self.spent.tick()
        # A macro sees its arguments as a tuple and a dict: two more ways to build a list.
        named = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        __self.spent.check([args, named])
        receiver = getattr(__obj, "__self__", None)
        if isinstance(receiver, str) and __obj.__name__ == "join":
            return __self._join(*args, d=receiver, **named)  # type: ignore[misc]
        if isinstance(receiver, str) and __obj.__name__ == "replace":
            return __self._replace(receiver, *args, **named)
        return __self.spent.weigh(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.spent
        budget.tick()
        if operator == "%" and isinstance(left, str):
            self._check_percent(left, [right])
        elif operator == "+" and is_sized(left) and is_sized(right):
            budget.spend(len(left) + len(right))
        elif operator == "*":
            if isinstance(left, int) and isinstance(right, int):
                check_bits(left.bit_length() + right.bit_length())
            for sequence, count in ((left, right), (right, left)):
                if is_sized(sequence) and isinstance(count, int):
                    budget.spend(len(sequence) * max(count, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * max(right, 0))
        return budget.weigh(super().call_binop(context, operator, left, right))

    # What templates may reach

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, PLAIN):
            kind = next((kind for kind in METHOD_NAMES if isinstance(obj, kind)), None)
            return kind is not None and attr in METHOD_NAMES[kind]
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None or value.__name__ != "format":
            return None  # format_map is then refused by is_safe_attribute.

        def bounded_format(*args: Any, **kwargs: Any) -> str:
            specs = [spec or "" for _, name, spec, _ in Formatter().parse(value.__self__) if name is not None]
            self._check_widths(value.__self__, specs, [*args, *kwargs.values()], forbidden="{")
            return inner(*args, **kwargs)

        return bounded_format

    def _ticking(self, function: Any) -> Callable[..., Any]:
        """A filter or test with its cost on the budget."""

        @functools.wraps(function)
        def ticking(*args: Any, **kwargs: Any) -> Any:
            self.spent.tick()
            return self.spent.weigh(function(*args, **kwargs))

        return ticking

    # Filters that could make much of little

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        text = str(value)
        self._check_percent(text, [*args, *kwargs.values()])
        return text % (kwargs or args)

    def _indent(self, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:  # noqa: FBT001
        text = str(s)
        by = len(width) if isinstance(width, str) else check_width(width)
        self.spent.spend(len(text) + (text.count("\n") + 1) * by)
        return FILTERS["indent"](text, width, first, blank)

    def _join(self, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            value = (self._attribute(item, attribute) for item in value)
        parts: list[str] = []
        size, separator = 0, str(d)
        for item in value:
            parts.append(str(item))
            size += len(parts[-1]) + len(separator)
            if size > self.spent.max_size:
                break
        self.spent.spend(size)
        return separator.join(parts)

    def _replace(self, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = str(s), str(old), str(new)
        times = text.count(old) if count is None or count < 0 else min(text.count(old), count)
        self.spent.spend(len(text) + times * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _sum(self, iterable: Iterable[Any], attribute: str | int | None = None, start: float = 0) -> Any:
        if not isinstance(start, (int, float)):
            raise OverBudget("it sums something else than numbers")
        if attribute is not None:
            iterable = (self._attribute(item, attribute) for item in iterable)
        return functools.reduce(operator.add, iterable, start)

    def _attribute(self, item: Any, attribute: str | int) -> Any:
        for part in str(attribute).split("."):
            item = self.getitem(item, int(part) if part.isdecimal() else part)
        return item

    def _tojson(
        self,
        x: Any,
        ensure_ascii: bool = False,  # noqa: FBT001
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,  # noqa: FBT001
    ) -> str:
        """As Hugging Face renders: plain JSON, nothing escaped for HTML."""
        if indent is not None:
            check_width(indent)
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return self._join(encoder.iterencode(x))

    def _check_percent(self, text: str, values: list[Any]) -> None:
        specs = re.findall(r"%(?:\([^)]*\))?([^a-zA-Z%]*)", text)
        self._check_widths(text, specs, values, forbidden="*")

    def _check_widths(self, text: str, specs: list[str], values: list[Any], *, forbidden: str) -> None:
        """Widths and precisions multiply: refuse large ones, and those that values would give."""
        widest = 0
        for spec in specs:
            if forbidden in spec:
                raise OverBudget("it formats text with a width that is not written out")
            widest = max([widest, *(check_width(digits) for digits in re.findall(r"\d+", spec))])
        self.spent.spend(len(text) + len(specs) * (widest + weight(values, self.spent.max_size)))


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """The class itself would offer its methods, with which a dict can be changed."""
    return dict(*args, **kwargs)


class _Namespace(Namespace):
    """Written out it would show its values, and theirs, and theirs."""

    def __repr__(self) -> str:
        return "<namespace>"
