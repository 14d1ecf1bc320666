"""Pages and length, from the numbers alone."""

import pytest

from jserve.config import ServeConfig
from jserve.engine.memory import plan_memory
from jserve.errors import ConfigError, OutOfMemory
from sharding import MeshSpec

MIB = 2**20


def plan(*, mesh="", model_len=4096, page_bytes=MIB, **settings):
    built = MeshSpec.parse(mesh).build()
    return plan_memory(
        ServeConfig(**settings), mesh=built, model_len=model_len, page_size=16, page_bytes=page_bytes, param_bytes=0
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
