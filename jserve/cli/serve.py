"""`jserve serve`: load a model, open the doors, stay until told to stop."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from jserve.cli.console import ConsoleProgress, rows, say
from jserve.cli.options import parse
from jserve.cli.settings import ServeOptions, digest, settle
from jserve.config import ServeConfig

if TYPE_CHECKING:
    from jserve.request import ServedModel

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

    from jserve.llm import load
    from jserve.serving.server import Server

    with ConsoleProgress() as progress:
        loaded = load(config, progress=progress)
    try:
        server = Server(config=config, frontend=loaded.frontend, engine=loaded.engine, metrics=loaded.metrics)
        doors = server.start()
        took = time.monotonic() - begun
        if options.json:
            ready = {"event": "ready", "model": asdict(loaded.served), "addresses": asdict(doors), "seconds": took}
            print(json.dumps(ready), flush=True)
        say(f"ready after {took:.1f} s\n" + rows(describe(loaded.served, asdict(doors), config)))
        server.run_until_signal()
    finally:
        loaded.close()
    say("stopped")
    return 0


def describe(served: ServedModel, doors: dict[str, str | None], config: ServeConfig) -> list[tuple[str, str]]:
    """What is served and where, and lines to paste that ask it something."""
    tokens = served.num_pages * served.page_size
    longest = served.max_model_len
    table = [
        ("model", f"{served.name} ({served.family}), {served.dtype}, {served.mesh}, settings {digest(config)}"),
        (
            "cache",
            f"{served.num_pages} pages of {served.page_size} = {tokens} tokens: about "
            f"{max(1, tokens // longest)} sequences at {longest} tokens, {config.max_num_seqs} at most",
        ),
    ]
    table += [(name, address) for name, address in doors.items() if address]
    if doors.get("grpc"):
        table += [
            ("shell", f'jserve generate --address {doors["grpc"]} "What is gravity?"'),
            ("python", "from jserve.client import Client"),
            ("", f'for delta in Client("{doors["grpc"]}").generate("Gravity is"): print(delta.text, end="")'),
        ]
    return table


def _print_config(config: ServeConfig, origins: dict[str, str], *, as_json: bool) -> None:
    values = asdict(config)
    if as_json:
        print(json.dumps({name: {"value": value, "origin": origins[name]} for name, value in values.items()}))
        return
    width = max(map(len, values))
    for name, value in values.items():
        shown = "chosen at start" if value is None else json.dumps(value)
        print(f"{name.replace('_', '-'):<{width}}  {shown:<28}  # {origins[name]}")
