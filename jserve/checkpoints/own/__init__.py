"""Modules of the user's own: found by name, built without values, restored from what was saved of them."""
