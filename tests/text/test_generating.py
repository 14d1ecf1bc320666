"""What of a model's text side is refused before anything is compiled."""

import pytest
from tokenizers import decoders

from jserve.errors import CheckpointError, UnsupportedModel
from jserve.testing.tokenizer import BOS_ID, CHAT_TEMPLATE, EOS_ID, VOCAB_SIZE, ByteTokenizer
from jserve.text.generating import model_template


def test_what_can_be_served_gives_the_template_with_the_tokenizer_s_own_ends():
    template = model_template("{{ bos_token }} {{ eos_token }}", ByteTokenizer(), eos_ids=[EOS_ID])
    assert template.render([]) == f"{ByteTokenizer().token(BOS_ID)} {ByteTokenizer().token(EOS_ID)}"
    assert model_template(None, ByteTokenizer(), eos_ids=[]) is None
    assert model_template(CHAT_TEMPLATE, None, eos_ids=[10**6]) is None


@pytest.mark.parametrize("source", [None, CHAT_TEMPLATE])
def test_a_tokenizer_that_cannot_stream_is_refused(source):
    tokenizer = ByteTokenizer()
    tokenizer.backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="the tokenizer's decoder is WordPiece; built are"):
        model_template(source, tokenizer, eos_ids=[EOS_ID])


@pytest.mark.parametrize("tokenizer", [None, ByteTokenizer()])
def test_too_many_ends_are_refused(tokenizer):
    with pytest.raises(CheckpointError, match=r"the ids that end a text are \[0, 1, .*; allowed are 16 ids"):
        model_template(None, tokenizer, eos_ids=range(17))


@pytest.mark.parametrize("end", [-1, VOCAB_SIZE])
def test_ends_that_the_tokenizer_does_not_have_are_refused(end):
    with pytest.raises(CheckpointError, match=rf"the ids that end a text are \[{end}\]; .* of 0\.\.{VOCAB_SIZE - 1}"):
        model_template(None, ByteTokenizer(), eos_ids=[end])


def test_a_template_that_does_not_compile_is_refused():
    with pytest.raises(CheckpointError, match="line 1 of the chat template"):
        model_template("{% if %}", ByteTokenizer(), eos_ids=[])
