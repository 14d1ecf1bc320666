"""Every bound of a request, by name, before anything is spent; and what absent fields become."""

import math

import pytest

from jserve.engine.contract import EngineLimits
from jserve.errors import InvalidRequest, PromptTooLong
from jserve.request import MAX_STOP_STRING_BYTES, SamplingParams
from jserve.serving import limits
from jserve.serving.limits import (
    check_max_tokens,
    check_messages,
    check_prompt_ids,
    check_request_id,
    check_stop_strings,
    check_text,
    resolve_sampling,
)

ENGINE = EngineLimits(max_model_len=32, vocab_size=100, max_num_seqs=4, num_pages=8, page_size=16, max_queue=4)


def resolve(*, defaults=SamplingParams(), eos_ids=(7,), **fields):
    return resolve_sampling(
        SamplingParams(**fields), defaults=defaults, eos_ids=eos_ids, vocab_size=100, max_model_len=32
    )


def test_absent_fields_are_the_defaults_else_neutral():
    plain = resolve()
    assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p) == (1.0, 1.0, 0, 0.0)
    assert (plain.n, plain.min_tokens, plain.stop_ids, plain.logprobs) == (1, 0, (7,), None)
    defaults = SamplingParams(temperature=0.2, top_p=0.9, top_k=5, min_p=0.1)
    own = resolve(defaults=defaults, temperature=0.0, top_k=0)
    assert (own.temperature, own.top_p, own.top_k, own.min_p) == (0.0, 0.9, 0, 0.1)


def test_an_absent_seed_is_drawn_anew():
    seeds = {resolve().seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert resolve(seed=2**64 - 1).seed == 2**64 - 1


@pytest.mark.parametrize("top_k", [0, -1, -(2**40), 100, 110, 2**40])
def test_top_k_without_a_limit(top_k):
    assert resolve(top_k=top_k).top_k == 0


@pytest.mark.parametrize("top_k", [1, 99])
def test_top_k_with_a_limit(top_k):
    assert resolve(top_k=top_k).top_k == top_k


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 1e-8}, {"temperature": 100}, {"top_p": 0}, {"top_p": 1e-9}, {"min_p": 1}, {"logprobs": 20}],
)
def test_the_edges_are_allowed(fields):
    resolve(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; allowed are 0 to 100"),
        ({"temperature": 101}, "temperature is 101"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "warm"}, "temperature is 'warm'; it must be a number"),
        ({"temperature": 10**400}, "it must be a number"),
        ({"temperature": "0.5"}, "temperature is '0.5'; it must be a number"),
        ({"temperature": True}, "temperature is True; it must be a number"),
        ({"n": True}, "n is True; it must be a whole number"),
        ({"top_p": 1.1}, "top_p is 1.1; allowed are 0 to 1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -1e-9}, "min_p is -1e-09"),
        ({"min_p": math.inf}, "min_p is inf"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be a whole number"),
        ({"seed": -1}, "seed is -1; allowed are 0 to 18446744073709551615"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"n": 0}, "n is 0; allowed are 1 to 16"),
        ({"n": 17}, "n is 17"),
        ({"n": None}, "n is None; it must be a whole number"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be 1 or more"),
        ({"max_tokens": -5}, "max_tokens is -5"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens is 4; allowed are 0 to 3"),
        ({"logprobs": 21}, "logprobs is 21; allowed are 0 to 20"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"stop_token_ids": (100,)}, "a stop token id is 100; allowed are 0 to 99"),
        ({"stop_token_ids": (-1,)}, "a stop token id is -1"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12'; it must be a list"),
        ({"stop_token_ids": 12}, "stop_token_ids is 12; it must be a list"),
        ({"stop_token_ids": (1,) * 1000}, "stop_token_ids has 1000 ids; at most 16"),
        ({"stop_token_ids": tuple(range(20, 36))}, "16 ids besides the model's 1 end-of-text ids; together at most 16"),
    ],
)
def test_what_is_out_of_bounds_is_named(fields, words):
    with pytest.raises(InvalidRequest, match=words.replace(".", r"\.")):
        resolve(**fields)


def test_stop_ids_are_the_models_and_the_callers_once_each():
    assert resolve(eos_ids=(7, 8), stop_token_ids=[9, 7, 9]).stop_ids == (7, 8, 9)
    assert resolve(eos_ids=(7, 8), stop_token_ids=[9], ignore_eos=True).stop_ids == (9,)
    assert len(resolve(stop_token_ids=tuple(range(20, 36)), ignore_eos=True).stop_ids) == 16


def fit(prompt_tokens, max_tokens=None, min_tokens=0):
    sampling = resolve(max_tokens=max_tokens, min_tokens=min_tokens)
    return check_max_tokens(sampling, max_tokens, prompt_tokens=prompt_tokens, limits=ENGINE).max_tokens


def test_prompt_and_output_fill_the_limit_exactly():
    assert fit(1) == 31
    assert fit(30) == 2
    assert fit(31) == 1
    assert fit(30, 1) == 1
    assert fit(30, 2) == 2


@pytest.mark.parametrize("prompt_tokens", [32, 33])
def test_a_prompt_without_room_for_a_token(prompt_tokens):
    with pytest.raises(PromptTooLong, match=f"has {prompt_tokens} tokens; prompt and output together may have 32"):
        fit(prompt_tokens)


def test_more_than_fits_is_refused_with_what_fits():
    with pytest.raises(InvalidRequest, match="max_tokens is 3; after a prompt of 30 tokens 2 fit in the limit of 32"):
        fit(30, 3)
    with pytest.raises(InvalidRequest, match="min_tokens is 3; after a prompt of 30 tokens 2 fit"):
        fit(30, min_tokens=3)


def test_stop_strings():
    assert check_stop_strings(["a", "bc", "a"]) == ("a", "bc")
    assert check_stop_strings(["é" * (MAX_STOP_STRING_BYTES // 2)])


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ("abc", r"stop is 'abc'; it must be a list of strings"),
        (5, "stop is 5; it must be a list"),
        (["x"] * 17, "stop has 17 strings; at most 16"),
        (["a", ""], r"stop\[1\] has 0 bytes; allowed are 1 to 256"),
        (["é" * 129], r"stop\[0\] has 258 bytes"),
        ([b"a"], r"stop\[0\] is bytes; it must be text"),
        (["\ud800"], r"stop\[0\] is not valid Unicode: a lone surrogate at character 0"),
    ],
)
def test_bad_stop_strings(stop, words):
    with pytest.raises(InvalidRequest, match=words):
        check_stop_strings(stop)


def test_prompt_ids():
    assert check_prompt_ids([0, 99], limits=ENGINE) == (0, 99)
    assert check_prompt_ids([], limits=ENGINE) == ()


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 100], r"prompt token id 100 at position 1 is not in 0\.\.99"),
        ([-1], "prompt token id -1 at position 0"),
        ([1.0], r"a prompt token id is 1\.0; it must be a whole number"),
        ([1, {"role": "user"}], "a prompt token id is dict"),
        (range(32), "the prompt has 32 tokens; prompt and output together may have 32, so a prompt may have 31"),
        (range(10**12), "the prompt has 1000000000000 tokens"),
    ],
)
def test_bad_prompt_ids(ids, words):
    with pytest.raises(InvalidRequest, match=words):
        check_prompt_ids(ids, limits=ENGINE)


def test_text_is_bounded_before_it_is_tokenized():
    check_text("é" * 8, max_bytes=16, limits=ENGINE)
    with pytest.raises(PromptTooLong, match="the prompt has 18 bytes; the limit of 32 tokens holds at most 16"):
        check_text("é" * 9, max_bytes=16, limits=ENGINE)
    with pytest.raises(InvalidRequest, match="lone surrogate at character 1"):
        check_text("a\udfff", max_bytes=16, limits=ENGINE)


def test_messages_become_plain_dicts():
    class Turn(dict):
        pass

    assert check_messages([Turn(role="user", content="hi")], max_bytes=99, limits=ENGINE) == [
        {"role": "user", "content": "hi"}
    ]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user"}], r"message 0 has the keys \['role'\]; it must have exactly role and content"),
        ([{"role": "user", "content": "x", "name": "y"}], r"the keys \['content', 'name', 'role'\]"),
        ([{"role": "user", "content": None}], "message 0's content is None; it must be text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0's content is"),
        ([{"role": 5, "content": "x"}], "message 0's role is 5"),
        ([{"role": "", "content": "x"}], "message 0's role is empty"),
        ([{"role": "user", "content": "x"}, "hi"], "message 1 is 'hi'; it must have a role and a content"),
        ([{"role": "user", "content": "x" * 99}], "the messages have 103 bytes"),
        ([{"role": "user", "content": ""}] * (limits.MAX_MESSAGES + 1), "1025 messages; at most 1024"),
    ],
)
def test_bad_messages(messages, words):
    with pytest.raises(InvalidRequest, match=words):
        check_messages(messages, max_bytes=99, limits=ENGINE)


def test_request_ids_are_bounded():
    check_request_id("x" * 128)
    with pytest.raises(InvalidRequest, match="request_id has 129 bytes; at most 128"):
        check_request_id("x" * 129)
