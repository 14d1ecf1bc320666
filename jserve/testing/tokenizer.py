"""A tokenizer small enough to follow by hand: every byte of UTF-8 is one token, with its own value as its id."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jserve.text.pieces import BYTE_ALPHABET
from jserve.text.tokenizer import Tokenizer

__all__ = ["BOS_ID", "CHAT_TEMPLATE", "EOS_ID", "VOCAB_SIZE", "ByteTokenizer"]

BOS_ID = 256
EOS_ID = 257
VOCAB_SIZE = 258

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}"
    "{% endif %}"
    "{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Renders one user turn "hi" as ``<bos>user: hi\\nassistant:``."""


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are the bytes, 256 is ``<bos>``, 257 is ``<eos>``. ``"A"`` encodes to ``[65]``.

    It is a real byte-level ``tokenizers`` model without merges, so it streams, splits characters and writes
    ``tokenizer.json`` like any other.
    """

    def __init__(self, *, add_bos: bool = False) -> None:
        backend = tokenizers.Tokenizer(models.BPE(vocab=BYTE_ALPHABET, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<bos>", "<eos>"])
        super().__init__(backend, eos_ids=(EOS_ID,), bos_id=BOS_ID, add_bos=add_bos)
