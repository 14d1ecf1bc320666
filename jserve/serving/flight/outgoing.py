"""Rows as Flight's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from jserve.serving.flight.verb import Output
from jserve.wire.ipc import batch_message, schema_message

__all__ = ["rows_message", "schema_bytes"]


def schema_bytes(schema: pa.Schema) -> bytes:
    """The first message of every stream of rows."""
    return schema_message(schema).serialize()


def rows_message(output: Output[Any], rows: Sequence[tuple[str, Any]], *, metadata: bytes = b"") -> bytes:
    return batch_message(output.batch(rows), metadata=metadata).serialize()
