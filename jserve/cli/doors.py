"""Doors looked at before a model is loaded: minutes of compiling are no time to learn that a port is taken."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import ExitStack
from pathlib import Path

from jserve.address import Address
from jserve.config import ServeConfig
from jserve.serving.address import DOORS, cannot_open, check_addresses, door_address

__all__ = ["check_doors", "taken_door"]


def check_doors(config: ServeConfig) -> None:
    """ConfigError where a door of ``config`` could not be opened now."""
    check_addresses(config)
    setting = taken_door(config)
    if setting is not None:
        raise cannot_open(setting, door_address(config, setting))


def taken_door(config: ServeConfig) -> str | None:
    """The setting of the first door that would not get its address; None: all would.

    Each probe stays until the last: doors may be in each other's way too, such as localhost:80 and 127.0.0.1:80.
    """
    with ExitStack() as probes:
        for setting in DOORS:
            if getattr(config, setting):
                try:
                    _probe(door_address(config, setting), probes)
                except OSError:
                    return setting
    return None


def _probe(address: Address, probes: ExitStack) -> None:
    """OSError where a listener of ours would not get ``address``."""
    if address.path:
        _probe_path(Path(address.path))
        return
    family, kind, protocol, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    probe = probes.enter_context(socket.socket(family, kind, protocol))
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed one's leftovers do not count
    probe.bind(target)
    probe.listen(1)  # until then another probe could bind the same


def _probe_path(path: Path) -> None:
    """A Unix socket is looked at and not bound, for that would leave a file behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            if not (path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)):
                raise
        except ConnectionRefusedError:  # nobody listens: gRPC takes away a dead socket, and nothing else
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise
        else:
            raise FileExistsError(f"somebody listens on {path}")
