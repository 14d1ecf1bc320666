"""`jserve serve`: load a model, open the doors, stay until told to stop."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING

from jserve import __version__
from jserve.cli.console import rows, say
from jserve.cli.doors import check_doors
from jserve.cli.options import parse
from jserve.cli.settings import ServeOptions, digest, settle
from jserve.config import ServeConfig
from jserve.progress import ConsoleProgress

if TYPE_CHECKING:
    from jserve.request import ServedModel
    from jserve.serving.server import Addresses

__all__ = ["run"]

USAGE = "jserve serve [MODEL] [options]"


def run(arguments: list[str]) -> int:
    begun = time.monotonic()
    options = parse(ServeOptions, arguments, prog="jserve serve", usage=USAGE)
    config, origins = settle(options, arguments)
    if options.print_config:
        _print_config(config, origins, as_json=options.json)
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jserve").setLevel(logging.INFO)

    check_doors(config)
    say(f"jserve {__version__} loads {config.model}")
    from jserve.load import load
    from jserve.serving.server import Server

    with _heeding_interrupts(), ConsoleProgress() as progress:
        loaded = load(config, progress=progress)
    try:
        with Server(config, loaded.frontend, loaded.engine, loaded.metrics) as server:
            doors = server.start()

            def announce() -> None:
                took = time.monotonic() - begun
                if options.json:
                    facts = {"model": asdict(loaded.served), "addresses": asdict(doors), "seconds": round(took, 3)}
                    print(json.dumps({"event": "ready"} | facts), flush=True)
                say(f"ready after {took:.1f} s\n" + rows(describe(loaded.served, doors, config)))

            status = server.run_until_signal(ready=announce)
    finally:
        loaded.close()
    say("stopped")
    return status


@contextmanager
def _heeding_interrupts() -> Iterator[None]:
    """KeyboardInterrupt for a SIGINT, in the end at the latest: JAX's hooks of the garbage collector swallow one."""
    heard = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        heard = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
        if heard:
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


def describe(served: ServedModel, doors: Addresses, config: ServeConfig) -> list[tuple[str, str]]:
    """What is served and where, and lines to paste that ask it something."""
    if served.kind == "encoder":
        return _describe_encoder(served, doors, config)
    tokens = served.num_pages * served.page_size
    most, long = config.max_num_seqs, served.max_model_len
    short = min(long, 512)
    rooms = [f"{max(1, min(tokens // length, most))} of {length} tokens" for length in dict.fromkeys((long, short))]
    table = [
        _model_row(served, config),
        ("cache", f"{served.num_pages} pages of {served.page_size} = {tokens} tokens"),
        ("room", f"at once {' or '.join(rooms)}; at most {most}"),
        *_door_rows(doors),
    ]
    if doors.grpc is not None:
        text = served.has_tokenizer
        if text:
            table.append(("shell", f'jserve generate --address {doors.grpc} "What is gravity?"'))
        most_new = min(48, max(1, long // 2))
        prompt = '"Gravity is"' if text else "[1, 2, 3]"
        table += [
            ("python", "from jserve import SamplingParams"),
            ("", "from jserve.client import Client"),
            ("", f'for delta in Client("{doors.grpc}").generate({prompt}, SamplingParams(max_tokens={most_new})):'),
            ("", '    print(delta.text, end="", flush=True)' if text else "    print(delta.token_ids, flush=True)"),
        ]
    return table


def _describe_encoder(served: ServedModel, doors: Addresses, config: ServeConfig) -> list[tuple[str, str]]:
    table = [
        _model_row(served, config),
        ("vectors", f"{served.dimensions} numbers each, of texts of up to {served.max_model_len} tokens"),
        *_door_rows(doors),
    ]
    if doors.grpc is not None:
        table += [
            ("python", "from jserve.client import Client"),
            ("", f'print(Client("{doors.grpc}").embed(["What is gravity?", "Things fall."]).values)'),
        ]
    return table


def _model_row(served: ServedModel, config: ServeConfig) -> tuple[str, str]:
    return "model", f"{served.name} ({served.family}), {served.dtype}, {served.mesh}; settings {digest(config)}"


def _door_rows(doors: Addresses) -> list[tuple[str, str]]:
    rows = [(door, address) for door, address in (("grpc", doors.grpc), ("flight", doors.flight)) if address]
    if doors.metrics is not None:
        rows.append(("metrics", f"http://{doors.metrics}/metrics"))
    return rows


def _print_config(config: ServeConfig, origins: dict[str, str], *, as_json: bool) -> None:
    values = asdict(config)
    if as_json:
        print(json.dumps({name: {"value": value, "origin": origins[name]} for name, value in values.items()}))
        return
    width = max(map(len, values))
    for name, value in values.items():
        shown = "chosen at start" if value is None else json.dumps(value)
        print(f"{name.replace('_', '-'):<{width}}  {shown:<28}  # {origins[name]}")
