"""A small HTTP server for ``GET /metrics``."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from prometheus_client import CONTENT_TYPE_LATEST

from jserve.address import Address
from jserve.errors import ConfigError

__all__ = ["MetricsServer"]

SOCKET_TIMEOUT_S = 10.0
"""A connection that sends nothing for so long is closed."""
MAX_CONNECTIONS = 16
"""Most connections at once; one more is closed at once."""

log = logging.getLogger(__name__)


class MetricsServer:
    """Answers ``GET /metrics`` with what ``render`` gives, from its own thread, until closed. TCP only."""

    def __init__(self, address: Address, render: Callable[[], bytes]) -> None:
        try:
            if address.path:
                raise OSError("it is a Unix socket, and metrics are served over TCP")
            self._http = _HTTPServer(address.host, address.port, _handler(render))
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {address}: {error}", fix="--metrics-address 127.0.0.1:0"
            ) from None
        self.port: int = self._http.server_address[1]
        """The port that was bound."""
        self.address = str(replace(address, port=self.port))
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, name="jserve-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering and give the port back. Idempotent."""
        self._http.shutdown()
        self._thread.join()
        self._http.drop_connections()
        self._http.server_close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = False  # server_close() then waits for them.

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        # As socketserver does it, without the look-up of the host's name that http.server adds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: socket.socket, client_address: object) -> bool:  # type: ignore[override]
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                return False
            self._open.add(request)
        return True

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def drop_connections(self) -> None:
        """End reads that wait for a silent client."""
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        # A client that goes away is nobody's fault; anything else is ours.
        level = logging.DEBUG if isinstance(sys.exception(), OSError) else logging.ERROR
        log.log(level, "a metrics request failed", exc_info=True)


def _handler(render: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = SOCKET_TIMEOUT_S

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "only /metrics is here")
                return
            body = render()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    return Handler
