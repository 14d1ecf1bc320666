"""Which addresses the doors may be opened on."""

from __future__ import annotations

from jserve.address import Address, parse_address
from jserve.config import ServeConfig
from jserve.errors import ConfigError

__all__ = ["DOORS", "cannot_open", "check_addresses", "door_address"]

DOORS = ("grpc_address", "flight_address", "metrics_address")
"""The settings that hold addresses; an empty one leaves its door closed."""


def door_address(config: ServeConfig, setting: str) -> Address:
    """Where the door of ``setting`` is to be.

    ConfigError where the setting is no address of its kind (metrics are HTTP over TCP), or where it is not on
    loopback and ``config.insecure`` is not set: the doors have neither TLS nor tokens.
    """
    text = getattr(config, setting)
    address = parse_address(text, name=setting, unix=setting != "metrics_address")
    if not (address.is_local or config.insecure):
        raise ConfigError(
            f"{setting} is {text!r}: other machines could reach it, without TLS or a token",
            fix="use a loopback address such as 127.0.0.1, or allow it with --insecure",
        )
    return address


def check_addresses(config: ServeConfig) -> None:
    """ConfigError where an address may not be opened, where two are one, or where no door for requests is open."""
    if not (config.grpc_address or config.flight_address):
        raise ConfigError("grpc_address and flight_address are both empty; open at least one door")
    seen: dict[Address, str] = {}
    for setting in DOORS:
        if not getattr(config, setting):
            continue
        address = door_address(config, setting)
        other = seen.setdefault(address, setting)
        if other != setting and (address.port or address.path):
            raise ConfigError(
                f"{other} and {setting} are both {address}; each door needs its own",
                fix=f"choose another port with {_option(setting)} (port 0 takes a free one)",
            )


def cannot_open(setting: str, address: Address) -> ConfigError:
    """The error for a door whose listener did not get its address."""
    return ConfigError(
        f"{setting} {address} cannot be opened: it is in use, perhaps by another jserve, or this machine lacks it",
        fix=f"stop that program, or choose another address with {_option(setting)} (port 0 takes a free one)",
    )


def _option(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"
