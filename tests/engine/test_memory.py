"""Pages and length, from the numbers alone."""

import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from jserve.config import ServeConfig
from jserve.engine.memory import exhaustion_in_words, plan_memory
from jserve.errors import ConfigError, OutOfMemory
from sharding import MeshSpec

MIB = 2**20


@pytest.fixture(autouse=True)
def system_memory(monkeypatch):
    """A machine of 8 GiB."""
    monkeypatch.setattr("jserve.engine.memory._system_bytes", lambda: 8192 * MIB)


def plan(*, mesh="", model_len=4096, page_bytes=MIB, page_rows=64, param_bytes=0, **settings):
    built = MeshSpec.parse(mesh).build()
    return plan_memory(
        ServeConfig(**settings),
        mesh=built,
        model_len=model_len,
        page_size=16,
        page_bytes=page_bytes,
        page_rows=page_rows,
        param_bytes=param_bytes,
    )


def test_a_cpu_gives_512_mib_however_many_virtual_devices_share_it():
    assert plan().num_pages == 512
    # A page costs each of two devices half: as many pages, in half of the 512 MiB each.
    assert plan(mesh="tensor=2", page_bytes=MIB // 2).num_pages == 512


def test_no_more_pages_than_all_sequences_can_fill():
    assert plan(max_num_seqs=2, max_model_len=33).num_pages == 2 * 3


def test_a_pool_shorter_than_the_model_shortens_the_length_unless_one_was_asked_for():
    assert plan(num_pages=4).max_model_len == 64
    with pytest.raises(OutOfMemory, match=r"4 pages of 16 tokens \(4.0 MiB\); one sequence of 100 tokens needs 7"):
        plan(num_pages=4, max_model_len=100)


@pytest.mark.parametrize("model_len", [1, 4096])
def test_a_length_without_room_for_an_answer_is_refused(model_len):
    with pytest.raises(ConfigError, match="max_model_len is 1; it must be 2 or more"):
        plan(model_len=model_len, max_model_len=1)


def test_more_pages_than_memory_has_room_for_are_refused_with_the_number_that_fits():
    half = {"memory_fraction": 0.5, "param_bytes": 1024 * MIB}
    assert plan(num_pages=3072, **half).num_pages == 3072
    with pytest.raises(
        OutOfMemory, match=r"3073 pages of 16 tokens take 3073.0 MiB.*0.5 .*leaves 3072.0 MiB"
    ) as caught:
        plan(num_pages=3073, **half)
    assert caught.value.fix == "--num-pages 3072 or less"
    with pytest.raises(OutOfMemory, match="3072 pages"):
        plan(num_pages=3072, mesh="tensor=2", **half)


def test_memory_fraction_bounds_the_default_pool_of_a_cpu_too():
    assert plan(memory_fraction=0.5, param_bytes=4000 * MIB).num_pages == 96


@pytest.mark.parametrize("pages", [{}, {"num_pages": 4}])
def test_weights_that_leave_no_room_are_refused_before_they_are_loaded(pages):
    with pytest.raises(OutOfMemory, match=r"weights of 9000.0 MiB a device leave no room"):
        plan(param_bytes=9000 * MIB, **pages)


def test_a_device_that_does_not_tell_its_memory_needs_a_number():
    class Device:
        platform, device_kind = "gpu", "Odd 1"

        def memory_stats(self):
            return None

    class Mesh:
        devices = np.array([Device()])
        size = 1

    sizes = {"model_len": 64, "page_size": 16, "page_bytes": MIB, "page_rows": 64, "param_bytes": 0}
    with pytest.raises(OutOfMemory, match="Odd 1 does not tell its memory"):
        plan_memory(ServeConfig(), mesh=Mesh(), **sizes)
    assert plan_memory(ServeConfig(num_pages=9), mesh=Mesh(), **sizes).num_pages == 9


def test_more_pages_than_int32_counts_are_refused():
    assert plan(num_pages=2**25 - 1, page_bytes=8).num_pages == 2**25 - 1
    with pytest.raises(ConfigError, match=f"num_pages is {2**25}; at most {2**25 - 1} pages"):
        plan(num_pages=2**25, page_bytes=8)


@pytest.mark.parametrize("error", [JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes\nmore"), MemoryError("9 bytes")])
def test_running_out_of_memory_is_said_in_words_wherever_it_comes_from(error):
    @exhaustion_in_words(plan(num_pages=4))
    def load():
        try:
            raise error
        except Exception as cause:
            raise RuntimeError("while loading") from cause

    with pytest.raises(OutOfMemory, match=r"a cache of 4.0 MiB \(4 pages\) a device: .*9 bytes$"):
        load()


def test_another_failure_stays_what_it_is():
    with pytest.raises(JaxRuntimeError, match="INTERNAL"), exhaustion_in_words(plan(num_pages=4)):
        raise JaxRuntimeError("INTERNAL: broken")
