"""Linen modules behind the model contract: their variables become ``nnx.Param``s, their methods are applied to them.

A Linen module keeps the contract of ``jserve.models.contract`` in its own manner:

    class MyModel(nn.Module):
        num_layers: int
        max_position: int
        def setup(self): ...
        def embed(self, tokens, step): ...
        def layer(self, i, x, step): ...
        def logits(self, x): ...

or has one ``__call__(self, tokens, positions, attend)``, which may be ``@nn.compact``. Logical axes are those of
``nn.with_partitioning`` and ``nn.with_logical_partitioning``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import Array
from jaxtyping import Float, Int32

from jserve.errors import UnsupportedModel
from jserve.models.contract import METHODS, Step, all_logits, is_whole, only_decoders

__all__ = ["LinenDecoder", "LinenWhole", "from_linen", "linen_params"]


class _Linen(nnx.Module):
    def __init__(self, module: nn.Module, params: Any) -> None:
        self.linen = module
        self.params = params
        """The collection ``params`` as an nnx.Dict, by its own names."""

    def _apply(self, method: str, *arguments: Any) -> Any:
        return self.linen.apply({"params": nnx.to_pure_dict(nnx.state(self.params))}, *arguments, method=method)


class LinenDecoder(_Linen):
    """A Linen module with the methods of the contract."""

    def __init__(self, module: nn.Module, params: Any) -> None:
        super().__init__(module, params)
        self.num_layers: int = module.num_layers

    def embed(self, tokens: Int32[Array, " T"], step: Step) -> Float[Array, "T D"]:
        return self._apply("embed", tokens, step)

    def layer(self, i: int, x: Float[Array, "T D"], step: Step) -> Float[Array, "T D"]:
        return self._apply("layer", i, x, step)

    def logits(self, x: Float[Array, "R D"]) -> Float[Array, "R V"]:
        return self._apply("logits", x)


class LinenWhole(_Linen):
    """A Linen module in one piece."""

    def __call__(
        self,
        tokens: Int32[Array, " T"],
        positions: Int32[Array, " T"],
        attend: Callable[..., Float[Array, "T H Dh"]],
    ) -> Float[Array, "T V"]:
        return self._apply("__call__", tokens, positions, attend)


def from_linen(module: nn.Module) -> LinenDecoder | LinenWhole:
    """``module`` behind the contract, its parameters ShapeDtypeStructs with the logical axes that they declare.

    Raises UnsupportedModel that says what to change where the module does not keep the contract.
    """
    whole = is_whole(module)
    _check_names(module, whole=whole)
    tokens = jax.ShapeDtypeStruct((1,), jnp.int32)

    def init(tokens: Int32[Array, " T"]) -> Any:
        step = Step(positions=jnp.zeros_like(tokens), valid=jnp.ones(tokens.shape, bool), answer=lambda query: query.q)
        # Every method once: what is created lazily in a method that did not run would be missing.
        return module.init(jax.random.key(0), method=lambda linen: all_logits(linen, tokens, step))

    try:
        variables = jax.eval_shape(init, tokens)
    except Exception as error:
        raise UnsupportedModel(
            f"initialising the Linen module {type(module).__name__} raised {type(error).__name__}: {error}",
            fix="see the shapes of jserve.models.contract; submodules belong into setup()",
        ) from error
    if others := sorted(variables.keys() - {"params"}):
        raise UnsupportedModel(
            f"{type(module).__name__} keeps variables in the collections {', '.join(others)}; only params are served",
            fix="make them params, or constants of the code",
        )
    return (LinenWhole if whole else LinenDecoder)(module, _params(variables.get("params", {})))


def linen_params(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as ``from_linen`` names them, from what ``init`` gives (boxed or not) or its collection alone."""
    plain: Any = nn.meta.unbox(given)
    return dict(plain) if plain.keys() == {"params"} else {"params": dict(plain)}


def _check_names(module: nn.Module, *, whole: bool) -> None:
    absent = [] if whole else [name for name in ("num_layers", *METHODS) if not hasattr(module, name)]
    if absent:
        raise UnsupportedModel(
            f"the Linen module {type(module).__name__} has no {', '.join(absent)}{only_decoders(absent)}",
            fix="give it the fields (or properties) num_layers and max_position, its submodules in setup(), and the "
            "methods embed(tokens, step), layer(i, x, step) and logits(x); or the field max_position and one "
            "__call__(tokens, positions, attend), @nn.compact or not",
        )


def _params(node: Any) -> Any:
    """Nested dicts of arrays, boxed or not, as an nnx.Dict of Params."""
    if isinstance(node, Mapping):
        return nnx.Dict({str(name): _params(child) for name, child in node.items()})
    if isinstance(node, nn.Partitioned):  # LogicallyPartitioned is one too
        return nnx.Param(node.value, out_sharding=node.names, eager_sharding=False)
    if isinstance(node, nn.meta.AxisMetadata):
        raise UnsupportedModel(
            f"a parameter is boxed as {type(node).__name__}; its axes cannot be read",
            fix="nn.with_partitioning or nn.with_logical_partitioning",
        )
    return nnx.Param(node)
