"""The shapes that an encoder's programs are compiled for: S texts of up to L tokens each. No JAX."""

from __future__ import annotations

from dataclasses import dataclass

from jserve.engine.buckets import sizes

__all__ = ["MAX_PROGRAMS", "EncoderBuckets"]

MAX_PROGRAMS = 24
_SHORTEST = 16
"""A shorter text costs hardly less than one of so many tokens."""
_GROWTH = 4


@dataclass(frozen=True, kw_only=True)
class EncoderBuckets:
    """Numbers of texts, ascending, by length; lengths ascend too."""

    by_length: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def build(cls, *, max_length: int, max_num_tokens: int, max_num_seqs: int) -> EncoderBuckets:
        """Lengths: powers of two, the last one ``max_length`` itself. Texts: down to 1 from what ``max_num_tokens``
        and ``max_num_seqs`` allow, in so few steps that there are at most MAX_PROGRAMS shapes."""
        shortest, growth = _SHORTEST, _GROWTH
        while True:
            lengths = [shortest]
            while lengths[-1] < max_length:
                lengths.append(2 * lengths[-1])
            lengths[-1] = max_length
            rows = [max(1, min(max_num_tokens // length, max_num_seqs)) for length in lengths]
            texts = [sizes(most, growth=growth, smallest=1) for most in rows]
            if sum(map(len, texts)) <= MAX_PROGRAMS:
                return cls(by_length=tuple(zip(lengths, texts, strict=True)))
            # First fewer numbers of texts, down to two a length; then fewer lengths.
            if any(len(steps) > 2 for steps in texts):
                growth *= 2
            else:
                shortest *= 2

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(S, L) of every program, the costliest last."""
        found = [(texts, length) for length, steps in self.by_length for texts in steps]
        return tuple(sorted(found, key=lambda shape: (shape[0] * shape[1], shape[1])))

    def length_for(self, tokens: int) -> int:
        """The place in ``by_length`` of the shortest length that holds a text of so many tokens."""
        return next(i for i, (length, _) in enumerate(self.by_length) if length >= tokens)
