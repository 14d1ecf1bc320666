"""A table of prompts in, a table of answers out, over Arrow Flight.

    jserve serve                          # in one terminal
    python examples/flight_table.py       # in another

The first part sends a whole table and gets a whole table. The second streams rows with plain pyarrow, as any Arrow
Flight client can, and prints each answer when it is whole. A row that fails says why and leaves the others alone.
"""

import json
import sys

import pyarrow as pa
from pyarrow import flight

from jserve.client import FlightClient
from jserve.errors import JserveError
from jserve.request import SamplingParams

QUESTIONS = pa.table(
    {
        "id": ["gravity", "colours", "nothing"],
        "prompt": ["Gravity is", "Three colours are", None],
        # A column of a sampling field is for its own row; null leaves the field to the call or the model.
        "max_tokens": [24, None, None],
        # The door ignores columns that it does not know.
        "source": ["school", "school", "a mistake"],
    }
)


def whole_table(address: str) -> None:
    with FlightClient(address) as client:
        answers = client.table(QUESTIONS, params=SamplingParams(temperature=0, max_tokens=16))
    for row in answers.select(["id", "text", "finish_reason", "error"]).to_pylist():
        print(f"{row['id']}: {row['error'] or row['text']!r} [{row['finish_reason']}]")


def stream_rows(address: str) -> None:
    """DoExchange: answers come while prompts are still sent."""
    prompts = pa.record_batch(
        {"prompt": ["The sky is", "The sea is"], "temperature": [0.0, 0.0], "max_tokens": [16, 16]}
    )
    texts: dict[str, str] = {}
    with flight.connect(f"grpc://{address.removeprefix('grpc://')}") as client:
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("generate"))
        with writer:
            writer.begin(prompts.schema)
            writer.write_batch(prompts)
            writer.done_writing()
            for chunk in reader:
                for row in chunk.data.select(["id", "text", "finish_reason", "error"]).to_pylist():
                    # A row that failed before it said anything has no text.
                    texts[row["id"]] = texts.get(row["id"], "") + (row["text"] or "")
                    if row["finish_reason"] is not None:
                        print(f"row {row['id']}: {row['error'] or texts[row['id']]!r} [{row['finish_reason']}]")


def main() -> int:
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7471"
    try:
        whole_table(address)
        stream_rows(address)
    except JserveError as error:
        print(f"error {error.code}: {error}", file=sys.stderr)
        return error.exit_status
    except (flight.FlightError, pa.ArrowException) as error:
        # What plain pyarrow raises. Where jserve refused the call, extra_info has its code and words as JSON.
        info = json.loads(getattr(error, "extra_info", b"") or "{}")
        print(f"error {info.get('code', 'of Flight')}: {info.get('message', error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
