"""`jserve bench`: concurrent streams against a server; first-token and between-token times, tokens a second."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from jserve.cli.child import server_process
from jserve.cli.console import rows, say
from jserve.cli.options import Flag, parse
from jserve.cli.usage import UsageError
from jserve.request import SamplingParams

__all__ = ["Figures", "Trace", "measure", "run", "summarize"]

USAGE = "jserve bench [MODEL | --address HOST:PORT] [options]"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time a server under concurrent streams of random prompts, greedy, each to its full length."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = ""
    """Start a server of this model for the time of the run. Default: the default model."""
    address: str | None = None
    """Time the server that runs at this host:port instead of starting one."""
    streams: int = 8
    """Requests open at once."""
    requests: int | None = None
    """Requests in all. Default: four times --streams."""
    prompt_tokens: int = 128
    """Tokens of each prompt."""
    output_tokens: int = 64
    """Tokens generated for each."""
    json: Flag = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One request as its client saw it: when it was sent, and when how many tokens arrived (monotonic seconds)."""

    sent: float
    arrivals: list[tuple[float, int]]


@dataclass(frozen=True, kw_only=True)
class Spread:
    median: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a run came to. Milliseconds, and tokens a second."""

    requests: int
    streams: int
    ttft_ms: Spread
    """Request sent to first token."""
    itl_ms: Spread
    """Between two tokens of a stream; the tokens of one message share the time since the message before."""
    stream_tokens_per_s: Spread
    """Of each stream after its first message; p99: the rate that 99 % of the streams reach."""
    output_tokens_per_s: float
    """Of all streams together, over the whole run."""
    seconds: float


def run(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="jserve bench", usage=USAGE)
    if options.model and options.address:
        raise UsageError("give a MODEL to start a server, or --address of one that runs, not both", usage=USAGE)
    requests = 4 * options.streams if options.requests is None else options.requests
    for name, value in {**asdict(options), "requests": requests}.items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be 1 or more", usage=USAGE)
    with _address(options) as address:
        traces = asyncio.run(
            measure(
                address,
                streams=options.streams,
                requests=requests,
                prompt_tokens=options.prompt_tokens,
                output_tokens=options.output_tokens,
            )
        )
    figures = summarize(traces, streams=options.streams)
    print(json.dumps(asdict(figures)) if options.json else _table(figures))
    return 0


@contextmanager
def _address(options: Options) -> Iterator[str]:
    if options.address is not None:
        yield options.address
        return
    with server_process([options.model] if options.model else []) as server:
        yield server["addresses"]["grpc"]


async def measure(
    address: str, *, streams: int, requests: int, prompt_tokens: int, output_tokens: int, seed: int = 0
) -> list[Trace]:
    """Send ``requests`` prompts of random token ids, ``streams`` at once, after one that is not counted."""
    from jserve.client import AsyncClient

    rng = random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    async with AsyncClient(address) as client:
        vocabulary = (await client.models())[0].vocab_size

        async def one() -> Trace:
            prompt = [rng.randrange(vocabulary) for _ in range(prompt_tokens)]
            sent, arrivals = time.monotonic(), []
            async for delta in client.generate(prompt, params):
                if delta.token_ids:
                    arrivals.append((time.monotonic(), len(delta.token_ids)))
            return Trace(sent=sent, arrivals=arrivals)

        await one()
        say(f"{requests} requests of {prompt_tokens} + {output_tokens} tokens, {streams} at once, to {address}")
        left = iter(range(requests))
        done: list[Trace] = []

        async def worker() -> None:
            for _ in left:
                done.append(await one())

        await asyncio.gather(*(worker() for _ in range(streams)))
    return done


def summarize(traces: list[Trace], *, streams: int) -> Figures:
    firsts = [1e3 * (trace.arrivals[0][0] - trace.sent) for trace in traces]
    gaps: list[float] = []
    rates: list[float] = []
    for trace in traces:
        for (before, _), (now, count) in zip(trace.arrivals, trace.arrivals[1:], strict=False):
            gaps += [1e3 * (now - before) / count] * count
        took = trace.arrivals[-1][0] - trace.arrivals[0][0]
        if took > 0:
            rates.append(sum(count for _, count in trace.arrivals[1:]) / took)
    seconds = max(trace.arrivals[-1][0] for trace in traces) - min(trace.sent for trace in traces)
    tokens = sum(count for trace in traces for _, count in trace.arrivals)
    return Figures(
        requests=len(traces),
        streams=streams,
        ttft_ms=Spread(median=_quantile(firsts, 0.5), p99=_quantile(firsts, 0.99)),
        itl_ms=Spread(median=_quantile(gaps, 0.5), p99=_quantile(gaps, 0.99)),
        stream_tokens_per_s=Spread(median=_quantile(rates, 0.5), p99=_quantile(rates, 0.01)),
        output_tokens_per_s=tokens / seconds,
        seconds=seconds,
    )


def _quantile(values: list[float], q: float) -> float:
    """The smallest value that a share ``q`` of the values does not exceed; 0 where there is none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * q) - 1)] if ordered else 0.0


def _table(figures: Figures) -> str:
    def spread(value: Spread, unit: str) -> str:
        return f"median {value.median:8.1f}   p99 {value.p99:8.1f}   {unit}"

    return rows(
        [
            ("first token", spread(figures.ttft_ms, "ms")),
            ("between tokens", spread(figures.itl_ms, "ms")),
            ("a stream", spread(figures.stream_tokens_per_s, "tokens/s")),
            ("all streams", f"{figures.output_tokens_per_s:15.1f}{'':19}tokens/s"),
            ("run", f"{figures.requests} requests, {figures.streams} at once, {figures.seconds:.1f} s"),
        ],
        indent="",
    )
