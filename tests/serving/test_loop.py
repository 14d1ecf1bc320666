"""The doors' event loop, driven from other threads."""

import gc

import pytest

from jserve.serving.loop import LoopThread


async def nothing():
    pass


def test_work_for_a_closed_loop_is_refused_and_leaves_no_coroutine_behind(recwarn):
    with LoopThread("closing") as loop:
        loop.run(nothing())
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(nothing())
    gc.collect()
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]
