"""All that is wrong with a checkpoint, in one error."""

from __future__ import annotations

from collections.abc import Sequence

from jserve.errors import CheckpointError

__all__ = ["MAX_PROBLEMS", "raise_all"]

MAX_PROBLEMS = 1000
"""After so many no more need be looked for: settings may announce millions of experts that no file has."""
_MAX_LISTED = 40


def raise_all(headline: str, wrong: Sequence[str], *, fix: str | None = None) -> None:
    """Raise CheckpointError with all of ``wrong`` under ``headline``, unless it is empty; of very many with some."""
    if wrong:
        count = len(wrong) - _MAX_LISTED
        more = (
            [f"and {count} more" if len(wrong) < MAX_PROBLEMS else f"and at least {count} more"]
            if len(wrong) > _MAX_LISTED
            else []
        )
        raise CheckpointError("\n  ".join([headline, *wrong[:_MAX_LISTED], *more]), fix=fix)
