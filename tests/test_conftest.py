"""What the tests' own plugin says of them."""

import json
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
MARKED = """
import pytest

def row(how):
    return pytest.mark.verifies("family", "source", how)

@row("runs")
def test_runs(): ...

@row("runs here")
@pytest.mark.skipif(False, reason="no")
def test_runs_here(): ...

@row("skipped")
@pytest.mark.skip
def test_skipped(): ...

@row("skipped here")
@pytest.mark.skipif(True, reason="yes")
def test_skipped_here(): ...

@pytest.mark.parametrize("case", [
    pytest.param(1, marks=row("case")), pytest.param(2, marks=[row("skipped case"), pytest.mark.skip])
])
def test_cases(case): ...
"""


def test_what_never_runs_verifies_nothing(tmp_path):
    (tmp_path / "test_marked.py").write_text(MARKED)
    command = [sys.executable, "-m", "pytest", "-c", str(TESTS.parent / "pyproject.toml"), "-p", "conftest"]
    command += ["--collect-only", "-q", "--verified", str(tmp_path / "rows.json"), str(tmp_path / "test_marked.py")]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [how for _, _, how in rows] == ["case", "runs", "runs here"]
