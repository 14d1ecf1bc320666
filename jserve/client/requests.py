"""What ``generate_stream`` of both clients takes: many requests over one call."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from jserve.request import Prompt, SamplingParams
from jserve.v1 import inference_pb2 as pb
from jserve.wire import convert

__all__ = ["Cancel", "PromptRequest", "to_proto"]

WINDOW = 128
"""Most requests that ``generate_stream`` keeps open at once, unless told."""


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Told apart by it; no two live requests of a server may share one. Absent: a new one."""
    model: str = ""


@dataclass(frozen=True)
class Cancel:
    """Ends an earlier request of the same stream: its last delta says finish_reason cancelled."""

    request_id: str


def to_proto(item: PromptRequest | Cancel) -> pb.GenerateStreamRequest:
    if isinstance(item, Cancel):
        return pb.GenerateStreamRequest(cancel=item.request_id)
    request = convert.generate_request(item.prompt, item.params, request_id=item.request_id, model=item.model)
    return pb.GenerateStreamRequest(generate=request)
