"""What crosses the wire comes out as it went in; zero is a value; sizes are bounded before they are copied."""

import random
import re

import pytest

from jserve.errors import InvalidRequest, PromptTooLong
from jserve.request import Delta, FinishReason, SamplingParams, ServedModel, Timings, TokenLogprob, Usage
from jserve.v1 import inference_pb2 as pb
from jserve.wire import convert

LIMITS = {"max_tokens": 8, "max_messages": 2}


def parsed(message):
    return type(message).FromString(message.SerializeToString())


def request(prompt, params=SamplingParams()):
    return parsed(convert.generate_request(prompt, params, request_id="r", model="m"))


@pytest.mark.parametrize(
    "prompt", ["", "héllo \U0001f600", [], [0, 5, 2**31 - 1], [{"role": "user", "content": ""}]], ids=repr
)
def test_prompts_round_trip(prompt):
    message = request(prompt)
    assert (message.request_id, message.model) == ("r", "m")
    assert convert.prompt_from_proto(message, **LIMITS) == prompt


def test_absent_is_not_zero():
    assert convert.sampling_from_proto(parsed(pb.SamplingParams())) == SamplingParams()
    zeros = SamplingParams(
        temperature=0.0, top_p=0.0, top_k=0, min_p=0.0, seed=0, n=0, max_tokens=0, min_tokens=0, logprobs=0
    )
    assert convert.sampling_from_proto(parsed(convert.sampling_to_proto(zeros))) == zeros


def test_every_sampling_field_round_trips():
    params = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=-1,
        min_p=0.125,
        seed=2**64 - 1,
        n=3,
        max_tokens=9,
        min_tokens=2,
        stop=("a", "é"),
        include_stop=True,
        stop_token_ids=(1, 2),
        ignore_eos=True,
        logprobs=20,
    )
    assert convert.sampling_from_proto(parsed(convert.sampling_to_proto(params))) == params


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("seed", 2**64),
        ("seed", -1),
        ("temperature", "hot"),
        ("n", 1.5),
        ("stop", (1,)),
        ("stop_token_ids", (2**31,)),
    ],
)
def test_values_that_no_field_holds_are_refused_by_the_client(field, value):
    with pytest.raises(InvalidRequest, match=re.escape(f"{field} cannot be {value!r}")):
        convert.sampling_to_proto(SamplingParams(**{field: value}))


@pytest.mark.parametrize(
    "prompt",
    [
        "\ud800",
        b"bytes",
        {"role": "user", "content": "a"},
        [1.5],
        [2**31],
        ["a"],
        5,
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "a", "name": "b"}],
        [{"role": "user", "content": "a"}, "b"],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": "\ud800"}],
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused_by_the_client(prompt):
    with pytest.raises(InvalidRequest):
        convert.generate_request(prompt, SamplingParams(), request_id="", model="")


def test_a_stop_string_is_not_taken_for_its_characters():
    with pytest.raises(InvalidRequest, match="'END'; it must be a list"):
        convert.sampling_to_proto(SamplingParams(stop="END"))


def test_token_ids_need_no_tokenizing():
    with pytest.raises(InvalidRequest, match="only text"):
        convert.tokenize_request([1, 2], model="")


@pytest.mark.parametrize(
    ("message", "error", "words"),
    [
        (pb.GenerateRequest(), InvalidRequest, "no prompt"),
        (pb.TokenizeRequest(), InvalidRequest, "no prompt"),
        (pb.GenerateRequest(tokens=pb.TokenPrompt(ids=range(9))), PromptTooLong, "9 tokens; the limit is 8"),
        (
            pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage()] * 3)),
            InvalidRequest,
            "3 messages; at most 2",
        ),
    ],
)
def test_prompts_are_bounded_before_they_are_copied(message, error, words):
    with pytest.raises(error, match=words):
        convert.prompt_from_proto(message, **LIMITS)


@pytest.mark.parametrize("field", [{"stop": ["a"] * 17}, {"stop_token_ids": [1] * 17}])
def test_lists_are_bounded_before_they_are_copied(field):
    with pytest.raises(InvalidRequest, match="17 entries; at most 16"):
        convert.sampling_from_proto(pb.SamplingParams(**field))


FULL = Delta(
    request_id="r",
    index=3,
    token_ids=(0, 7),
    text="é\0",
    logprobs=(TokenLogprob(token_id=0, logprob=-0.5, top=((0, -0.5), (9, -1.5))), TokenLogprob(token_id=7, logprob=0)),
    finish_reason=FinishReason.ERROR,
    error="broken",
    error_code="JS-INT-01",
    usage=Usage(prompt_tokens=1, output_tokens=2, cached_tokens=3),
    timings=Timings(queue=0.25, ttft=0.5, total=1.0),
)


@pytest.mark.parametrize(
    "delta",
    [
        FULL,
        Delta(request_id="", index=0),
        Delta(
            request_id="r",
            index=0,
            usage=Usage(prompt_tokens=0, output_tokens=0),
            timings=Timings(queue=0, ttft=0, total=0),
        ),
        *(Delta(request_id="r", index=0, finish_reason=reason, error="e") for reason in FinishReason),
    ],
)
def test_deltas_round_trip(delta):
    assert convert.delta_from_proto(parsed(convert.delta_to_proto(delta))) == delta


def test_a_finish_reason_of_a_newer_server_is_an_error_that_names_it():
    delta = convert.delta_from_proto(pb.GenerateResponse(finish_reason="tool_call"))
    assert delta.finish_reason is FinishReason.ERROR
    assert "tool_call" in delta.error


def test_models_round_trip():
    model = ServedModel(
        name="m",
        family="llama",
        dtype="float32",
        mesh="tensor=2",
        max_model_len=1,
        vocab_size=2,
        num_pages=3,
        page_size=4,
        has_chat_template=True,
        has_tokenizer=True,
    )
    assert convert.model_from_proto(parsed(convert.model_to_proto(model))) == model


@pytest.mark.parametrize("tokens", [0, 1, 6_000])
@pytest.mark.parametrize("chars", [0, 1, 3_000_001])
def test_large_responses_are_split_and_join_to_the_whole(tokens, chars):
    rng = random.Random(tokens + chars)
    ids = tuple(rng.randrange(50_000) for _ in range(tokens))
    whole = convert.delta_to_proto(
        Delta(
            request_id="r",
            index=1,
            token_ids=ids,
            text="é" * chars,
            logprobs=tuple(TokenLogprob(token_id=i, logprob=-1.0, top=((i, -1.0),) * 20) for i in ids) or None,
            finish_reason=FinishReason.LENGTH,
            usage=Usage(prompt_tokens=1, output_tokens=tokens),
        )
    )
    pieces = list(convert.split_response(whole))
    assert all(piece.ByteSize() <= convert.MAX_RESPONSE_BYTES for piece in pieces)
    assert {(piece.request_id, piece.index) for piece in pieces} == {("r", 1)}
    assert [piece.HasField("usage") for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    joined = pb.GenerateResponse()
    for piece in pieces:
        text = joined.text
        joined.MergeFrom(piece)
        joined.text = text + piece.text
    assert joined == whole


def test_the_conversions_import_no_server_and_no_client():
    import subprocess
    import sys

    code = (
        "import sys, jserve.wire.convert, jserve.wire.errors\n"
        "print([m for m in sys.modules if m.startswith(('jserve.serving', 'jserve.client', 'grpc', 'jax'))])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
