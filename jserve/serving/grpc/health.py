"""The standard health service, with a bound on its watches."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio

from jserve.serving.calls import Calls
from jserve.wire import SERVICE

__all__ = ["HealthServicer"]

_NAMES = ("", SERVICE)


class HealthServicer(aio.HealthServicer):
    """Check answers always; each Watch takes a place of ``watches`` and ends when they are cut."""

    def __init__(self, watches: Calls) -> None:
        super().__init__()
        self._watches = watches

    async def set_serving(self, *, serving: bool) -> None:
        """The health of the whole server and of jserve.v1.Inference."""
        statuses = health_pb2.HealthCheckResponse
        for name in _NAMES:
            await self.set(name, statuses.SERVING if serving else statuses.NOT_SERVING)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with self._watches.place(context):
            await super().Watch(request, context)
