"""Embed: texts in, one vector a text out."""

from __future__ import annotations

import asyncio

from jserve.errors import MessageTooLarge
from jserve.serving.embed_frontend import EmbedFrontend
from jserve.v1 import inference_pb2 as pb
from jserve.wire import convert

__all__ = ["answer"]

_VALUE_BYTES = 4
_TEXT_BYTES = 24
"""What a vector takes in a message besides its values, at most."""


async def answer(
    frontend: EmbedFrontend, request: pb.EmbedRequest, *, deadline: float | None, max_message_bytes: int
) -> pb.EmbedResponse:
    """Raises MessageTooLarge, before anything is computed, where the vectors would not fit in a message."""
    texts = len(request.texts)
    size = texts * (frontend.model.dimensions * _VALUE_BYTES + _TEXT_BYTES)
    if size > max_message_bytes:
        raise MessageTooLarge(
            f"the vectors of {texts} texts take {size} bytes, and a message {max_message_bytes}: make several calls"
        )
    # The texts as they are: a worker of the frontend makes strings of them, not the doors' loop.
    embeddings = await frontend.embed(request.texts, model=request.model, deadline=deadline)
    # Millions of numbers become Python's on the way: not on the doors' loop.
    return await asyncio.to_thread(convert.embeddings_to_proto, embeddings)
