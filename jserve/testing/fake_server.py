"""A real server on a FakeEngine or a FakeEncoder: real doors, no model. For tests of clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jserve.config import ServeConfig
from jserve.observe.metrics import Metrics
from jserve.request import SamplingParams, ServedModel
from jserve.serving.embed_frontend import EmbedFrontend
from jserve.serving.embed_texts import TextPreparer
from jserve.serving.frontend import DEFAULT_OUTBOX_BYTES, Frontend
from jserve.serving.server import Addresses, Server
from jserve.testing.fake_encoder import FakeEncoder
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.tokenizer import CHAT_TEMPLATE, EOS_ID, ByteTokenizer
from jserve.text.chat_template import ChatTemplate

__all__ = [
    "FakeEncoderServer",
    "FakeServer",
    "fake_embed_frontend",
    "fake_encoder_server",
    "fake_frontend",
    "fake_server",
]


@dataclass(frozen=True, kw_only=True)
class FakeServer:
    addresses: Addresses
    server: Server
    frontend: Frontend
    engine: FakeEngine

    @property
    def grpc(self) -> str:
        """The address of the gRPC door."""
        if self.addresses.grpc is None:
            raise ValueError("this server has no gRPC door")
        return self.addresses.grpc


@dataclass(frozen=True, kw_only=True)
class FakeEncoderServer:
    addresses: Addresses
    server: Server
    frontend: EmbedFrontend
    engine: FakeEncoder


def fake_embed_frontend(engine: FakeEncoder, *, metrics: Metrics | None = None) -> EmbedFrontend:
    """A frontend with ByteTokenizer, serving the encoder "fake"."""
    limits = engine.limits
    return EmbedFrontend(
        engine=engine,
        preparer=TextPreparer(ByteTokenizer(), max_tokens=limits.max_model_len, lowercase=False),
        model=ServedModel(
            name="fake",
            family="fake",
            dtype="float32",
            mesh="1 device",
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            num_pages=0,
            page_size=0,
            has_chat_template=False,
            has_tokenizer=True,
            kind="encoder",
            dimensions=engine.dimensions,
        ),
        metrics=metrics,
    )


@contextmanager
def fake_encoder_server(engine: FakeEncoder | None = None, **settings: Any) -> Iterator[FakeEncoderServer]:
    """``fake_server`` of an encoder; all doors open."""
    doors = dict.fromkeys(("grpc_address", "flight_address", "metrics_address"), "127.0.0.1:0")
    config = ServeConfig(**(doors | settings))
    with engine or FakeEncoder() as engine:
        metrics = Metrics(model_name="fake", engine=engine)
        frontend = fake_embed_frontend(engine, metrics=metrics)
        try:
            with Server(config, frontend, engine, metrics) as server:
                yield FakeEncoderServer(addresses=server.start(), server=server, frontend=frontend, engine=engine)
        finally:
            frontend.close()


def fake_frontend(
    engine: FakeEngine,
    *,
    defaults: SamplingParams | None = None,
    metrics: Metrics | None = None,
    outbox_bytes: int = DEFAULT_OUTBOX_BYTES,
) -> Frontend:
    """A frontend with ByteTokenizer and its chat template, serving the model "fake"."""
    limits = engine.limits
    return Frontend(
        engine=engine,
        tokenizer=ByteTokenizer(),
        chat_template=ChatTemplate(CHAT_TEMPLATE, bos_token="<bos>", eos_token="<eos>"),
        defaults=defaults or SamplingParams(),
        eos_ids=(EOS_ID,),
        model=ServedModel(
            name="fake",
            family="fake",
            dtype="float32",
            mesh="1 device",
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            has_chat_template=True,
            has_tokenizer=True,
        ),
        metrics=metrics,
        outbox_bytes=outbox_bytes,
    )


@contextmanager
def fake_server(
    engine: FakeEngine | None = None,
    *,
    defaults: SamplingParams | None = None,
    outbox_bytes: int = DEFAULT_OUTBOX_BYTES,
    stall_s: float = 8.0,
    watch_interval_s: float = 1.0,
    **settings: Any,
) -> Iterator[FakeServer]:
    """Serve on free ports of loopback until the block ends; the engine is closed too.

    ``settings`` are fields of ServeConfig. Only the gRPC door opens, unless an address is given for another.
    """
    doors = {"grpc_address": "127.0.0.1:0", "flight_address": "", "metrics_address": ""}
    config = ServeConfig(**(doors | settings))
    engine = engine or FakeEngine()
    with engine:
        metrics = Metrics(model_name="fake", engine=engine)
        frontend = fake_frontend(engine, defaults=defaults, metrics=metrics, outbox_bytes=outbox_bytes)
        try:
            with Server(
                config, frontend, engine, metrics, stall_s=stall_s, watch_interval_s=watch_interval_s
            ) as server:
                yield FakeServer(addresses=server.start(), server=server, frontend=frontend, engine=engine)
        finally:
            frontend.close()
