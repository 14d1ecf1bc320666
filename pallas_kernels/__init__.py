"""Kernels for serving, each with a plain-jnp reference beside it. Needs only jax."""
