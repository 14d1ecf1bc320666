"""A server process for the life-cycle tests: serves a FakeEngine until signalled.

Arguments: the grace in seconds, the seconds of one token, and "elsewhere" to keep signals from the main thread (the
system may give a process's signal to any thread) or "forked" to have a child, which prints its id. Prints its gRPC
address once signals are caught.
"""

import os
import signal
import sys
import time

from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_server import fake_server

grace_s, token_delay_s = map(float, sys.argv[1:3])
how = sys.argv[3] if len(sys.argv) > 3 else ""


def ready():
    if how == "forked" and os.fork() == 0:
        os.write(1, f"{os.getpid()}\n".encode())
        time.sleep(60)
        os._exit(0)
    if how == "elsewhere":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    print(served.grpc, flush=True)


with fake_server(FakeEngine(max_num_seqs=16, token_delay_s=token_delay_s), grace_s=grace_s) as served:
    status = served.server.run_until_signal(ready=ready)
sys.exit(status)
