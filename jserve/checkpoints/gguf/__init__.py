"""GGUF files: the container (file), the blocks of its tensors (tensors), and each architecture (llama)."""
