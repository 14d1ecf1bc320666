"""The open calls of a door: bounded, refused while the server drains, cut when its grace has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from jserve.errors import Draining, InvalidRequest, QueueFull

__all__ = ["Abort", "Calls", "Place", "deadline_of"]

Abort = Callable[[grpc.aio.ServicerContext[Any, Any], Exception], Awaitable[NoReturn]]
"""Ends a call with an error's status, as the clients of the door read it."""


def deadline_of(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """The client's deadline in monotonic seconds, or None where it set none."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


class Place:
    """One open call. While ``resting`` it does nothing, and a drain need not wait for it."""

    def __init__(self, task: asyncio.Task[Any], note: Callable[[], None]) -> None:
        self.task = task
        self._note = note
        self._resting = False

    @property
    def resting(self) -> bool:
        return self._resting

    @resting.setter
    def resting(self, value: bool) -> None:
        self._resting = value
        self._note()


class Calls:
    """At most ``limit`` calls at once. Belongs to its event loop's thread.

    gRPC's own ``maximum_concurrent_rpcs`` would count health checks too, and refuse them when all are taken.
    """

    def __init__(self, limit: int, *, abort: Abort) -> None:
        self._limit = limit
        self._abort = abort
        self._places: set[Place] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._draining = False
        self._cut = False

    @asynccontextmanager
    async def place(self, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Place]:
        """The body of one call. Whatever it raises ends the call with the status that fits."""
        if self._draining:
            await self._abort(context, Draining("the server is shutting down and takes no new calls; ask another one"))
        if len(self._places) >= self._limit:
            await self._abort(context, QueueFull(f"{self._limit} calls are open and no more may be; try again later"))
        place = Place(_this_task(), self._note)
        self._places.add(place)
        self._note()
        try:
            yield place
        except asyncio.CancelledError as cancelled:
            if not self._cut:
                raise  # the client went away, or its deadline passed
            place.task.uncancel()
            try:
                await self._abort(
                    context, Draining("the server is shutting down and its grace has ended; ask another one")
                )
            except grpc.aio.InternalError:
                # A message that the client does not take is still under way: its connection's end will tell it.
                raise cancelled from None
        except grpc.aio.InternalError as error:
            # The client is gone, and gRPC has not heard of it yet. A cancelled call is one that it logs no fault for.
            raise asyncio.CancelledError(str(error)) from None
        except grpc.aio.BaseError:
            raise  # the call has ended: there is nobody to tell
        except DecodeError as error:
            await self._abort(context, InvalidRequest(f"a message cannot be read: {error}"))
        except Exception as error:
            await self._abort(context, error)
        finally:
            self._places.discard(place)
            self._note()

    def refuse(self) -> None:
        """Take no new calls from here on."""
        self._draining = True

    def cut(self) -> None:
        """End every open call with UNAVAILABLE, also one whose client does not read. Idempotent."""
        self._draining = True
        if not self._cut:
            self._cut = True
            for place in self._places:
                place.task.cancel()

    async def wait_quiet(self, timeout: float) -> bool:
        """Wait until every open call rests. False where the timeout, in seconds, came first."""
        try:
            async with asyncio.timeout(timeout):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    def _note(self) -> None:
        if all(place.resting for place in self._places):
            self._quiet.set()
        else:
            self._quiet.clear()


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("not called from a task")
    return task
