"""The oracle's tiny models as GGUF files, with the tiny tokenizer."""

from families import read_tiny

from jserve.testing.gguf import TINY_TOKENS, tokenizer_metadata, write_gguf
from jserve.testing.gguf_families import gguf_metadata, gguf_tensors
from jserve.testing.weights import random_weights

TABLES = ("embed_tokens.weight", "lm_head.weight", "wte.weight")


def tiny(case, **changed):
    """A config.json and weights, with room for the tiny tokenizer: rows of tables follow those of the oracle's."""
    found = read_tiny(case)
    config = {**found.config, "vocab_size": len(TINY_TOKENS), **changed}
    if case in ("gemma2", "gemma3"):  # GGUF has no key for it but in the largest
        config["query_pre_attn_scalar"] = config["head_dim"]
    shapes = {
        name: (len(TINY_TOKENS), shape[1]) if name.endswith(TABLES) else shape for name, shape in found.shapes.items()
    }
    return config, random_weights(shapes, found.seed, kind=config["model_type"])


def write(path, config, weights, *, metadata=None, drop=()):
    tensors = {name: tensor for name, tensor in gguf_tensors(config, weights).items() if name not in drop}
    known = {**gguf_metadata(config), **tokenizer_metadata(len(TINY_TOKENS)), **(metadata or {})}
    write_gguf(path, known, tensors)
    return path
