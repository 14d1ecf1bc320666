"""Hugging Face folders: config.json, safetensors, a tokenizer."""
