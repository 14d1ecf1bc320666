"""Modules of users, made ready for serving: in evaluation mode, without what draws random numbers."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flax import linen as nn
from flax import nnx
from flax.errors import TraceContextError

from jserve.errors import ConfigError, JserveError, UnsupportedModel
from jserve.models.linen import from_linen

__all__ = [
    "LOST",
    "for_serving",
    "in_words",
    "is_transforms",
    "leaves_beside_params",
    "length_if_known",
    "length_of",
    "random_leaves",
    "traced_in_words",
    "type_name",
]


def for_serving(module: Any) -> nnx.Module:
    """``module`` as it is served; the one given stays as it was.

    A Linen module comes behind the contract (``jserve.models.linen``), an NNX module as a copy that shares its
    arrays: with ``eval()`` called on it, and with the generators of its dropouts and the like taken out. Raises
    UnsupportedModel for anything else, and for random state that is not held as ``nnx.Rngs`` or ``nnx.RngStream``.
    """
    if isinstance(module, nn.Module):
        return from_linen(module)
    if not isinstance(module, nnx.Module):
        raise UnsupportedModel(
            f"{type(module).__name__} is neither a flax.nnx.Module nor a flax.linen.Module", fix="a Flax module"
        )
    copy = nnx.merge(*nnx.split(module))
    copy.eval()
    for _, node in nnx.iter_modules(copy):
        for name, value in list(vars(node).items()):
            if isinstance(value, nnx.Rngs | nnx.RngStream):
                setattr(node, name, None)
    if left := random_leaves(copy):
        raise UnsupportedModel(
            f"{type(module).__name__} keeps random state in {', '.join('.'.join(path) for path in left)}",
            fix="hold generators as attributes of type nnx.Rngs; served, a model draws nothing",
        )
    return copy


def random_leaves(module: Any) -> list[tuple[str, ...]]:
    """Paths of a module's random keys and counters: no parameters, though ``nnx.state`` has them."""
    if not isinstance(module, nnx.Module):
        return []
    random = nnx.split(module, nnx.RngState, ...)[1]
    return [tuple(map(str, path)) for path, _ in nnx.to_flat_state(random)]


def leaves_beside_params(module: nnx.Module) -> list[tuple[str, ...]]:
    """Paths of the arrays that are no ``nnx.Param``: other Variables, and arrays that attributes hold as they are."""
    leaves = nnx.to_flat_state(nnx.split(module)[1])
    return [tuple(map(str, path)) for path, leaf in leaves if not isinstance(leaf, nnx.Param)]


def length_if_known(module: Any) -> int | None:
    """As ``length_of``; None where the module does not say it."""
    module = _users(module)
    config = getattr(module, "config", None)
    for length in (
        getattr(module, "max_position", None),
        getattr(config, "max_position", None),
        config.get("max_position") if isinstance(config, Mapping) else None,  # Linen makes a FrozenDict of a dict
    ):
        if isinstance(length, int):
            return length
    return None


def length_of(module: Any) -> int:
    """A module says how many tokens a sequence may have as ``max_position``, on itself or on (or in) its config.

    Raises ConfigError where it does not.
    """
    length = length_if_known(module)
    if length is None:
        raise ConfigError(
            f"{type_name(module)} has no max_position, itself or in its config", fix="add one: an int, in tokens"
        )
    return length


def type_name(module: Any) -> str:
    """The name of the user's own class."""
    return type(_users(module)).__name__


def _users(module: Any) -> Any:
    """What the user wrote: of a Linen module behind the contract, that one."""
    return getattr(module, "linen", module)


def in_words(error: BaseException) -> str:
    """An exception, and the last line outside of libraries that it came through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}{where}"


LOST = (
    "change no variable while the module runs; and give nnx.remat, nnx.jit and the like, which write back what they "
    "are given, only submodules of nnx.Param; or use jax.checkpoint and jax.jit over arrays in their place"
)
"""What to do about a TraceContextError that is not ``is_transforms``."""


def is_transforms(error: TraceContextError) -> bool:
    """Whether a transform of NNX (``nnx.remat``, ``nnx.jit``) raised it over a submodule that was merged in the trace
    around: it would run in that one.

    False where a variable is changed that is no ``nnx.Param``: what it becomes is lost, in whichever trace. Flax tells
    these apart by its words alone; a Param is only ever written back as it was.
    """
    return bool(re.search(r"extract graph node|mutate \w*Param\b", str(error)))


@contextmanager
def traced_in_words() -> Iterator[None]:
    """Whatever a user's module raises while its methods are traced comes out as UnsupportedModel that says where."""
    try:
        yield
    except JserveError:
        raise
    except Exception as error:
        check = "see what jserve inspect --check package.module:Class says of it"
        raise UnsupportedModel(
            f"the model cannot be compiled: tracing it raised {in_words(error)}",
            fix=LOST if isinstance(error, TraceContextError) else check,
        ) from error


def _is_users(filename: str) -> bool:
    return (
        filename.endswith(".py")
        and "site-packages" not in filename
        and not filename.startswith((str(Path(__file__).parents[1]), os.path.dirname(os.__file__)))
    )
