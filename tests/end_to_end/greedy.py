"""Greedy continuations that transformers made of a real model (tests/oracle), and what is held against them."""

import json
from pathlib import Path

from jserve import SamplingParams

DATA = Path(__file__).parents[1] / "oracle" / "data"
NEAR = 1e-4
"""Where the two best scores differ by less, either is right, and what follows may differ."""


def read_cases(name):
    return json.loads((DATA / name).read_text(encoding="utf-8"))["cases"]


def how_many(cases):
    """The prompts of ``cases``, in words for a row of docs/models.md."""
    return f"{len(cases)} prompts of up to {max(len(case['prompt_ids']) for case in cases):,} tokens"


def greedy(case):
    return SamplingParams(temperature=0, max_tokens=len(case["output_ids"]))


def prompt_of(case):
    """Chat turns, a text, or the ids where there is neither."""
    prompt = case["prompt"] or case["prompt_ids"]
    return [dict(turn) for turn in prompt] if isinstance(prompt[0], dict) else prompt


def check(case, token_ids):
    """Equal to the oracle's ids, but for what follows a near tie."""
    for i, (got, want) in enumerate(zip(token_ids, case["output_ids"], strict=True)):
        if got != want:
            assert case["margins"][i] < NEAR, f"{case['name']}: token {i} is {got}, not {want}"
            return


def check_all(cases, outputs):
    for case, tokens in zip(cases, outputs, strict=True):
        check(case, tokens)


def gather(deltas, n=1):
    """The ids of each of a request's n choices."""
    tokens = [[] for _ in range(n)]
    for delta in deltas:
        assert delta.error is None or not delta.error
        tokens[delta.index].extend(delta.token_ids)
    return tokens[0] if n == 1 else tokens
