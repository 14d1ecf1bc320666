"""The few Flight messages that pyarrow cannot write or read by itself, as protobuf bytes.

Server and client speak Flight's RPCs on gRPC directly. pyarrow's own server decodes (and decompresses) every
message before Python sees it, sets no limit on their size, knows no deadline and has no status for a bad argument;
its client aborts the process where a call fails while one thread reads and another writes. Descriptors, tickets,
infos, actions and results go through pyarrow's ``serialize``; what is left is FlightData, which carries the Arrow
bodies and is read here without copying them, and messages of one or two fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from jserve.errors import InvalidRequest

__all__ = [
    "FLIGHT_SERVICE",
    "FlightData",
    "action_type",
    "cancel_result",
    "cancelled_info",
    "put_metadata",
    "put_result",
]

FLIGHT_SERVICE = "arrow.flight.protocol.FlightService"

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_FIELDS = 64
"""Flight's messages have at most five fields; more is not a Flight client."""


@dataclass(frozen=True, kw_only=True)
class FlightData:
    """One message of a DoExchange, DoPut or DoGet. Buffers are views of the message's bytes."""

    descriptor: bytes = b""
    """A serialized FlightDescriptor; on a call's first message only."""
    header: memoryview | bytes = b""
    """An Arrow IPC message's flatbuffer; empty where the message is metadata only."""
    metadata: memoryview | bytes = b""
    body: memoryview | bytes = b""

    @classmethod
    def parse(cls, message: bytes) -> FlightData:
        """Raises InvalidRequest where the bytes are not a FlightData."""
        found = dict(_fields(message, {1, 2, 3, 1000}))
        empty = memoryview(b"")
        return cls(
            descriptor=bytes(found.get(1, empty)),
            header=found.get(2, empty),
            metadata=found.get(3, empty),
            body=found.get(1000, empty),
        )

    def serialize(self) -> bytes:
        return b"".join(
            part
            for number, value in ((1, self.descriptor), (2, self.header), (3, self.metadata), (1000, self.body))
            if len(value)
            for part in (_varint(number << 3 | _BYTES), _varint(len(value)), value)
        )


def put_result(metadata: bytes) -> bytes:
    """A PutResult: what DoPut answers."""
    return _field(1, metadata)


def put_metadata(put_result: bytes) -> bytes:
    """What is in a PutResult."""
    return _bytes_field(put_result)


def action_type(name: str, description: str) -> bytes:
    """An ActionType: one line of ListActions."""
    return _field(1, name.encode()) + _field(2, description.encode())


def cancelled_info(request: bytes) -> bytes:
    """The serialized FlightInfo in a CancelFlightInfoRequest."""
    return _bytes_field(request)


def cancel_result(*, cancelled: bool) -> bytes:
    """A CancelFlightInfoResult: CANCELLED, or NOT_CANCELLABLE where there is nothing to cancel."""
    return _varint(1 << 3 | _VARINT) + _varint(1 if cancelled else 3)


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _bytes_field(message: bytes) -> bytes:
    """Field 1 of a message, empty where it is absent."""
    return bytes(dict(_fields(message, {1})).get(1, b""))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise InvalidRequest("the message is not a Flight message: it ends inside a number")


def _fields(message: bytes, known: Set[int]) -> Iterator[tuple[int, memoryview]]:
    """Each known length-delimited field with its bytes; unknown fields are stepped over."""
    data, at = memoryview(message), 0
    for _ in range(_MAX_FIELDS):
        if at == len(data):
            return
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        if number in known and kind != _BYTES:
            raise InvalidRequest(f"the message is not a Flight message: field {number} has wire type {kind}")
        if kind == _BYTES:
            size, at = _read_varint(data, at)
        elif kind == _VARINT:
            _, at = _read_varint(data, at)
            size = 0
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise InvalidRequest(f"the message is not a Flight message: wire type {kind}")
        if size > len(data) - at:
            raise InvalidRequest(f"the message is not a Flight message: field {number} is cut off")
        if number in known:
            yield number, data[at : at + size]
        at += size
    raise InvalidRequest(f"the message is not a Flight message: more than {_MAX_FIELDS} fields")
