"""jserve.v1 messages <-> jserve.request. Both directions of each type stand side by side.

In proto3 zero is not absent: every optional field is read through HasField, so that temperature 0 is greedy and
seed 0 is a seed. What comes in is bounded before it is copied into Python objects; the values themselves are
judged by the one validator of all doors, in serving.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from jserve.errors import InvalidRequest, PromptTooLong
from jserve.request import (
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    Delta,
    Embedding,
    Embeddings,
    FinishReason,
    Prompt,
    SamplingParams,
    ServedModel,
    Timings,
    TokenLogprob,
    Usage,
)
from jserve.v1 import inference_pb2 as pb

__all__ = [
    "MAX_RESPONSE_BYTES",
    "delta_from_proto",
    "delta_to_proto",
    "embed_request",
    "embeddings_from_proto",
    "embeddings_to_proto",
    "generate_request",
    "model_from_proto",
    "model_to_proto",
    "prompt_from_proto",
    "sampling_from_proto",
    "sampling_to_proto",
    "split_response",
    "tokenize_request",
]

MAX_RESPONSE_BYTES = 1 << 20
"""A response larger than this is sent in pieces: stock clients refuse messages over 4 MiB."""

_OPTIONAL = tuple(field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.has_presence)
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: "whole numbers below 2**31",
    FieldDescriptor.CPPTYPE_UINT32: "whole numbers from 0 to 2**32 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "whole numbers from 0 to 2**64 - 1",
}
_REASONS = {reason.value: reason for reason in FinishReason}


def prompt_from_proto(
    message: pb.GenerateRequest | pb.TokenizeRequest, *, max_tokens: int, max_messages: int
) -> Prompt:
    """The prompt of a request.

    InvalidRequest where none is set or the chat has more than ``max_messages``, PromptTooLong over
    ``max_tokens`` ids.
    """
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return message.text
    if kind == "chat":
        turns = message.chat.messages
        if len(turns) > max_messages:
            raise InvalidRequest(f"the chat has {len(turns)} messages; at most {max_messages} are allowed")
        return [{"role": turn.role, "content": turn.content} for turn in turns]
    if kind == "tokens" and isinstance(message, pb.GenerateRequest):
        if len(message.tokens.ids) > max_tokens:
            raise PromptTooLong(f"the prompt has {len(message.tokens.ids)} tokens; the limit is {max_tokens}")
        return list(message.tokens.ids)
    raise InvalidRequest("the request has no prompt; set one of its prompt fields")


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Sampling fields that are present; absent ones keep SamplingParams' own defaults."""
    for name, values, most in (
        ("stop", message.stop, MAX_STOP_STRINGS),
        ("stop_token_ids", message.stop_token_ids, MAX_STOP_TOKENS),
    ):
        if len(values) > most:
            raise InvalidRequest(f"{name} has {len(values)} entries; at most {most} are allowed")
    given = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    return SamplingParams(stop=tuple(message.stop), stop_token_ids=tuple(message.stop_token_ids), **given)


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """The wire form; InvalidRequest for values that no field can hold, such as a negative max_tokens."""
    if isinstance(params.stop, str):
        raise InvalidRequest(f"stop is {params.stop!r:.60}; it must be a list of strings")  # not its characters
    message = pb.SamplingParams()
    for name in _OPTIONAL:
        if (value := getattr(params, name)) is not None:
            with _refused(f"{name} cannot be {value!r:.60}{_allowed(name)}"):
                setattr(message, name, value)
    for name in ("stop", "stop_token_ids"):
        with _refused(f"{name} cannot be {getattr(params, name)!r:.60}{_allowed(name)}"):
            getattr(message, name).extend(getattr(params, name))
    return message


def _allowed(name: str) -> str:
    """What the field's type can hold, where that is a range of whole numbers."""
    bits = _INTEGERS.get(pb.SamplingParams.DESCRIPTOR.fields_by_name[name].cpp_type)
    return "" if bits is None else f" (allowed: {bits})"


def generate_request(prompt: Prompt, params: SamplingParams, *, request_id: str, model: str) -> pb.GenerateRequest:
    """A caller's prompt and parameters in wire form; InvalidRequest for what is no Prompt."""
    sampling = sampling_to_proto(params)
    with _refused("the request cannot be sent"):
        request = pb.GenerateRequest(request_id=request_id, model=model, sampling=sampling)
        if isinstance(prompt, str):
            request.text = prompt
            return request
    if _is_chat(prompt):
        request.chat.CopyFrom(_chat(prompt))
        return request
    ids: Any = prompt
    with _refused("the prompt is no text, no chat and no list of token ids"):
        if isinstance(prompt, bytes | bytearray):
            raise TypeError(f"it is of type {type(prompt).__name__}")  # not its bytes as ids
        request.tokens.CopyFrom(pb.TokenPrompt(ids=ids))
    return request


def tokenize_request(prompt: Prompt, *, model: str) -> pb.TokenizeRequest:
    """A text or chat in wire form; InvalidRequest for token ids, which need no tokenizing."""
    if isinstance(prompt, str):
        with _refused("the request cannot be sent"):
            return pb.TokenizeRequest(model=model, text=prompt)
    if _is_chat(prompt):
        return pb.TokenizeRequest(model=model, chat=_chat(prompt))
    raise InvalidRequest("only text (str) and chat (list of messages) can be tokenized; this prompt is neither")


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _chat(turns: Any) -> pb.ChatPrompt:
    chat = pb.ChatPrompt()
    for i, turn in enumerate(turns):
        # protobuf takes None for absent and would send an empty text.
        if not (isinstance(turn, Mapping) and set(turn) == {"role", "content"}) or None in turn.values():
            raise InvalidRequest(f"chat message {i} needs exactly role and content, both str; given: {turn!r:.200}")
        with _refused(f"chat message {i} cannot be sent"):
            chat.messages.add(**turn)
    return chat


@contextmanager
def _refused(words: str) -> Iterator[None]:
    """What protobuf refuses (wrong types, numbers out of range, lone surrogates) as InvalidRequest."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{words}: {error}") from None


def delta_to_proto(delta: Delta) -> pb.GenerateResponse:
    response = pb.GenerateResponse(
        request_id=delta.request_id,
        index=delta.index,
        token_ids=delta.token_ids,
        text=delta.text,
        finish_reason=delta.finish_reason or "",
        error=delta.error or "",
        error_code=delta.error_code or "",
    )
    for entry in delta.logprobs or ():
        added = response.logprobs.add(token_id=entry.token_id, logprob=entry.logprob)
        for token_id, logprob in entry.top:
            added.top.add(token_id=token_id, logprob=logprob)
    if delta.usage is not None:
        usage = delta.usage
        response.usage.prompt_tokens = usage.prompt_tokens
        response.usage.output_tokens = usage.output_tokens
        response.usage.cached_tokens = usage.cached_tokens
        response.usage.SetInParent()  # all zero is not absent either
    if delta.timings is not None:
        timings = delta.timings
        response.timings.CopyFrom(pb.Timings(queue=timings.queue, ttft=timings.ttft, total=timings.total))
    return response


def split_response(response: pb.GenerateResponse) -> Iterator[pb.GenerateResponse]:
    """The response in pieces of at most MAX_RESPONSE_BYTES; joined by a reader, they are the response.

    A single token with its text is never cut. Finish, error, usage and timings stand in the last piece.
    """
    tokens, chars = len(response.token_ids), len(response.text)
    if response.ByteSize() <= MAX_RESPONSE_BYTES or (tokens < 2 and chars < 2):
        yield response
        return
    tokens, chars = tokens // 2, chars // 2
    head = pb.GenerateResponse(request_id=response.request_id, index=response.index)
    head.token_ids.extend(response.token_ids[:tokens])
    head.logprobs.extend(response.logprobs[:tokens])
    head.text = response.text[:chars]
    tail = pb.GenerateResponse()
    tail.CopyFrom(response)
    del tail.token_ids[:tokens], tail.logprobs[:tokens]
    tail.text = response.text[chars:]
    yield from split_response(head)
    yield from split_response(tail)


def delta_from_proto(response: pb.GenerateResponse) -> Delta:
    """A finish_reason that this version does not know becomes ERROR, with its name in ``error``."""
    finish, error = _finish(response.finish_reason), response.error or None
    if finish is FinishReason.ERROR and error is None:
        error = f"the server ended the choice for a reason this client does not know: {response.finish_reason}"
    usage, timings = response.usage, response.timings
    return Delta(
        request_id=response.request_id,
        index=response.index,
        token_ids=tuple(response.token_ids),
        text=response.text,
        logprobs=tuple(map(_logprob, response.logprobs)) or None,
        finish_reason=finish,
        error=error,
        error_code=response.error_code or None,
        usage=Usage(
            prompt_tokens=usage.prompt_tokens, output_tokens=usage.output_tokens, cached_tokens=usage.cached_tokens
        )
        if response.HasField("usage")
        else None,
        timings=Timings(queue=timings.queue, ttft=timings.ttft, total=timings.total)
        if response.HasField("timings")
        else None,
    )


def embed_request(texts: Sequence[str], *, model: str) -> pb.EmbedRequest:
    """Texts in wire form; InvalidRequest for a lone one, and for what is no text."""
    if isinstance(texts, str):
        raise InvalidRequest("texts is one text; give a list of them")  # not its characters
    with _refused("the texts cannot be sent"):
        return pb.EmbedRequest(model=model, texts=texts)


def embeddings_to_proto(embeddings: Sequence[Embedding]) -> pb.EmbedResponse:
    response = pb.EmbedResponse()
    for embedding in embeddings:
        response.embeddings.add(
            values=embedding.values.tolist(), prompt_tokens=embedding.prompt_tokens, truncated=embedding.truncated
        )
    return response


def embeddings_from_proto(response: pb.EmbedResponse) -> Embeddings:
    """[0, 0] where there are no texts."""
    found = response.embeddings
    return Embeddings(
        values=np.array([entry.values for entry in found], np.float32).reshape(len(found), -1)
        if found
        else np.zeros((0, 0), np.float32),
        prompt_tokens=tuple(entry.prompt_tokens for entry in found),
        truncated=tuple(entry.truncated for entry in found),
    )


def model_to_proto(model: ServedModel) -> pb.ModelInfo:
    return pb.ModelInfo(**{field.name: getattr(model, field.name) for field in dataclasses.fields(model)})


def model_from_proto(info: pb.ModelInfo) -> ServedModel:
    return ServedModel(**{field.name: getattr(info, field.name) for field in dataclasses.fields(ServedModel)})


def _finish(name: str) -> FinishReason | None:
    return _REASONS.get(name, FinishReason.ERROR) if name else None


def _logprob(entry: pb.TokenLogprob) -> TokenLogprob:
    top = tuple((other.token_id, other.logprob) for other in entry.top)
    return TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, top=top)
