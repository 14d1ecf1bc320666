"""The shapes that programs are compiled for. Everything else is padded up to the next one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Buckets", "sizes"]

_SMALLEST_MIXED = 32


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Rows of the decode programs and tokens of the mixed ones, each ascending."""

    decode: tuple[int, ...]
    mixed: tuple[int, ...]

    @classmethod
    def build(cls, *, max_num_seqs: int, max_num_tokens: int, decode_growth: int = 2) -> Buckets:
        """From each limit downwards: rows by ``decode_growth`` to 1, tokens by 2 to a few dozen.

        More rows than needed cost a decode step little, since its time goes into reading weights; more tokens than
        needed cost a mixed step in proportion. Each size costs a compilation at the first start.
        """
        return cls(
            decode=sizes(max_num_seqs, growth=decode_growth, smallest=1),
            mixed=sizes(max_num_tokens, growth=2, smallest=_SMALLEST_MIXED),
        )

    def decode_for(self, rows: int) -> int:
        return next(size for size in self.decode if size >= rows)

    def mixed_for(self, tokens: int) -> int:
        return next(size for size in self.mixed if size >= tokens)


def sizes(limit: int, *, growth: int, smallest: int) -> tuple[int, ...]:
    """From ``limit`` down to ``smallest`` by ``growth``, ascending."""
    found = [limit]
    while found[-1] > smallest:
        found.append(max(smallest, found[-1] // growth))
    return tuple(reversed(found))
