"""`jserve demo`, whole: the default model, both doors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CASES = json.loads((Path(__file__).parents[1] / "oracle/data/smollm2_greedy.json").read_text(encoding="utf-8"))["cases"]


def _demo(*arguments):
    command = [sys.executable, "-m", "jserve.cli.main", "demo", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", env=os.environ | {"PYTHONIOENCODING": "utf-8"}
    )


def test_it_answers_over_both_doors_and_ends():
    done = _demo("--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    grpc, flight = told["answers"]
    assert (grpc["door"], flight["door"]) == ("gRPC", "Flight")
    (gravity,) = [case for case in CASES if case["name"] == "gravity"]
    assert gravity["prompt"][0]["content"] == "What is gravity? Answer in one sentence."
    assert grpc["tokens"] == flight["tokens"] == len(gravity["output_ids"])
    assert grpc["text"] == flight["text"]
    assert told["first_token_s"] > grpc["ttft_s"] > 0

    again = _demo()
    assert again.returncode == 0, again.stderr
    assert again.stdout == f"{grpc['text']}\n{grpc['text']}\n"
    assert " from the cache)" in again.stderr
