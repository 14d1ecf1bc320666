"""Every bound of the Flight door, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from jserve.config import ServeConfig

__all__ = ["FlightLimits"]

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FlightLimits:
    """Bytes, rows and seconds; of one call unless said otherwise."""

    max_calls: int
    """Calls of the door open at once."""
    message_bytes: int
    """Largest message, and largest uploaded table."""
    rows_in_flight: int
    """Rows that the engine has at once, where it generates."""
    texts_in_flight: int
    """Rows that are begun and not delivered, where it embeds."""

    batch_rows: int = 65_536
    """Most rows of one incoming batch."""
    columns: int = 256
    """Most columns of an incoming schema."""
    dictionary_bytes: int = 4 * MIB
    """Dictionaries that a stream keeps alive, and those before one batch; each batch is validated against its own."""

    waiting_rows: int = 16_384
    waiting_bytes: int = 16 * MIB
    """Rows read and not yet given to the engine: a client may write so much before it reads anything."""
    outbox_bytes: int = 4 * MIB
    """Deltas or vectors made and not yet written, as they lie in memory."""
    output_bytes: int = MIB // 4
    """Size at which an outgoing batch is cut: many clients keep gRPC's limit of 4 MiB, and it is made on the loop."""
    stall_s: float = 60.0
    """How long a client may neither read nor leave room for more of what it writes."""

    upload_stall_s: float = 120.0
    """How long an upload may bring no whole batch; it holds one of the tables meanwhile."""
    max_tables: int = 64
    """Tables kept at once, in the whole server."""
    tables_bytes: int = 512 * MIB
    """Uploaded rows kept at once, in the whole server."""
    table_window_bytes: int = 64 * MIB
    """Results of one table, as they lie in memory, at which it begins no more rows until some are fetched."""
    results_bytes: int = 512 * MIB
    """The same of all tables together, in the whole server. A table of which nothing is held goes on all the same."""
    table_ttl_s: float = 600.0
    """How long an uploaded table is kept when nothing happens to it, or when who fetches it reads nothing."""

    @classmethod
    def from_config(cls, config: ServeConfig) -> FlightLimits:
        return cls(
            max_calls=config.max_streams,
            message_bytes=config.max_message_mb * MIB,
            # Twice what can run, so that a slot that falls free finds its next row already tokenized and waiting.
            rows_in_flight=min(2 * config.max_num_seqs, config.max_queue),
            # Two groups run, and others are tokenized meanwhile.
            texts_in_flight=max(256, 8 * config.max_num_seqs),
        )
