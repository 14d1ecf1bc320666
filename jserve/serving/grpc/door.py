"""The gRPC door."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jserve.address import Address
from jserve.config import ServeConfig
from jserve.serving.calls import Calls
from jserve.serving.door import Door, server_options
from jserve.serving.frontends import AnyFrontend
from jserve.serving.grpc.decoding import DecodingInterceptor
from jserve.serving.grpc.health import HealthServicer
from jserve.serving.grpc.servicer import InferenceServicer
from jserve.serving.grpc.status import abort
from jserve.serving.loop import LoopThread
from jserve.v1 import inference_pb2_grpc
from jserve.wire import SERVICE

__all__ = ["GrpcDoor"]

MAX_WATCHES = 1024
"""Most health watches at once; they take no places of other calls."""


class GrpcDoor(Door):
    """jserve.v1.Inference, health and reflection.

    ``set_serving`` as often as the health changes, between ``start`` and ``stop``. Health is NOT_SERVING until told.
    """

    def __init__(self, frontend: AnyFrontend, config: ServeConfig, *, loop: LoopThread) -> None:
        calls = Calls(config.max_streams, abort=abort)
        super().__init__(frontend, config, setting="grpc_address", calls=calls, loop=loop)
        self._max_message_bytes = config.max_message_mb << 20
        self._watches = Calls(MAX_WATCHES, abort=abort)
        self._health = HealthServicer(self._watches)

    def set_serving(self, *, serving: bool) -> None:
        """Tell Check and Watch at once."""
        self._loop.run(self._health.set_serving(serving=serving))

    # On the loop's thread

    async def _serve(self) -> grpc.aio.Server:
        options = server_options(max_message_bytes=self._max_message_bytes)
        server = grpc.aio.server(interceptors=[DecodingInterceptor()], options=list(options.items()))
        servicer = InferenceServicer(self._frontend, self._calls, max_message_bytes=self._max_message_bytes)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await self._health.set_serving(serving=False)
        return server

    def _shown(self, address: Address) -> str:
        return str(address)

    async def _cut(self) -> None:
        await super()._cut()
        self._watches.cut()
