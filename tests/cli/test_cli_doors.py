"""Doors that cannot be opened are found before a model is loaded."""

import os
import socket

import pytest

from jserve.cli.doors import check_doors, taken_door
from jserve.config import ServeConfig
from jserve.errors import ConfigError


def config(**settings):
    """A config whose other doors are closed."""
    return ServeConfig(**{"grpc_address": "", "flight_address": "", "metrics_address": ""} | settings)


def test_free_ports_can_be_opened():
    check_doors(config(grpc_address="127.0.0.1:0", flight_address="127.0.0.1:0", metrics_address="127.0.0.1:0"))


def test_a_port_of_another_program(unused_tcp_port):
    address = f"127.0.0.1:{unused_tcp_port}"
    asked = config(grpc_address="127.0.0.1:0", metrics_address=address)
    check_doors(asked)
    with socket.create_server(("127.0.0.1", unused_tcp_port)):
        with pytest.raises(ConfigError, match=f"metrics_address {address} cannot be opened") as caught:
            check_doors(asked)
        assert "--metrics-address" in caught.value.fix
    assert taken_door(asked) is None


@pytest.mark.parametrize("other", ["localhost", "0.0.0.0"])
def test_doors_that_are_in_each_others_way(unused_tcp_port, other):
    addresses = {"grpc_address": f"127.0.0.1:{unused_tcp_port}", "flight_address": f"{other}:{unused_tcp_port}"}
    if socket.getaddrinfo(other, 0, type=socket.SOCK_STREAM)[0][0] != socket.AF_INET:
        pytest.skip(f"{other} is no IPv4 address here")
    assert taken_door(config(**addresses, insecure=True)) == "flight_address"


def test_unix_sockets(tmp_path):
    path = tmp_path / "s"
    asked = config(grpc_address=f"unix:{path}")
    assert taken_door(asked) is None
    assert list(tmp_path.iterdir()) == []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert taken_door(asked) == "grpc_address"
    assert taken_door(asked) is None  # a dead one's leftover
    os.unlink(path)
    path.write_text("a file of somebody's")
    assert taken_door(asked) == "grpc_address"
    assert taken_door(config(grpc_address=f"unix:{tmp_path}/absent/s")) == "grpc_address"
    assert taken_door(config(grpc_address=f"unix:{tmp_path}/{'s' * 200}")) == "grpc_address"
