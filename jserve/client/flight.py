"""The blocking Arrow Flight client, over pyarrow's own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pyarrow as pa
from pyarrow import flight

from jserve.errors import Cancelled, ConfigError, DeadlineExceeded, JserveError, MessageTooLarge, Unreachable
from jserve.request import Delta, Prompt, SamplingParams, ServedModel
from jserve.wire.columns import deltas_from_batch, prompts_to_batch
from jserve.wire.errors import error_from_code

__all__ = ["DEFAULT_ADDRESS", "FlightClient"]

DEFAULT_ADDRESS = "127.0.0.1:7471"

_SCHEMES = ("grpc://", "grpc+tcp://", "grpc+unix://")
_LOCAL = ("grpc://127.", "grpc+tcp://127.", "grpc://localhost:", "grpc://[::1]:", "grpc+unix://")


class FlightClient:
    """A connection to a jserve server's Flight door. Close it, or use it as a context manager.

    ``address``: host:port or a Flight location such as grpc://127.0.0.1:7471. Its methods may be called from any
    thread. ``timeout`` is in seconds, travels with the call as its deadline and ends it on the server too; None:
    no deadline. Every method raises the errors of jserve.errors.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = _location(address)
        # A proxy cannot reach this machine's loopback.
        options = [("grpc.enable_http_proxy", 0)] if self.address.startswith(_LOCAL) else []
        self._client = flight.connect(self.address, generic_options=options)

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
        with contextlib.closing(self.exchange([batch], model=model, timeout=timeout)) as answers:
            for answer in answers:
                for delta in deltas_from_batch(answer):
                    yield delta
                    if delta.error_code is not None:
                        raise _named(delta.error_code, delta.error or "the request failed")

    def exchange(
        self,
        batches: Iterable[pa.RecordBatch],
        *,
        params: SamplingParams = SamplingParams(),
        model: str = "",
        timeout: float | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Send batches of prompts, all of one schema, and iterate over batches of deltas as they are made.

        The columns are those of jserve.wire.columns; ``params`` stand for what a row leaves out. The call begins
        when the first batch is asked for; from then on ``batches`` is read, on another thread. A row that fails
        says so in its last delta and leaves the others alone. An exception of ``batches`` ends the sending and is
        raised after the answers to what was sent. Leaving the iteration early cancels everything.
        """
        source = iter(batches)
        first = next(source, None)
        if first is None:
            return
        failures: list[Exception] = []
        with self._errors(timeout):
            writer, reader = self._client.do_exchange(_descriptor(model, params), _options(timeout))

            def send() -> None:
                try:
                    writer.begin(first.schema)
                    writer.write_batch(first)
                    for batch in source:
                        writer.write_batch(batch)
                except (pa.ArrowException, OSError):
                    return  # the call has ended, and the reading side knows why
                except Exception as error:  # whatever the caller's iterable raises belongs to the reading thread
                    failures.append(error)
                with contextlib.suppress(pa.ArrowException, OSError):
                    writer.done_writing()

            sender = threading.Thread(target=send, name="jserve-flight-send", daemon=True)
            sender.start()
            try:
                for chunk in reader:
                    if chunk.data is not None:
                        yield chunk.data
            finally:
                reader.cancel()
                sender.join()
                with contextlib.suppress(pa.ArrowException, OSError):
                    writer.close()
        if failures:
            raise failures[0]

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
        with self._errors(timeout):
            writer, answers = self._client.do_put(_descriptor(model, params), prompts.schema, _options(timeout))
            with writer:
                writer.write_table(prompts)
                writer.done_writing()
                ticket = answers.read()
            return self._client.do_get(flight.Ticket(ticket.to_pybytes()), _options(timeout)).read_all()

    def schema(self, *, model: str = "", timeout: float | None = None) -> pa.Schema:
        """The columns of deltas and results."""
        with self._errors(timeout):
            return self._client.get_schema(_descriptor(model, SamplingParams()), _options(timeout)).schema

    def models(self, *, timeout: float | None = None) -> list[ServedModel]:
        return [ServedModel(**model) for model in self._act("list_models", timeout)]

    def health(self, *, timeout: float | None = None) -> str:
        """Such as "serving"."""
        status: str = self._act("health", timeout)[0]["status"]
        return status

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> FlightClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _act(self, name: str, timeout: float | None) -> list[dict[str, Any]]:
        with self._errors(timeout):
            results = self._client.do_action(flight.Action(name, b""), _options(timeout))
            return [json.loads(result.body.to_pybytes()) for result in results]

    @contextmanager
    def _errors(self, timeout: float | None) -> Iterator[None]:
        try:
            yield
        except (flight.FlightError, pa.ArrowException) as error:
            raise _translated(error, address=self.address, timeout=timeout) from None


def _location(address: str) -> str:
    location = address if "://" in address else f"grpc://{address}"
    if not location.startswith(_SCHEMES) or location in _SCHEMES:
        raise ConfigError(f"the address is {address!r}; give host:port, such as {DEFAULT_ADDRESS}, or grpc://host:port")
    return location


def _descriptor(model: str, params: SamplingParams) -> flight.FlightDescriptor:
    given = {
        field.name: value
        for field in dataclasses.fields(params)
        if (value := getattr(params, field.name)) != field.default
    }
    return flight.FlightDescriptor.for_command(json.dumps({"model": model, **given}))


def _options(timeout: float | None) -> flight.FlightCallOptions:
    return flight.FlightCallOptions(timeout=timeout)


def _named(code: str, message: str, retry_after_s: float | None = None) -> JserveError:
    return error_from_code(code, message, retry_after_s=retry_after_s) or JserveError(f"{message} ({code})")


def _translated(error: Exception, *, address: str, timeout: float | None) -> JserveError:
    """The error that the server named in extra_info, else the one that fits what gRPC says."""
    try:
        info = json.loads(getattr(error, "extra_info", b"") or b"{}")
        return _named(info["code"], info["message"], info.get("retry_after_s"))
    except (ValueError, KeyError, TypeError):  # an error that gRPC or Arrow made, on either side
        words = str(error).partition("\n")[0]
    if isinstance(error, flight.FlightUnavailableError):
        return Unreachable(f"no jserve server answers at {address}; is the server running? jserve serve ({words})")
    if isinstance(error, flight.FlightTimedOutError):
        limit = "its deadline" if timeout is None else f"{timeout:g} s"
        return DeadlineExceeded(f"the call to {address} did not end within {limit}")
    if isinstance(error, flight.FlightCancelledError):
        return Cancelled(words)
    if "message larger than max" in words:
        return MessageTooLarge(words)
    return JserveError(f"{words} (from {address})")
