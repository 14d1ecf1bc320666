"""A Flight door on loopback over the fake engine; pyarrow's own client, and hand-made messages."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import pyarrow as pa
import pytest
from pyarrow import flight

from jserve.config import ServeConfig
from jserve.serving.flight.door import FlightDoor
from jserve.serving.flight.limits import FlightLimits
from jserve.serving.frontend import Frontend
from jserve.serving.loop import LoopThread
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_server import fake_frontend
from jserve.testing.waiting import wait_for
from jserve.wire.flight import FLIGHT_SERVICE, FlightData
from jserve.wire.ipc import batch_message, schema_message

GENERATE = flight.FlightDescriptor.for_path("generate", "fake")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a hand-made call ended."""

    status: str
    code: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Served:
    engine: FakeEngine
    frontend: Frontend
    door: FlightDoor
    location: str
    client: flight.FlightClient

    def exchange(self, batches: Iterable[pa.RecordBatch | pa.Table]) -> list[dict[str, Any]]:
        """All is written before anything is read."""
        batches = list(batches)
        writer, reader = self.client.do_exchange(GENERATE)
        with writer:
            writer.begin(batches[0].schema)
            for batch in batches:
                writer.write(batch)
            writer.done_writing()
            rows: list[dict[str, Any]] = reader.read_all().to_pylist()
        return rows

    def held_up(self) -> int:
        """Wait until what was begun is made and nothing more is begun. How many rows were begun."""

        def stands() -> bool:
            begun = len(self.engine.submitted)
            time.sleep(0.4)
            return 0 < begun == len(self.engine.submitted) and not self.frontend.live

        wait_for(stands, 60)
        return len(self.engine.submitted)

    def raw(self, method: str, messages: Iterable[bytes], *, timeout: float = 20.0) -> Failure | list[bytes]:
        """A call of messages that pyarrow would not write. What it answered, or how it failed."""
        with grpc.insecure_channel(
            self.location.removeprefix("grpc://"), options=[("grpc.max_send_message_length", -1)]
        ) as channel:
            call = channel.stream_stream(f"/{FLIGHT_SERVICE}/{method}")(iter(messages), timeout=timeout)
            try:
                return list(call)
            except grpc.RpcError as error:
                trailers = dict(error.trailing_metadata() or ())
                info = json.loads(trailers.get("grpc-status-details-bin", b"{}"))
                return Failure(status=error.code().name, code=info.get("code", ""), message=error.details())


def first_message(schema: pa.Schema, descriptor: flight.FlightDescriptor = GENERATE) -> bytes:
    return FlightData(descriptor=descriptor.serialize(), header=schema_message(schema).header).serialize()


def next_message(batch: pa.RecordBatch) -> bytes:
    return batch_message(batch).serialize()


@pytest.fixture
def messages() -> Callable[..., list[bytes]]:
    """A call's messages: the descriptor and the first batch's schema, then the batches."""

    def make(*batches: pa.RecordBatch) -> list[bytes]:
        return [first_message(batches[0].schema), *map(next_message, batches)]

    return make


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Starts a door; keywords are ServeConfig's, ``engine`` those of FakeEngine, ``limits`` the door's own."""
    with ExitStack() as undo:

        def start(
            *,
            engine: dict[str, Any] | None = None,
            limits: dict[str, Any] | None = None,
            outbox_bytes: int = 4 << 20,
            **config: Any,
        ) -> Served:
            settings = ServeConfig(flight_address="127.0.0.1:0", **config)
            bounds = FlightLimits.from_config(settings)
            fake = undo.enter_context(FakeEngine(**(engine or {})))
            frontend = fake_frontend(fake, outbox_bytes=outbox_bytes)
            undo.callback(frontend.close)
            loop = undo.enter_context(LoopThread("test-doors"))
            door = FlightDoor(
                frontend,
                settings,
                loop=loop,
                health=lambda: "serving",
                limits=dataclasses.replace(bounds, **(limits or {})),
            )
            location = door.start()
            undo.callback(door.stop, 0.0)
            client = undo.enter_context(flight.connect(location))
            return Served(engine=fake, frontend=frontend, door=door, location=location, client=client)

        yield start
