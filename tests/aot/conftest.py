"""Meshes of devices that are not here: their compilers are, in the aot extra."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

from sharding import MeshSpec

PACKAGES = ("libtpu", "jax_cuda12_plugin", "jax_plugins.xla_cuda12", "absl")


@pytest.fixture(autouse=True)
def compilers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where the aot extra is missing; fail where --require-aot asks for it."""
    missing = [package for package in PACKAGES if not _is_there(package)]
    if missing:
        message = f"the aot extra is missing ({', '.join(missing)}): pip install '.[test,aot]'"
        if request.config.getoption("--require-aot"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    # Two test processes may compile at once; libtpu's lock file is for those that own a chip.
    monkeypatch.setitem(os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    monkeypatch.setitem(os.environ, "TPU_SKIP_MDS_QUERY", "1")


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(params=["v5e", "h100"])
def tensor_mesh(request: pytest.FixtureRequest) -> Mesh:
    """Four devices on the axis ``tensor``: a TPU v5e 2x2, or four H100."""
    if request.param == "v5e":
        described = topologies.get_topology_desc("v5e:2x2", platform="tpu")
    else:
        target = (Path(__file__).parent / "h100.textproto").read_text(encoding="utf-8")
        described = topologies.get_topology_desc("h100", platform="cuda", topology="1x1x4", target_config=target)
    return MeshSpec(tensor=4).build(described.devices)
