"""Times jserve's engine on the loads of bench_serving.py, without a wire; prints one JSON object.

python tests/benchmarks/engine_child.py MODEL LOADS     # LOADS: JSON, see bench_serving.Load
"""

import json
import random
import resource
import sys
import threading
import time
from collections.abc import Sequence

from jserve.config import ServeConfig
from jserve.load import load
from jserve.request import Request, ResolvedSampling, TokenDelta


def main(model: str, loads: list[dict[str, int]]) -> None:
    begun = time.monotonic()
    loaded = load(ServeConfig(model=model))
    ready = time.monotonic() - begun
    engine, rng = loaded.engine, random.Random(0)

    def run(streams: int, prompt_tokens: int, output_tokens: int) -> float:
        left = threading.Semaphore(0)

        def sink(deltas: Sequence[TokenDelta]) -> None:
            if deltas[-1].finish_reason is not None:
                left.release()

        sampling = ResolvedSampling.greedy(output_tokens)
        sent = time.monotonic()
        for i in range(streams):
            prompt = tuple(rng.randrange(engine.limits.vocab_size) for _ in range(prompt_tokens))
            engine.submit(Request(request_id=str(i), prompt_ids=prompt, sampling=sampling, arrival=sent), sink)
        for _ in range(streams):
            left.acquire()
        return time.monotonic() - sent

    run(1, 8, 2)
    seconds = [[run(**one) for _ in range(3)] for one in loads]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"ready_s": ready, "peak_bytes": peak, "seconds": seconds}), flush=True)
    loaded.close()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
