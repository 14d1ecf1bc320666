"""How addresses are written: one rule for doors and clients."""

import pytest

from jserve.address import parse_address
from jserve.client import Client, FlightClient
from jserve.config import ServeConfig
from jserve.errors import ConfigError

BAD = [
    "",
    "7470",
    ":7470",
    "localhost",
    "localhost:",
    "localhost:http",
    "localhost:65536",
    "localhost:-1",
    "localhost:٧٤٧٠",
    "::1:80",
    "[1]:80",
    "http://localhost:80",
    "unix:relative",
]


@pytest.mark.parametrize(
    ("text", "host", "port", "path", "local"),
    [
        ("127.0.0.1:7470", "127.0.0.1", 7470, "", True),
        ("127.9.9.9:0", "127.9.9.9", 0, "", True),
        ("localhost:65535", "localhost", 65535, "", True),
        ("[::1]:80", "::1", 80, "", True),
        ("unix:/run/jserve.sock", "", 0, "/run/jserve.sock", True),
        ("0.0.0.0:80", "0.0.0.0", 80, "", False),
        ("[::]:80", "::", 80, "", False),
        ("10.1.2.3:80", "10.1.2.3", 80, "", False),
        ("localhost.evil.org:80", "localhost.evil.org", 80, "", False),
    ],
)
def test_an_address_is_read_and_written_back(text, host, port, path, local):
    address = parse_address(text, name="it")
    assert (address.host, address.port, address.path, address.is_local) == (host, port, path, local)
    assert str(address) == text


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_address_is_named(text):
    with pytest.raises(ConfigError, match=r"^flight_address is .*; give host:port, such as .*, or unix:/path$"):
        parse_address(text, name="flight_address")


@pytest.mark.parametrize("text", BAD)
@pytest.mark.parametrize("client", [Client, FlightClient])
def test_clients_have_the_same_rule(client, text):
    with pytest.raises(ConfigError, match=r"^the address is .*; give host:port"):
        client(text)


@pytest.mark.parametrize(("client", "setting"), [(Client, "grpc_address"), (FlightClient, "flight_address")])
def test_clients_ask_where_servers_are_unless_told_otherwise(client, setting):
    with client() as connected:
        assert connected.address == getattr(ServeConfig(), setting)


def test_a_unix_socket_is_refused_where_it_cannot_be_used():
    with pytest.raises(ConfigError, match=r"give host:port, such as .*; a Unix socket cannot be used"):
        parse_address("unix:/run/metrics.sock", name="metrics_address", unix=False)
