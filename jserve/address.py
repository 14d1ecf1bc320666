"""Addresses, of doors and as clients take them: how they are written, and which lie on this machine."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from jserve.errors import ConfigError

__all__ = ["Address", "parse_address"]


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


def parse_address(text: str, *, name: str, unix: bool = True) -> Address:
    """Read ``host:port``, ``[v6]:port`` or, where ``unix`` is set, ``unix:/path``.

    ConfigError, calling it by ``name``, where it is none of them.
    """
    address = _read(text)
    if address is None or (address.path and not unix):
        forms = "host:port, such as 127.0.0.1:7470" + (", or unix:/path" if unix else "; a Unix socket cannot be used")
        raise ConfigError(f"{name} is {text!r}; give {forms}")
    return address


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
