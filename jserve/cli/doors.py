"""Doors looked at before a model is loaded: minutes of compiling are no time to learn that a port is taken."""

from __future__ import annotations

import socket

from jserve.config import ServeConfig
from jserve.errors import ConfigError
from jserve.serving.address import DOORS, check_addresses, parse_address

__all__ = ["check_doors", "is_taken"]


def check_doors(config: ServeConfig) -> None:
    """ConfigError where a door of ``config`` could not be opened now."""
    check_addresses(config)
    for setting in DOORS:
        address = getattr(config, setting)
        if address and is_taken(address):
            option = f"--{setting.replace('_', '-')}"
            raise ConfigError(
                f"{setting} {address} cannot be opened: another program uses it, or this machine lacks it",
                fix=f"stop that program, or choose another port with {option} (port 0 takes a free one)",
            )


def is_taken(address: str) -> bool:
    """Whether a listener of ours would not get this TCP address. Unix sockets are left to their door."""
    place = parse_address(address, setting="address", insecure=True)
    if place.path:
        return False
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed one's leftovers do not count
            probe.bind(target)
    except OSError:
        return True
    return False
