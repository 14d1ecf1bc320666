from __future__ import annotations

import asyncio

from jserve.serving.flight.queue import BoundedQueue


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def queue(*, max_bytes: int = 10, max_items: int = 3) -> BoundedQueue[str]:
    return BoundedQueue(max_bytes=max_bytes, max_items=max_items, clock=Clock())


async def started(work: asyncio.Task[None]) -> asyncio.Task[None]:
    for _ in range(5):
        await asyncio.sleep(0)
    return work


async def test_items_come_out_in_order_and_as_many_as_fit() -> None:
    items = queue(max_bytes=100)
    for name, size in (("a", 4), ("b", 4), ("c", 4)):
        await items.put(name, size)
    assert await items.take(9) == ["a", "b"]
    assert await items.take(1) == ["c"]
    assert len(items) == 0


async def test_an_item_may_weigh_other_than_its_size_when_it_is_taken() -> None:
    items = queue(max_bytes=10)
    await items.put("a", 5, weight=1)
    await items.put("b", 5, weight=1)
    waiting = await started(asyncio.create_task(items.put("c", 5, weight=1)))
    assert not waiting.done()
    assert await items.take(2) == ["a", "b"]
    await waiting


async def test_put_waits_for_room_in_bytes() -> None:
    items = queue()
    await items.put("a", 6)
    waiting = await started(asyncio.create_task(items.put("b", 6)))
    assert (waiting.done(), items.blocked) == (False, 1)
    assert await items.take(100) == ["a"]
    await waiting
    assert (items.blocked, await items.take(100)) == (0, ["b"])


async def test_put_waits_for_room_in_items() -> None:
    items = queue()
    for name in "abc":
        await items.put(name, 0)
    waiting = await started(asyncio.create_task(items.put("d", 0)))
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert items.blocked == 0


async def test_one_item_is_always_let_in() -> None:
    items = queue()
    await asyncio.wait_for(items.put("huge", 1000), 1)
    assert await items.take(1) == ["huge"]


async def test_take_waits_and_ends() -> None:
    items = queue()
    taking = asyncio.create_task(items.take(100))
    await items.put("a", 1)
    assert await taking == ["a"]
    await items.put("b", 1)
    await items.close()
    await items.put("dropped", 1)
    assert await items.take(100) == ["b"]
    assert await items.take(100) == []


async def test_closing_frees_whoever_waits_for_room() -> None:
    items = queue()
    await items.put("a", 10)
    waiting = await started(asyncio.create_task(items.put("b", 10)))
    await items.close()
    await asyncio.wait_for(waiting, 1)
    assert await items.take(100) == ["a"]


async def test_taken_at_tells_since_when_nothing_moves() -> None:
    clock = Clock()
    items: BoundedQueue[str] = BoundedQueue(max_bytes=10, max_items=3, clock=clock)
    clock.now = 5.0
    await items.put("a", 1)
    clock.now = 7.0
    await items.put("b", 1)
    assert items.taken_at == 5.0
    await items.take(1)
    assert items.taken_at == 7.0
