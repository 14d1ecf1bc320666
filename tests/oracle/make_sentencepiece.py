"""Makes the tiny SentencePiece models of ``data/`` and the ids that sentencepiece and transformers give for them.

Run in the oracle environment (requirements.txt beside this file):

    ORACLE/bin/python tests/oracle/make_sentencepiece.py

``spm_NAME.model``   one a style: ``llama`` (BPE, bytes, a space in front), ``gemma`` (BPE, bytes, no space in front,
                     newlines and runs of spaces as user-defined symbols), ``plain`` (BPE without bytes, spaces cleaned,
                     a table of replacements), ``unigram`` and ``unigram_bytes``.
``spm_ids.json``     for every model: texts and ``SentencePieceProcessor.encode`` of them; and texts with control tokens
                     in them and the ids of transformers' own reading of the file.
"""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece
import transformers
from make_greedy import AWKWARD, DATA, dump, long_text

CONTROL = ["<|turn|>", "<|end|>"]
SPACES = ["▁" * n for n in range(2, 9)]
NEWLINES = ["\n" * n for n in range(1, 5)]

COMMON: dict[str, Any] = {
    "control_symbols": CONTROL,
    "hard_vocab_limit": False,
    "minloglevel": 2,
    "num_threads": 1,
    "split_digits": True,
}
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
RULES = "FF21\t41\nFF22\t42\nFB01\t66 69\n9\t20\nA0\t20\n"
"""Fullwidth A and B, the ligature fi, tab and no-break space: a small table instead of the 240 kB of the default."""

STYLES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "vocab_size": 480, "byte_fallback": True, **IDENTITY},
    "gemma": {
        "model_type": "bpe",
        "vocab_size": 500,
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<mark>", *NEWLINES, *SPACES],
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "bos_piece": "<bos>",
        "eos_piece": "<eos>",
        **IDENTITY,
    },
    "plain": {"model_type": "bpe", "vocab_size": 200, "user_defined_symbols": ["<mark>", "é"], "rules": RULES},
    "unigram": {"model_type": "unigram", "vocab_size": 200, "user_defined_symbols": ["<mark>"], "rules": RULES},
    "unigram_bytes": {"model_type": "unigram", "vocab_size": 460, "byte_fallback": True, **IDENTITY},
}

TEXTS = [
    *(text for text in AWKWARD if "\x00" not in text),
    "Day 3: the Cormorant took on 31 tons of oranges",
    "the the  the   the    the",
    "harbour\n\nharbour\n  harbour\n\n\n\n\nharbour",
    "<mark>",
    "a<mark>b <mark> c<mark><mark>",
    " <mark>x",
    "▁", "▁▁a", "a▁b",
    "ＡＢ ﬁn",
    "ééé été",
]  # fmt: skip
MARKED = [
    "<|turn|>the harbour<|end|>",
    "<|turn|> the harbour <|end|> ",
    "the<|end|>the",
    "<|turn|>\nthe\n<|end|>\n<|turn|>",
    "<s>the</s>",
    "<|turn| >the<|end",
]


def train(style: dict[str, Any]) -> bytes:
    options = dict(style)
    rules = options.pop("rules", None)
    lines = [*long_text(120).split("\n"), "café été", "if (x <= 10) { return y[3]; }"]
    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as table:
        if rules is not None:
            table.write(rules)
            table.flush()
            options["normalization_rule_tsv"] = table.name
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **COMMON, **options)
    return without_paths(model.getvalue())


def without_paths(model: bytes) -> bytes:
    """The temporary name of the table is no part of the model."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    proto.normalizer_spec.ClearField("normalization_rule_tsv")
    proto.trainer_spec.ClearField("model_prefix")
    return proto.SerializeToString(deterministic=True)


def transformers_ids(model: bytes, *, legacy: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.model").write_bytes(model)
        config = {"tokenizer_class": "TokenizersBackend", "legacy": legacy, "clean_up_tokenization_spaces": False}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = transformers.TokenizersBackend.from_pretrained(folder)
        return [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False)} for text in MARKED]


def main() -> None:
    rows: dict[str, Any] = {}
    for name, style in STYLES.items():
        model = train(style)
        (DATA / f"spm_{name}.model").write_bytes(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        print(name, len(model), "bytes,", processor.vocab_size(), "pieces")
        rows[name] = {
            "sentencepiece": [{"text": text, "ids": processor.encode(text)} for text in TEXTS],
            "transformers": transformers_ids(model, legacy=True),
        }
        if name == "llama":
            rows[name]["transformers_first"] = transformers_ids(model, legacy=False)
    head = {"made_with": f"sentencepiece {sentencepiece.__version__}, transformers {transformers.__version__}"}
    dump(DATA / "spm_ids.json", head | rows)


if __name__ == "__main__":
    main()
