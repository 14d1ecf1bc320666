"""Writes tests/oracle/data/: what Hugging Face transformers says of the model that jserve serves by default.

Run by hand, in an environment of its own (requirements.txt beside this file), with the GGUF file as the argument:

    ORACLE/bin/python tests/oracle/make_greedy.py SmolLM2-135M-Instruct.Q4_1.gguf

``smollm2_greedy.json``    prompts, their ids, the greedy ids in float32, and for every step the margin between
                           the best two logits: where it is under 1e-4 another choice is excused.
``smollm2_tokenize.json``  texts that tokenizers like to get wrong, and their ids.

Two things are checked before anything is written: the weights that transformers read equal ``gguf.dequantize``,
and the tokenizer splits as the file asks (pre-tokenizer "smollm": digits one by one, then GPT-2's byte-level
rule). transformers rebuilds only the second half of that rule, so the first is put back here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

DATA = Path(__file__).parent / "data"
NEW_TOKENS = 48


def long_text(sentences: int) -> str:
    """A harbour log: varied, the same every time, about 21 tokens a sentence."""
    ships = ("Albatross", "Brévine", "Cormorant", "Dunlin", "Eider", "Fulmar", "Grebe")
    cargo = ("barley", "slate", "salt", "oranges", "timber", "wool", "copper wire", "window glass")
    ends = ("Bergen", "Porto", "Gdańsk", "Cork", "Riga", "Nantes")
    lines = []
    for i in range(sentences):
        ship, load, end = ships[i % 7], cargo[i * 3 % 8], ends[i * 5 % 6]
        lines.append(f"Day {i + 1}: the {ship} took on {17 + i * 7 % 90} tons of {load} and sailed for {end}.")
    return "\n".join(lines)


def cases() -> list[dict[str, Any]]:
    def user(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    code = (
        'def fib(n):\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n        return n\n'
        "    a, b = 0, 1\n    for _ in range(n - 1):\n"
    )
    return [
        {"name": "one_token", "prompt": "The"},
        {"name": "capital", "prompt": "The capital of France is"},
        {
            "name": "accents",
            "prompt": "Où est le café préféré de Zoë ? À côté de l'hôtel, près de la forêt. Le serveur",
        },
        {"name": "code", "prompt": code},
        {"name": "tabs", "prompt": "name\tage\tcity\nAnna\t31\tOslo\nBen\t45\tKyiv\nCarla\t28\t"},
        {"name": "digits", "prompt": "2 4 8 16 32 64 128 256 512 1024 2048  4096   8192 3.14159 1,000,000 "},
        {"name": "other_scripts", "prompt": "你好，世界! Привет, мир! こんにちは世界! Γειά σου Κόσμε! Hello"},
        {"name": "gravity", "prompt": user("What is gravity? Answer in one sentence.")},
        {"name": "emoji", "prompt": user("What do these emoji mean? 🚀🌍 👩‍🔬 ❤️ 🇳🇴")},
        {
            "name": "turns",
            "prompt": [
                {"role": "system", "content": "You answer in short sentences."},
                {"role": "user", "content": "Name a river in Africa."},
                {"role": "assistant", "content": "The Nile."},
                {"role": "user", "content": "And one in South America? Why is it famous?"},
            ],
        },
        {"name": "chat_code", "prompt": user("Write a Python function that reverses a list in place.")},
        {"name": "chat_500", "prompt": user("Which ship carried slate?\n\n" + long_text(21))},
        {"name": "ids_15", "ids_of": long_text(2), "take": 15},
        {"name": "ids_16", "ids_of": long_text(2), "take": 16},
        {"name": "ids_17", "ids_of": long_text(2), "take": 17},
        {"name": "long_2000", "prompt": long_text(83) + "\nIn short, the harbour"},
    ]


AWKWARD = [
    "",
    " ",
    "  ",
    "\n\n  \n",
    "\t\tx\t y",
    "a b",
    "a  b   c",
    " leading and trailing ",
    " 123 😀",
    "  123",
    "12345678901234567890",
    "v1.2.3-rc4, ½ and ² and ٣٤",
    "Café",
    "Cafe\u0301",
    "don't we'll I'M you'RE",
    "<|im_start|>user",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "text<|im_end|>next",
    " <|im_end|> spaced <|im_end|>\n",
    "<|im_start|",
    "<|endoftext|><|endoftext|>",
    "<repo_name>jserve<file_sep>README.md",
    "👩‍👩‍👧‍👦 🇳🇴 ❤️",
    "你好，世界。こんにちは",
    "\u00a0non\u2003breaking\u200bspaces",
    "zero\x00byte \x1b[0m",
    "if (x<=10){return y[3]&&z;} // ok",
    "\r\nwindows\r\nlines\r\n",
    "ﬁ ligature, ＦＵＬＬ width, İstanbul",
    "áéíóúÁÉÍÓÚñüß€£¥",
]


def load_tokenizer(path: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    reader = gguf.GGUFReader(path)
    assert reader.fields["tokenizer.ggml.pre"].contents() == "smollm"
    # Every id round trips, and digits stand alone, with the run of spaces before them whole.
    assert tokenizer.convert_ids_to_tokens(tokenizer("  42")["input_ids"]) == ["ĠĠ", "4", "2"]
    for text in AWKWARD:
        assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text, text
    return tokenizer


def check_weights(path: Path, model: Any) -> int:
    """Every tensor of the file equals the module's, q and k rows put back in Hugging Face's order; their count."""
    state = dict(model.state_dict())
    config = model.config
    seen = 0
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    for tensor in gguf.GGUFReader(path).tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name == "token_embd.weight":
            target = "model.embed_tokens.weight"
        elif tensor.name == "output_norm.weight":
            target = "model.norm.weight"
        elif tensor.name == "output.weight":
            target = "lm_head.weight"
        else:
            _, layer, part, _ = tensor.name.split(".")
            target = f"model.layers.{layer}.{names[part]}.weight"
            if part in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
                rows = value.reshape(heads, -1, 2, value.shape[-1])  # [head, pair, (re, im), in]
                value = rows.swapaxes(1, 2).reshape(value.shape)
        np.testing.assert_array_equal(value, state[target].numpy(), err_msg=tensor.name)
        seen += 1
    return seen


@torch.no_grad()
def greedy(model: Any, prompt_ids: list[int], eos: int) -> dict[str, list[Any]]:
    """Greedy ids up to and with EOS; per step the best two logits' distance and the chosen one's logprob."""
    ids, margins, logprobs = [], [], []
    feed, cache = torch.tensor([prompt_ids]), None
    for _ in range(NEW_TOKENS):
        out = model(feed, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[0, -1]
        best = torch.topk(logits, 2).values
        token = int((logits == best[0]).nonzero()[0, 0])  # the lowest id on ties
        ids.append(token)
        margins.append(round(float(best[0] - best[1]), 6))
        logprobs.append(round(float(torch.log_softmax(logits.double(), -1)[token]), 5))
        if token == eos:
            break
        feed = torch.tensor([[token]])
    return {"output_ids": ids, "margins": margins, "logprobs": logprobs}


def dump(path: Path, data: dict[str, Any]) -> None:
    """JSON with one short line a list of numbers, so that a diff can be read."""
    text = json.dumps(data, ensure_ascii=False, indent=1)
    lines: list[str] = []
    inside = False
    for line in text.split("\n"):
        bare = line.strip().rstrip(",")
        number = bare.lstrip("-").replace(".", "").replace("e-", "").isdigit()
        if inside and (number or bare == "]"):
            lines[-1] += line.strip() + (" " if line.endswith(",") and number else "")
            inside = number
        else:
            lines.append(line)
            inside = line.endswith("[")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    path = parser.parse_args().gguf.resolve()
    torch.manual_seed(0)
    tokenizer = load_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    print(f"{check_weights(path, model)} tensors equal gguf.dequantize")

    head = {
        "model": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
    }
    eos = tokenizer.eos_token_id
    rows = []
    for case in cases():
        text = case.get("ids_of", case.get("prompt"))
        if isinstance(text, list):
            text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text)["input_ids"]
        row = {"name": case["name"], "prompt": case.get("prompt"), "prompt_ids": ids}
        if "take" in case:
            row["prompt"] = row["prompt_ids"] = ids[: case["take"]]
        row |= greedy(model, row["prompt_ids"], eos)
        low = min(row["margins"])
        print(f"{row['name']:15} {len(row['prompt_ids']):5} tokens, lowest margin {low:.6f}", flush=True)
        print("   ", repr(tokenizer.decode(row["output_ids"]))[:160])
        rows.append(row)
    DATA.mkdir(exist_ok=True)
    dump(DATA / "smollm2_greedy.json", head | {"eos_id": eos, "cases": rows})
    texts = [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in AWKWARD]
    dump(DATA / "smollm2_tokenize.json", head | {"cases": texts})


if __name__ == "__main__":
    main()
