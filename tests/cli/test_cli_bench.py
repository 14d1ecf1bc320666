"""The figures of a run follow from when its tokens arrived."""

import pytest

from jserve.cli.bench import Trace, summarize


def test_figures_of_two_streams():
    traces = [
        Trace(sent=0.0, arrivals=[(0.1, 1), (0.2, 1), (0.5, 3)]),
        Trace(sent=0.0, arrivals=[(0.3, 1), (1.0, 7)]),
    ]
    figures = summarize(traces, streams=2)
    assert figures.ttft_ms.median == pytest.approx(100)
    assert figures.ttft_ms.p99 == pytest.approx(300)
    assert figures.itl_ms.median == pytest.approx(100)
    assert figures.stream_tokens_per_s.median == pytest.approx(10)
    assert figures.output_tokens_per_s == pytest.approx(13)
    assert figures.seconds == pytest.approx(1.0)


def test_one_message_has_no_time_between_tokens():
    figures = summarize([Trace(sent=1.0, arrivals=[(1.5, 4)])], streams=1)
    assert figures.itl_ms.median == 0.0
    assert figures.stream_tokens_per_s.median == 0.0
    assert figures.output_tokens_per_s == pytest.approx(8)
