"""The tiny random models that make_families.py asked transformers about: for the tests that hold ours against them."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jserve.testing.hf import write_shards
from jserve.testing.weights import random_weights

DATA = Path(__file__).parent / "data" / "families"
LOGITS = np.load(DATA / "logits.npz")
FAMILY_NAMES = {
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 (text)",
    "gpt2": "GPT-2",
    "llama": "Llama 2 and 3",
    "llama2": "Llama 2 and 3",
    "llama_dynamic": "Llama 2 and 3",
    "llama_linear": "Llama 2 and 3",
    "llama_tied": "Llama 2 and 3",
    "llama_yarn": "Llama 2 and 3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "phi3": "Phi-3",
    "phi3_longrope": "Phi-4-mini",
    "phi3_longrope_short": "Phi-4-mini",
    "qwen2": "Qwen2 and 2.5",
    "qwen2_window": "Qwen2 and 2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_moe_norm": "Qwen3-MoE",
}
"""By case, what its users call it: so it stands in the table of docs/models.md."""
CASES = sorted(FAMILY_NAMES)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    ids: list[int]
    greedy: list[int]
    """What follows."""
    logits: np.ndarray
    """[4, V]: those that the greedy ids 0, 4, 8 and 12 were chosen from."""


@dataclass(frozen=True, kw_only=True)
class Tiny:
    config: dict
    """config.json."""
    shapes: dict[str, tuple[int, ...]]
    seed: int
    length: int | None
    """Tokens that scalings were chosen for, where they depend on it."""
    prompts: list[Prompt]
    """Of 8, 500 and 4,000 tokens, or the model's limit."""

    def weights(self):
        """By the names that transformers gives them, float32."""
        return random_weights(self.shapes, self.seed, kind=self.config["model_type"])

    def write(self, folder, *, shards=1):
        """The model as a Hugging Face folder; ``folder`` is made."""
        folder.mkdir(parents=True)
        write_shards(folder, self.weights(), count=shards)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        return folder


def lengths(prompts):
    """Those of ``prompts``, in words for a row of docs/models.md."""
    *most, last = [f"{len(prompt.ids):,}" for prompt in prompts]
    return f"{', '.join(most)} and {last} tokens"


def read_tiny(case):
    found = json.loads((DATA / f"{case}.json").read_text(encoding="utf-8"))

    def prompt(one):
        length = one["length"]
        ids = np.random.default_rng([found["seed"], length]).integers(0, 256, length).tolist()
        return Prompt(ids=ids, greedy=one["greedy"], logits=LOGITS[f"{case}/{length}"])

    return Tiny(
        config=found["config"],
        shapes={name: tuple(shape) for name, shape in found["shapes"].items()},
        seed=found["seed"],
        length=found["length"],
        prompts=[prompt(one) for one in found["prompts"]],
    )
