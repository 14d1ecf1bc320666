"""The blocking gRPC client."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import grpc
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

__all__ = ["Client"]


class Client:
    """A connection to a jserve server. Thread-safe. Close it, or use it as a context manager.

    Nothing is sent before the first call. ``timeout`` is in seconds, travels with the call as its deadline and
    ends it on the server too; None: no deadline. Every method raises the errors of jserve.errors.
    """

    def __init__(self, address: str = ServeConfig.grpc_address, *, max_message_mb: int = 64) -> None:
        target = parse_address(address, name="the address")
        self.address = str(target)
        options = channel_options(target, max_message_mb=max_message_mb)
        self._channel = grpc.insecure_channel(self.address, options=options)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),
        *,
        request_id: str = "",
        model: str = "",
        timeout: float | None = None,
    ) -> Iterator[Delta]:
        """Send one request now; iterate over its deltas as they are made.

        Leaving the iteration early cancels the request. A request that fails on its way raises after the
        deltas that it made.
        """
        request = convert.generate_request(prompt, params, request_id=request_id, model=model)
        return self._deltas(self._stub.Generate(request, timeout=timeout), timeout=timeout)

    def generate_stream(
        self, requests: Iterable[PromptRequest | Cancel], *, window: int = WINDOW, timeout: float | None = None
    ) -> Iterator[Delta]:
        """Send many requests over one call, at most ``window`` open at once; deltas of all come as they are made.

        The call begins when the first delta is asked for; from then on ``requests`` is read, on another thread.
        A request that fails on the server says so in its last delta (finish_reason error, error, error_code) and
        leaves the others alone. ``usage`` stands in each request's last delta. An exception of ``requests``, or
        an item that cannot be sent, ends the sending and is raised after the deltas of what was sent. Leaving
        the iteration early cancels everything.
        """
        places = threading.Semaphore(window)
        failures: list[Exception] = []
        left = False

        def messages() -> Iterator[pb.GenerateStreamRequest]:
            try:
                for item in requests:
                    if isinstance(item, PromptRequest):
                        places.acquire()
                    if left:
                        return
                    yield to_proto(item)
            except Exception as error:  # whatever the caller's iterable raises belongs to the reading thread
                failures.append(error)

        call = self._stub.GenerateStream(messages(), timeout=timeout)
        try:
            for delta in self._deltas(call, timeout=timeout):
                if delta.usage is not None:
                    places.release()
                yield delta
        finally:
            left = True
            places.release()
            call.cancel()
        if failures:
            raise failures[0]

    def tokenize(self, prompt: Prompt, *, model: str = "", timeout: float | None = None) -> list[int]:
        """The token ids of a text, or of a chat as the model's template renders it."""
        with self._errors(timeout):
            request = convert.tokenize_request(prompt, model=model)
            return list(self._stub.Tokenize(request, timeout=timeout).token_ids)

    def embed(self, texts: Sequence[str], *, model: str = "", timeout: float | None = None) -> Embeddings:
        """One vector a text, in their order; see Embeddings. Fails with the first text that does."""
        request = convert.embed_request(texts, model=model)
        with self._errors(timeout):
            return convert.embeddings_from_proto(self._stub.Embed(request, timeout=timeout))

    def models(self, *, timeout: float | None = None) -> list[ServedModel]:
        with self._errors(timeout):
            listed = self._stub.ListModels(pb.ListModelsRequest(), timeout=timeout)
        return [convert.model_from_proto(info) for info in listed.models]

    def health(self, *, timeout: float | None = None) -> str:
        """``SERVING`` or ``NOT_SERVING``."""
        with self._errors(timeout):
            answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    def close(self) -> None:
        """Cancel what is open and disconnect."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _errors(self, timeout: float | None) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise from_rpc(error, address=self.address, timeout=timeout) from None

    def _deltas(self, call: Any, *, timeout: float | None) -> Iterator[Delta]:
        try:
            with self._errors(timeout):
                for response in call:
                    yield convert.delta_from_proto(response)
        finally:
            call.cancel()
