"""Shapes of programs, and which texts run together."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jserve.engine.encoder.batching import WaitingTexts
from jserve.engine.encoder.buckets import MAX_PROGRAMS, EncoderBuckets


@dataclass(frozen=True)
class Text:
    request_id: str
    num_tokens: int


BUCKETS = EncoderBuckets.build(max_length=64, max_num_tokens=128, max_num_seqs=32)


def waiting(*lengths):
    texts = WaitingTexts(BUCKETS)
    for i, length in enumerate(lengths):
        texts.add(Text(str(i), length))
    return texts


def test_lengths_are_powers_of_two_up_to_the_limit():
    assert BUCKETS.by_length == ((16, (1, 2, 8)), (32, (1, 4)), (64, (1, 2)))
    assert BUCKETS.shapes == ((1, 16), (2, 16), (1, 32), (1, 64), (8, 16), (4, 32), (2, 64))
    odd = EncoderBuckets.build(max_length=40, max_num_tokens=80, max_num_seqs=4)
    assert odd.by_length == ((16, (1, 4)), (32, (1, 2)), (40, (1, 2)))


@given(max_length=st.integers(1, 1 << 15), max_num_tokens=st.integers(1, 1 << 18), max_num_seqs=st.integers(1, 1 << 12))
def test_programs_are_few_and_hold_every_text(max_length, max_num_tokens, max_num_seqs):
    buckets = EncoderBuckets.build(max_length=max_length, max_num_tokens=max_num_tokens, max_num_seqs=max_num_seqs)
    assert len(buckets.shapes) <= MAX_PROGRAMS
    assert len(set(buckets.shapes)) == len(buckets.shapes)
    for length, steps in buckets.by_length:
        assert steps[0] == 1
        assert steps[-1] == max(1, min(max_num_tokens // length, max_num_seqs))
    assert buckets.by_length[-1][0] == max_length
    for tokens in (1, max_length):
        at = buckets.length_for(tokens)
        assert buckets.by_length[at][0] >= tokens
        assert at == 0 or buckets.by_length[at - 1][0] < tokens


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([], []),
        ([5], [("0", 1, 16)]),
        # Texts of one bucket, in their order, no more than fit.
        ([5] * 10, [("01234567", 8, 16), ("89", 2, 16)]),
        # More than half of the next shape: padded up. Less: the smaller one first.
        ([5] * 5, [("01234", 8, 16)]),
        ([5] * 4, [("01", 2, 16), ("23", 2, 16)]),
        # The oldest decides the length; a row that is free goes to a shorter text.
        ([30, 30, 30, 5], [("0123", 4, 32)]),
        ([60, 5, 60], [("02", 2, 64), ("1", 1, 16)]),
        ([5, 60, 5], [("02", 2, 16), ("1", 1, 64)]),
    ],
)
def test_groups(lengths, groups):
    texts = waiting(*lengths)
    found = []
    while (group := texts.take()) is not None:
        found.append(("".join(text.request_id for text in group.texts), group.num_rows, group.length))
    assert found == groups
    assert len(texts) == 0


@given(st.lists(st.integers(1, 64), max_size=60))
def test_every_text_runs_once_and_the_oldest_is_never_passed_over(lengths):
    texts = waiting(*lengths)
    left = list(range(len(lengths)))
    while left:
        group = texts.take()
        ids = [int(text.request_id) for text in group.texts]
        assert left[0] in ids
        assert (group.num_rows, group.length) in BUCKETS.shapes
        assert len(ids) <= group.num_rows
        assert all(text.num_tokens <= group.length for text in group.texts)
        left = [i for i in left if i not in ids]
    assert texts.take() is None


def test_a_text_that_is_removed_does_not_run():
    texts = waiting(5, 5, 60)
    texts.remove(Text("0", 5))
    texts.remove(Text("9", 5))
    assert [text.request_id for text in texts] == ["1", "2"]
    assert [text.request_id for text in texts.take().texts] == ["1"]
