import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.engine.store import ProgramStore


@pytest.fixture
def program():
    return jax.jit(lambda x: x * 2 + 1).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()


@pytest.fixture
def store(tmp_path):
    return ProgramStore(tmp_path / "programs")


DEVICES = jax.devices()[:1]


def test_a_stored_program_runs(store, program):
    assert store.load("key", DEVICES) is None
    store.save("key", program)
    loaded = store.load("key", DEVICES)
    np.testing.assert_array_equal(loaded(jnp.arange(4.0)), [1.0, 3.0, 5.0, 7.0])
    assert ProgramStore(store.folder).load("key", DEVICES) is not None


def test_the_folder_and_the_key_are_private(store):
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert (store.folder / "key").stat().st_mode & 0o777 == 0o600


def test_a_swapped_entry_is_not_loaded(store, program):
    store.save("a", program)
    store.path("a").rename(store.path("b"))
    assert store.load("b", DEVICES) is None


@pytest.mark.parametrize("where", [0, 20, 60, 200, -1])
def test_a_flipped_byte_is_found(store, program, where):
    store.save("key", program)
    data = bytearray(store.path("key").read_bytes())
    data[where] ^= 1
    store.path("key").write_bytes(bytes(data))
    assert store.load("key", DEVICES) is None


@pytest.mark.parametrize("size", [0, 10, 40, 1000])
def test_a_cut_entry_is_found(store, program, size):
    store.save("key", program)
    store.path("key").write_bytes(store.path("key").read_bytes()[:size])
    assert store.load("key", DEVICES) is None


def test_an_entry_that_cannot_be_read_costs_only_itself(store, program, caplog):
    store.path("key").mkdir()
    assert store.load("key", DEVICES) is None
    assert "cannot be read" in caplog.text
    store.save("key", program)  # nor can it be written
    assert [path for path in store.folder.iterdir() if path.suffix == ".tmp"] == []


def test_another_users_entries_are_strangers(store, program, tmp_path):
    store.save("key", program)
    other = ProgramStore(tmp_path / "other")
    other.path("key").write_bytes(store.path("key").read_bytes())
    assert other.load("key", DEVICES) is None


def test_a_key_that_others_could_read_is_replaced(store, program):
    store.save("key", program)
    (store.folder / "key").chmod(0o644)
    assert ProgramStore(store.folder).load("key", DEVICES) is None


def test_a_store_that_cannot_be_written_costs_only_the_entry(store, program, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jserve.engine.store.tempfile.NamedTemporaryFile", full)
    store.save("key", program)
    assert store.load("key", DEVICES) is None


def test_a_store_that_cannot_be_opened_is_done_without(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    assert ProgramStore.open(tmp_path / "file") is None
    assert "are not kept" in caplog.text
    monkeypatch.setattr("jserve.engine.store.os.geteuid", lambda: -5)
    assert ProgramStore.open(tmp_path) is None
    assert "belongs to user" in caplog.text


def test_a_program_that_cannot_be_written_down_costs_only_the_entry(store, program, monkeypatch):
    def refuse(_program):
        raise RuntimeError("UNIMPLEMENTED")

    monkeypatch.setattr("jserve.engine.store.serialize_executable.serialize", refuse)
    store.save("key", program)
    assert store.load("key", DEVICES) is None


def test_a_disk_that_fills_up_is_left_as_it_was(store, program, monkeypatch):
    before = sorted(store.folder.iterdir())

    def full(_self, _target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jserve.engine.store.Path.replace", full)
    store.save("key", program)
    assert sorted(store.folder.iterdir()) == before


def aged(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_opening_drops_the_entries_used_longest_ago_beyond_the_bound(store, program):
    for age, key in enumerate(["new", "middle", "old", "used"], start=1):
        store.save(key, program)
        aged(store.path(key), age * 1000)
    assert store.load("used", DEVICES) is not None
    size = store.path("new").stat().st_size
    ProgramStore(store.folder, max_bytes=4 * size)
    assert all(store.path(key).exists() for key in ("new", "middle", "old", "used"))
    ProgramStore(store.folder, max_bytes=2 * size)
    assert [key for key in ("new", "middle", "old", "used") if store.path(key).exists()] == ["new", "used"]


def test_opening_removes_what_dead_processes_left_half_written(store):
    drafts = [store.folder / name for name in ("tmpold.tmp", "key.7.ab", "tmpnew.tmp", "key.8.cd")]
    for path in drafts:
        path.touch()
    for path in (*drafts[:2], store.folder / "key"):
        aged(path, 7200)
    ProgramStore(store.folder)
    assert [path.exists() for path in (*drafts, store.folder / "key")] == [False, False, True, True, True]


def test_an_entry_that_another_process_removes_first_counts_as_removed(store, program, monkeypatch):
    for age, key in enumerate(["new", "old"], start=1):
        store.save(key, program)
        aged(store.path(key), age * 1000)
    unlink = Path.unlink

    def late(path, **options):
        os.remove(path)
        unlink(path, **options)

    monkeypatch.setattr("jserve.engine.store.Path.unlink", late)
    ProgramStore(store.folder, max_bytes=store.path("new").stat().st_size)
    assert not store.path("old").exists()
    assert store.path("new").exists()
