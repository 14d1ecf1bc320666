"""GGUF files: the container (file), the blocks of its tensors (tensors), and the architectures (llama, gemma, gpt2)."""
