"""`jserve demo`: the whole way once: fetch, convert, serve, ask over gRPC, ask over Flight, stop."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from jserve import __version__
from jserve.cli.console import rows, say
from jserve.cli.doors import taken_door
from jserve.cli.options import Flag, parse
from jserve.config import ServeConfig, cache_dir
from jserve.progress import ConsoleProgress
from jserve.request import Delta, SamplingParams

__all__ = ["run"]

QUESTION = "What is gravity? Answer in one sentence."
PARAMS = SamplingParams(temperature=0.0, max_tokens=96)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Serve the default model for a moment and ask it one question, over gRPC and over Arrow Flight."""

    json: Flag = False
    """Print one JSON object with both answers and their times, instead of streaming them."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One streamed answer as its client saw it. Seconds; tokens a second after the first message."""

    door: str
    text: str
    tokens: int
    ttft_s: float
    tokens_per_s: float


def run(arguments: list[str]) -> int:
    begun = time.monotonic()
    options = parse(Options, arguments, prog="jserve demo", usage="jserve demo [--json]")
    config = _config()
    say(f"jserve {__version__} loads {config.model}")
    from jserve.client import Client, FlightClient
    from jserve.load import load
    from jserve.serving.server import Server

    with ConsoleProgress() as progress:
        loaded = load(config, progress=progress)
    try:
        with Server(config, loaded.frontend, loaded.engine, loaded.metrics) as server:
            doors = server.start()
            if doors.grpc is None or doors.flight is None:
                raise RuntimeError("the demo opens both doors")
            say(f"{loaded.served.name} is served after {time.monotonic() - begun:.1f} s\n\n{QUESTION}")
            prompt = [{"role": "user", "content": QUESTION}]
            asked = time.monotonic() - begun
            with Client(doors.grpc) as client:
                first = _ask("gRPC", doors.grpc, client.generate(prompt, PARAMS), echo=not options.json)
            with FlightClient(doors.flight) as flight:
                second = _ask("Flight", doors.flight, flight.generate(prompt, PARAMS), echo=not options.json)
    finally:
        loaded.close()
    first_token = asked + first.ttft_s
    if options.json:
        answers = [asdict(first), asdict(second)]
        print(json.dumps({"answers": answers, "first_token_s": first_token, "cache": str(cache_dir())}))
    say(
        rows(
            [
                ("first token", f"{first_token:.1f} s after the start of the program"),
                *((answer.door, _timing(answer)) for answer in (first, second)),
                ("kept in", f"{cache_dir()} (download, Orbax checkpoint, compiled programs)"),
                ("next", "jserve serve, then in another terminal: jserve generate 'Tell me a story.'"),
            ]
        )
    )
    return 0


def _ask(door: str, address: str, deltas: Iterator[Delta], *, echo: bool) -> Answer:
    say(f"\nover {door}, {address}:")
    sent = time.monotonic()
    text, arrivals = "", []
    for delta in deltas:
        if delta.token_ids:
            arrivals.append((time.monotonic(), len(delta.token_ids)))
        text += delta.text
        if echo:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    if echo:
        sys.stdout.write("\n")
    begun, ended = arrivals[0][0], arrivals[-1][0]
    later = sum(count for _, count in arrivals[1:])
    return Answer(
        door=door,
        text=text,
        tokens=sum(count for _, count in arrivals),
        ttft_s=begun - sent,
        tokens_per_s=later / (ended - begun) if later else 0.0,
    )


def _timing(answer: Answer) -> str:
    return (
        f"{answer.tokens} tokens, the first after {1e3 * answer.ttft_s:.0f} ms, then {answer.tokens_per_s:.0f} a second"
    )


def _config() -> ServeConfig:
    """A server for one caller, so that few and small programs are compiled; on free ports where its own are taken."""
    config = ServeConfig(max_num_seqs=2, max_num_tokens=64, max_model_len=1024)
    if taken_door(config) is None:
        return config
    free = "127.0.0.1:0"
    return dataclasses.replace(config, grpc_address=free, flight_address=free, metrics_address=free)
