"""Text to token ids and back, over one ``tokenizers.Tokenizer``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import tokenizers

from jserve.text.detokenizer import Detokenizer
from jserve.text.pieces import Pieces

__all__ = ["Tokenizer"]


class Tokenizer:
    """A ``tokenizers`` backend together with what generation needs to know of it. Safe from any thread.

    The beginning-of-sequence rule lives here and nowhere else: ``encode`` puts at most one BOS in front, and
    only where ``add_special`` is asked for, the model wants one, and the text did not write it itself; the
    backend's own post-processor is not run. The backend is taken over: truncation and padding that it was set to are
    switched off.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int],
        bos_id: int | None,
        add_bos: bool,
    ) -> None:
        if add_bos and bos_id is None:
            raise ValueError("add_bos is True and bos_id is None: name the BOS id, or pass add_bos=False")
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.eos_ids: tuple[int, ...] = tuple(eos_ids)
        """Ids that end a text, each once, the main one first."""
        self.bos_id = bos_id
        self.add_bos = add_bos

    @classmethod
    def from_json(cls, text: str, *, eos_ids: Iterable[int], bos_id: int | None, add_bos: bool) -> Tokenizer:
        """Read a ``tokenizer.json`` (its text, not its path). Raises ValueError where it is not one."""
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # The backend raises bare Exception for whatever it cannot read.
            raise ValueError(f"not a tokenizer.json: {error}") from None
        return cls(backend, eos_ids=eos_ids, bos_id=bos_id, add_bos=add_bos)

    def to_json(self) -> str:
        """The backend as the text of a ``tokenizer.json``; ids and rules of this class are not in it."""
        return self._backend.to_str()

    @property
    def backend(self) -> tokenizers.Tokenizer:
        return self._backend

    @cached_property
    def vocab_size(self) -> int:
        """Highest token id plus one, added tokens included."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def longest_token_bytes(self) -> int:
        """UTF-8 bytes of the longest written form in the vocabulary: no token stands for more text than that."""
        return max((len(token.encode()) for token in self._backend.get_vocab(with_added_tokens=True)), default=0)

    def token(self, token_id: int | None) -> str:
        """The written form of an id, such as "<|im_end|>"; "" for None and for an id without one."""
        return "" if token_id is None else self._backend.id_to_token(token_id) or ""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of a text. Special tokens written out in the text are recognised as such.

        ``add_special=False`` gives the ids of the text alone.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return self.with_bos(ids) if add_special else ids

    def with_bos(self, ids: list[int]) -> list[int]:
        """``ids`` of a whole prompt with BOS in front, where the model wants one and they do not begin with it."""
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of token ids, exactly as Detokenizer streams it.

        Bytes that are not UTF-8 become U+FFFD. It is the backend's own decode, but for one case: in a run of byte
        tokens with a malformed part, the backend replaces the whole run, and this keeps the whole characters.
        """
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def pieces(self, *, skip_special: bool) -> Pieces:
        """Each id's share of the text. Raises UnsupportedModel where the backend's decoder is not built."""
        return self._pieces_skipping if skip_special else self._pieces_whole

    @cached_property
    def _pieces_skipping(self) -> Pieces:
        return Pieces(self._backend, skip_special=True)

    @cached_property
    def _pieces_whole(self) -> Pieces:
        return Pieces(self._backend, skip_special=False)
