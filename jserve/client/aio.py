"""The asyncio gRPC client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jserve.address import parse_address
from jserve.client.channel import channel_options
from jserve.client.errors import from_rpc
from jserve.client.requests import WINDOW, Cancel, PromptRequest, to_proto
from jserve.config import ServeConfig
from jserve.request import Delta, Embeddings, Prompt, SamplingParams, ServedModel
from jserve.v1 import inference_pb2 as pb
from jserve.v1 import inference_pb2_grpc
from jserve.wire import convert

__all__ = ["AsyncClient"]

_Item = TypeVar("_Item")


class AsyncClient:
    """``Client`` for asyncio: the same methods, awaited or iterated with ``async for``.

    Make it where an event loop runs; it belongs to that loop. Close it, or use it with ``async with``.
    ``timeout`` is in seconds and travels with the call as its deadline. Every method raises the errors of
    jserve.errors.
    """

    def __init__(self, address: str = ServeConfig.grpc_address, *, max_message_mb: int = 64) -> None:
        asyncio.get_running_loop()
        target = parse_address(address, name="the address")
        self.address = str(target)
        options = channel_options(target, max_message_mb=max_message_mb)
        self._channel = grpc.aio.insecure_channel(self.address, options=options)
        # The stubs are typed for the blocking channel; aio's calls are awaitable.
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),
        *,
        request_id: str = "",
        model: str = "",
        timeout: float | None = None,
    ) -> AsyncIterator[Delta]:
        """Send one request now; iterate over its deltas as they are made.

        Leaving the iteration early cancels the request once the iterator is closed or forgotten. A request
        that fails on its way raises after the deltas that it made.
        """
        request = convert.generate_request(prompt, params, request_id=request_id, model=model)
        return self._deltas(self._stub.Generate(request, timeout=timeout), timeout=timeout)

    async def generate_stream(
        self,
        requests: Iterable[PromptRequest | Cancel] | AsyncIterable[PromptRequest | Cancel],
        *,
        window: int = WINDOW,
        timeout: float | None = None,
    ) -> AsyncIterator[Delta]:
        """Send many requests over one call; see ``Client.generate_stream``. ``requests`` may be async too."""
        places = asyncio.Semaphore(window)
        call = self._stub.GenerateStream(timeout=timeout)

        async def send() -> None:
            try:
                async for item in _aiter(requests):
                    if isinstance(item, PromptRequest):
                        await places.acquire()
                    await call.write(to_proto(item))
            finally:
                await call.done_writing()

        sender = asyncio.create_task(send())
        try:
            async for delta in self._deltas(call, timeout=timeout):
                if delta.usage is not None:
                    places.release()
                yield delta
            await sender
        finally:
            sender.cancel()
            call.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def tokenize(self, prompt: Prompt, *, model: str = "", timeout: float | None = None) -> list[int]:
        """The token ids of a text, or of a chat as the model's template renders it."""
        with self._errors(timeout):
            request = convert.tokenize_request(prompt, model=model)
            return list((await self._stub.Tokenize(request, timeout=timeout)).token_ids)

    async def embed(self, texts: Sequence[str], *, model: str = "", timeout: float | None = None) -> Embeddings:
        """One vector a text, in their order; see Embeddings. Fails with the first text that does."""
        request = convert.embed_request(texts, model=model)
        with self._errors(timeout):
            return convert.embeddings_from_proto(await self._stub.Embed(request, timeout=timeout))

    async def models(self, *, timeout: float | None = None) -> list[ServedModel]:
        with self._errors(timeout):
            listed = await self._stub.ListModels(pb.ListModelsRequest(), timeout=timeout)
        return [convert.model_from_proto(info) for info in listed.models]

    async def health(self, *, timeout: float | None = None) -> str:
        """``SERVING`` or ``NOT_SERVING``."""
        with self._errors(timeout):
            answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    async def close(self) -> None:
        """Cancel what is open and disconnect."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @contextmanager
    def _errors(self, timeout: float | None) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, address=self.address, timeout=timeout) from None

    async def _deltas(self, call: Any, *, timeout: float | None) -> AsyncIterator[Delta]:
        try:
            with self._errors(timeout):
                async for response in call:
                    yield convert.delta_from_proto(response)
        finally:
            call.cancel()


async def _aiter(items: Iterable[_Item] | AsyncIterable[_Item]) -> AsyncIterator[_Item]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
