"""The life of a server: open the doors, tell its health, drain, close."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from jserve.config import ServeConfig
from jserve.engine.contract import Watched
from jserve.serving.address import check_addresses, door_address
from jserve.serving.frontends import AnyFrontend
from jserve.serving.health import Health, Watchdog
from jserve.serving.loop import LoopThread

if TYPE_CHECKING:
    from jserve.observe.metrics import Metrics
    from jserve.observe.server import MetricsServer
    from jserve.serving.flight.door import FlightDoor
    from jserve.serving.grpc.door import GrpcDoor

__all__ = ["Addresses", "Server"]

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FORCE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where the doors are, with their real ports; None for a door left closed."""

    grpc: str | None
    flight: str | None
    metrics: str | None


class Server:
    """The doors of one engine. Engine and frontend are given, and stay the caller's to close.

    ``start``, then ``run_until_signal``, or ``drain`` or ``stop`` from any thread. A closed server stays closed.
    Health is SERVING from the moment the engine is ready; see jserve.serving.health.
    """

    def __init__(
        self,
        config: ServeConfig,
        frontend: AnyFrontend,
        engine: Watched,
        metrics: Metrics | None = None,
        *,
        stall_s: float = 8.0,
        watch_interval_s: float = 1.0,
    ) -> None:
        self._config = config
        self._frontend = frontend
        self._metrics = metrics
        self._watchdog = Watchdog(engine, self._tell, stall_s=stall_s, interval_s=watch_interval_s)
        self._loop: LoopThread | None = None
        self._grpc: GrpcDoor | None = None
        self._flight: FlightDoor | None = None
        self._metrics_server: MetricsServer | None = None
        self._closing = threading.Lock()
        self._closed = False

    @property
    def health(self) -> Health:
        return self._watchdog.health

    def start(self) -> Addresses:
        """Open the doors that the settings name. ConfigError where one cannot be opened; then none is open."""
        if self._loop is not None or self._closed:
            raise RuntimeError("a server starts once")
        check_addresses(self._config)
        try:
            return self._open()
        except BaseException:
            self.stop()
            raise

    def drain(self, grace_s: float | None = None) -> None:
        """Refuse new requests, say NOT_SERVING, let running ones end within the grace, cut the rest, close.

        ``grace_s``: seconds; absent: the settings'. Returns when all doors are closed. Idempotent: a second
        caller waits for the first.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            # In this order, so that whoever reads "draining" is also refused.
            self._frontend.refuse("the server is shutting down and takes no new requests; ask another one")
            self._watchdog.drain()
            grace_s = self._config.grace_s if grace_s is None else grace_s
            with ExitStack() as then:
                if self._loop is not None:
                    then.callback(self._loop.close)
                if self._metrics_server is not None:
                    then.callback(self._metrics_server.close)
                then.callback(self._watchdog.stop)
                pool = then.enter_context(ThreadPoolExecutor(max_workers=2, thread_name_prefix="jserve-drain"))
                for closing in [pool.submit(door.stop, grace_s) for door in self._doors()]:
                    closing.result()

    def stop(self) -> None:
        """Drain without grace."""
        self.drain(0.0)

    def run_until_signal(self, *, ready: Callable[[], None] | None = None) -> int:
        """Serve until SIGTERM or SIGINT, drain, and return the exit status, 0. Main thread only.

        ``ready`` is called once signals are caught. A second signal ends the grace at once, and the process too
        if the doors are not closed 5 s later; the status is then 128 and the signal's number.
        """
        with _Events() as events:
            if ready is not None:
                ready()
            number = events.get()
            log.warning("%s: draining, for %g s at most; a second signal forces", _name(number), self._config.grace_s)
            drained = self._drain_aside(events.done)
            second = events.get()
            if second is None:
                drained.result()
                return 0
            log.warning("%s: the grace ends now", _name(second))
            # Aside, for what hangs could hang this too.
            threading.Thread(target=self._force, name="jserve-force", daemon=True).start()
            try:
                last = events.get(_FORCE_S)
            except TimeoutError:
                last = second
            if last is not None:
                os._exit(128 + last)
            return 128 + second

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _open(self) -> Addresses:
        # Each door is imported where it opens: gRPC and Arrow are slow to import.
        grpc = flight = metrics = None
        self._loop = LoopThread("jserve-doors")
        if self._config.metrics_address and self._metrics is not None:
            self._metrics_server = self._metrics.serve(door_address(self._config, "metrics_address"))
            metrics = self._metrics_server.address
        if self._config.flight_address:
            from jserve.serving.flight.door import FlightDoor

            flight_door = FlightDoor(self._frontend, self._config, loop=self._loop, health=lambda: self.health)
            flight = flight_door.start()
            self._flight = flight_door
        if self._config.grpc_address:
            from jserve.serving.grpc.door import GrpcDoor

            grpc_door = GrpcDoor(self._frontend, self._config, loop=self._loop)
            grpc = grpc_door.start()
            self._grpc = grpc_door
        self._watchdog.start()
        return Addresses(grpc=grpc, flight=flight, metrics=metrics)

    def _doors(self) -> list[GrpcDoor | FlightDoor]:
        return [door for door in (self._grpc, self._flight) if door is not None]

    def _tell(self, health: Health) -> None:
        if self._grpc is not None:
            self._grpc.set_serving(serving=health is Health.SERVING)

    def _drain_aside(self, done: Callable[[], None]) -> Future[None]:
        """Drain on another thread, so that this one can hear a second signal."""
        drained: Future[None] = Future()

        def run() -> None:
            try:
                self.drain()
                drained.set_result(None)
            except BaseException as error:
                drained.set_exception(error)
            finally:
                done()

        threading.Thread(target=run, name="jserve-drain", daemon=True).start()
        return drained

    def _force(self) -> None:
        self._frontend.abort_all("the server was told to shut down at once; ask another one")
        for door in self._doors():
            with suppress(RuntimeError):  # it was over already, and its loop with it
                door.cut()


class _Events:
    """SIGINT and SIGTERM, instead of what they did before, and the word that the drain is done.

    They wait in a queue; a byte in a socket wakes the main thread, written by the C half of signal handling as a signal
    comes (signal.set_wakeup_fd). A main thread that waited for a lock would sleep through a signal that comes between
    its last look and its wait, or on another thread: Python runs handlers on the main thread alone, once something
    wakes it. A full socket loses bytes and nothing else.
    """

    def __enter__(self) -> _Events:
        self._events: deque[int | None] = deque()
        self._out, self._in = socket.socketpair()
        self._in.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._in.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        _heard_by.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _heard_by.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        self._out.close()
        self._in.close()

    def done(self) -> None:
        """From any thread, also a late one."""
        self._events.append(None)
        with suppress(OSError):
            self._in.send(b"\0")

    def get(self, timeout_s: float | None = None) -> int | None:
        """The next signal's number, or None for done. TimeoutError after ``timeout_s``."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._events:
            self._out.settimeout(None if end is None else max(end - time.monotonic(), 1e-3))
            self._out.recv(4096)  # whoever embeds a server may handle other signals in Python; they wake it too
        return self._events.popleft()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._events.append(number)


_heard_by: list[_Events] = []


def _leave_in_child() -> None:
    """A forked child has the socket too: its signals are not the server's, and end it as they would any process."""
    if _heard_by:
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_leave_in_child)


def _name(number: int | None) -> str:
    return "stop" if number is None else signal.Signals(number).name
