"""The program as a whole, in processes of its own, on a tiny checkpoint."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from jserve.cli.child import server_process

FREE = "127.0.0.1:0"
GRPC, FLIGHT, METRICS = (("--grpc-address", FREE), ("--flight-address", FREE), ("--metrics-address", FREE))
SMALL = ("--max-num-seqs", "2", "--max-num-tokens", "32", "--max-model-len", "128")


def test_a_server_says_what_it_serves_answers_and_drains(jserve, tiny_gguf, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with server_process([str(tiny_gguf), *SMALL]) as ready:
        assert ready["event"] == "ready"
        assert ready["model"]["name"] == "tiny"
        assert ready["model"]["max_model_len"] == 128
        doors = ready["addresses"]

        options = ("--json", "--temperature", "0", "--max-tokens", "9", "hello")
        grpc = jserve("generate", "--address", doors["grpc"], *options)
        flight = jserve("generate", "--address", doors["flight"], "--flight", *options)
        assert grpc.returncode == flight.returncode == 0, grpc.stderr + flight.stderr
        whole, other = (json.loads(done.stdout.splitlines()[-1]) for done in (grpc, flight))
        assert whole["finish_reason"] == "length"
        assert len(whole["token_ids"]) == 9
        assert whole["token_ids"] == other["token_ids"]

        long = jserve("generate", "--address", doors["grpc"], "long " * 60)
        assert long.returncode == 1
        assert long.stderr.startswith("error JS-REQ-02: ")
        assert "128" in long.stderr
        assert len(long.stderr.splitlines()) == 1

        with urllib.request.urlopen(f"http://{doors['metrics']}/metrics", timeout=10) as page:
            metrics = page.read().decode()
        assert "jserve_" in metrics

        os.kill(ready["pid"], signal.SIGTERM)
        _, status = os.waitpid(ready["pid"], 0)
        assert os.waitstatus_to_exitcode(status) == 0


def _errors(done):
    assert "Traceback" not in done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("error")]


def test_a_missing_model_is_one_line(jserve, tmp_path):
    done = jserve("serve", *GRPC, *FLIGHT, *METRICS, str(tmp_path / "nowhere.gguf"))
    assert done.returncode == 4
    (line,) = _errors(done)
    assert line.startswith("error JS-CKP-02: ")
    assert "nowhere.gguf" in line


@pytest.mark.parametrize("verb", [("serve", *GRPC, *FLIGHT, *METRICS), ("inspect",)], ids=["serve", "inspect"])
def test_a_damaged_file_is_one_line(jserve, tiny_gguf, tmp_path, verb):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(tiny_gguf.read_bytes()[:-1000])
    done = jserve(*verb, str(damaged))
    assert done.returncode == 4
    (line,) = _errors(done)
    assert line.startswith("error JS-CKP-01: ")
    assert "damaged.gguf" in line


def test_a_mesh_that_does_not_divide_the_model_is_refused_with_the_numbers(jserve, tiny_gguf):
    done = jserve("serve", *GRPC, *FLIGHT, *METRICS, str(tiny_gguf), "--mesh", "tensor=64")
    assert done.returncode == 3
    (line,) = _errors(done)
    assert line.startswith("error JS-CFG-02: ")
    assert "64" in line


def test_a_mesh_of_a_slipped_finger_is_refused_without_making_its_devices(jserve, tiny_gguf):
    done = jserve("serve", *GRPC, *FLIGHT, *METRICS, str(tiny_gguf), "--mesh", "tensor=1000000")
    assert done.returncode == 3
    assert _errors(done) == ["error JS-CFG-02: mesh tensor=1000000 needs 1000000 devices; there are 64 (cpu)"]


def test_a_taken_port_is_said_before_the_model_is_loaded(jserve, tiny_gguf):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = jserve("serve", *FLIGHT, *METRICS, str(tiny_gguf), "--grpc-address", address)
    assert done.returncode == 3
    first, fix = done.stderr.splitlines()
    assert first.startswith(f"error JS-CFG-01: grpc_address {address} cannot be opened")
    assert fix.startswith("  fix: ")


@pytest.mark.parametrize("address", ["localhost", "0.0.0.0:7470"])
def test_an_address_that_may_not_be_opened_is_said_before_the_model_is_loaded(jserve, tiny_gguf, address):
    done = jserve("serve", *GRPC, *METRICS, str(tiny_gguf), "--flight-address", address)
    assert done.returncode == 3
    assert done.stderr.startswith("error JS-CFG-01: flight_address is ")


def test_convert_then_inspect_ends_with_the_line_that_serves_it(jserve, tiny_gguf, tmp_path):
    folder = tmp_path / "tiny"
    assert jserve("convert", str(tiny_gguf), str(folder)).returncode == 0
    shown = jserve("inspect", "--check", str(folder))
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-1] == f"jserve serve {folder}"
    report = json.loads(jserve("inspect", "--json", str(folder)).stdout)
    assert report["family"] == "llama"
    again = jserve("convert", str(tiny_gguf), str(folder))
    assert again.returncode == 4
    assert _errors(again)[0].startswith("error JS-CKP-01: ")


def test_version_names_what_it_stands_on(jserve):
    facts = json.loads(jserve("version", "--json").stdout)
    import jax

    assert facts["jax"] == jax.__version__
    assert facts["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert "cpu" in facts["devices"]


def test_ctrl_c_while_loading_ends_without_a_traceback(tiny_gguf, tmp_path):
    command = [sys.executable, "-m", "jserve.cli.main", "serve", *GRPC, *FLIGHT, *METRICS, str(tiny_gguf), *SMALL]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("convert "):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 130
    assert "Traceback" not in rest
    assert rest.splitlines()[-1] == "interrupted"
