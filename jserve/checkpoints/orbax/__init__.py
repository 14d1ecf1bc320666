"""Orbax checkpoints: how they are read, straight through TensorStore, and how they are written, through Orbax."""
