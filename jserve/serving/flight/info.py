"""What ListFlights and GetFlightInfo say."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pyarrow as pa
from pyarrow import flight

from jserve.request import ServedModel
from jserve.serving.flight.command import VerbName, descriptor_of, ticket_of
from jserve.serving.flight.table import Table

__all__ = ["table_info", "verb_info"]


def verb_info(verb: VerbName, model: ServedModel, schema: pa.Schema, about: Mapping[str, object]) -> flight.FlightInfo:
    """The one flight of a server. How to call it stands in its metadata; there is no endpoint before a DoPut."""
    return _info(schema, descriptor_of(verb, model.name), [], about)


def table_info(token: str, table: Table) -> flight.FlightInfo:
    """An uploaded table: its ticket, without locations, which means here."""
    ticket = ticket_of(token)
    about = {"rows": table.total_rows, "uploading": table.uploading, **table.about_input}
    endpoints = [flight.FlightEndpoint(ticket, [])]
    return _info(table.schema, flight.FlightDescriptor.for_command(ticket), endpoints, about)


def _info(
    schema: pa.Schema,
    descriptor: flight.FlightDescriptor,
    endpoints: list[flight.FlightEndpoint],
    about: Mapping[str, object],
) -> flight.FlightInfo:
    return flight.FlightInfo(schema, descriptor, endpoints, ordered=True, app_metadata=json.dumps(about))
