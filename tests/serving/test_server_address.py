"""Which addresses a door may be opened on."""

import pytest

from jserve.errors import ConfigError
from jserve.serving.address import parse_address


@pytest.mark.parametrize(
    ("text", "host", "port", "path"),
    [
        ("127.0.0.1:7470", "127.0.0.1", 7470, ""),
        ("127.9.9.9:0", "127.9.9.9", 0, ""),
        ("localhost:65535", "localhost", 65535, ""),
        ("[::1]:80", "::1", 80, ""),
        ("unix:/run/jserve.sock", "", 0, "/run/jserve.sock"),
    ],
)
def test_local_addresses(text, host, port, path):
    address = parse_address(text, setting="grpc_address", insecure=False)
    assert (address.host, address.port, address.path) == (host, port, path)
    assert str(address) == text


@pytest.mark.parametrize("text", ["0.0.0.0:80", "[::]:80", "10.1.2.3:80", "example.org:80", "localhost.evil.org:80"])
def test_addresses_that_others_reach_need_insecure(text):
    with pytest.raises(ConfigError, match="without TLS or a token") as caught:
        parse_address(text, setting="grpc_address", insecure=False)
    assert "--insecure" in caught.value.fix
    assert str(parse_address(text, setting="grpc_address", insecure=True)) == text


@pytest.mark.parametrize(
    "text", ["", "7470", ":7470", "localhost", "localhost:", "localhost:http", "localhost:65536", "::1:80", "[1]:80"]
)
def test_what_is_no_address_is_named(text):
    with pytest.raises(ConfigError, match=r"flight_address is .*; give host:port"):
        parse_address(text, setting="flight_address", insecure=True)
