"""Folders that are whole or not there, whoever is killed when."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jserve.checkpoints.cache import make_new, make_once
from jserve.errors import CheckpointError
from jserve.progress import SILENT
from jserve.testing.waiting import wait_for


def fill(scratch):
    (scratch / "deep").mkdir()
    (scratch / "deep" / "data").write_text("whole")


def read(folder):
    text = (folder / "deep" / "data").read_text()
    if text != "whole":
        raise CheckpointError(f"{folder}/deep/data is damaged")
    return text


def left_over(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


class Notes:
    def __init__(self):
        self.notes = []

    def note(self, message):
        self.notes.append(message)


def test_made_once_and_then_found(tmp_path):
    final = tmp_path / "cache" / "x"
    assert make_once(final, check=read, make=fill, progress=SILENT) == "whole"

    def never(scratch):
        raise AssertionError("made twice")

    assert make_once(final, check=read, make=never, progress=SILENT) == "whole"
    assert left_over(tmp_path / "cache") == ["x"]


@pytest.mark.parametrize("leads", [None, "nowhere", "."])
def test_what_is_no_folder_of_ours_is_replaced(tmp_path, leads):
    final = tmp_path / "cache" / "x"
    final.parent.mkdir()
    if leads is None:
        final.write_text("in the way")
    else:
        final.symlink_to(tmp_path / leads)
    outside = tmp_path / "keep"
    outside.write_text("kept")
    if leads == ".":
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "data").write_text("damaged")
    assert make_once(final, check=read, make=fill, progress=Notes()) == "whole"
    assert not final.is_symlink()
    assert left_over(tmp_path / "cache") == ["x"]
    assert outside.read_text() == "kept"


def test_a_failed_make_leaves_nothing(tmp_path):
    def fail(scratch):
        fill(scratch)
        raise CheckpointError("bad source")

    with pytest.raises(CheckpointError, match="bad source"):
        make_once(tmp_path / "x", check=read, make=fail, progress=SILENT)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(("home", "fix"), [("xdg/jserve", "XDG_CACHE_HOME"), ("own", "name a folder elsewhere")])
def test_a_full_disk_is_said_in_words(tmp_path, home, fix):
    def full(scratch):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"cannot write .*/x: No space left on device") as error:
        make_once(tmp_path / home / "x", check=read, make=full, progress=SILENT)
    assert fix in error.value.fix
    assert left_over(tmp_path / home) == []


def test_what_cannot_be_read_is_not_said_to_be_unwritable(tmp_path):
    def read_source(scratch):
        (tmp_path / "source.gguf").read_bytes()

    with pytest.raises(CheckpointError) as error:
        make_once(tmp_path / "x", check=read, make=read_source, progress=SILENT)
    assert error.value.message == f"cannot read {tmp_path}/source.gguf: No such file or directory"
    assert error.value.fix is None
    assert left_over(tmp_path) == []


def test_an_error_without_a_name_is_said_as_it_is(tmp_path):
    def fail(scratch):
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(CheckpointError, match=r"^cannot make .*/x: Input/output error"):
        make_once(tmp_path / "x", check=read, make=fail, progress=SILENT)


def test_a_file_that_cannot_be_written_is_said_to_be_so(tmp_path):
    def into_nowhere(scratch):
        (scratch / "none" / "file").write_text("x")

    with pytest.raises(CheckpointError, match=r"^cannot write .*/x: No such file or directory"):
        make_once(tmp_path / "x", check=read, make=into_nowhere, progress=SILENT)


def test_a_cache_that_is_a_file_is_said_in_words(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*/cache"):
        make_once(tmp_path / "cache" / "x", check=read, make=fill, progress=SILENT)


def test_a_damaged_folder_is_made_again(tmp_path):
    make_once(tmp_path / "x", check=read, make=fill, progress=SILENT)
    (tmp_path / "x" / "deep" / "data").write_text("wh")
    notes = Notes()
    assert make_once(tmp_path / "x", check=read, make=fill, progress=notes) == "whole"
    assert notes.notes == [f"{tmp_path}/x/deep/data is damaged; making it again"]
    assert left_over(tmp_path) == ["x"]


def test_make_new_never_writes_over_anything(tmp_path):
    make_new(tmp_path / "x", make=fill, progress=SILENT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "xdg"]
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("x", "file", "link"):
        with pytest.raises(CheckpointError, match="is there already; nothing was written"):
            make_new(tmp_path / name, make=fill, progress=SILENT)
    assert (tmp_path / "file").read_text() == "mine"


MAKER = """
    import sys, time
    from pathlib import Path
    from jserve.checkpoints.cache import make_once
    from jserve.progress import SILENT

    final, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

    def make(scratch):
        with log.open("a") as file:
            file.write("made\\n")
        (scratch / "half").write_text("half")
        time.sleep(seconds)
        (scratch / "half").rename(scratch / "data")

    def check(folder):
        return (folder / "data").read_text()

    print(make_once(final, check=check, make=make, progress=SILENT))
"""


def start_maker(final, log, seconds):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(MAKER), str(final), str(log), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_processes_do_the_work_once(tmp_path):
    final, log = tmp_path / "x", tmp_path / "log"
    makers = [start_maker(final, log, 0.5) for _ in range(2)]
    outputs = [maker.communicate(timeout=60)[0] for maker in makers]
    assert outputs == ["half\n", "half\n"]
    assert log.read_text() == "made\n"


def test_a_killed_maker_leaves_nothing_that_looks_whole(tmp_path):
    final, log = tmp_path / "x", tmp_path / "log"
    maker = start_maker(final, log, 600)
    wait_for(lambda: list(tmp_path.glob(".x.scratch-*/half")))
    os.kill(maker.pid, signal.SIGKILL)
    maker.communicate(timeout=60)
    assert not final.exists()
    next_maker = start_maker(final, log, 0)
    assert next_maker.communicate(timeout=60)[0] == "half\n"
    assert sorted(path.name for path in Path(tmp_path).iterdir() if not path.name.startswith(".x.lock")) == ["log", "x"]
