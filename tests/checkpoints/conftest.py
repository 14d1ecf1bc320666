"""Every test of this room has a cache of its own."""

import sys
from pathlib import Path

import pytest

from jserve.checkpoints.sources import known_wheels
from jserve.checkpoints.sources.known_wheels import KnownWheel

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    """The cache folder of this test, empty; ``jserve.config.cache_dir`` lies in it."""
    home = tmp_path / "xdg"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def know(monkeypatch):
    """Have jserve know the wheel ``name==version`` by its digest, and no other but those told of before."""
    wheels = {}

    def tell(requirement, sha256, size=1, joined=None):
        wheels[requirement] = KnownWheel(sha256=sha256, size=size, joined=joined or {})
        monkeypatch.setattr(known_wheels, "_known_wheels", lambda: wheels)

    return tell
