"""How both gRPC clients connect."""

from __future__ import annotations

from jserve.config import MAX_MESSAGE_MB
from jserve.errors import ConfigError

__all__ = ["DEFAULT_ADDRESS", "channel_options", "check_address"]

DEFAULT_ADDRESS = "127.0.0.1:7470"

_LOCAL = ("127.", "localhost:", "[::1]:", "unix:")


def check_address(address: str) -> str:
    """The address as given; ConfigError unless it is host:port or unix:/path."""
    _, colon, port = address.rpartition(":")
    if address.startswith("unix:/") or (colon and "/" not in address and port.isdecimal()):
        return address
    raise ConfigError(f"the address is {address!r}; give host:port, such as {DEFAULT_ADDRESS}, or unix:/path")


def channel_options(address: str, *, max_message_mb: int) -> list[tuple[str, int]]:
    """Raises ConfigError where gRPC cannot take the limit."""
    if not 1 <= max_message_mb <= MAX_MESSAGE_MB:
        raise ConfigError(f"max_message_mb is {max_message_mb}; gRPC allows 1 to {MAX_MESSAGE_MB}")
    limit = max_message_mb << 20
    options = [
        ("grpc.max_send_message_length", limit),
        ("grpc.max_receive_message_length", limit),
        # A dead connection is noticed during a long silence too. Servers of jserve allow such pings.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]
    if address.startswith(_LOCAL):
        options.append(("grpc.enable_http_proxy", 0))  # a proxy cannot reach this machine's loopback
    return options
