"""Checkpoints in object stores: the small files copied, the arrays read where they are."""
