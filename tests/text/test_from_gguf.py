"""Tokenizers from GGUF metadata: cuts, flags, added tokens, and refusals by name."""

import json
from pathlib import Path

import pytest

from jserve.errors import CheckpointError, UnsupportedModel
from jserve.models.llama import LlamaConfig
from jserve.testing.gguf import TINY_TOKENS, llama_metadata
from jserve.testing.models import TINY_LLAMA
from jserve.text.from_gguf import tokenizer_from_gguf
from jserve.text.pre_tokenizers import PRE_TOKENIZERS

DATA = Path(__file__).parents[1] / "oracle" / "data"
CONFIG = LlamaConfig(**{**TINY_LLAMA, "vocab_size": len(TINY_TOKENS)})
TYPES = [3] * 3 + [1] * (len(TINY_TOKENS) - 3)


def fields(**changes):
    """The tiny tokenizer's metadata; None leaves a key out. Names are those after ``tokenizer.ggml.``."""
    changed = llama_metadata(CONFIG) | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return {name: value for name, value in changed.items() if value is not None}


def cut(pre, text):
    """How ``pre`` cuts a text, with its bytes as text again."""
    backend = tokenizer_from_gguf(fields(pre=pre)).backend
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", " 123 a", [" ", "1", "2", "3", " a"]),
        ("smollm", "it's  2x\t\n", ["it", "'s", "  ", "2", "x", "\t\n"]),
        ("smollm", "x²٣Ⅷ", ["x", "²", "٣", "Ⅷ"]),
        ("gpt-2", " 123 a", [" 123", " a"]),
        ("gpt-2", "IT'S it's a  b\n\n c", ["IT", "'", "S", " it", "'s", " a", " ", " b", "\n\n", " c"]),
        ("llama-bpe", " 12345 a", [" ", "123", "45", " a"]),
        ("llama-bpe", "IT'S (ok)!\n\nx\t y", ["IT", "'S", " (", "ok", ")!\n\n", "x", "\t", " y"]),
        ("qwen2", " 123 a", [" ", "1", "2", "3", " a"]),
        ("qwen2", "你好，世界 we'LL", ["你好", "，世界", " we", "'LL"]),
        ("qwen35", "मिले e\u0301t 12", ["मिले", " e\u0301t", " ", "1", "2"]),
        ("qwen2", "मिले e\u0301t", ["म", "िल", "े", " e", "\u0301t"]),
        (
            "gpt-4o",
            "camelCase HTMLParser's x//\n\ny 1234",
            ["camel", "Case", " HTMLParser's", " x", "//\n\n", "y", " ", "123", "4"],
        ),
        ("tekken", "camelCase it's/\n 123", ["camel", "Case", " it", "'s", "/\n", " ", "1", "2", "3"]),
        ("dbrx", " 12345 don'T", [" ", "123", "45", " don", "'T"]),
        ("default", "a+b $5, 12345.", ["a", "+", "b", " ", "$", "5", ",", " ", "123", "45", "."]),
    ],
)
def test_each_kind_cuts_as_its_models_do(pre, text, pieces):
    assert cut(pre, text) == pieces


def test_two_spellings_of_one_kind():
    assert PRE_TOKENIZERS["llama3"] is PRE_TOKENIZERS["llama-v3"] is PRE_TOKENIZERS["llama-bpe"]


def test_ids_and_text():
    tokenizer = tokenizer_from_gguf(fields())
    h, hello, the, wor = (TINY_TOKENS.index(token) for token in ("h", "hello", "Ġthe", "Ġwor"))
    ids = tokenizer.encode("hello the worh", add_special=True)
    assert ids == [hello, the, wor, h]
    assert tokenizer.decode(ids) == "hello the worh"
    for text in (" 123 😀", "Café", "a\tb", "\n\n", "日本", "don't"):
        assert tokenizer.decode(tokenizer.encode(text, add_special=True)) == text


@pytest.mark.parametrize(("pre", "expected"), [("gpt-2", "gpt2"), ("qwen2", "qwen2")])
def test_ids_are_those_of_transformers_with_the_same_vocabulary(pre, expected):
    """GGUF does not tell what a token swallows around it; so without the one that does."""
    oracle = json.loads((DATA / "hf_tokenizers.json").read_text(encoding="utf-8"))
    tokens = [*sorted(oracle["vocab"], key=oracle["vocab"].__getitem__), "<think>"]
    types = [3 if token == "<|endoftext|>" else 4 if token == "<think>" else 1 for token in tokens]
    end = tokens.index("<|endoftext|>")
    tokenizer = tokenizer_from_gguf(
        fields(
            pre=pre,
            tokens=tokens,
            token_type=types,
            merges=oracle["merges"],
            bos_token_id=end,
            eos_token_id=end,
        )
    )
    rows = [row for row in oracle[expected] if "<|mark|>" not in row["text"]]
    assert len(rows) > 30
    for row in rows:
        assert tokenizer.encode(row["text"], add_special=False) == row["ids"], row["text"]


def test_text_next_to_an_added_token_is_cut_as_if_alone():
    tokenizer = tokenizer_from_gguf(fields())
    user = tokenizer.encode("user", add_special=False)
    assert tokenizer.encode("<|im_start|>user<|im_end|>", add_special=True) == [1, *user, 2]
    assert tokenizer.encode(" <|im_start|> ", add_special=True) == [TINY_TOKENS.index("Ġ"), 1, TINY_TOKENS.index("Ġ")]


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({"add_bos_token": True}, True),
        ({"add_bos_token": False}, False),
        ({"add_bos_token": None}, False),
        ({"add_bos_token": None, "pre": "llama-bpe"}, True),
        ({"add_bos_token": False, "pre": "llama-bpe"}, False),
    ],
)
def test_bos(changes, added):
    tokenizer = tokenizer_from_gguf(fields(**changes))
    assert (tokenizer.add_bos, tokenizer.bos_id) == (added, 1)
    assert (tokenizer.encode("h", add_special=True)[0] == 1) is added


def test_every_end_is_an_end():
    assert tokenizer_from_gguf(fields(eot_token_id=5, eom_token_id=2)).eos_ids == (2, 5)
    assert tokenizer_from_gguf(fields(eos_token_id=None)).eos_ids == ()


def test_space_prefix():
    plain, prefixed = (tokenizer_from_gguf(fields(pre="gpt-2", add_space_prefix=flag)) for flag in (False, True))
    assert prefixed.encode("the", add_special=True) == plain.encode(" the", add_special=True)
    assert prefixed.encode(" the", add_special=True) == plain.encode(" the", add_special=True)
    with pytest.raises(UnsupportedModel, match="add_space_prefix is true"):
        tokenizer_from_gguf(fields(pre="llama-bpe", add_space_prefix=True))


def test_a_piece_that_is_a_token_skips_its_merges_only_where_the_kind_says_so():
    tokens = [*TINY_TOKENS, "word"]
    changes = {"tokens": tokens, "token_type": [*TYPES, 1], "add_bos_token": False}
    assert tokenizer_from_gguf(fields(**changes, pre="llama-bpe")).encode("word", add_special=True) == [272]
    assert len(tokenizer_from_gguf(fields(**changes, pre="qwen2")).encode("word", add_special=True)) == 3


def test_normal_form():
    composed, apart = "é", "e\u0301"
    qwen = tokenizer_from_gguf(fields(pre="qwen2"))
    assert qwen.encode(apart, add_special=True) == qwen.encode(composed, add_special=True)
    smollm = tokenizer_from_gguf(fields())
    assert smollm.encode(apart, add_special=True) != smollm.encode(composed, add_special=True)


def test_control_tokens_are_special_and_user_defined_ones_are_text():
    tokens = [*TINY_TOKENS, "<think>"]
    tokenizer = tokenizer_from_gguf(fields(tokens=tokens, token_type=[*TYPES, 4]))
    assert tokenizer.encode("<think>h", add_special=True) == [272, TINY_TOKENS.index("h")]
    assert tokenizer.decode([1, 272, 2]) == "<think>"
    assert tokenizer.decode([1, 272, 2], skip_special=False) == "<|im_start|><think><|im_end|>"


def test_unused_tokens_at_the_end_are_no_part_of_the_vocabulary():
    tokens = [*TINY_TOKENS, "[unused]", "x y", "[PAD0]", "[PAD1]"]
    tokenizer = tokenizer_from_gguf(fields(tokens=tokens, token_type=[*TYPES, 5, 1, 5, 5]))
    assert tokenizer.vocab_size == len(TINY_TOKENS) + 2
    with pytest.raises(CheckpointError, match="ids go from 0 to 273"):
        tokenizer_from_gguf(fields(tokens=tokens, token_type=[*TYPES, 5, 1, 5, 5], eos_token_id=274))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "gemma4"}, r"tokenizer\.ggml\.model is 'gemma4'; tokenizers read from GGUF: 'gpt2', 'llama'"),
        ({"model": None}, r"tokenizer\.ggml\.model is missing"),
        ({"pre": "viking"}, r"pre is 'viking'; pre-tokenizers read from GGUF: default, gpt-2, phi-2"),
        ({"pre": None}, r"tokenizer\.ggml\.pre is missing"),
        ({"add_eos_token": True}, "add_eos_token is true"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes, words):
    with pytest.raises(UnsupportedModel, match=words):
        tokenizer_from_gguf(fields(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing; it must be a list of str"),
        ({"tokens": [1, 2]}, r"tokens is \[1, 2\]"),
        ({"tokens": [], "token_type": []}, "tokens is empty"),
        ({"tokens": [*TINY_TOKENS[:-1], "h"]}, "has 'h' twice"),
        ({"token_type": [1]}, "has 1 entries for 272 tokens"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["he"]}, r"merges\[0\] is 'he'; it must be two tokens"),
        ({"merges": ["h ⊕"]}, "merges does not fit"),
        ({"bos_token_id": 272}, "bos_token_id is 272; ids go from 0 to 271"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"add_bos_token": 1}, "add_bos_token is 1; it must be true or false"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id is missing"),
    ],
)
def test_tables_that_contradict_each_other(changes, words):
    with pytest.raises(CheckpointError, match=words) as error:
        tokenizer_from_gguf(fields(**changes))
    assert error.type is CheckpointError
