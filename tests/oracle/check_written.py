"""Are the folders that `jserve convert --to safetensors` writes those that transformers wrote? Run by hand, as

    PYTHONPATH=. ORACLE/bin/python tests/oracle/check_written.py path/to/jserve

in the environment of requirements.txt beside this file, with the `jserve` command of another. A tiny random model of
every case of make_families.py, and the encoder of make_encoders.py, goes from transformers to safetensors, by
`jserve convert` to Orbax and again to safetensors, and transformers loads both: logits (of the encoder, hidden states
of a padded batch of texts) must be the same to the last bit, and no tensor may be missing or left over.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_families import CASES, SMALL, build

TOKENS = 300


ENCODER = Path(__file__).parent / "data" / "tiny_bert"


def load(folder: Path, kind: Any = transformers.AutoModelForCausalLM) -> tuple[Any, dict[str, Any]]:
    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    model, info = kind.from_pretrained(folder, **options)
    return model.eval(), {key: sorted(map(str, value)) for key, value in info.items() if value}


@torch.no_grad()
def logits(model: Any) -> np.ndarray:
    ids = np.random.default_rng(0).integers(0, 256, TOKENS).tolist()
    return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


@torch.no_grad()
def states(folder: Path) -> np.ndarray:
    model, _ = load(folder, transformers.AutoModel)
    model.pooler = None  # vectors are not made of it, and it is not written
    texts = ["the quick brown fox", "jumps", "over the lazy dog and away"]
    batch = transformers.AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    return model(**batch).last_hidden_state.numpy()


def there_and_back(jserve: str, hf: Path, scratch: Path) -> str:
    """By Orbax into ``scratch / "back"``; the last line of an error."""
    for words in (["convert", hf, scratch / "orbax"], ["convert", "--to", "safetensors", scratch / "orbax"]):
        command = [jserve, *words, *([scratch / "back"] if "--to" in words else [])]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return done.stderr.strip().splitlines()[-1]
    return ""


def check_encoder(jserve: str, scratch: Path) -> str:
    if refused := there_and_back(jserve, ENCODER, scratch):
        return refused
    transformers.AutoTokenizer.from_pretrained(scratch / "back").save_pretrained(scratch / "hf")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(ENCODER / name, scratch / "hf")
    difference = np.abs(states(scratch / "hf") - states(scratch / "back")).max()
    return "equal" if difference == 0 else f"hidden states differ by {difference:.2e}"


def check(case: str, jserve: str, scratch: Path) -> str:
    kind, entries = CASES[case]
    config = kind(**(entries if kind is transformers.GPT2Config else {**SMALL, **entries}))
    build(config, 0)[0].save_pretrained(scratch / "hf")
    if refused := there_and_back(jserve, scratch / "hf", scratch):
        return refused
    (one, _), (other, info) = load(scratch / "hf"), load(scratch / "back")
    if info:
        return f"loading says {json.dumps(info)[:300]}"
    difference = np.abs(logits(one) - logits(other)).max()
    return "equal" if difference == 0 else f"logits differ by {difference:.2e}"


def main() -> None:
    torch.set_num_threads(1)
    failed = 0
    for case in (*CASES, "bert"):
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            said = check_encoder(sys.argv[1], scratch) if case == "bert" else check(case, sys.argv[1], scratch)
        failed += said != "equal"
        print(f"{case:<16} {said}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
