"""Arrow messages are judged before they are decoded, and decoded only when whole and valid."""

from __future__ import annotations

import dataclasses
import io
import random
import struct
import sys

import pyarrow as pa
import pytest

from jserve.errors import InvalidRequest, MessageTooLarge, RequestError, Unsupported
from jserve.wire.flight import FlightData
from jserve.wire.ipc import BatchReader, BatchWriter, batch_message, peek, schema_message


def written(schema: pa.Schema, *batches: pa.RecordBatch, compression: str | None = None) -> list[FlightData]:
    """What pyarrow writes for a stream, message by message."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    messages = []
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return messages
        body = message.body.to_pybytes() if message.body else b""
        messages.append(FlightData(header=message.metadata.to_pybytes(), body=body))


def opened(message: FlightData, *, columns: list[int] | None = None, max_rows: int = 100) -> BatchReader:
    reader = BatchReader(max_rows=max_rows, max_dictionary_bytes=1000)
    schema = reader.schema(message)
    reader.open(message, list(range(len(schema))) if columns is None else columns)
    return reader


def read_all(messages: list[FlightData], **options: int) -> list[pa.RecordBatch]:
    reader = opened(messages[0], **options)
    batches = [reader.read(message) for message in messages[1:]]
    return [batch for batch in batches if batch is not None]


TEXT = pa.record_batch({"prompt": ["one", None, "three"]})


def test_peek_tells_what_a_message_holds() -> None:
    batch = pa.record_batch({"a": [1, 2, 3], "b": [["x"], [], None]})
    schema, data = written(batch.schema, batch)
    assert peek(schema.header).kind == "schema"
    envelope = peek(data.header)
    assert (envelope.kind, envelope.rows, envelope.nodes, envelope.compressed) == ("batch", 3, 3, False)
    assert envelope.body_bytes == len(data.body)
    assert peek(written(batch.schema, batch, compression="zstd")[1].header).compressed


@pytest.mark.parametrize(
    "kind",
    [
        pa.utf8(),
        pa.large_utf8(),
        pa.string_view(),
        pa.dictionary(pa.int8(), pa.utf8()),
        pa.dictionary(pa.int32(), pa.large_utf8()),
    ],
    ids=str,
)
def test_batches_come_back_equal(kind: pa.DataType) -> None:
    texts = ["a text longer than the twelve bytes that a view holds", None, "", "short"]
    whole = pa.record_batch({"prompt": pa.array(texts).cast(kind)})
    sliced = whole.slice(1, 2)
    messages = written(whole.schema, whole, sliced)
    assert read_all(messages) == [whole, sliced]


def test_a_batch_that_we_wrote_comes_back_equal() -> None:
    batch = pa.record_batch({"a": [1, None], "b": [[{"x": 1.5}], None]})
    assert read_all([schema_message(batch.schema), batch_message(batch)]) == [batch]
    data = batch_message(batch, metadata=b"m")
    assert FlightData.parse(data.serialize()).metadata == b"m"


def test_a_writer_writes_what_pyarrow_would() -> None:
    batches = [
        pa.record_batch({"prompt": pa.array(["a", "b", name]).dictionary_encode(), "n": [1, 2, None]}) for name in "cd"
    ]
    writer = BatchWriter(batches[0].schema)
    messages = [*writer.messages(batches[0]), *writer.messages(batches[1])]
    assert [peek(message.header).kind for message in messages] == ["schema", *["dictionary", "batch"] * 2]
    assert read_all(messages) == batches
    with pytest.raises(pa.ArrowInvalid):
        writer.messages(TEXT)


def test_columns_that_are_not_asked_for_are_not_decoded() -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array(["r"]))
    batch = pa.record_batch(
        {"x": runs, "prompt": ["a", "b"], "y": pa.nulls(2), "z": pa.array(["q", "q"]).dictionary_encode()}
    )
    messages = written(batch.schema, batch)
    reader = opened(messages[0], columns=[1])
    assert [reader.read(message) for message in messages[1:]] == [None, batch.select(["prompt"])]


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_bodies_are_refused_before_they_are_decoded(codec: str) -> None:
    bomb = pa.record_batch({"prompt": ["x" * 10_000_000]})
    messages = written(bomb.schema, bomb, compression=codec)
    assert len(messages[1].body) < 50_000
    before = pa.total_allocated_bytes()
    with pytest.raises(Unsupported, match="batch 1 is compressed"):
        read_all(messages)
    assert pa.total_allocated_bytes() - before < 1000


def test_compressed_dictionaries_are_refused() -> None:
    batch = pa.record_batch({"prompt": pa.array(["x" * 1000, "y"]).dictionary_encode()})
    with pytest.raises(Unsupported, match="compressed"):
        read_all(written(batch.schema, batch, compression="zstd"))


def test_a_million_rows_in_no_bytes_are_refused() -> None:
    batch = pa.record_batch({"prompt": pa.nulls(1_000_000)})
    messages = written(batch.schema, batch)
    assert sum(len(message.header) + len(message.body) for message in messages) < 400
    with pytest.raises(MessageTooLarge, match="batch 1 has 1000000 rows; at most 100"):
        read_all(messages)


def test_a_dictionary_bomb_is_refused() -> None:
    batch = pa.record_batch({"prompt": pa.DictionaryArray.from_arrays(pa.array([0] * 50, pa.int8()), ["x" * 5000])})
    with pytest.raises(MessageTooLarge, match=r"batch 1 has 5\d{3} bytes of dictionaries"):
        read_all(written(batch.schema, batch))


def test_dictionaries_that_replace_each_other_are_not_added_up() -> None:
    batches = [pa.record_batch({"prompt": pa.array([str(i) * 300]).dictionary_encode()}) for i in range(9)]
    assert read_all(written(batches[0].schema, *batches)) == batches


def test_dictionaries_that_no_batch_follows_are_added_up() -> None:
    """Each replaces the one before, and yet all of them wait for the batch that decodes them."""
    batch = pa.record_batch({"prompt": pa.array(["x" * 100]).dictionary_encode()})
    schema, dictionary, data = written(batch.schema, batch)
    size = len(dictionary.header) + len(dictionary.body)
    allowed = 1000 // size
    assert allowed > 2
    reader = opened(schema)
    for _ in range(2):
        for _ in range(allowed):
            assert reader.read(dictionary) is None
        assert reader.read(data) == batch
    for _ in range(allowed):
        assert reader.read(dictionary) is None
    with pytest.raises(
        MessageTooLarge, match=f"batch 3 has {(allowed + 1) * size} bytes of dictionaries; at most 1000"
    ):
        reader.read(dictionary)


def test_a_waiting_dictionary_keeps_nothing_else_of_its_message_alive() -> None:
    batch = pa.record_batch({"prompt": pa.array(["x" * 100]).dictionary_encode()})
    schema, dictionary, _ = written(batch.schema, batch)
    reader = opened(schema)
    message = dataclasses.replace(dictionary, metadata=bytes(1 << 20)).serialize()
    references = sys.getrefcount(message)
    reader.read(FlightData.parse(message))
    assert sys.getrefcount(message) == references


def test_delta_dictionaries_are_refused() -> None:
    schema = pa.schema([("prompt", pa.dictionary(pa.int32(), pa.utf8()))])
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)) as writer:
        for values in (["a"], ["a", "b"]):
            indices = pa.array(range(len(values)), pa.int32())
            writer.write_batch(pa.record_batch([pa.DictionaryArray.from_arrays(indices, values)], schema=schema))
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    messages = [reader.read_next_message() for _ in range(5)]
    parts = [FlightData(header=m.metadata.to_pybytes(), body=m.body.to_pybytes() if m.body else b"") for m in messages]
    with pytest.raises(Unsupported, match="appends to a dictionary"):
        read_all(parts)


def test_a_second_schema_and_other_columns_are_refused() -> None:
    other = pa.record_batch({"prompt": ["a"], "n": [1]})
    first = written(TEXT.schema, TEXT)
    reader = opened(first[0])
    assert reader.read(first[1]) == TEXT
    with pytest.raises(InvalidRequest, match="batch 2 has other columns than the schema: 2 arrays and not 1"):
        reader.read(written(other.schema, other)[1])
    with pytest.raises(InvalidRequest, match="batch 2 brings another schema"):
        reader.read(first[0])


def test_the_first_message_must_be_a_schema() -> None:
    with pytest.raises(InvalidRequest, match="must be the schema"):
        opened(written(TEXT.schema, TEXT)[1])


def test_a_batch_before_its_dictionary_is_refused() -> None:
    batch = pa.record_batch({"prompt": pa.array(["a", "b"]).dictionary_encode()})
    schema, _, data = written(batch.schema, batch)
    with pytest.raises(InvalidRequest, match="batch 1 is not valid Arrow data"):
        read_all([schema, data])


def test_a_body_of_another_length_is_refused() -> None:
    schema, data = written(TEXT.schema, TEXT)
    with pytest.raises(InvalidRequest, match="announces 32 bytes and has 24"):
        read_all([schema, FlightData(header=data.header, body=data.body[:-8])])


def test_a_bad_offset_in_the_middle_is_found() -> None:
    """validate() without full=True lets it pass, and reading the cell kills the process."""
    batch = pa.record_batch({"prompt": ["aa", "bb", "cc"]})
    schema, data = written(batch.schema, batch)
    body = bytearray(data.body)
    offset = body.index(struct.pack("<4i", 0, 2, 4, 6))
    body[offset + 4 : offset + 8] = struct.pack("<i", 2_000_000)
    with pytest.raises(InvalidRequest, match="batch 1 is not valid Arrow data"):
        read_all([schema, FlightData(header=data.header, body=bytes(body))])


@pytest.mark.parametrize("kind", [pa.utf8(), pa.string_view(), pa.dictionary(pa.int8(), pa.utf8())], ids=str)
def test_text_that_is_no_utf8_is_found(kind: pa.DataType) -> None:
    batch = pa.record_batch({"prompt": pa.array(["good", "b\u00e4d"]).cast(kind)})
    messages = [
        FlightData(header=message.header, body=bytes(message.body).replace("\u00e4".encode(), b"\xff\xfe"))
        for message in written(batch.schema, batch)
    ]
    with pytest.raises(InvalidRequest, match="is not valid Arrow data"):
        read_all(messages)


def test_damaged_messages_are_refused_or_read_but_never_crash() -> None:
    columns = {
        "prompt": pa.array(["a text longer than twelve bytes", None, "b"], pa.string_view()),
        "token_ids": [[1, 2], None, []],
        "stop": pa.array([["x"], ["y", None], None]),
        "temperature": [0.5, None, 1.0],
        "d": pa.array(["u", "v", "u"]).dictionary_encode(),
    }
    batch = pa.record_batch(columns)
    messages = written(batch.schema, batch)
    dice = random.Random(7)
    refused = 0
    for _ in range(2000):
        victim = dice.randrange(len(messages))
        header, body = bytearray(messages[victim].header), bytearray(messages[victim].body)
        target = header if dice.random() < 0.6 or not body else body
        for _ in range(dice.randint(1, 4)):
            target[dice.randrange(len(target))] = dice.randrange(256)
        damaged = [*messages[:victim], FlightData(header=bytes(header), body=bytes(body)), *messages[victim + 1 :]]
        try:
            for result in read_all(damaged):
                result.to_pylist()
        except RequestError:
            refused += 1
    assert refused > 500


@pytest.mark.parametrize("size", [0, 1, 4, 7, 16, 40])
def test_a_cut_header_is_refused(size: int) -> None:
    header = schema_message(TEXT.schema).header[:size]
    with pytest.raises(InvalidRequest):
        opened(FlightData(header=header))
