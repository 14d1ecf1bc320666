"""The shapes that programs are compiled for. Everything else is padded up to the next one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Buckets"]


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Rows of the decode programs and tokens of the mixed ones, each ascending."""

    decode: tuple[int, ...]
    mixed: tuple[int, ...]

    @classmethod
    def build(cls, *, max_num_seqs: int, max_num_tokens: int, smallest_mixed: int = 16) -> Buckets:
        """Powers of two up to each limit, and the limit itself."""
        return cls(
            decode=_powers(1, max_num_seqs),
            mixed=_powers(min(smallest_mixed, max_num_tokens), max_num_tokens),
        )

    def decode_for(self, rows: int) -> int:
        return next(size for size in self.decode if size >= rows)

    def mixed_for(self, tokens: int) -> int:
        return next(size for size in self.mixed if size >= tokens)


def _powers(first: int, limit: int) -> tuple[int, ...]:
    sizes = []
    while first < limit:
        sizes.append(first)
        first *= 2
    return (*sizes, limit)
