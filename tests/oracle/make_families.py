"""Writes tests/oracle/data/families/: what Hugging Face transformers says of a tiny random model of every family.

Run by hand from the root of the project, in an environment of its own (requirements.txt beside this file):

    PYTHONPATH=. ORACLE/bin/python tests/oracle/make_families.py [CASE ...]

Given cases, it makes these anew and leaves the others as they are.

``CASE.json``  config.json as transformers saves it; the seed of the weights (``jserve.testing.weights``) and of the
               prompts; for each prompt its length, and 16 greedy ids after it.
``gemma.npz``  for each Gemma and each of float32 and bfloat16 (kept as float32): what goes into the first layer, and
               that through its first norm, of the prompt of 8 tokens, [8, D].
``logits.npz`` for each ``CASE/LENGTH`` the logits that the greedy ids 0, 4, 8 and 12 were chosen from, [4, V].

Scalings that transformers chooses anew as a sequence grows are forced to one choice, for ``length`` tokens. Before
anything is written, the best two logits of every step must lie 1e-3 apart, and the names of the weights must be those
that ``save_pretrained`` writes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jserve.testing.weights import random_weights

DATA = Path(__file__).parent / "data" / "families"
NEW_TOKENS = 16
LENGTHS = (8, 500, 4000)

SMALL = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
GPT2 = {
    "vocab_size": 256,
    "n_positions": 1024,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}
GEMMA = {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 40, "query_pre_attn_scalar": 24}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.05, 1.1],
    "long_factor": [1.1, 2.5, 7.0],
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 0.75,
}
EXPERTS = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "head_dim": 16}


def rope(kind: str, theta: float = 10000.0, **entries: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **entries}}


CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama2": (transformers.LlamaConfig, {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama_tied": (transformers.LlamaConfig, {"tie_word_embeddings": True, "head_dim": 16}),
    "llama_linear": (transformers.LlamaConfig, rope("linear", factor=3.0)),
    "llama_dynamic": (transformers.LlamaConfig, {"max_position_embeddings": 2048, **rope("dynamic", factor=2.0)}),
    "llama_yarn": (
        transformers.LlamaConfig,
        rope("yarn", factor=8.0, original_max_position_embeddings=512, beta_fast=16.0, mscale=1.0, mscale_all_dim=0.5),
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": 50}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2_window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": (
        transformers.Qwen3Config,
        {"head_dim": 16, **rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=1024)},
    ),
    "phi3": (transformers.Phi3Config, {"sliding_window": 2047, "num_key_value_heads": 4}),
    "phi3_longrope": (
        transformers.Phi3Config,
        {"original_max_position_embeddings": 256, "tie_word_embeddings": True, "rope_parameters": LONGROPE},
    ),
    "phi3_longrope_short": (
        transformers.Phi3Config,
        {"original_max_position_embeddings": 256, "tie_word_embeddings": True, "rope_parameters": LONGROPE},
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, **EXPERTS}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": False, **EXPERTS},
    ),
    "qwen3_moe_norm": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True, **EXPERTS},
    ),
    "gemma2": (
        transformers.Gemma2Config,
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **GEMMA},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            **GEMMA,
            "num_hidden_layers": 7,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gpt2": (transformers.GPT2Config, GPT2),
}
SERVED = {"llama_dynamic": 4096, "phi3_longrope": 4096, "phi3_longrope_short": 256}
"""Tokens of the longest sequence, where a scaling depends on it."""


def build(config: Any, seed: int) -> Any:
    """The model with weights that our tests make again, in float32, with plain attention."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        path = next(Path(folder).glob("*.safetensors"))
        with safe_open(path, "np") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        from safetensors.numpy import save_file

        save_file(random_weights(shapes, seed, kind=config.model_type), path, metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        saved = json.loads((Path(folder) / "config.json").read_text())
    return model.eval(), saved, shapes


def force(model: Any, length: int) -> None:
    """Rotary frequencies for sequences of ``length`` tokens, whatever comes."""
    rotary = model.model.rotary_emb
    frequencies, factor = ROPE_INIT_FUNCTIONS[rotary.rope_type](model.config, "cpu", seq_len=length)
    rotary.inv_freq, rotary.original_inv_freq, rotary.attention_scaling = frequencies, frequencies.clone(), factor
    rotary.long_inv_freq = frequencies
    rotary.max_seq_len_cached, rotary.original_max_seq_len = length, 0


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """Ids, and the logits that each was chosen from: made token by token, then all computed anew without a cache."""
    ids, step = list(prompt), model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    for _ in range(NEW_TOKENS):
        ids.append(int(step.logits[0, -1].argmax()))
        step = model(torch.tensor([ids[-1:]]), use_cache=True, past_key_values=step.past_key_values)
    rows = model(torch.tensor([ids[:-1]]), use_cache=False, logits_to_keep=NEW_TOKENS).logits[0].numpy()
    after = ids[len(prompt) :]
    best = np.sort(rows)[:, -2:]
    if (best[:, 1] - best[:, 0]).min() < 1e-3 or rows.argmax(-1).tolist() != after:
        raise SystemExit("the best two logits lie too near")
    return after, rows


@torch.no_grad()
def entrance(model: Any, prompt: list[int]) -> dict[str, np.ndarray]:
    """What a Gemma's first layer is given, and that through its first norm, in either dtype."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
        x = model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states[0]
        name = str(dtype).removeprefix("torch.")
        found[f"{name}/input"] = x[0].float().numpy()
        found[f"{name}/norm"] = model.model.layers[0].input_layernorm(x)[0].float().numpy()
    return found


def make(
    case: str,
    kind: type,
    entries: dict[str, Any],
    logits: dict[str, np.ndarray],
    at_entrance: dict[str, np.ndarray],
) -> None:
    for seed in range(60):
        config = kind(**(entries if kind is transformers.GPT2Config else {**SMALL, **entries}))
        model, saved, shapes = build(config, seed)
        if case in SERVED:
            force(model, SERVED[case])
        limit = SERVED.get(case, getattr(config, "n_positions", 4096)) - NEW_TOKENS
        prompts = []
        try:
            for length in sorted({min(length, limit) for length in LENGTHS}):
                ids = np.random.default_rng([seed, length]).integers(0, 256, length).tolist()
                after, rows = greedy(model, ids)
                if len(set(after)) < 6:
                    raise SystemExit(f"only {len(set(after))} different ids")
                prompts.append({"length": length, "greedy": after})
                logits[f"{case}/{length}"] = rows[::4]
        except SystemExit as error:
            print(case, "seed", seed, error)
            continue
        break
    else:
        raise SystemExit(f"{case}: no seed will do")
    text = {"config": saved, "seed": seed, "length": SERVED.get(case), "shapes": shapes, "prompts": prompts}
    lines = ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in text.items())
    (DATA / f"{case}.json").write_text(f"{{\n{lines}\n}}\n")
    print(case, "seed", seed, {p["length"]: p["greedy"] for p in prompts})
    if case.startswith("gemma"):
        ids = np.random.default_rng([seed, 8]).integers(0, 256, 8).tolist()
        at_entrance.update({f"{case}/{name}": values for name, values in entrance(model, ids).items()})


def kept(name: str) -> dict[str, np.ndarray]:
    path = DATA / name
    return dict(np.load(path)) if path.exists() else {}


def main() -> None:
    asked = sys.argv[1:] or list(CASES)
    DATA.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    logits, at_entrance = kept("logits.npz"), kept("gemma.npz")
    for case in asked:
        make(case, *CASES[case], logits, at_entrance)
    np.savez_compressed(DATA / "logits.npz", **logits)
    np.savez_compressed(DATA / "gemma.npz", **at_entrance)


if __name__ == "__main__":
    main()
