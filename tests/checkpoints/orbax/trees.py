"""Tiny models as Hugging Face names their tensors, and the same as the trees of public training code.

The trees are made as that code's own converters make them; the formulas stand here a second time, in numpy.
"""

import numpy as np

LLAMA = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = LLAMA | {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
}
QWEN3 = LLAMA | {"model_type": "qwen3"}
GEMMA3 = {
    "model_type": "gemma3_text",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 4,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 32}


def hf_weights(config, seed=0):
    """Random tensors of a Llama, a Qwen3 or a Gemma 3, by Hugging Face's names."""
    rng = np.random.default_rng(seed)
    V, D, F, L = (config[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"))
    H, K, Dh = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    gemma = config["model_type"] == "gemma3_text"
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not gemma:
        shapes["lm_head.weight"] = (V, D)
    for i in range(L):
        at = f"model.layers.{i}."
        shapes |= {
            at + "input_layernorm.weight": (D,),
            at + "post_attention_layernorm.weight": (D,),
            at + "self_attn.q_proj.weight": (H * Dh, D),
            at + "self_attn.k_proj.weight": (K * Dh, D),
            at + "self_attn.v_proj.weight": (K * Dh, D),
            at + "self_attn.o_proj.weight": (D, H * Dh),
            at + "mlp.gate_proj.weight": (F, D),
            at + "mlp.up_proj.weight": (F, D),
            at + "mlp.down_proj.weight": (D, F),
        }
        if gemma or config["model_type"] == "qwen3":
            shapes |= {at + "self_attn.q_norm.weight": (Dh,), at + "self_attn.k_norm.weight": (Dh,)}
        if gemma:
            shapes |= {at + f"{which}_feedforward_layernorm.weight": (D,) for which in ("pre", "post")}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def gpt2_weights(seed=0):
    rng = np.random.default_rng(seed)
    D = GPT2["n_embd"]
    shapes = {"wte.weight": (16, D), "wpe.weight": (32, D), "ln_f.weight": (D,), "ln_f.bias": (D,)}
    for i in range(GPT2["n_layer"]):
        for name, rows, columns in (
            ("attn.c_attn", D, 3 * D),
            ("attn.c_proj", D, D),
            ("mlp.c_fc", D, 4 * D),
            ("mlp.c_proj", 4 * D, D),
        ):
            shapes |= {f"h.{i}.{name}.weight": (rows, columns), f"h.{i}.{name}.bias": (columns,)}
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{norm}.weight": (D,), f"h.{i}.{norm}.bias": (D,)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def nested(leaves, separator="."):
    tree = {}
    for name, leaf in leaves.items():
        node = tree
        *parts, last = name.split(separator)
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def flax_names(weights):
    """As transformers' Flax modules have it: kernels transposed, tables and scales by those names."""
    renamed = {}
    for name, value in weights.items():
        *parts, module, leaf = name.split(".")
        if leaf == "bias":
            new, stored = "bias", value
        elif "embed" in module or module in ("wte", "wpe"):
            new, stored = "embedding", value
        elif value.ndim == 1:
            new, stored = "scale", value
        else:
            new, stored = "kernel", value.T
        renamed[".".join([*parts, module, new])] = np.ascontiguousarray(stored)
    return nested(renamed)


def maxtext(config, weights, *, scan_axis):
    """``scan_axis`` None: ``layers_0``, ``layers_1``, ..."""
    H, K, Dh = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    D = config["hidden_size"]

    def rotary(kernel):
        if "rope_scaling" not in config:
            return kernel
        paired = np.empty_like(kernel)
        paired[..., ::2], paired[..., 1::2] = np.split(kernel, 2, axis=-1)
        return paired

    def layer(i):
        w = {name.removeprefix(f"model.layers.{i}."): value for name, value in weights.items()}
        q = rotary(w["self_attn.q_proj.weight"].T.reshape(D, H, Dh))
        if config["model_type"] != "qwen3":
            q = q / np.float32(np.sqrt(Dh))
        found = {
            "pre_self_attention_layer_norm.scale": w["input_layernorm.weight"],
            "post_self_attention_layer_norm.scale": w["post_attention_layernorm.weight"],
            "self_attention.query.kernel": q,
            "self_attention.key.kernel": rotary(w["self_attn.k_proj.weight"].T.reshape(D, K, Dh)),
            "self_attention.value.kernel": w["self_attn.v_proj.weight"].T.reshape(D, K, Dh),
            "self_attention.out.kernel": w["self_attn.o_proj.weight"].T.reshape(H, Dh, D),
            "mlp.wi_0.kernel": w["mlp.gate_proj.weight"].T,
            "mlp.wi_1.kernel": w["mlp.up_proj.weight"].T,
            "mlp.wo.kernel": w["mlp.down_proj.weight"].T,
        }
        if config["model_type"] == "qwen3":
            found["self_attention.query_norm.scale"] = w["self_attn.q_norm.weight"]
            found["self_attention.key_norm.scale"] = w["self_attn.k_norm.weight"]
        return found

    layers = [layer(i) for i in range(config["num_hidden_layers"])]
    if scan_axis is None:
        inner = {f"layers_{i}": nested(found) for i, found in enumerate(layers)}
    else:
        inner = {"layers": nested({k: np.stack([found[k] for found in layers], scan_axis) for k in layers[0]})}
    return {
        "token_embedder": {"embedding": weights["model.embed_tokens.weight"]},
        "decoder": {
            **inner,
            "decoder_norm": {"scale": weights["model.norm.weight"]},
            "logits_dense": {"kernel": np.ascontiguousarray(weights["lm_head.weight"].T)},
        },
    }


def deepmind_gemma(config, weights, form):
    """``form``: nested, flat or stacked."""
    H, K, Dh = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    D, L = config["hidden_size"], config["num_hidden_layers"]
    flat = {
        "embedder/input_embedding": weights["model.embed_tokens.weight"],
        "final_norm/scale": weights["model.norm.weight"],
    }
    for i in range(L):
        w = {name.removeprefix(f"model.layers.{i}."): value for name, value in weights.items()}
        kv = [w[f"self_attn.{part}_proj.weight"].reshape(K, Dh, D).transpose(0, 2, 1) for part in "kv"]
        found = {
            "pre_attention_norm/scale": w["input_layernorm.weight"],
            "post_attention_norm/scale": w["post_attention_layernorm.weight"],
            "pre_ffw_norm/scale": w["pre_feedforward_layernorm.weight"],
            "post_ffw_norm/scale": w["post_feedforward_layernorm.weight"],
            "attn/_query_norm/scale": w["self_attn.q_norm.weight"],
            "attn/_key_norm/scale": w["self_attn.k_norm.weight"],
            "attn/q_einsum/w": w["self_attn.q_proj.weight"].reshape(H, Dh, D).transpose(0, 2, 1),
            "attn/kv_einsum/w": np.stack(kv),
            "attn/attn_vec_einsum/w": w["self_attn.o_proj.weight"].reshape(D, H, Dh).transpose(1, 2, 0),
            "mlp/gating_einsum": np.stack([w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"]]),
            "mlp/linear": np.ascontiguousarray(w["mlp.down_proj.weight"].T),
        }
        flat |= {f"layer_{i}/{name}": np.ascontiguousarray(value) for name, value in found.items()}
    if form == "nested":
        return nested(flat, "/")
    if form == "stacked":
        for k in range(2):
            for name in [name.removeprefix(f"layer_{k}") for name in flat if name.startswith(f"layer_{k}/")]:
                rows = [flat.pop(f"layer_{i}{name}") for i in range(k, L, 2)]
                flat[f"stacked_layers/attention_type_{k}{name}"] = np.stack(rows)
    # Old names: one level of names with slashes, and the products of the MLP under "w".
    tree = {}
    for name, value in flat.items():
        name += "/w" if name.endswith(("gating_einsum", "linear")) else ""
        module, leaf = name.rsplit("/", 1)
        tree.setdefault(f"transformer/{module}", {})[leaf] = value
    return tree | {"SigLiPFromPatches_0/embedding": {"kernel": np.ones((2, 2), np.float32)}}
