"""The columns of embedding over Arrow Flight: texts in, one vector a text out. Used by the server and by the client.

In: ``text`` (any text type; a null is a row that fails), and perhaps ``id``.
Out: see ``embeddings_schema``; one row a text, in the order of the texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from jserve.errors import InvalidRequest, JserveError
from jserve.request import Embedding, Embeddings
from jserve.wire.errors import error_from_code

__all__ = ["embeddings_from_table", "embeddings_schema", "embeddings_to_batch", "texts_to_batch"]


def embeddings_schema(dimensions: int) -> pa.Schema:
    """Of vectors with ``dimensions`` numbers. In a row that failed all is null but its id and the error."""
    return pa.schema(
        [
            # The row's own id, else its number in the call, from 0.
            pa.field("id", pa.utf8(), nullable=False),
            pa.field("embedding", pa.list_(pa.float32(), dimensions)),
            # Tokens that were read, special ones too.
            pa.field("prompt_tokens", pa.int32()),
            # The end of the text was cut off: it is longer than the model reads.
            pa.field("truncated", pa.bool_()),
            pa.field("error", pa.utf8()),
            pa.field("error_code", pa.utf8()),
        ]
    )


def embeddings_to_batch(rows: Sequence[tuple[str, Embedding | JserveError]], *, dimensions: int) -> pa.RecordBatch:
    """Vectors, or why there is none, with the ids that their rows are known by."""
    values = np.zeros((len(rows), dimensions), np.float32)
    for row, (_, result) in enumerate(rows):
        if isinstance(result, Embedding):
            values[row] = result.values
    good = [result if isinstance(result, Embedding) else None for _, result in rows]
    bad = [result if isinstance(result, JserveError) else None for _, result in rows]
    columns = [
        pa.array([row_id for row_id, _ in rows], pa.utf8()),
        pa.FixedSizeListArray.from_arrays(
            pa.array(values.reshape(-1)), dimensions, mask=pa.array([result is None for result in good], pa.bool_())
        ),
        pa.array([result and result.prompt_tokens for result in good], pa.int32()),
        pa.array([result and result.truncated for result in good], pa.bool_()),
        pa.array([result and result.message for result in bad], pa.utf8()),
        pa.array([result and result.code for result in bad], pa.utf8()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=embeddings_schema(dimensions))


def embeddings_from_table(table: pa.Table) -> Embeddings:
    """The vectors of a server's table. Raises the error of the first row that has one."""
    for message, code in zip(table["error"].to_pylist(), table["error_code"].to_pylist(), strict=True):
        if code is not None:
            raise error_from_code(code, message) or JserveError(f"{message} ({code})")
    kind = table.schema.field("embedding").type
    flat = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return Embeddings(
        values=flat.reshape(len(table), kind.list_size),
        prompt_tokens=tuple(table["prompt_tokens"].to_pylist()),
        truncated=tuple(table["truncated"].to_pylist()),
    )


def texts_to_batch(texts: Sequence[str]) -> pa.RecordBatch:
    """Texts as a batch for the server. Raises InvalidRequest for a lone one, and for what is no text."""
    if isinstance(texts, str):
        raise InvalidRequest("texts is one text; give a list of them")  # not its characters
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidRequest(f"text {i} is of type {type(text).__name__}; it must be text")
    try:
        return pa.RecordBatch.from_arrays([pa.array(texts, pa.utf8())], ["text"])
    except (pa.ArrowException, UnicodeEncodeError, ValueError) as error:
        raise InvalidRequest(f"the texts cannot be sent: {error}") from None
