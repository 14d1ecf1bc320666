"""Strictness for every test: no silent promotion, no warnings, shapes and types checked at run time.

``CHECKED`` are the modules whose functions and dataclasses take arrays: beartype holds each call against its
annotations. It must stand before the first import of any of them.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jaxtyping import install_import_hook

CHECKED = [
    "jserve.models",
    *(f"jserve.engine.{name}" for name in ("encoder.program", "forward", "plan", "sampler", "state", "step")),
]
# The tower: an int is as good as a float, as type checkers have it.
install_import_hook(CHECKED, "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


sys.path.insert(0, str(Path(__file__).parent / "oracle"))  # families.py, for several rooms


def pytest_addoption(parser):
    parser.addoption("--require-aot", action="store_true", help="fail, not skip, where the aot extra is missing")
    parser.addoption("--verified", metavar="FILE", help="write what the tests verify (family, source, how) to FILE")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if (file := config.getoption("--verified")) is not None:
        rows = {mark.args for item in items if not _is_skipped(item) for mark in item.iter_markers("verifies")}
        Path(file).write_text(json.dumps(sorted(rows)), encoding="utf-8")


def pytest_sessionfinish(session):
    # What libraries said while they were imported above would come after the closing lines.
    capture = session.config.pluginmanager.getplugin("capturemanager")
    if capture is not None and capture.is_globally_capturing():
        capture.read_global_capture()


def _is_skipped(item):
    """Whether a mark keeps it from running here."""
    skipif = (mark.args[:1] == (True,) for mark in item.iter_markers("skipif"))
    return item.get_closest_marker("skip") is not None or any(skipif)
