"""What ListFlights and GetFlightInfo say."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from pyarrow import flight

from jserve.request import ServedModel
from jserve.serving.flight.command import descriptor_of, ticket_of
from jserve.serving.flight.table import Table
from jserve.wire.columns import OUTPUT, PROMPT_COLUMNS, SAMPLING_COLUMNS

__all__ = ["generate_info", "table_info"]


def generate_info(model: ServedModel) -> flight.FlightInfo:
    """The one flight. How to call it stands in its metadata; there is no endpoint before a DoPut."""
    about = {
        "model": dataclasses.asdict(model),
        "methods": ["DoExchange", "DoPut"],
        "exactly_one_of": list(PROMPT_COLUMNS),
        "input_columns": {
            "prompt": "string",
            "token_ids": "list<int32>",
            "messages": "list<struct<role: string, content: string>>",
            "id": "string",
            **{name: str(kind) for name, kind in SAMPLING_COLUMNS.items()},
        },
    }
    return _info(descriptor_of(model.name), [], about)


def table_info(token: str, table: Table) -> flight.FlightInfo:
    """An uploaded table: its ticket, without locations, which means here."""
    ticket = ticket_of(token)
    about = {"prompts": table.total_rows, "uploading": table.uploading}
    return _info(flight.FlightDescriptor.for_command(ticket), [flight.FlightEndpoint(ticket, [])], about)


def _info(
    descriptor: flight.FlightDescriptor, endpoints: list[flight.FlightEndpoint], about: Mapping[str, object]
) -> flight.FlightInfo:
    return flight.FlightInfo(OUTPUT, descriptor, endpoints, ordered=True, app_metadata=json.dumps(about))
