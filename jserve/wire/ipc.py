"""Arrow IPC messages as Flight carries them: looked at before they are decoded, then decoded one by one.

A peer's message is hostile until proven otherwise. Its flatbuffer tells, before a byte of the body is
touched, whether the body is compressed (33 KB can hold 1 GB), how many rows it announces (a null column has
any number of rows in no bytes) and whether it fits the schema. Only then pyarrow decodes it, without copies of a
batch's columns, so that what is held is what was received.
"""

from __future__ import annotations

import io
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from jserve.errors import InvalidRequest, MessageTooLarge, Unsupported
from jserve.wire.flight import FlightData

__all__ = ["BatchReader", "BatchWriter", "Envelope", "batch_message", "peek", "schema_message"]

Kind = Literal["schema", "dictionary", "batch"]

_KINDS: dict[int, Kind] = {1: "schema", 2: "dictionary", 3: "batch"}
_CONTINUATION = b"\xff\xff\xff\xff"


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """What a message's flatbuffer says of its body."""

    kind: Kind
    body_bytes: int
    rows: int = 0
    nodes: int = 0
    """Arrays described, nested ones included."""
    compressed: bool = False
    dictionary: int = 0
    """The dictionary's id."""
    delta: bool = False
    """A dictionary that is appended to the one before."""


def peek(header: memoryview | bytes) -> Envelope:
    """Read a message's flatbuffer. Raises InvalidRequest where it is none, or no message that Flight may carry."""
    try:
        return _peek(memoryview(header))
    except (struct.error, IndexError):
        raise InvalidRequest("the Arrow message's header is damaged") from None


def _peek(data: memoryview) -> Envelope:
    message = _Table(data, _uint32(data, 0))
    kind = _KINDS.get(message.scalar(1, "<B"))
    if kind is None:
        raise InvalidRequest("the Arrow message is no schema, dictionary or record batch")
    body_bytes = message.scalar(3, "<q")
    if kind == "schema":
        return Envelope(kind=kind, body_bytes=body_bytes)
    table = message.table(2)
    dictionary, delta = 0, False
    if kind == "dictionary":
        dictionary, delta = table.scalar(0, "<q"), bool(table.scalar(2, "<B"))
        table = table.table(1)
    return Envelope(
        kind=kind,
        body_bytes=body_bytes,
        rows=table.scalar(0, "<q"),
        nodes=table.vector_length(1),
        compressed=table.at(3) is not None,
        dictionary=dictionary,
        delta=delta,
    )


class _Table:
    """A table of a flatbuffer: a vtable of 16-bit offsets stands where its first word points back to."""

    def __init__(self, data: memoryview, start: int) -> None:
        self._data, self._start = data, start
        self._vtable = start - _unpack("<i", data, start)
        self._size = _unpack("<H", data, self._vtable)

    def at(self, slot: int) -> int | None:
        """Where a field stands; None where it has its default."""
        entry = 4 + 2 * slot
        if entry + 2 > self._size:
            return None
        offset = _unpack("<H", self._data, self._vtable + entry)
        return self._start + offset if offset else None

    def scalar(self, slot: int, form: str) -> int:
        at = self.at(slot)
        return 0 if at is None else _unpack(form, self._data, at)

    def table(self, slot: int) -> _Table:
        at = self.at(slot)
        if at is None:
            raise InvalidRequest("the Arrow message's header lacks a part")
        return _Table(self._data, at + _uint32(self._data, at))

    def vector_length(self, slot: int) -> int:
        at = self.at(slot)
        return 0 if at is None else _uint32(self._data, at + _uint32(self._data, at))


def _unpack(form: str, data: memoryview, at: int) -> int:
    if at < 0:
        raise IndexError(at)
    value: int = struct.unpack_from(form, data, at)[0]
    return value


def _uint32(data: memoryview, at: int) -> int:
    return _unpack("<I", data, at)


class BatchReader:
    """Decodes one stream's messages: a schema, then record batches, with dictionaries before them.

    Every batch comes back wholly validated. ``max_rows`` bounds the rows of one batch, ``max_dictionary_bytes``
    the dictionaries that the stream keeps alive, and also those that wait for the batch which decodes them.
    """

    def __init__(self, *, max_rows: int, max_dictionary_bytes: int) -> None:
        self._max_rows = max_rows
        self._max_dictionary_bytes = max_dictionary_bytes
        self._feed = _Feed()
        self._reader: pa.ipc.RecordBatchStreamReader | None = None
        self._nodes = 0
        self._dictionaries: dict[int, int] = {}
        # Dictionaries since the last batch wait as they came, also those that are replaced meanwhile.
        self._pending_bytes = 0
        self._batches = 0

    def schema(self, message: FlightData) -> pa.Schema:
        """The stream's schema, from its first message that has a header."""
        envelope = peek(message.header)
        if envelope.kind != "schema":
            raise InvalidRequest("the first Arrow message must be the schema")
        try:
            schema = pa.ipc.read_schema(pa.py_buffer(_framed(message.header)))
            self._nodes = sum(map(_nodes, schema))
        except UnicodeDecodeError:
            raise InvalidRequest("the Arrow schema cannot be read: a column's name is not UTF-8") from None
        except (pa.ArrowException, OSError) as error:
            raise InvalidRequest(f"the Arrow schema cannot be read: {_first_line(error)}") from None
        return schema

    def open(self, message: FlightData, columns: Sequence[int]) -> None:
        """Begin the stream, reading only these columns of the schema message; the others are never decoded."""
        self._feed.add(_framed(message.header))
        options = pa.ipc.IpcReadOptions(included_fields=list(columns), use_threads=False)
        self._reader = pa.ipc.open_stream(pa.PythonFile(self._feed, mode="r"), options=options)

    def read(self, message: FlightData) -> pa.RecordBatch | None:
        """The batch in a message; None for a dictionary. Raises InvalidRequest, MessageTooLarge or Unsupported."""
        if self._reader is None:
            raise RuntimeError("read before open")
        envelope = peek(message.header)
        self._check(envelope, message)
        self._feed.add(_framed(message.header))
        if envelope.kind == "dictionary":
            # Copied, because a view would keep the message's metadata alive too, which nothing here counts.
            self._feed.add(bytes(message.body))
            return None
        self._feed.add(message.body)
        self._batches += 1
        self._pending_bytes = 0
        try:
            batch = self._reader.read_next_batch()
            if batch.num_rows:
                # Not merely validate(): that lets a bad offset in the middle pass, and reading it is a segfault.
                batch.validate(full=True)
        except (pa.ArrowException, OSError, StopIteration) as error:
            raise InvalidRequest(f"batch {self._batches} is not valid Arrow data: {_first_line(error)}") from None
        return batch

    def _check(self, envelope: Envelope, message: FlightData) -> None:
        """What can be known before anything is decoded."""
        where = f"batch {self._batches + 1}"
        if envelope.kind == "schema":
            raise InvalidRequest(f"{where} brings another schema; a call has one schema: open another call")
        if envelope.compressed:
            raise Unsupported(f"{where} is compressed; send it plain, with IpcWriteOptions(compression=None)")
        if envelope.body_bytes != len(message.body):
            raise InvalidRequest(f"{where} announces {envelope.body_bytes} bytes and has {len(message.body)}")
        if envelope.rows < 0 or envelope.rows > self._max_rows:
            raise MessageTooLarge(f"{where} has {envelope.rows} rows; at most {self._max_rows} a batch: split it")
        if envelope.kind == "batch" and envelope.nodes != self._nodes:
            raise InvalidRequest(
                f"{where} has other columns than the schema: {envelope.nodes} arrays and not {self._nodes}"
            )
        if envelope.kind == "dictionary":
            if envelope.delta:
                raise Unsupported(f"{where} appends to a dictionary; send whole dictionaries")
            size = envelope.body_bytes + len(message.header)
            self._dictionaries[envelope.dictionary] = size
            self._pending_bytes += size
            total = max(sum(self._dictionaries.values()), self._pending_bytes)
            if total > self._max_dictionary_bytes:
                raise MessageTooLarge(
                    f"{where} has {total} bytes of dictionaries; at most {self._max_dictionary_bytes}: send plain text"
                )


class _Feed(io.RawIOBase):
    """A file that ends where the messages given so far end; gives out whole pieces without copying."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: deque[memoryview] = deque()

    def add(self, piece: memoryview | bytes) -> None:
        if piece:
            self._pieces.append(memoryview(piece))

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._take(size).to_pybytes()

    def read_buffer(self, size: int = -1) -> pa.Buffer:
        return self._take(size)

    def _take(self, size: int) -> pa.Buffer:
        if not self._pieces:
            return pa.py_buffer(b"")
        piece = self._pieces.popleft()
        if 0 <= size < len(piece):
            self._pieces.appendleft(piece[size:])
            piece = piece[:size]
        # Bodies begin anywhere in the gRPC message; Arrow's arrays want to begin on multiples of 8.
        buffer = pa.py_buffer(piece)
        return buffer if buffer.address % 8 == 0 else pa.py_buffer(bytes(piece))


def _framed(header: memoryview | bytes) -> bytes:
    """A message's flatbuffer as a stream has it: marker, length, padding to 8 bytes."""
    padding = -len(header) % 8
    return b"".join((_CONTINUATION, struct.pack("<i", len(header) + padding), header, bytes(padding)))


def _nodes(field: pa.Field) -> int:
    """Arrays that a record batch describes for one field. Raises UnicodeDecodeError for a name that is no text."""
    _ = field.name
    kind = field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type
    if isinstance(kind, pa.DictionaryType):
        return 1
    return 1 + sum(_nodes(kind.field(i)) for i in range(kind.num_fields))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]


class BatchWriter:
    """Writes one stream's messages: a schema, then batches, with dictionaries before them."""

    def __init__(self, schema: pa.Schema) -> None:
        self._sink = io.BytesIO()
        self._writer = pa.ipc.new_stream(self._sink, schema)

    def messages(self, batch: pa.RecordBatch) -> list[FlightData]:
        """The batch, and what it needs before it: the schema comes with the first one.

        Raises pyarrow.ArrowInvalid where the batch has another schema.
        """
        self._writer.write_batch(batch)
        data = memoryview(self._sink.getvalue())
        self._sink.seek(0)
        self._sink.truncate()
        messages = []
        while data:
            header, rest = _split(data)
            size = peek(header).body_bytes
            messages.append(FlightData(header=header, body=rest[:size]))
            data = rest[size:]
        return messages


def schema_message(schema: pa.Schema) -> FlightData:
    return FlightData(header=_split(memoryview(schema.serialize()))[0])


def batch_message(batch: pa.RecordBatch, *, metadata: bytes = b"") -> FlightData:
    """A batch without dictionaries as one message."""
    header, body = _split(memoryview(batch.serialize()))
    return FlightData(header=header, metadata=metadata, body=body)


def _split(data: memoryview) -> tuple[memoryview, memoryview]:
    """Flatbuffer of the first message as pyarrow writes it (marker, length, flatbuffer, body), and what follows."""
    start = len(_CONTINUATION) + 4
    end = start + struct.unpack_from("<i", data, len(_CONTINUATION))[0]
    return data[start:end], data[end:]
