"""Between the protobuf messages of ``jserve.v1`` and ``jserve.request``: used by the server and by the clients.

No sockets here, and no import of ``jserve.serving`` or ``jserve.client``.
"""

SERVICE = "jserve.v1.Inference"
"""The service's full name, also its name in the health service."""

CODE_KEY = "jserve-code"
"""Trailing metadata that carries JserveError.code."""
