"""One BOS at most, by one rule; and a backend survives its JSON."""

import pytest

from jserve.testing.tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, ByteTokenizer
from jserve.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("add_bos", "add_special", "text", "ids"),
    [
        (True, True, "hi", [BOS_ID, 104, 105]),
        (True, True, "<bos>hi", [BOS_ID, 104, 105]),
        (True, True, "<bos><bos>", [BOS_ID, BOS_ID]),
        (True, True, "", [BOS_ID]),
        (True, False, "hi", [104, 105]),
        (True, False, "<bos>hi", [BOS_ID, 104, 105]),
        (False, True, "hi", [104, 105]),
        (False, True, "<bos>hi<eos>", [BOS_ID, 104, 105, EOS_ID]),
    ],
)
def test_bos(add_bos, add_special, text, ids):
    assert ByteTokenizer(add_bos=add_bos).encode(text, add_special=add_special) == ids


def test_facts():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.bos_id) == (VOCAB_SIZE, (EOS_ID,), BOS_ID)
    assert (tokenizer.token(BOS_ID), tokenizer.token(None), tokenizer.token(99_999)) == ("<bos>", "", "")
    assert tokenizer.longest_token_bytes == len("<bos>")


def test_text_comes_back():
    tokenizer = ByteTokenizer()
    text = "Café \N{GRINNING FACE}\t\n  x"
    ids = tokenizer.encode(text, add_special=True)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_json_round_trip():
    first = ByteTokenizer()
    second = Tokenizer.from_json(first.to_json(), eos_ids=first.eos_ids, bos_id=first.bos_id, add_bos=True)
    assert second.encode("hé<eos>", add_special=True) == [BOS_ID, *"hé".encode(), EOS_ID]


def test_what_is_no_tokenizer_is_refused():
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        Tokenizer.from_json("{}", eos_ids=(), bos_id=None, add_bos=False)
    with pytest.raises(ValueError, match="bos_id is None"):
        Tokenizer(ByteTokenizer().backend, eos_ids=(), bos_id=None, add_bos=True)
