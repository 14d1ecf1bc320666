"""How the clients connect."""

from __future__ import annotations

from jserve.address import Address
from jserve.config import MAX_MESSAGE_MB
from jserve.errors import ConfigError

__all__ = ["channel_options"]


def channel_options(address: Address, *, max_message_mb: int) -> list[tuple[str, int]]:
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
    if address.is_local:
        options.append(("grpc.enable_http_proxy", 0))  # a proxy cannot reach this machine's loopback
    return options
