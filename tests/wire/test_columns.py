"""Deltas and prompts as Arrow columns, there and back."""

from __future__ import annotations

import pyarrow as pa
import pytest

from jserve.errors import InvalidRequest
from jserve.request import Delta, FinishReason, SamplingParams, Timings, TokenLogprob, Usage
from jserve.wire.columns import OUTPUT, SAMPLING_COLUMNS, deltas_from_batch, deltas_to_batch, prompts_to_batch


def logprob(token: int, *top: int) -> TokenLogprob:
    return TokenLogprob(token_id=token, logprob=-0.5, top=tuple((other, -0.25 * other) for other in top))


DELTAS = [
    Delta(request_id="a", index=0, token_ids=(1, 2), text="ä", logprobs=(logprob(1, 1, 2), logprob(2))),
    Delta(request_id="b", index=1, token_ids=(3,)),
    Delta(request_id="b", index=0, logprobs=()),
    Delta(
        request_id="a",
        index=0,
        token_ids=(7,),
        logprobs=(logprob(7, 7, 8, 9),),
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=3, output_tokens=3, cached_tokens=1),
        timings=Timings(queue=0.5, ttft=1.0, total=2.0),
    ),
    Delta(request_id="c", index=0, finish_reason=FinishReason.ERROR, error="no", error_code="JS-REQ-01"),
    Delta(
        request_id="d", index=0, text="half", finish_reason=FinishReason.DEADLINE, error="late", error_code="JS-REQ-07"
    ),
]


@pytest.mark.parametrize("deltas", [DELTAS, DELTAS[1:2], DELTAS[2:3], DELTAS[4:], []])
def test_deltas_come_back(deltas: list[Delta]) -> None:
    batch = deltas_to_batch([(delta.request_id, delta) for delta in deltas])
    batch.validate(full=True)
    assert batch.schema == OUTPUT
    assert deltas_from_batch(batch) == deltas


def test_a_failed_row_that_has_nothing_is_null() -> None:
    rows = deltas_to_batch([(delta.request_id, delta) for delta in DELTAS[4:]]).to_pylist()
    assert [(row["text"], row["token_ids"]) for row in rows] == [(None, None), ("half", [])]


def test_logprobs_are_lists_of_structs() -> None:
    column = deltas_to_batch([("a", DELTAS[0]), ("b", DELTAS[1])]).column("logprobs").to_pylist()
    top = [{"token_id": 1, "logprob": -0.25}, {"token_id": 2, "logprob": -0.5}]
    first = [{"token_id": 1, "logprob": -0.5, "top": top}, {"token_id": 2, "logprob": -0.5, "top": []}]
    assert column == [first, None]


def test_prompts_have_the_columns_that_they_need() -> None:
    batch = prompts_to_batch(
        [
            ("x", "hi", SamplingParams(temperature=0.0, stop=("a", "b"))),
            ("y", [1, 2], SamplingParams(seed=2**64 - 1)),
            ("z", [{"role": "user", "content": "ho"}], SamplingParams()),
        ]
    )
    assert batch.to_pydict() == {
        "id": ["x", "y", "z"],
        "prompt": ["hi", None, None],
        "temperature": [0.0, None, None],
        "stop": [["a", "b"], None, None],
        "token_ids": [None, [1, 2], None],
        "seed": [None, 2**64 - 1, None],
        "messages": [None, None, [{"role": "user", "content": "ho"}]],
    }
    assert batch.schema.field("seed").type == SAMPLING_COLUMNS["seed"] == pa.uint64()


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("hi", SamplingParams(seed=-1), "seed cannot be sent"),
        ("hi", SamplingParams(n=2**40), "n cannot be sent"),
        ([1, "x"], SamplingParams(), "token_ids cannot be sent"),
        ([1, {"role": "user", "content": "x"}], SamplingParams(), "must have exactly role and content"),
        ([{"role": "user"}], SamplingParams(), "must have exactly role and content"),
        ([{"role": "user", "content": 5}], SamplingParams(), "messages cannot be sent"),
        ("\ud800", SamplingParams(), "prompt cannot be sent"),
        (5, SamplingParams(), "it is of type int"),
        (None, SamplingParams(), "it is of type NoneType"),
        (b"hi", SamplingParams(), "it is of type bytes"),
        ([1, 2.5], SamplingParams(), "token_ids cannot be sent: '2.5' is not a whole number"),
        ([1, True], SamplingParams(), "token_ids cannot be sent: 'True' is not a whole number"),
        ("hi", SamplingParams(n=2.0), "n cannot be sent: '2.0' is not a whole number"),  # type: ignore[arg-type]
        ("hi", SamplingParams(max_tokens=1.9), "max_tokens cannot be sent: '1.9'"),  # type: ignore[arg-type]
        ("hi", SamplingParams(seed=True), "seed cannot be sent"),
        ("hi", SamplingParams(stop_token_ids=(1.5,)), "stop_token_ids cannot be sent"),  # type: ignore[arg-type]
        ("hi", SamplingParams(stop_token_ids=5), "stop_token_ids cannot be sent"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit_is_refused_by_name(prompt: object, params: SamplingParams, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        prompts_to_batch([("x", prompt, params)])  # type: ignore[list-item]
