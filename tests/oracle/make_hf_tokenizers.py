"""Makes ``data/hf_tokenizers.json``: tiny tokenizers in the files of Hugging Face style folders, and transformers' ids.

Run in the oracle environment (requirements.txt beside this file):

    ORACLE/bin/python tests/oracle/make_hf_tokenizers.py

``vocab`` and ``merges`` are what vocab.json and merges.txt hold; ``gpt2`` and ``qwen2`` are the ids that these classes
give with them. ``bert`` is a tokenizer.json, with the ids that BertTokenizerFast gives when it truncates.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from make_greedy import AWKWARD, DATA, dump, long_text
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [*AWKWARD, "<think>no special</think>", "a <|endoftext|> b", "x<think> y", "<|mark|> z"]
ADDED = {
    "<think>": {"content": "<think>", "special": False, "normalized": False, "lstrip": False, "rstrip": False},
    "<|mark|>": {"content": "<|mark|>", "special": True, "normalized": False, "lstrip": False, "rstrip": True},
}
BERT_TEXTS = ["", "Day", "Day 3: the CORMORANT took on 31 tons of oranges, café!", long_text(3), "[SEP] the [MASK]"]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*long_text(120).split("\n"), "don't we'll", "été café", "if (x<=10)"], trainer)
    return tokenizer


def class_ids(name: str, vocab: dict[str, int], merges: list[str], **settings: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vocab.json").write_text(json.dumps(vocab))
        (Path(folder) / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
        added = {str(len(vocab) + i): token for i, token in enumerate(ADDED.values())}
        config = {"tokenizer_class": name, "added_tokens_decoder": added, **settings}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = getattr(transformers, name).from_pretrained(folder)
        return [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False)} for text in TEXTS]


def bert() -> tokenizers.Tokenizer:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(long_text(60).split("\n"), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.enable_truncation(max_length=12)
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]", length=12)
    return tokenizer


def bert_ids(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        config = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
        made = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        return [
            {"text": text, "max_length": length, "ids": made(text, truncation=True, max_length=length)["input_ids"]}
            for text in BERT_TEXTS
            for length in (3, 12, 256)
        ]


def main() -> None:
    model = json.loads(byte_level().to_str())["model"]
    vocab, merges = model["vocab"], [" ".join(merge) for merge in model["merges"]]
    encoder = bert()
    dump(
        DATA / "hf_tokenizers.json",
        {
            "made_with": f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}",
            "vocab": vocab,
            "merges": merges,
            "added": ADDED,
            "gpt2": class_ids("GPT2Tokenizer", vocab, merges),
            "gpt2_space": class_ids("GPT2Tokenizer", vocab, merges, add_prefix_space=True),
            "qwen2": class_ids("Qwen2Tokenizer", vocab, merges),
            "bert": encoder.to_str(),
            "bert_ids": bert_ids(encoder),
        },
    )


if __name__ == "__main__":
    main()
