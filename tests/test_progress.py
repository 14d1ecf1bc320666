"""Progress without a terminal: a line at the start, one now and then, one at the end."""

import pytest

from jserve import progress as module
from jserve.progress import ConsoleProgress


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_task_says_how_far_it_is_and_how_long_it_takes(clock, capsys):
    with ConsoleProgress() as progress:
        progress.start("compile", 23, "programs")
        clock[0] = 3.0
        progress.advance(1)
        progress.note("5 from the cache")
        clock[0] = 10.0
        progress.advance(4)
        clock[0] = 11.0
        progress.advance(1)
        clock[0] = 46.0
        progress.advance(17)
        progress.done()
    assert capsys.readouterr().err.splitlines() == [
        "compile ...",
        "compile 5/23, 36 s left (5 from the cache)",
        "compile 23/23 in 46.0 s (5 from the cache)",
    ]


def test_bytes_are_megabytes_and_an_unknown_total_is_left_out(clock, capsys):
    with ConsoleProgress() as progress:
        progress.start("download a.gguf", None, "B")
        clock[0] = 6.0
        progress.advance(1_500_000)
        progress.done()
        progress.note("a word of its own")
    assert capsys.readouterr().err.splitlines() == [
        "download a.gguf ...",
        "download a.gguf 1.5 MB",
        "download a.gguf 1.5 MB in 6.0 s",
        "a word of its own",
    ]


@pytest.mark.parametrize("total", [None, 100])
def test_a_task_that_failed_is_not_told_as_done(clock, capsys, total):
    def fail():
        with ConsoleProgress() as progress:
            progress.start("convert a.gguf", total, "B")
            progress.advance(100)
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert capsys.readouterr().err == "convert a.gguf ...\n"


@pytest.mark.parametrize(("total", "amount"), [(None, "0.0 MB"), (0, "0.0/0.0 MB")])
def test_a_task_of_nothing_is_told_as_done(clock, capsys, total, amount):
    with ConsoleProgress() as progress:
        progress.start("hash", total, "B")
        progress.done()
    assert capsys.readouterr().err.splitlines() == ["hash ...", f"hash {amount} in 0.0 s"]
