"""FlightData and the small messages, against pyarrow's own reading and writing of protobuf."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import flight

from jserve.errors import InvalidRequest
from jserve.wire.flight import FlightData, action_type, cancel_result, cancelled_info, put_metadata, put_result

blobs = st.binary(max_size=300)


@given(blobs, blobs, blobs, blobs)
def test_flight_data_comes_back_as_it_was_written(
    descriptor: bytes, header: bytes, metadata: bytes, body: bytes
) -> None:
    data = FlightData(descriptor=descriptor, header=header, metadata=metadata, body=body)
    back = FlightData.parse(data.serialize())
    assert (back.descriptor, bytes(back.header), bytes(back.metadata), bytes(back.body)) == (
        descriptor,
        header,
        metadata,
        body,
    )


def test_flight_data_is_written_with_flights_field_numbers() -> None:
    data = FlightData(descriptor=b"d", header=b"hh", metadata=b"m", body=bytes(200))
    assert data.serialize() == b"\x0a\x01d\x12\x02hh\x1a\x01m\xc2\x3e\xc8\x01" + bytes(200)


def test_fields_of_later_versions_are_stepped_over() -> None:
    varint, fixed64, fixed32, unknown = b"\x28\xff\x01", b"\x31" + bytes(8), b"\x3d" + bytes(4), b"\x42\x03xyz"
    parsed = FlightData.parse(varint + fixed64 + b"\x12\x01h" + fixed32 + unknown)
    assert bytes(parsed.header) == b"h"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"\x12", "inside a number"),
        (b"\x12\x05ab", "field 2 is cut off"),
        (b"\xff" * 20, "inside a number"),
        (b"\x10\x01", "field 2 has wire type 0"),
        (b"\x2b", "wire type 3"),
        (b"\x28\x00" * 65, "more than 64 fields"),
        (b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "field 2 is cut off"),
    ],
)
def test_what_is_no_flight_data_is_refused(message: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        FlightData.parse(message)


@given(st.binary(max_size=64))
def test_any_bytes_are_parsed_or_refused(message: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        FlightData.parse(message)


def test_put_result_and_cancel_messages() -> None:
    assert put_result(b"ticket") == b"\x0a\x06ticket"
    assert put_metadata(b"\x0a\x06ticket") == b"ticket"
    assert action_type("health", "How?") == b"\x0a\x06health\x12\x04How?"
    assert cancel_result(cancelled=True) == b"\x08\x01"
    assert cancel_result(cancelled=False) == b"\x08\x03"
    # A Ticket has one bytes field numbered 1, as a CancelFlightInfoRequest has.
    assert cancelled_info(flight.Ticket(b"info").serialize()) == b"info"
    assert cancelled_info(b"") == b""
