"""The blocking Arrow Flight client."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import grpc
import pyarrow as pa
from pyarrow import flight

from jserve.address import parse_address
from jserve.client.channel import channel_options
from jserve.client.errors import FailedCall, from_rpc
from jserve.config import ServeConfig
from jserve.errors import JserveError, RequestError
from jserve.request import Delta, Embeddings, Prompt, SamplingParams, ServedModel
from jserve.wire.columns import deltas_from_batch, prompts_to_batch
from jserve.wire.embeddings import embeddings_from_table, texts_to_batch
from jserve.wire.errors import error_from_code
from jserve.wire.flight import FLIGHT_SERVICE, FlightData, put_metadata
from jserve.wire.ipc import BatchReader, BatchWriter

__all__ = ["FlightClient"]

_ANY_SIZE = 2**31 - 1
"""A server's batches are validated like any other; how large they are is its own affair."""


class FlightClient:
    """A connection to the Flight door of a jserve server. Thread-safe. Close it, or use it as a context manager.

    ``address``: host:port, unix:/path, or a Flight location such as grpc://127.0.0.1:7471. Nothing is sent before
    the first call. ``timeout`` is in seconds, travels with the call as its deadline and ends it on the server too;
    None: no deadline. Every method raises the errors of jserve.errors.
    """

    def __init__(self, address: str = ServeConfig.flight_address, *, max_message_mb: int = 64) -> None:
        target = parse_address(_plain(address), name="the address")
        self.address = str(target)
        options = channel_options(target, max_message_mb=max_message_mb)
        self._channel = grpc.insecure_channel(self.address, options=options)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),
        *,
        request_id: str = "",
        model: str = "",
        timeout: float | None = None,
    ) -> Iterator[Delta]:
        """Send one request when the first delta is asked for; iterate over its deltas as they are made.

        Leaving the iteration early cancels the request. A request that fails on its way raises after the deltas
        that it made.
        """
        batch = prompts_to_batch([(request_id or "0", prompt, params)])
        failure: JserveError | None = None
        with contextlib.closing(self.exchange([batch], model=model, timeout=timeout)) as answers:
            for answer in answers:
                for delta in deltas_from_batch(answer):
                    yield delta
                    if delta.error_code is not None and failure is None:
                        failure = _named(delta.error_code, delta.error or "the request failed")
        if failure is not None:
            raise failure

    def exchange(
        self,
        batches: Iterable[pa.RecordBatch],
        *,
        params: SamplingParams = SamplingParams(),
        model: str = "",
        timeout: float | None = None,
    ) -> Generator[pa.RecordBatch, None, None]:
        """Send batches of prompts, all of one schema, and iterate over batches of deltas as they are made.

        The columns are those of jserve.wire.columns; ``params`` stand for what a row leaves out. The call begins
        when the first answer is asked for; from then on ``batches`` is read, on another thread. A row that fails
        says so in its last delta and leaves the others alone. An exception of ``batches`` ends the sending and is
        raised after the answers to what was sent. Leaving the iteration early cancels everything.
        """
        yield from self._exchange(batches, _descriptor(model, params), timeout=timeout)

    def table(
        self,
        prompts: pa.Table,
        *,
        params: SamplingParams = SamplingParams(),
        model: str = "",
        timeout: float | None = None,
    ) -> pa.Table:
        """Upload a table of prompts, wait, and return the table of results, in the order of the prompts.

        One row for each prompt and choice, with the whole token_ids and text. ``timeout`` is for each of the two
        calls.
        """
        return self._table(prompts, _descriptor(model, params), timeout=timeout)

    def embed(
        self, texts: pa.Table | Sequence[str], *, model: str = "", timeout: float | None = None
    ) -> pa.Table | Embeddings:
        """One vector a text, in their order. ``timeout`` is for the upload and the fetching each.

        Of a table with a column ``text``, and perhaps ``id``: a table with the columns of jserve.wire.embeddings, where
        a row that failed says so. Of a list: its Embeddings, or the error of the first text that failed.
        """
        descriptor = _embed_descriptor(model)
        if isinstance(texts, pa.Table):
            return self._table(texts, descriptor, timeout=timeout)
        table = pa.Table.from_batches([texts_to_batch(texts)])
        return embeddings_from_table(self._table(table, descriptor, timeout=timeout))

    def embed_exchange(
        self, batches: Iterable[pa.RecordBatch], *, model: str = "", timeout: float | None = None
    ) -> Generator[pa.RecordBatch, None, None]:
        """``exchange`` for batches of texts: batches of vectors, in the order of the texts, as they are made."""
        yield from self._exchange(batches, _embed_descriptor(model), timeout=timeout)

    def schema(
        self, *, verb: Literal["generate", "embed"] = "generate", model: str = "", timeout: float | None = None
    ) -> pa.Schema:
        """The columns of deltas and results, or of vectors."""
        descriptor = _embed_descriptor(model) if verb == "embed" else _descriptor(model, SamplingParams())
        with self._errors(timeout):
            answer = self._method("unary_unary", "GetSchema")(descriptor.serialize(), timeout=timeout)
        return flight.SchemaResult.deserialize(answer).schema

    def models(self, *, timeout: float | None = None) -> list[ServedModel]:
        return [ServedModel(**model) for model in self._act("list_models", timeout)]

    def health(self, *, timeout: float | None = None) -> str:
        """Such as "serving"."""
        status: str = self._act("health", timeout)[0]["status"]
        return status

    def close(self) -> None:
        """Cancel what is open and disconnect."""
        self._channel.close()

    def __enter__(self) -> FlightClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(
        self, batches: Iterable[pa.RecordBatch], descriptor: flight.FlightDescriptor, *, timeout: float | None
    ) -> Generator[pa.RecordBatch, None, None]:
        sending = _Sending(batches, descriptor)
        call = self._method("stream_stream", "DoExchange")(sending.messages(), timeout=timeout)
        try:
            with self._errors(timeout):
                yield from _Answer().batches(call)
        finally:
            call.cancel()
            sending.stop()
        sending.check()

    def _table(self, table: pa.Table, descriptor: flight.FlightDescriptor, *, timeout: float | None) -> pa.Table:
        """Upload a table and fetch what is made of it."""
        # An empty table has no batch, and still a schema to send.
        batches = table.to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]
        sending = _Sending(batches, descriptor)
        with self._errors(timeout):
            answers = list(self._method("stream_stream", "DoPut")(sending.messages(), timeout=timeout))
            sending.check()
            ticket = flight.Ticket(put_metadata(answers[0])).serialize()
            answer = _Answer()
            results = list(answer.batches(self._method("unary_stream", "DoGet")(ticket, timeout=timeout)))
        return pa.Table.from_batches(results, schema=answer.schema)

    def _method(self, kind: str, name: str) -> Any:
        return getattr(self._channel, kind)(f"/{FLIGHT_SERVICE}/{name}")

    def _act(self, name: str, timeout: float | None) -> list[dict[str, Any]]:
        with self._errors(timeout):
            action = flight.Action(name, b"").serialize()
            results = list(self._method("unary_stream", "DoAction")(action, timeout=timeout))
        return [json.loads(flight.Result.deserialize(result).body.to_pybytes()) for result in results]

    @contextmanager
    def _errors(self, timeout: float | None) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise _translated(error, address=self.address, timeout=timeout) from None


class _Sending:
    """The messages of one call, made from batches on gRPC's thread."""

    def __init__(self, batches: Iterable[pa.RecordBatch], descriptor: flight.FlightDescriptor) -> None:
        self._batches = batches
        self._descriptor = descriptor.serialize()
        self._stopped = threading.Event()
        self._failure: Exception | None = None

    def messages(self) -> Iterator[bytes]:
        descriptor = self._descriptor
        try:
            writer: BatchWriter | None = None
            for batch in self._batches:
                if self._stopped.is_set():
                    return
                writer = writer or BatchWriter(batch.schema)
                for message in writer.messages(batch):
                    # It goes with the first message, which is the schema.
                    yield dataclasses.replace(message, descriptor=descriptor).serialize()
                    descriptor = b""
            if writer is None:
                yield FlightData(descriptor=descriptor).serialize()
        except Exception as error:  # whatever the caller's iterable raises belongs to the caller's thread
            self._failure = error

    def stop(self) -> None:
        """Read no more batches."""
        self._stopped.set()

    def check(self) -> None:
        """Raise what ended the sending early."""
        if self._failure is not None:
            raise self._failure


class _Answer:
    """What a server writes: a schema, then batches."""

    def __init__(self) -> None:
        self.schema: pa.Schema | None = None
        """Known from the first message on."""

    def batches(self, call: Iterable[bytes]) -> Iterator[pa.RecordBatch]:
        reader = BatchReader(max_rows=_ANY_SIZE, max_dictionary_bytes=_ANY_SIZE)
        for answer in call:
            try:
                message = FlightData.parse(answer)
                if not message.header:
                    continue
                if self.schema is None:
                    self.schema = reader.schema(message)
                    reader.open(message, range(len(self.schema)))
                    continue
                batch = reader.read(message)
            except RequestError as error:
                raise JserveError(f"the server's answer cannot be read: {error.message}") from None
            if batch is not None:
                yield batch


def _plain(address: str) -> str:
    """A Flight location as gRPC writes it; other addresses as they are."""
    for scheme, plain in (("grpc://", ""), ("grpc+tcp://", ""), ("grpc+unix://", "unix:")):
        if address.startswith(scheme):
            return plain + address.removeprefix(scheme)
    return address


def _descriptor(model: str, params: SamplingParams) -> flight.FlightDescriptor:
    given = {
        field.name: value
        for field in dataclasses.fields(params)
        if (value := getattr(params, field.name)) != field.default
    }
    return flight.FlightDescriptor.for_command(json.dumps({"model": model, **given}))


def _embed_descriptor(model: str) -> flight.FlightDescriptor:
    return flight.FlightDescriptor.for_command(json.dumps({"verb": "embed", "model": model}))


def _named(code: str, message: str, retry_after_s: float | None = None) -> JserveError:
    return error_from_code(code, message, retry_after_s=retry_after_s) or JserveError(f"{message} ({code})")


def _translated(failed: FailedCall, *, address: str, timeout: float | None) -> JserveError:
    """The error that the server named, else the one that fits the status."""
    details = dict(failed.trailing_metadata() or ()).get("grpc-status-details-bin")
    if isinstance(details, bytes):
        # The key is gRPC's, so its content may come from anyone on the way.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            info = json.loads(details)
            return _named(info["code"], info["message"], info.get("retry_after_s"))
    return from_rpc(failed, address=address, timeout=timeout)
