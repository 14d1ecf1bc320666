"""Engines for the tests of this folder."""

import sys
from pathlib import Path

import pytest

from jserve.engine.store import ProgramStore

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    return ProgramStore(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="module")
def engine(store):
    from harness import make_engine

    built = make_engine(store)
    yield built
    built.close()
