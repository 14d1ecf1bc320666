"""Nothing of a stop string is let out, a near miss is let out in full, and the split into parts does not matter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.text.stop import StopMatcher, StopStrings


def feed(matcher, parts):
    """All that is let out, and whether a stop string ended it."""
    out = []
    for part in parts:
        released, matched = matcher.push(part)
        out.append(released)
        if matched:
            return "".join(out), True
    return "".join([*out, matcher.flush()]), False


def expected(text, stops, *, include_stop):
    """By the rule in words: the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include_stop else end - len(max(found, key=len))], True
    return text, False


def test_nothing_of_the_stop_is_sent():
    matcher = StopMatcher(["DEFGHIJ"], include_stop=False)
    assert [matcher.push(char) for char in "ABCDEFGHIJ"] == [
        *[(char, False) for char in "ABC"],
        *[("", False)] * 6,
        ("", True),
    ]


def test_a_near_miss_is_released_in_full():
    matcher = StopMatcher(["DEFGHIJ"], include_stop=False)
    released = [matcher.push(char)[0] for char in "ABCDEFGHIK"]
    assert released == ["A", "B", "C", "", "", "", "", "", "", "DEFGHIK"]
    assert matcher.flush() == ""


def test_the_end_of_the_text_releases_what_is_held():
    matcher = StopMatcher(["DEFGHIJ"], include_stop=False)
    assert matcher.push("ABCDEF") == ("ABC", False)
    assert matcher.flush() == "DEF"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abSTOP")])
def test_a_stop_inside_a_part(include, text):
    assert StopMatcher(["STOP"], include_stop=include).push("abSTOPcd") == (text, True)


def test_the_match_that_ends_first_wins_and_of_those_the_longest():
    assert feed(StopMatcher(["BCDE", "C"], include_stop=False), ["ABCDE"]) == ("AB", True)
    assert feed(StopMatcher(["D", "BCD"], include_stop=False), ["ABCDE"]) == ("A", True)
    assert feed(StopMatcher(["D", "BCD"], include_stop=True), ["ABCDE"]) == ("ABCD", True)


def test_only_what_may_become_a_stop_is_held():
    matcher = StopMatcher(["aab"], include_stop=False)
    assert matcher.push("aaaa") == ("aa", False)
    assert matcher.push("c") == ("aac", False)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


@st.composite
def texts_in_parts(draw):
    text = draw(st.text("ab\u00e9", max_size=24))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return text, [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(texts_in_parts(), st.lists(st.text("ab\u00e9", min_size=1, max_size=5), min_size=1, max_size=4), st.booleans())
@settings(max_examples=500, deadline=None)
def test_any_split_gives_the_same(text_in_parts, stops, include):
    text, parts = text_in_parts
    matcher = StopMatcher(stops, include_stop=include)
    assert feed(matcher, parts) == expected(text, stops, include_stop=include)


@given(texts_in_parts(), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_what_is_held_is_always_the_start_of_a_stop(text_in_parts, stops):
    _, parts = text_in_parts
    matcher = StopMatcher(stops, include_stop=False)
    held = ""
    for part in parts:
        out, matched = matcher.push(part)
        if matched:
            return
        assert (held + part).startswith(out)
        held = (held + part)[len(out) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    assert matcher.flush() == held


def test_the_cost_is_linear_in_the_text():
    """Every step follows at most as many fail links as characters came before it: count them."""
    stops = StopStrings(["a" * 255 + "b", "aab"])
    steps = 0

    class Counting(list):
        def __getitem__(self, i):
            nonlocal steps
            steps += 1
            return super().__getitem__(i)

    stops._fail = Counting(stops._fail)
    matcher = StopMatcher(stops, include_stop=False)
    for _ in range(40):
        matcher.push("a" * 250)
    assert steps <= 10_000
