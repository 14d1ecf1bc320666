"""Hugging Face folders: config.json, safetensors and tokenizer files, read as they are."""
