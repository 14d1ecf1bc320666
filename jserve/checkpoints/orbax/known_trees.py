"""Trees of public training code -> tensors as Hugging Face names and lays them out, from where its key maps go on.

What each table says was held against the code that writes such trees: MaxText's own converters (``query`` divided by
the root of the head's size for Llama and Mistral and not for Qwen3; rotary pairs next to each other for Llama 3.1 and
its successors) and the modules of google-deepmind/gemma (rotary halves, norms stored as what they differ from 1, as
Hugging Face has them). What was not is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jserve.checkpoints.arrays.axes import axis_groups, regrouped
from jserve.checkpoints.arrays.key_map import KeyMap, Path
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.tree import is_number
from jserve.checkpoints.orbax.unstack import spelled, unstack
from jserve.checkpoints.problems import raise_all
from jserve.errors import UnsupportedModel

__all__ = ["HfTree", "hf_tensors", "recognise"]


@dataclass(frozen=True, kw_only=True)
class Rename:
    """One array of a tree, and the tensor that it becomes."""

    leaf: str
    """Its path, with dots; ``{i}`` stands for each layer."""
    tensor: str
    how: str = ""
    """Axes of the tensor, with those that are merged in parentheses, and behind an arrow those of the array. Empty:
    they are the same."""
    index: int | None = None
    """The array holds several tensors on its first axis, which ``how`` leaves out: which."""
    rotated: bool = False
    """``Dh`` is turned by the rotary embedding: where a tree pairs neighbours, they come apart here."""
    folded: bool = False
    """Divided by the root of ``Dh`` where the tree's code does so."""

    @cached_property
    def axes(self) -> tuple[list[list[str]], list[str]]:
        ours, _, theirs = self.how.partition("<-")
        return axis_groups(ours), theirs.split()

    def view(self, array: LazyArray, *, paired: bool, folded: bool) -> LazyArray | None:
        """``array`` as the tensor; None where it has another number of axes."""
        if self.index is not None:
            if not array.shape or self.index >= array.shape[0]:
                return None
            array = array.at(0, self.index)
        if not self.how:
            return array
        groups, theirs = self.axes
        if len(array.shape) != len(theirs):
            return None
        if self.rotated and paired:
            array = array.paired(theirs.index("Dh"))
        if self.folded and folded:
            array = array.times(math.sqrt(array.shape[theirs.index("Dh")]))
        return regrouped(array, theirs, groups)


_L = "model.layers.{i}."
_QUERY, _KEY = "self_attention.query", "self_attention.key"
MAXTEXT = (
    Rename(leaf="token_embedder.embedding", tensor="model.embed_tokens.weight"),
    Rename(leaf="decoder.decoder_norm.scale", tensor="model.norm.weight"),
    Rename(leaf="decoder.logits_dense.kernel", tensor="lm_head.weight", how="V D <- D V"),
    *(
        Rename(leaf=f"decoder.layers.{{i}}.{leaf}", tensor=_L + tensor, how=how, rotated=rotated, folded=folded)
        for leaf, tensor, how, rotated, folded in (
            ("pre_self_attention_layer_norm.scale", "input_layernorm.weight", "", False, False),
            ("post_self_attention_layer_norm.scale", "post_attention_layernorm.weight", "", False, False),
            (f"{_QUERY}.kernel", "self_attn.q_proj.weight", "(H Dh) D <- D H Dh", True, True),
            (f"{_KEY}.kernel", "self_attn.k_proj.weight", "(K Dh) D <- D K Dh", True, False),
            ("self_attention.value.kernel", "self_attn.v_proj.weight", "(K Dh) D <- D K Dh", False, False),
            ("self_attention.out.kernel", "self_attn.o_proj.weight", "D (H Dh) <- H Dh D", False, False),
            (f"{_QUERY}_norm.scale", "self_attn.q_norm.weight", "", False, False),
            (f"{_KEY}_norm.scale", "self_attn.k_norm.weight", "", False, False),
            ("mlp.wi_0.kernel", "mlp.gate_proj.weight", "F D <- D F", False, False),
            ("mlp.wi_1.kernel", "mlp.up_proj.weight", "F D <- D F", False, False),
            ("mlp.wo.kernel", "mlp.down_proj.weight", "D F <- F D", False, False),
        )
    ),
)
_MAXTEXT_FOLDED: Mapping[str, bool] = {"llama": True, "mistral": True, "qwen3": False}
"""model_type -> whether queries are divided in the checkpoint, by the root of the head's size."""

GEMMA = (
    Rename(leaf="embedder.input_embedding", tensor="model.embed_tokens.weight"),
    Rename(leaf="final_norm.scale", tensor="model.norm.weight"),
    *(
        Rename(leaf=f"layer.{{i}}.{leaf}", tensor=_L + tensor, how=how, index=index)
        for leaf, tensor, how, index in (
            ("pre_attention_norm.scale", "input_layernorm.weight", "", None),
            ("post_attention_norm.scale", "post_attention_layernorm.weight", "", None),
            ("pre_ffw_norm.scale", "pre_feedforward_layernorm.weight", "", None),
            ("post_ffw_norm.scale", "post_feedforward_layernorm.weight", "", None),
            ("attn.q_einsum.w", "self_attn.q_proj.weight", "(H Dh) D <- H D Dh", None),
            ("attn.kv_einsum.w", "self_attn.k_proj.weight", "(K Dh) D <- K D Dh", 0),
            ("attn.kv_einsum.w", "self_attn.v_proj.weight", "(K Dh) D <- K D Dh", 1),
            ("attn.qkv_einsum.w", "self_attn.q_proj.weight", "(H Dh) D <- H D Dh", 0),
            ("attn.qkv_einsum.w", "self_attn.k_proj.weight", "(K Dh) D <- K D Dh", 1),
            ("attn.qkv_einsum.w", "self_attn.v_proj.weight", "(K Dh) D <- K D Dh", 2),
            ("attn.attn_vec_einsum.w", "self_attn.o_proj.weight", "D (H Dh) <- H Dh D", None),
            ("attn._query_norm.scale", "self_attn.q_norm.weight", "", None),
            ("attn._key_norm.scale", "self_attn.k_norm.weight", "", None),
            ("mlp.gating_einsum", "mlp.gate_proj.weight", "F D <- F D", 0),
            ("mlp.gating_einsum", "mlp.up_proj.weight", "F D <- F D", 1),
            ("mlp.linear", "mlp.down_proj.weight", "D F <- F D", None),
        )
    ),
)
_GEMMA_TYPES = ("gemma2", "gemma3", "gemma3_text")
_VISION = ("SigLiPFromPatches_0", "vision_encoder")
_VISION_EMBEDDER = ("mm_input_projection", "mm_soft_embedding_norm")


@dataclass(frozen=True, kw_only=True)
class HfTree:
    """A tree of a known kind."""

    name: str
    """Whose, in words."""
    tensors: Callable[[Mapping[Path, LazyArray], Mapping[str, Any], str], dict[str, LazyArray]]
    """From the peeled tree, config.json and the words that name the files to tensors. Raises CheckpointError that lists
    every array that has no place, UnsupportedModel for what is not known of such a tree."""


def recognise(tree: Mapping[Path, LazyArray], key_map: KeyMap) -> HfTree | None:
    """The kind of ``tree``, by names that no other has; Hugging Face's, if half of those in ``key_map`` are there."""
    parts = [tuple(part for name in path for part in name.split("/")) for path in tree]
    if ("token_embedder", "embedding") in parts and any(path[0] == "decoder" for path in parts):
        return HfTree(name="MaxText", tensors=_maxtext)
    if any("attn_vec_einsum" in path for path in parts):
        return HfTree(name="google-deepmind/gemma", tensors=_gemma)
    if _has_hf_names(tree, key_map):
        return HfTree(name="the names of Hugging Face", tensors=hf_tensors)
    return None


def _has_hf_names(tree: Mapping[Path, LazyArray], key_map: KeyMap) -> bool:
    """Whether ``tree`` has at least half of the names, numbers aside and whatever stands before them there or here."""
    tensors = key_map.named_anew({".".join(_hf_path(path)): array for path, array in spelled(tree).items()})
    names = {_unnumbered(name) for name in tensors}
    known = {_unnumbered(entry.tensor) for entry in key_map.entries}
    found = [one for one in known if any(f".{one}".endswith(f".{n}") or f".{n}".endswith(f".{one}") for n in names)]
    return 2 * len(found) >= len(known)


def _unnumbered(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in ("{i}", "{e}") and not is_number(part))


def _hf_path(path: Path) -> Path:
    return (*path[:-1], "weight" if path[-1] in ("kernel", "embedding", "scale") else path[-1])


def hf_tensors(tree: Mapping[Path, LazyArray], config: Mapping[str, Any], where: str) -> dict[str, LazyArray]:
    """A tree that mirrors Hugging Face's Flax modules or its tensors' own names.

    ``kernel`` is ``weight`` transposed; ``embedding`` and ``scale`` are ``weight``.
    """
    wrong: list[str] = []
    tensors: dict[str, LazyArray] = {}
    for path, array in unstack(tree, _layers(config), where=where).items():
        last = path[-1]
        if last == "kernel" and len(array.shape) != 2:
            wrong.append(f"{'.'.join(path)} {list(array.shape)}: a kernel has two axes in Hugging Face's modules")
        elif last == "kernel":
            array = array.transposed((1, 0))
        tensors[".".join(_hf_path(path))] = array
    raise_all(f"{where} does not fit the names of Hugging Face:", wrong)
    return tensors


def _maxtext(tree: Mapping[Path, LazyArray], config: Mapping[str, Any], where: str) -> dict[str, LazyArray]:
    kind = str(config.get("model_type"))
    if kind not in _MAXTEXT_FOLDED:
        raise UnsupportedModel(
            f"{where} is a tree of MaxText for a {kind}; such trees are read for {', '.join(_MAXTEXT_FOLDED)}",
            fix="convert it with MaxText's own to_huggingface and give that folder",
        )
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling = str(rope.get("rope_type", rope.get("type", "default"))) if isinstance(rope, Mapping) else "default"
    if scaling not in ("default", "llama3"):
        raise UnsupportedModel(
            f"{where} is a tree of MaxText, with a rotary scaling of the kind {scaling}; known of such trees is how "
            "rotary dimensions are ordered without scaling and with llama3's"
        )
    layers = unstack(tree, _layers(config), where=where, default_axis=1)
    return _renamed(layers, MAXTEXT, where, paired=scaling == "llama3", folded=_MAXTEXT_FOLDED[kind])


def _gemma(tree: Mapping[Path, LazyArray], config: Mapping[str, Any], where: str) -> dict[str, LazyArray]:
    kind = str(config.get("model_type"))
    if kind not in _GEMMA_TYPES:
        raise UnsupportedModel(
            f"{where} is a tree of google-deepmind/gemma for a {kind}; such trees are read for "
            + ", ".join(_GEMMA_TYPES)
        )
    split: dict[Path, LazyArray] = {}
    for path, array in tree.items():
        parts = tuple(part for name in path for part in name.split("/"))
        parts = parts[1:] if parts[0] == "transformer" else parts
        if parts[0] in _VISION or (parts[0] == "embedder" and parts[1:2] and parts[1] in _VISION_EMBEDDER):
            continue  # only the text half is served
        if parts[-1] == "w" and parts[-2:-1] and parts[-2] in ("gating_einsum", "linear"):
            parts = parts[:-1]
        split[parts] = array
    pattern = len({path[1] for path in split if path[0] == "stacked_layers" and len(path) > 1})
    flat: dict[Path, LazyArray] = {}
    for path, array in split.items():
        stacked = (
            re.fullmatch(r"attention_type_(\d+)", path[1]) if path[0] == "stacked_layers" and len(path) > 2 else None
        )
        if stacked is None or not array.shape:
            flat[path] = array
            continue
        # Layers of one place in the pattern of local and global ones lie in one array.
        for row in range(array.shape[0]):
            flat["layer", str(row * pattern + int(stacked[1])), *path[2:]] = array.at(0, row)
    return _renamed(unstack(flat, _layers(config), where=where), GEMMA, where, paired=False, folded=False)


def _renamed(
    tree: Mapping[Path, LazyArray], renames: tuple[Rename, ...], where: str, *, paired: bool, folded: bool
) -> dict[str, LazyArray]:
    by_leaf: dict[str, list[Rename]] = {}
    for rename in renames:
        by_leaf.setdefault(rename.leaf, []).append(rename)
    tensors: dict[str, LazyArray] = {}
    wrong: list[str] = []
    for path, array in tree.items():
        layer = next((part for part in path if is_number(part)), "")
        found = by_leaf.get(".".join("{i}" if is_number(part) else part for part in path), [])
        views = {one.tensor.replace("{i}", layer): one.view(array, paired=paired, folded=folded) for one in found}
        if not views:
            wrong.append(f"{'.'.join(path)} {list(array.shape)} is not known of such trees")
        for name, view in views.items():
            if view is None:
                wrong.append(f"{'.'.join(path)} {list(array.shape)}: wanted axes {found[0].axes[1]}")
            else:
                tensors[name] = view
    raise_all(f"{where} has arrays that have no place in a model:", wrong)
    return tensors


def _layers(config: Mapping[str, Any]) -> int | None:
    inside = config.get("text_config")
    for values in (config, inside if isinstance(inside, Mapping) else {}):
        for key in ("num_hidden_layers", "n_layer", "num_layers"):
            if isinstance(values.get(key), int):
                return int(values[key])
    return None
