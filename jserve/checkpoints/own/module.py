"""``package.module:Class``: a module of the user's own, imported by name and built without values.

How the target (a class, or a function that returns a module) is called:

    rngs=nnx.Rngs(0)    if its signature has ``rngs``
    config=...          if its signature has ``config``: ``config.json`` of the checkpoint's folder or of the two above
                        it, as the dataclass or dict that the parameter is annotated with
    dtype=...           if its signature has ``dtype``: what is served in

Any other parameter needs a default.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from flax import linen as nn
from flax import nnx
from jax.typing import DTypeLike

from jserve.checkpoints.hf.files import CONFIG_NAME
from jserve.checkpoints.orbax.beside import find_beside
from jserve.checkpoints.own.config import read_config, unreadable
from jserve.errors import ConfigError, JserveError, UnsupportedModel
from jserve.models.own import for_serving, in_words, leaves_beside_params, random_leaves, type_name

__all__ = ["OwnModule", "build_own_module"]


@dataclass(frozen=True, kw_only=True)
class OwnModule:
    """A user's module, without values."""

    name: str
    """Of its class."""
    module: nnx.Module
    """Ready to serve (see ``for_serving``); its parameters are ShapeDtypeStructs."""
    random: tuple[tuple[str, ...], ...]
    """Random state that a checkpoint of the whole module has, and a served one has not."""
    unsaved: tuple[tuple[str, ...], ...]
    """What is no ``nnx.Param``, such as plain arrays: a checkpoint of the parameters alone has not got it."""
    takes_dtype: bool
    """Whether the dtype was given to it; else its parameters have those of its own choice."""
    config_path: Path | None
    """Where its config was read from."""


def build_own_module(target: str, *, where: Sequence[Path], dtype: DTypeLike) -> OwnModule:
    """Import ``target`` from ``sys.path`` and the current directory, and build it under ``nnx.eval_shape``.

    ``where`` are folders that config.json may be in, nearest first. Raises ConfigError for a target that cannot be
    imported or called so, CheckpointError for a config.json that does not fit, UnsupportedModel for what is no Flax
    module.
    """
    factory = _find(target)
    parameters = _parameters(target, factory)
    keywords, config_path = _keywords(target, factory, parameters, where, dtype)
    made: list[Any] = []

    def build() -> Any:
        built = factory(**keywords, **({"rngs": nnx.Rngs(0)} if _takes(parameters, "rngs") else {}))
        made.append(built)
        return built if isinstance(built, nnx.Module) else None

    try:
        # Axes are declared only: where they lie on a mesh is decided later.
        with nnx.use_eager_sharding(False):
            module: Any = nnx.eval_shape(build)
    except JserveError:
        raise
    except Exception as error:
        raise UnsupportedModel(f"{target}: building it raised {in_words(error)}") from error
    if module is None and isinstance(made[-1], nn.Module):
        module = made[-1]  # holds no values yet
    if module is None:
        raise UnsupportedModel(
            f"{target} gave a {type(made[-1]).__name__}; it must be a class of, or a function that returns, "
            "a flax.nnx.Module or a flax.linen.Module"
        )
    served = for_serving(module)
    return OwnModule(
        name=type_name(module),
        module=served,
        random=tuple(random_leaves(module)),
        unsaved=tuple(leaves_beside_params(served)),
        takes_dtype="dtype" in keywords,
        config_path=config_path,
    )


def _find(target: str) -> Callable[..., Any]:
    module_name, _, name = target.partition(":")
    module = _import(module_name)
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        near = _alike(name, public)
        own = [known for known in public if getattr(vars(module)[known], "__module__", None) == module.__name__]
        raise ConfigError(
            f"{module_name} ({module.__file__}) has no {name}"
            + (f"; did you mean {near}?" if near else f"; it defines: {', '.join(own) or 'nothing'}"),
            fix=f"{module_name}:{near}" if near else None,
        )
    factory = getattr(module, name)
    if not callable(factory) or isinstance(factory, nnx.Module | nn.Module):
        raise ConfigError(
            f"{target} is a {type(factory).__name__}; it must be a class of, or a function that returns, a Flax module"
        )
    found: Callable[..., Any] = factory
    return found


def _import(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # for good: a module may import its neighbours when it is called
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"importing {name} needs the module {error.name}, which is not installed",
                fix=f"pip install what provides {error.name}",
            ) from error
        raise ConfigError(
            f"there is no module {error.name} in {here} or on Python's path{_near(error.name)}",
            fix="run where the module's file or package lies, or pip install it",
        ) from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"importing {name} raised {in_words(error)}") from error


def _near(name: str) -> str:
    """What the module ``name`` may have been meant to be, of its package or of the current directory."""
    package, _, last = name.rpartition(".")
    places = getattr(sys.modules.get(package), "__path__", []) if package else [os.getcwd()]
    near = _alike(last, [found.name for found in pkgutil.iter_modules(places)])
    return f"; did you mean {f'{package}.' if package else ''}{near}?" if near else ""


def _alike(name: str, known: Sequence[str]) -> str | None:
    """The nearest of ``known``, whatever its case."""
    near = difflib.get_close_matches(name.lower(), [other.lower() for other in known], n=1)
    return next((other for other in known if other.lower() == near[0]), None) if near else None


def _parameters(target: str, factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    called = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]
    try:
        parameters = dict(inspect.signature(called).parameters)
    except (TypeError, ValueError) as error:  # of what is written in C
        raise ConfigError(
            f"{target} has no signature that can be read: {error}",
            fix="name a class of your own, or a function that returns the module",
        ) from None
    if isinstance(factory, type):
        parameters.pop(next(iter(parameters), ""), None)
    return parameters


def _takes(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    parameter = parameters.get(name)
    return parameter is not None and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def _keywords(
    target: str,
    factory: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    where: Sequence[Path],
    dtype: DTypeLike,
) -> tuple[dict[str, Any], Path | None]:
    """What the target is called with, but for rngs; and the path of the config."""
    given = [name for name in ("rngs", "config", "dtype") if _takes(parameters, name)]
    named = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    others = [
        name
        for name, parameter in parameters.items()
        if name not in given and parameter.default is parameter.empty and parameter.kind not in named
    ]
    if others:
        raise ConfigError(
            f"{target}({', '.join(map(str, parameters.values()))}) wants {', '.join(others)}; "
            "jserve gives only rngs, config and dtype, by these names",
            fix="give the others defaults, put them into config, or name a function that fills them in",
        )
    keywords: dict[str, Any] = {"dtype": dtype} if "dtype" in given else {}
    if "config" not in given:
        return keywords, None
    path = find_beside(where, CONFIG_NAME)
    if path is not None:
        keywords["config"] = read_config(path, _annotation(factory, "config"))
    elif parameters["config"].default is inspect.Parameter.empty:
        looked = f"{', '.join(map(str, where))} have none" if where else "no --checkpoint is given"
        raise ConfigError(
            f"{target} wants config, which is read from {CONFIG_NAME} of the checkpoint's folder; {looked}",
            fix=f"write {CONFIG_NAME} there, a JSON object of the config's fields"
            + ("" if where else ", and name the folder: --checkpoint DIR"),
        )
    return keywords, path


def _annotation(factory: Callable[..., Any], name: str) -> Any:
    called = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]
    try:
        return get_type_hints(called).get(name)
    except Exception as error:  # whatever evaluating the user's own text raises
        raise unreadable(factory, error) from None
