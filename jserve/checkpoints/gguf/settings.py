"""The settings of one architecture in a GGUF file's metadata, under keys that begin with its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jserve.checkpoints.gguf.file import GgufFile
from jserve.checkpoints.gguf.tensors import read_tensor
from jserve.checkpoints.settings import Settings
from jserve.errors import CheckpointError

__all__ = ["GgufSettings", "read_factors"]

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_gating_func": (1,),  # softmax
    "expert_weights_scale": (1.0,),
    "rope.scaling.finetuned": (True, False),
    "tensor_data_layout": ("Meta AI original pth",),
}
"""Keys that may be there, unread, if they hold one of these values."""


class GgufSettings(Settings):
    """The metadata under ``llama.``, say. A key that is neither asked for nor neutral is refused."""

    def __init__(self, file: GgufFile) -> None:
        prefix = f"{file.metadata['general.architecture']}."
        values = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
        super().__init__(values, where=str(file.path), prefix=prefix)
        self.file = file

    def known(self, key: str, value: Any) -> bool:
        return value in _NEUTRAL.get(key, ())

    def vocab_size(self) -> int:
        """Rows of the embedding table, which the tokenizer may fill only in part."""
        table = self.file.tensors.get("token_embd.weight")
        if table is None:
            self.wrong("tensor token_embd.weight is missing")
            return 1
        size = self.size("vocab_size", table.shape[0])
        if size != table.shape[0]:
            self.wrong(f"{self.prefix}vocab_size is {size}, and token_embd.weight has {table.shape[0]} rows")
        return table.shape[0]

    def heads(self) -> tuple[int, int, int]:
        """Numbers of query and KV heads, and their size, which is one for keys and values."""
        hidden, heads = self.size("embedding_length"), self.size("attention.head_count")
        head_dim = self.size("attention.key_length", max(1, hidden // heads))
        self.only("attention.value_length", head_dim)
        return heads, self.size("attention.head_count_kv", heads), head_dim

    @property
    def tied(self) -> bool:
        """The file has no output head: the embedding table is it."""
        return "output.weight" not in self.file.tensors


def read_factors(file: GgufFile, name: str, count: int) -> np.ndarray:
    """A tensor of ``count`` divisors of rotary frequencies. Raises CheckpointError where it is none."""
    tensor = file.tensors[name]
    if tensor.shape != (count,) or tensor.kind.name != "F32":
        raise CheckpointError(f"{file.path}: {name} is {tensor.kind.name} {list(tensor.shape)}; wanted F32 [{count}]")
    return read_tensor(file, tensor)
