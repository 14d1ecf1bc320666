"""Streamed text is the whole decode, whatever the ids; and it comes as soon as it is certain."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models

from jserve.errors import UnsupportedModel
from jserve.testing.tokenizer import ByteTokenizer
from jserve.text.detokenizer import Detokenizer
from jserve.text.tokenizer import Tokenizer

SPACE = "\u2581"
WORDS = [SPACE, SPACE + "Hello", "world", ",", SPACE * 2, "é", "\N{GRINNING FACE}", "a" + SPACE + "b", SPACE + "<0xZZ>"]


def sentencepiece(decoder) -> Tokenizer:
    """Ids 0..2 are specials, 3..258 the bytes, then WORDS, then a special and a plain added token."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    model = models.BPE(
        vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True, unk_token="<unk>"
    )
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoder
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "<tool>"])
    backend.add_tokens([AddedToken("plain" + SPACE, normalized=False)])
    return Tokenizer(backend, eos_ids=(2,), bos_id=1, add_bos=True)


def llama_decoder(*, strip=True):
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * strip)


BYTE_LEVEL = ByteTokenizer()
LLAMA = sentencepiece(llama_decoder())
OTHERS = {
    "gemma": sentencepiece(llama_decoder(strip=False)),
    "metaspace": sentencepiece(decoders.Metaspace(replacement=SPACE, prepend_scheme="always")),
    "metaspace never": sentencepiece(decoders.Metaspace(replacement=SPACE, prepend_scheme="never")),
    "none": sentencepiece(None),
}


def stream(tokenizer, ids, *, skip_special=True):
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


byte_ids = st.one_of(
    st.integers(0, 257),
    st.integers(0x80, 0xBF),
    st.sampled_from([0xC3, 0xE2, 0xED, 0xA0, 0xF0, 0x9F, 0xF4, 0x90, 0xC0, 0xFF, 65]),
)


@given(st.lists(byte_ids, max_size=40), st.booleans())
@settings(max_examples=400, deadline=None)
def test_byte_level_equals_the_backend_for_any_ids(ids, skip):
    assert "".join(stream(BYTE_LEVEL, ids, skip_special=skip)) == BYTE_LEVEL.backend.decode(
        ids, skip_special_tokens=skip
    )


@given(st.text(max_size=30), st.lists(st.sampled_from([0, 1, 2, *range(259, 259 + len(WORDS) + 2)]), max_size=8))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_equals_the_backend_for_whole_characters(text, words):
    ids = [*words[:4], *(3 + byte for byte in text.encode()), *words[4:]]
    for skip in (True, False):
        assert "".join(stream(LLAMA, ids, skip_special=skip)) == LLAMA.backend.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(3 + 0x80, 3 + 0xBF), max_size=12), st.sampled_from(["", "ok"]))
@settings(max_examples=50, deadline=None)
def test_sentencepiece_equals_the_backend_for_runs_of_bad_bytes(ids, word):
    ids = [*ids, *(3 + byte for byte in word.encode())] if not ids else [*ids, *([261] if word else [])]
    assert "".join(stream(LLAMA, ids)) == LLAMA.backend.decode(ids)


def test_sentencepiece_keeps_whole_characters_beside_bad_bytes():
    ids = [3 + byte for byte in "é".encode() + b"\xff"]
    assert "".join(stream(LLAMA, ids)) == LLAMA.decode(ids) == "é\ufffd"
    assert LLAMA.backend.decode(ids) == "\ufffd" * 3


@pytest.mark.parametrize("name", OTHERS)
@given(ids=st.lists(st.sampled_from([0, 1, 3 + 65, *range(259, 259 + len(WORDS) + 2)]), max_size=8))
@settings(max_examples=100, deadline=None)
def test_other_decoders_equal_the_backend(name, ids):
    tokenizer = OTHERS[name]
    assert "".join(stream(tokenizer, ids)) == tokenizer.backend.decode(ids)


def test_a_character_comes_with_its_last_byte():
    smile = "\N{GRINNING FACE}"
    assert stream(BYTE_LEVEL, list(smile.encode())) == ["", "", "", smile, ""]
    assert stream(LLAMA, [3 + byte for byte in smile.encode()]) == ["", "", "", smile, ""]


def test_lone_continuation_bytes_do_not_hold_back_what_follows():
    parts = stream(BYTE_LEVEL, [0x80] * 20 + list(b"ok"))
    assert parts == ["\ufffd"] * 20 + ["o", "k", ""]
    parts = stream(LLAMA, [3 + 0x80] * 20 + [261])
    assert parts == ["\ufffd"] * 20 + ["world", ""]


def test_an_end_inside_a_character_is_flushed():
    ids = list("a\N{GRINNING FACE}".encode())[:-1]
    assert stream(BYTE_LEVEL, ids) == ["a", "", "", "", "\ufffd"]
    assert stream(LLAMA, [3 + byte for byte in ids]) == ["a", "", "", "", "\ufffd" * 3]
    assert "".join(stream(LLAMA, [3 + byte for byte in ids[1:]])) == LLAMA.backend.decode([3 + b for b in ids[1:]])


def test_special_tokens_and_ids_out_of_the_vocabulary_have_no_text():
    assert stream(BYTE_LEVEL, [65, 256, 999_999, -1, 66, 257]) == ["A", "", "", "", "B", "", ""]
    assert stream(BYTE_LEVEL, [65, 257], skip_special=False) == ["A", "<eos>", ""]


def test_a_special_token_inside_a_character_does_not_part_it():
    ids = [0xC3, 256, 0xA9]
    assert "".join(stream(BYTE_LEVEL, ids)) == BYTE_LEVEL.backend.decode(ids) == "é"


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        (decoders.WordPiece(), "decoder is WordPiece"),
        (decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]), "decoder is Fuse, ByteFallback"),
        (decoders.Sequence([decoders.Replace(Regex("x+"), " ")]), "regular expression"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]), "strips"),
    ],
)
def test_unknown_decoders_are_refused_by_name(decoder, words):
    with pytest.raises(UnsupportedModel, match=words):
        Detokenizer(sentencepiece(decoder))
