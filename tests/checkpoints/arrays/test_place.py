"""What a restore may hold and do at once."""

import dataclasses
import threading
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jserve.checkpoints.arrays import place as placing
from jserve.checkpoints.arrays.lazy import LazyArray, aligned_empty
from jserve.checkpoints.arrays.place import place
from jserve.checkpoints.orbax.read import read_tree
from jserve.errors import CheckpointError

ROWS = 256
NBYTES = ROWS * 8 * 4


class Gauge:
    """Arrays of ``NBYTES`` that count who reads them at once."""

    def __init__(self):
        self.now = self.most = 0
        self._lock = threading.Lock()

    def array(self, value):
        def read(region):
            with self._lock:
                self.now += 1
                self.most = max(self.most, self.now)
            time.sleep(0.01)
            with self._lock:
                self.now -= 1
            return np.full([s.stop - s.start for s in region], value, np.float32)

        return LazyArray(shape=(ROWS, 8), dtype=np.dtype(np.float32), read_region=read)


def wanted(leaves):
    return {path[0]: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}


def restored_at_once(room, monkeypatch, platform):
    """How many of 12 arrays are read at once in ``room`` bytes, where the devices seem to be of ``platform``."""
    monkeypatch.setattr(placing, "_IN_FLIGHT_BYTES", room)
    monkeypatch.setattr(placing, "_on_host", lambda: platform == "cpu")
    gauge = Gauge()
    leaves = {(f"w{i}",): gauge.array(float(i)) for i in range(12)}
    found = place(leaves, wanted(leaves), where="ck")
    assert [float(found[f"w{i}"][0, 0]) for i in range(12)] == list(range(12))
    return gauge.most


def test_arrays_are_read_side_by_side_within_the_room(monkeypatch):
    cost = 2 * NBYTES  # as it is read, and as it is on its way
    assert restored_at_once(100 * cost, monkeypatch, "tpu") == placing._WORKERS
    assert restored_at_once(2 * cost, monkeypatch, "tpu") == 2
    assert restored_at_once(1, monkeypatch, "tpu") == 1


def test_what_lies_on_a_cpus_devices_counts_as_memory_too(monkeypatch):
    assert 1 <= restored_at_once(1, monkeypatch, "cpu") <= placing._WORKERS


def test_whoever_asks_for_much_is_not_passed_by(monkeypatch):
    budget = placing._Budget(10)
    order = []

    def ask(name, count):
        with budget.take(count, kept=0):
            order.append(name)

    with budget.take(6, kept=0):
        threads = []
        for name, count in (("large", 20), ("small", 1)):
            threads.append(threading.Thread(target=ask, args=(name, count)))
            threads[-1].start()
            time.sleep(0.05)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == ["large", "small"]


def test_what_is_kept_leaves_less_for_others():
    budget = placing._Budget(10)
    with budget.take(4, kept=6):
        assert budget._held == 10
    assert budget._held == 6
    assert budget._fits(5)  # alone, whatever it takes
    with budget.take(1, kept=0):
        assert not budget._fits(4)
        assert budget._fits(3)


def test_a_damaged_array_ends_the_restore_and_leaves_no_thread(monkeypatch):
    gauge = Gauge()

    def fails(region):
        raise CheckpointError("w3 is damaged")

    leaves = {(f"w{i}",): gauge.array(0.0) for i in range(8)}
    leaves["w3",] = dataclasses.replace(leaves["w3",], read_region=fails)
    with pytest.raises(CheckpointError, match="w3 is damaged"):
        place(leaves, wanted(leaves), where="ck")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read")]


@pytest.mark.parametrize(("stored", "asked"), [("int32", "float32"), ("float32", "int8"), ("bool", "bfloat16")])
def test_another_kind_of_dtype_is_refused_and_every_leaf_named(stored, asked):
    leaves = {(name,): LazyArray.of(np.ones((2, 3), stored)) for name in "ab"}
    with pytest.raises(CheckpointError) as error:
        place(leaves, {name: jax.ShapeDtypeStruct((2, 3), asked) for name in "ab"}, where="ck")
    assert error.value.message.splitlines() == [
        "ck does not fit the model:",
        f"  a: wanted {asked}, found {stored}",
        f"  b: wanted {asked}, found {stored}",
    ]


def test_tensorstores_own_concurrency_is_bounded(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ck", {"a": np.ones((4, 4), np.float32)})
    stored = read_tree(tmp_path / "ck").arrays["a",].source
    with stored.held():
        held = stored._array.spec(retain_context=True)
    for spec in (stored._array.spec(retain_context=True), held):
        context = spec.to_json(include_defaults=True)["context"]
        assert context["file_io_concurrency"] == {"limit": 8}
        assert 2 <= context["data_copy_concurrency"]["limit"] <= 16


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (33, 7)])
def test_a_cpu_takes_aligned_arrays_without_a_copy(shape):
    values = aligned_empty(shape, np.dtype(np.float32))
    values[...] = 3
    assert values.shape == shape
    if values.size:
        assert values.ctypes.data % 64 == 0
        assert jax.device_put(values, jax.devices()[1]).unsafe_buffer_pointer() == values.ctypes.data
