"""`jserve generate`: one prompt to a running server, its answer as it is made."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jserve.cli.console import say
from jserve.cli.options import Flag, parse
from jserve.cli.usage import UsageError
from jserve.config import ServeConfig
from jserve.request import Delta, FinishReason, Prompt, SamplingParams

if TYPE_CHECKING:
    from jserve.client import Client, FlightClient

__all__ = ["run"]

USAGE = "jserve generate [options] PROMPT"
_ADDRESS_HELP = (
    f"The server's host:port. Default: {ServeConfig.grpc_address}, with --flight {ServeConfig.flight_address}."
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Send one prompt to a running server and stream its answer to stdout."""

    prompt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")]
    """One user turn, through the model's chat template where there is one. "-" reads it from stdin."""
    address: Annotated[str | None, tyro.conf.arg(help=_ADDRESS_HELP)] = None
    flight: Flag = False
    """Ask over Arrow Flight instead of gRPC."""
    raw: Flag = False
    """Send the prompt as plain text, without the chat template."""
    max_tokens: int | None = None
    """Most tokens to generate. Default: to the model's limit."""
    temperature: float | None = None
    """0 is greedy. Default: the checkpoint's, else 1."""
    top_p: float | None = None
    """Sample from the likeliest tokens that together have this probability. Default: the checkpoint's, else 1, all."""
    top_k: int | None = None
    """Sample from so many of the likeliest tokens. Default: the checkpoint's, else 0, all."""
    min_p: float | None = None
    """Leave out tokens less likely than this share of the likeliest. Default: the checkpoint's, else 0."""
    stop: str | None = None
    """End before this text."""
    seed: int | None = None
    """Makes a sampled answer repeatable. Default: drawn by the server."""
    json: Flag = False
    """Print JSON Lines: an object a delta, and a last one with finish_reason, usage and all token_ids."""


def run(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="jserve generate", usage=USAGE)
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not text:
        raise UsageError("the PROMPT is empty", usage=USAGE)
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        stop=() if options.stop is None else (options.stop,),
        seed=options.seed,
    )
    deltas = _ask(options, text, params)
    return _print_json(deltas) if options.json else _print_text(deltas)


def _ask(options: Options, text: str, params: SamplingParams) -> Iterator[Delta]:
    with _client(options) as client:
        chat = not options.raw and client.models()[0].has_chat_template
        prompt: Prompt = [{"role": "user", "content": text}] if chat else text
        yield from client.generate(prompt, params)


def _client(options: Options) -> Client | FlightClient:
    # Each client is imported where it is asked for: gRPC and Arrow are slow to import.
    if options.flight:
        from jserve.client import FlightClient

        return FlightClient(options.address or ServeConfig.flight_address)
    from jserve.client import Client

    return Client(options.address or ServeConfig.grpc_address)


def _print_text(deltas: Iterator[Delta]) -> int:
    begun, first = time.monotonic(), None
    last = None
    for last in deltas:
        if last.token_ids and first is None:
            first = time.monotonic() - begun
        sys.stdout.write(last.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    if last is not None and last.usage is not None and sys.stderr.isatty():
        total = time.monotonic() - begun
        say(
            f"{last.usage.prompt_tokens} prompt tokens, {last.usage.output_tokens} generated in {total:.2f} s, "
            f"the first after {first or total:.2f} s; finish_reason {last.finish_reason}"
        )
    return 0


def _print_json(deltas: Iterator[Delta]) -> int:
    whole: dict[str, Any] = {"finish_reason": None, "usage": None, "timings": None, "token_ids": [], "text": ""}
    for delta in deltas:
        print(json.dumps(_as_json(delta)), flush=True)
        whole["token_ids"] += delta.token_ids
        whole["text"] += delta.text
        whole["finish_reason"] = delta.finish_reason or whole["finish_reason"]
        if delta.usage is not None:
            whole |= {"usage": asdict(delta.usage), "timings": delta.timings and asdict(delta.timings)}
    print(json.dumps(whole), flush=True)
    return 0


def _as_json(delta: Delta) -> dict[str, Any]:
    """The fields that say something; token_ids and text always."""
    fields = {name: value for name, value in asdict(delta).items() if value is not None}
    if isinstance(delta.finish_reason, FinishReason):
        fields["finish_reason"] = str(delta.finish_reason)
    return fields
