"""Every test of this room has a cache of its own."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    """The cache folder of this test, empty; ``jserve.config.cache_dir`` lies in it."""
    home = tmp_path / "xdg"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home
