"""A config.json of Hugging Face, and what is read of it."""

from jserve.checkpoints.hf.families import HF_FAMILIES

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "sliding_window": 1024,
}


def read(**changed):
    """The configuration of ``LLAMA`` with some of its settings changed."""
    values = {**LLAMA, **changed}
    return HF_FAMILIES[values["model_type"]].config(values)
