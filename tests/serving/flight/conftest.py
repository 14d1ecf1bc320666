"""A Flight door on loopback over the fake engine, and pyarrow's own client at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from pyarrow import flight

from jserve.config import ServeConfig
from jserve.request import SamplingParams, ServedModel
from jserve.serving.flight.door import FlightDoor
from jserve.serving.flight.limits import FlightLimits
from jserve.serving.frontend import Frontend
from jserve.serving.loop import LoopThread
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.tokenizer import CHAT_TEMPLATE, EOS_ID, VOCAB_SIZE, ByteTokenizer
from jserve.text.chat_template import ChatTemplate

GENERATE = flight.FlightDescriptor.for_path("generate", "fake")


@dataclass
class Served:
    engine: FakeEngine
    frontend: Frontend
    door: FlightDoor
    location: str
    client: flight.FlightClient


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Starts a door; keywords are ServeConfig's, ``engine`` those of FakeEngine, ``limits`` the door's own."""
    with ExitStack() as undo:

        def start(*, engine: dict[str, Any] | None = None, limits: FlightLimits | None = None, **config: Any) -> Served:
            settings = ServeConfig(flight_address="127.0.0.1:0", **config)
            fake = undo.enter_context(FakeEngine(**(engine or {})))
            tokenizer = ByteTokenizer()
            frontend = Frontend(
                engine=fake,
                tokenizer=tokenizer,
                chat_template=ChatTemplate(CHAT_TEMPLATE, bos_token="<bos>", eos_token="<eos>"),
                defaults=SamplingParams(),
                eos_ids=(EOS_ID,),
                model=ServedModel(
                    name="fake",
                    family="fake",
                    dtype="float32",
                    mesh="1 device",
                    max_model_len=fake.limits.max_model_len,
                    vocab_size=VOCAB_SIZE,
                    num_pages=fake.limits.num_pages,
                    page_size=fake.limits.page_size,
                    has_chat_template=True,
                ),
            )
            undo.callback(frontend.close)
            loop = undo.enter_context(LoopThread("test-doors"))
            door = FlightDoor(frontend, settings, loop=loop, health=lambda: "serving", limits=limits)
            location = door.start()
            undo.callback(door.stop, 0.0)
            client = undo.enter_context(flight.connect(location))
            return Served(engine=fake, frontend=frontend, door=door, location=location, client=client)

        yield start
