"""Which addresses a door may be opened on."""

import pytest

from jserve.config import ServeConfig
from jserve.errors import ConfigError
from jserve.serving.address import check_addresses, door_address


def closed(**settings):
    """A config whose other doors are closed."""
    return ServeConfig(**{"grpc_address": "", "flight_address": "", "metrics_address": ""} | settings)


@pytest.mark.parametrize("setting", ["grpc_address", "flight_address", "metrics_address"])
@pytest.mark.parametrize("text", ["0.0.0.0:80", "[::]:80", "10.1.2.3:80", "example.org:80", "localhost.evil.org:80"])
def test_addresses_that_others_reach_need_insecure(setting, text):
    with pytest.raises(ConfigError, match=f"{setting} is .* without TLS or a token") as caught:
        door_address(closed(**{setting: text}), setting)
    assert "--insecure" in caught.value.fix
    assert str(door_address(closed(**{setting: text}, insecure=True), setting)) == text


def test_metrics_are_not_served_on_a_unix_socket():
    config = closed(grpc_address="unix:/run/a.sock", metrics_address="unix:/run/b.sock")
    with pytest.raises(ConfigError, match=r"metrics_address is 'unix:/run/b\.sock'; give host:port"):
        check_addresses(config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"grpc_address": "127.0.0.1:7470", "flight_address": "127.0.0.1:7470"},
            "grpc_address and flight_address are both 127.0.0.1:7470",
        ),
        (
            {"grpc_address": "[::1]:80", "metrics_address": "[::1]:080"},
            r"grpc_address and metrics_address are both \[::1\]:80",
        ),
        ({"grpc_address": "unix:/a", "flight_address": "unix:/a"}, "grpc_address and flight_address are both unix:/a"),
    ],
)
def test_two_doors_have_two_addresses(settings, words):
    with pytest.raises(ConfigError, match=words):
        check_addresses(closed(**settings))


def test_free_ports_are_not_the_same_port():
    check_addresses(closed(grpc_address="127.0.0.1:0", flight_address="127.0.0.1:0", metrics_address="127.0.0.1:0"))
