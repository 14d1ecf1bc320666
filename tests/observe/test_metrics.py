"""What is counted, what is served, and that the server goes away cleanly."""

import socket
import threading
import urllib.error
import urllib.request

import pytest

from jserve.address import Address, parse_address
from jserve.engine.contract import EngineLimits, EngineStats
from jserve.errors import ConfigError
from jserve.observe import server as server_module
from jserve.observe.metrics import Metrics
from jserve.request import FinishReason

FREE = Address(host="127.0.0.1")


class StatsEngine:
    limits = EngineLimits(max_model_len=64, vocab_size=10, max_num_seqs=4, num_pages=40, page_size=16, max_queue=4)

    def stats(self):
        return EngineStats(
            waiting=3,
            running=2,
            pages_free=30,
            pages_in_use=10,
            prompt_tokens=100,
            output_tokens=50,
            dispatches=7,
            preemptions=1,
            compilations=0,
            last_progress=0.0,
            ready=True,
            failed=None,
        )


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(f"jserve_{name}", {"model_name": "m", **labels})


def test_the_engine_is_asked_at_each_scrape():
    metrics = Metrics(model_name="m", engine=StatsEngine())
    expected = {
        "num_requests_waiting": 3,
        "num_requests_running": 2,
        "kv_cache_usage_ratio": 0.25,
        "kv_cache_pages_in_use": 10,
        "kv_cache_pages_free": 30,
        "engine_ready": 1,
        "prompt_tokens_total": 100,
        "generation_tokens_total": 50,
        "num_preemptions_total": 1,
        "dispatches_total": 7,
        "compilations_total": 0,
    }
    assert {name: value(metrics, name) for name in expected} == expected


def test_requests_are_counted():
    metrics = Metrics(model_name="m")
    metrics.first_token(0.2)
    metrics.inter_token(0.4, tokens=4)
    metrics.choice_finished(FinishReason.STOP)
    metrics.request_finished(total=2.0, queue=0.5)
    assert value(metrics, "time_to_first_token_seconds_sum") == 0.2
    assert value(metrics, "inter_token_latency_seconds_count") == 4
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.4)
    assert value(metrics, "e2e_request_latency_seconds_sum") == 2.0
    assert value(metrics, "request_queue_time_seconds_sum") == 0.5
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    # Reasons that did not come yet are there, at 0.
    assert value(metrics, "request_success_total", finished_reason="error") == 0
    assert value(metrics, "num_requests_waiting") is None


def test_two_servers_of_one_process_do_not_mix():
    first, second = Metrics(model_name="m"), Metrics(model_name="m")
    first.choice_finished(FinishReason.STOP)
    assert value(second, "request_success_total", finished_reason="stop") == 0


def test_it_is_served_on_a_free_port_and_goes_away():
    metrics = Metrics(model_name="m", engine=StatsEngine())
    threads = threading.active_count()
    with metrics.serve(FREE) as served:
        assert served.address == f"127.0.0.1:{served.port}"
        with urllib.request.urlopen(f"http://{served.address}/metrics", timeout=5) as response:
            assert response.headers["Content-Type"].startswith("text/plain")
            assert b'jserve_num_requests_waiting{model_name="m"} 3.0' in response.read()
        with pytest.raises(urllib.error.HTTPError, match="404") as missing:
            urllib.request.urlopen(f"http://{served.address}/other", timeout=5)
        missing.value.close()
    assert threading.active_count() == threads
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{served.port}/metrics", timeout=5)
    # The port is free again; closing twice is once.
    again = metrics.serve(parse_address(served.address, name="served"))
    again.close()
    again.close()


def test_a_silent_client_does_not_hold_up_the_close():
    served = Metrics(model_name="m").serve(FREE)
    with socket.create_connection(("127.0.0.1", served.port)):
        with urllib.request.urlopen(f"http://{served.address}/metrics", timeout=5) as response:
            assert response.status == 200
        served.close()


def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 2)
    with Metrics(model_name="m").serve(FREE) as served:
        silent = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(2)]
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as third:
            assert third.recv(1) == b""
        for connection in silent:
            connection.close()


@pytest.mark.parametrize("address", [Address(host="256.0.0.1"), Address(path="/tmp/metrics.sock")], ids=str)
def test_an_address_that_cannot_be_bound_is_refused_in_words(address):
    with pytest.raises(ConfigError, match=f"cannot serve metrics on {address}: "):
        Metrics(model_name="m").serve(address)


def test_a_port_in_use_is_refused_in_words():
    with (
        Metrics(model_name="m").serve(FREE) as served,
        pytest.raises(ConfigError, match=f"cannot serve metrics on {served.address}"),
    ):
        Metrics(model_name="m").serve(parse_address(served.address, name="served"))


def test_ipv6():
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        served = Metrics(model_name="m").serve(Address(host="::1"))
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    with served, urllib.request.urlopen(f"http://{served.address}/metrics", timeout=5) as response:
        assert response.status == 200
