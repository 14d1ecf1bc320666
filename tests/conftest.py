"""Strictness for every test: no silent promotion, no warnings, shapes checked at run time."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--require-aot", action="store_true", help="fail, not skip, where the aot extra is missing")
