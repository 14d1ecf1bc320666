"""Descriptors and tickets: what a call is about.

PATH ["generate", MODEL]                     generate, with the checkpoint's sampling defaults
CMD  {"model": MODEL, "temperature": 0, ...} the same, with defaults for the rows' sampling fields
PATH ["embed", MODEL]                        embed
CMD  {"verb": "embed", "model": MODEL}       the same
CMD  {"table": TOKEN}                        an uploaded table, as its ticket says (GetFlightInfo)

MODEL may be left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
from pyarrow import flight

from jserve.errors import InvalidRequest, NotFound
from jserve.request import SamplingParams
from jserve.serving.flight.batch import sampling_from_json

__all__ = [
    "MAX_COMMAND_BYTES",
    "Command",
    "descriptor_of",
    "read_descriptor",
    "read_json",
    "read_table",
    "read_ticket",
    "ticket_of",
]

MAX_COMMAND_BYTES = 64 << 10
"""Longest descriptor, ticket and action."""

VerbName = Literal["generate", "embed"]
_VERBS: dict[str, VerbName] = {"generate": "generate", "embed": "embed"}
_PATHS = '["generate", MODEL], or ["embed", MODEL] of an encoder'


@dataclass(frozen=True, kw_only=True)
class Command:
    verb: VerbName = "generate"
    model: str = ""
    """Empty: the one model served."""
    defaults: SamplingParams = field(default_factory=SamplingParams)
    """For the rows of generate."""


def descriptor_of(verb: VerbName, model: str) -> flight.FlightDescriptor:
    return flight.FlightDescriptor.for_path(verb, model)


def ticket_of(token: str) -> bytes:
    return json.dumps({"table": token}).encode()


def read_descriptor(serialized: bytes) -> Command:
    """What a DoExchange or DoPut asks for. Raises InvalidRequest or NotFound that says what there is."""
    descriptor = _parse(serialized)
    if descriptor.descriptor_type is flight.DescriptorType.CMD:
        fields = _command(descriptor)
        model, name = fields.pop("model", ""), fields.pop("verb", "generate")
        if not isinstance(model, str):
            raise InvalidRequest("model in the descriptor's command must be a string")
        verb = _VERBS.get(name) if isinstance(name, str) else None
        if verb is None:
            raise InvalidRequest(f"verb in the descriptor's command is {name!r:.40}; known are {', '.join(_VERBS)}")
        if verb == "embed" and fields:
            raise InvalidRequest(f"unknown field {next(iter(fields))[:40]!r}; embed knows verb and model")
        return Command(verb=verb, model=model, defaults=sampling_from_json(fields))
    path = [part.decode(errors="replace") for part in descriptor.path or ()]
    if len(path) not in (1, 2) or path[0] not in _VERBS:
        shown = [part[:40] for part in path[:4]]
        raise NotFound(f"there is no flight {shown}; the path is {_PATHS}, see ListFlights")
    return Command(verb=_VERBS[path[0]], model=path[1] if len(path) == 2 else "")


def read_table(serialized: bytes) -> str | None:
    """The token where a descriptor names an uploaded table, else None."""
    descriptor = _parse(serialized)
    if descriptor.descriptor_type is not flight.DescriptorType.CMD:
        return None
    return read_ticket(descriptor.command) if "table" in _command(descriptor) else None


def read_ticket(ticket: bytes) -> str:
    """The token in a ticket."""
    fields = read_json(ticket, "the ticket")
    token = fields.pop("table", None)
    if fields or not isinstance(token, str):
        unknown = f"unknown field {next(iter(fields))[:40]!r}; " if fields else ""
        raise InvalidRequest(f"{unknown}a ticket is what DoPut answered, with one field, table")
    return token


def _parse(serialized: bytes) -> flight.FlightDescriptor:
    if not serialized:
        raise InvalidRequest(f"the call has no descriptor; use the path {_PATHS}")
    if len(serialized) > MAX_COMMAND_BYTES:
        raise InvalidRequest(f"the descriptor has {len(serialized)} bytes; at most {MAX_COMMAND_BYTES} are allowed")
    try:
        return flight.FlightDescriptor.deserialize(serialized)
    except (pa.ArrowException, OSError):
        raise InvalidRequest("the call's descriptor cannot be read") from None


def _command(descriptor: flight.FlightDescriptor) -> dict[str, Any]:
    return read_json(descriptor.command, "the descriptor's command")


def read_json(text: bytes, what: str) -> dict[str, Any]:
    """A small JSON object from a client. ``what`` names it in errors."""
    if len(text) > MAX_COMMAND_BYTES:
        raise InvalidRequest(f"{what} has {len(text)} bytes; at most {MAX_COMMAND_BYTES} are allowed")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"{what} is not a JSON object")
    return fields
