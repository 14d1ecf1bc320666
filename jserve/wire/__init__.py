"""Between what travels and ``jserve.request``: used by the server and by the clients.

    convert.py              the protobuf messages of ``jserve.v1``
    columns.py              the Arrow columns of the Flight door
    flight.py, ipc.py       Flight's messages and the Arrow IPC messages in them
    errors.py               error codes

No sockets here, and no import of ``jserve.serving`` or ``jserve.client``.
"""

SERVICE = "jserve.v1.Inference"
"""The service's full name, also its name in the health service."""

CODE_KEY = "jserve-code"
"""Trailing metadata that carries JserveError.code."""
