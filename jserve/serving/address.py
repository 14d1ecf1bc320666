"""Addresses of doors: how they are written, and which may be opened without protection."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from jserve.config import ServeConfig
from jserve.errors import ConfigError

__all__ = ["DOORS", "Address", "check_addresses", "parse_address"]

DOORS = ("grpc_address", "flight_address", "metrics_address")
"""The settings that hold addresses; an empty one leaves its door closed."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """A TCP host and port, or the path of a Unix socket (then ``host`` is empty and ``port`` 0)."""

    host: str = ""
    port: int = 0
    """0: any free port."""
    path: str = ""

    def __str__(self) -> str:
        """As gRPC and the settings write it."""
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Reachable from this machine only."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name: whatever it means today, it may mean another address tomorrow


def parse_address(text: str, *, setting: str, insecure: bool) -> Address:
    """Read ``host:port``, ``[v6]:port`` or ``unix:/path``.

    ConfigError, naming ``setting``, where it is none of them, or where it is not on loopback and ``insecure``
    is not set: the doors have neither TLS nor tokens.
    """
    address = _read(text)
    if address is None:
        raise ConfigError(f"{setting} is {text!r}; give host:port, such as 127.0.0.1:7470, or unix:/path")
    if not (address.is_local or insecure):
        raise ConfigError(
            f"{setting} is {text!r}: other machines could reach it, without TLS or a token",
            fix="use a loopback address such as 127.0.0.1, or allow it with --insecure",
        )
    return address


def check_addresses(config: ServeConfig) -> None:
    """ConfigError where an address cannot be read or may not be opened, or where both doors for requests are closed."""
    if not (config.grpc_address or config.flight_address):
        raise ConfigError("grpc_address and flight_address are both empty; open at least one door")
    for setting in DOORS:
        if getattr(config, setting):
            parse_address(getattr(config, setting), setting=setting, insecure=config.insecure)


def _read(text: str) -> Address | None:
    if text.startswith("unix:/"):
        return Address(path=text.removeprefix("unix:"))
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        return None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            return None
    elif ":" in host:
        return None
    return Address(host=host, port=int(port)) if host and not any(c in host for c in "/[] ") else None
