"""What the configurations of all families have in common."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from jserve.errors import UnsupportedModel
from jserve.models.number import check_number
from jserve.models.rope import RopeScaling

__all__ = [
    "MAX_EXPERTS",
    "MAX_LAYERS",
    "ModelConfig",
    "RotaryConfig",
    "check_heads",
    "check_numbers",
    "check_size",
    "check_sizes",
    "check_windows",
]

R = TypeVar("R", bound="RotaryConfig")
C = TypeVar("C", bound="ModelConfig")  # typing.Self is more than the checkers of shapes understand

_MAX_WIDTH = 1 << 24
"""Largest size of a dimension: far beyond any model, and the bytes of a parameter still count in 64 bits."""
MAX_LAYERS = 1024
"""They are built one by one."""
MAX_EXPERTS = 4096
"""Of a layer. Files may have a tensor for each."""
_MOST = {"num_layers": MAX_LAYERS, "the number of experts": MAX_EXPERTS, "max_position": 2**31 - 1}
"""Where it is not _MAX_WIDTH. Positions are int32."""
_ROTARY_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position",
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of a model of some family."""

    vocab_size: int
    hidden_size: int
    max_position: int = 2048
    """Most tokens of a sequence that the model was made for."""

    def for_length(self: C, length: int) -> C:
        """This model served with sequences of at most ``length`` tokens. Some rotary scalings ask; others do not."""
        del length
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
        """The inverse of ``to_dict``. Raises UnsupportedModel for names or values that do not belong there."""
        unknown = sorted(_unknown(values, cls, ""))
        if unknown:
            known = ", ".join(sorted(field.name for field in dataclasses.fields(cls)))
            raise UnsupportedModel(f"{cls.__name__} has unknown {unknown}; known: {known}")
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise UnsupportedModel(f"{cls.__name__} does not fit: {error}") from None


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(ModelConfig):
    """What all decoders have whose queries and keys rotate."""

    intermediate_size: int
    """Width of the feed-forward, or of each expert."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        check_sizes(self, _ROTARY_SIZES)
        check_numbers(self, ("rope_theta",))

    def for_length(self: R, length: int) -> R:
        scaling = self.rope_scaling
        return self if scaling is None else dataclasses.replace(self, rope_scaling=scaling.for_length(length))


def check_sizes(config: ModelConfig, names: tuple[str, ...]) -> None:
    """Raise UnsupportedModel for a field of ``names`` that is no size of a dimension, or counts too many."""
    for name in names:
        check_size(name, getattr(config, name))


def check_size(name: str, value: int) -> None:
    """Raise UnsupportedModel where ``value`` is no size that ``name`` can have."""
    most = _MOST.get(name, _MAX_WIDTH)
    if not 1 <= value <= most:
        raise UnsupportedModel(f"{name} is {value}; allowed are 1 to {most}")


def check_numbers(config: ModelConfig, names: tuple[str, ...]) -> None:
    """Raise UnsupportedModel for a field of ``names`` that is no number above 0 of float32's range."""
    for name in names:
        check_number(name, getattr(config, name))


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int) -> None:
    """Raise UnsupportedModel for attention heads that do not go together."""
    check_size("num_heads times head_dim", num_heads * head_dim)
    if num_heads % num_kv_heads:
        raise UnsupportedModel(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
    if rotary_dim == head_dim and head_dim % 2:
        raise UnsupportedModel(f"head_dim {head_dim} is odd; rotary embedding turns pairs of dimensions")
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise UnsupportedModel(f"rotary_dim is {rotary_dim}; allowed are even numbers from 2 to head_dim {head_dim}")


def check_windows(windows: Sequence[int | None], num_layers: int) -> None:
    """Raise UnsupportedModel where ``windows`` is not one for each layer, or one is no number of tokens."""
    if len(windows) != num_layers:
        raise UnsupportedModel(
            f"{len(windows)} attention windows are given for {num_layers} layers; one each is wanted"
        )
    wrong = sorted({window for window in windows if window is not None and not 1 <= window < 2**31})
    if wrong:
        raise UnsupportedModel(f"attention windows of {wrong} tokens; allowed are 1 to {2**31 - 1}, or null for none")


def _unknown(values: Any, kind: type, prefix: str) -> Iterator[str]:
    """Names in ``values`` that the dataclass ``kind`` does not have, those of dataclasses inside it included."""
    if not isinstance(values, Mapping):
        return  # None, or what msgspec refuses
    hints = get_type_hints(kind)
    for name, value in values.items():
        if name not in hints:
            yield prefix + str(name)
            continue
        hint = hints[name]
        inner = [k for k in (get_args(hint) if isinstance(hint, types.UnionType) else (hint,)) if isinstance(k, type)]
        for field_kind in filter(dataclasses.is_dataclass, inner):
            yield from _unknown(value, field_kind, f"{prefix}{name}.")
