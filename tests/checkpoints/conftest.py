"""Every test of this room has a cache of its own."""

import pytest


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    """The cache folder of this test, empty; ``jserve.config.cache_dir`` lies in it."""
    home = tmp_path / "xdg"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home
