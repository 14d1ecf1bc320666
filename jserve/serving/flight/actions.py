"""DoAction: small verbs with JSON bodies, and Flight's own CancelFlightInfo.

health                             -> {"status": "serving"}
version                            -> {"jserve": ..., "python": ..., "pyarrow": ...}
list_models                        -> one object a model
cancel       {"request_id": ID}    -> {"cancelled": true | false}
CancelFlightInfo  FlightInfo       -> CANCELLED | NOT_CANCELLABLE
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pyarrow as pa
from pyarrow import flight

import jserve
from jserve.errors import InvalidRequest, NotFound, Unsupported
from jserve.serving.flight.command import MAX_COMMAND_BYTES, read_json, read_ticket
from jserve.serving.flight.results import ResultStore
from jserve.serving.flight.verb import Runner
from jserve.serving.frontends import AnyFrontend
from jserve.wire.flight import action_type, cancel_result, cancelled_info

__all__ = ["Actions"]

_DESCRIPTIONS = {
    "health": "The server's health: starting, serving, stalled, failed or draining.",
    "version": "Versions of jserve and of what it stands on.",
    "list_models": "What is served; one result a model.",
    "cancel": 'Body {"request_id": ID}: ends a DoExchange\'s rows. ID is the "call" in the metadata of its first '
    "batch: its rows end, also those that have not begun. Or that and the number of a row that has begun: CALL-ROW.",
    "CancelFlightInfo": "Drops an uploaded table; the info comes from GetFlightInfo with the ticket as command.",
}


class Actions:
    """``runners`` are the open exchanges by call id."""

    def __init__(
        self, frontend: AnyFrontend, store: ResultStore, runners: Mapping[str, Runner], *, health: Callable[[], str]
    ) -> None:
        self._frontend = frontend
        self._store = store
        self._runners = runners
        self._health = health

    async def listing(self, request: bytes) -> AsyncIterator[bytes]:
        for name, description in _DESCRIPTIONS.items():
            yield action_type(name, description)

    async def do(self, request: bytes) -> AsyncIterator[bytes]:
        if len(request) > MAX_COMMAND_BYTES:
            raise InvalidRequest(f"the action has {len(request)} bytes; at most {MAX_COMMAND_BYTES} are allowed")
        try:
            action = flight.Action.deserialize(request)
        except (pa.ArrowException, OSError):
            raise InvalidRequest("the action cannot be read") from None
        body = action.body.to_pybytes()
        match action.type:
            case "health":
                yield _json({"status": self._health()})
            case "version":
                versions = {"jserve": jserve.__version__, "python": platform.python_version()}
                yield _json({**versions, "pyarrow": pa.__version__})
            case "list_models":
                yield _json(dataclasses.asdict(self._frontend.model))
            case "cancel":
                yield _json({"cancelled": self._cancel(body)})
            case "CancelFlightInfo":
                cancelled = await self._cancel_info(cancelled_info(body))
                yield flight.Result(cancel_result(cancelled=cancelled)).serialize()
            case unknown:
                raise Unsupported(f"there is no action {unknown[:40]!r}; there are {', '.join(_DESCRIPTIONS)}")

    def _cancel(self, body: bytes) -> bool:
        fields = read_json(body, "the body of cancel")
        request_id = fields.pop("request_id", None)
        if fields or not isinstance(request_id, str):
            raise InvalidRequest('the body of cancel must be {"request_id": ID} and nothing else')
        if request_id in self._runners:
            return self._runners[request_id].cancel()
        call_id, _, row = request_id.rpartition("-")
        runner = self._runners.get(call_id)
        return runner is not None and row.isascii() and row.isdecimal() and runner.cancel(int(row))

    async def _cancel_info(self, serialized: bytes) -> bool:
        try:
            endpoints = flight.FlightInfo.deserialize(serialized).endpoints
        except (pa.ArrowException, OSError):
            raise InvalidRequest("the FlightInfo cannot be read") from None
        cancelled = False
        for endpoint in endpoints:
            token = read_ticket(endpoint.ticket.ticket)
            try:
                self._store.find(token)
            except NotFound:
                continue
            await self._store.drop(token, "was cancelled")
            cancelled = True
        return cancelled


def _json(value: Mapping[str, Any]) -> bytes:
    serialized: bytes = flight.Result(json.dumps(value).encode()).serialize()
    return serialized
