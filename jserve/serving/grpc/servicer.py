"""jserve.v1.Inference on asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from jserve.errors import MessageTooLarge
from jserve.serving.calls import Calls, deadline_of
from jserve.serving.embed_frontend import EmbedFrontend
from jserve.serving.frontends import AnyFrontend, need_embedder, need_generator
from jserve.serving.grpc.embed import answer
from jserve.serving.grpc.exchange import Exchange
from jserve.serving.grpc.generate import open_stream, prompt_of, pump
from jserve.v1 import inference_pb2 as pb
from jserve.v1 import inference_pb2_grpc
from jserve.wire import convert

__all__ = ["InferenceServicer"]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Every call that computes takes a place of ``calls``; ListModels answers always."""

    def __init__(self, frontend: AnyFrontend, calls: Calls, *, max_message_bytes: int) -> None:
        self._frontend = frontend
        self._calls = calls
        self._max_message_bytes = max_message_bytes

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with self._calls.place(context):
            stream = await open_stream(need_generator(self._frontend), request, deadline=deadline_of(context))
            await pump(stream, context.write)
            if stream.failure is not None:
                raise stream.failure

    async def GenerateStream(
        self,
        request_iterator: AsyncIterator[pb.GenerateStreamRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        async with self._calls.place(context) as place:
            exchange = Exchange(need_generator(self._frontend), place, context.write, deadline=deadline_of(context))
            await exchange.run(request_iterator)

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.TokenizeResponse:
        async with self._calls.place(context):
            frontend = self._frontend
            frontend.check_model(request.model)
            if isinstance(frontend, EmbedFrontend):
                if request.WhichOneof("prompt") == "chat":
                    need_generator(frontend)
                ids = await frontend.tokenize(request.text)
            else:
                ids = await frontend.tokenize(prompt_of(frontend, request))
            response = pb.TokenizeResponse(token_ids=ids, max_model_len=self._frontend.model.max_model_len)
            if response.ByteSize() > self._max_message_bytes:
                raise MessageTooLarge(
                    f"{len(ids)} token ids do not fit in a message of {self._max_message_bytes} bytes"
                )
            return response

    async def Embed(self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.EmbedResponse:
        async with self._calls.place(context):
            embedder = need_embedder(self._frontend)
            return await answer(
                embedder, request, deadline=deadline_of(context), max_message_bytes=self._max_message_bytes
            )

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[convert.model_to_proto(self._frontend.model)])
