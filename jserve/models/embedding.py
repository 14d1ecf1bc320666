"""The table of token vectors, where every family begins."""

from __future__ import annotations

from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from jserve.models.contract import Step
from jserve.models.params import normal

__all__ = ["Embedding"]


class Embedding(nnx.Module):
    """V vectors of D. Calling it is what the contract's ``embed`` begins with."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.weight = normal((vocab_size, hidden_size), ("vocab", "embed"), hidden_size, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int32[Array, " T"], step: Step) -> Float[Array, "T D"]:
        del step
        return self.weight[...].at[tokens].get(mode="clip")
