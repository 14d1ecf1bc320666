"""A server process for the life-cycle tests: serves a FakeEngine until signalled.

Arguments: the grace in seconds, the seconds of one token, and whether signals are kept from the main thread (0 or 1:
the system may give a process's signal to any thread). Prints its gRPC address once signals are caught.
"""

import signal
import sys

from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_server import fake_server

grace_s, token_delay_s, elsewhere = map(float, sys.argv[1:])


def ready():
    if elsewhere:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    print(served.grpc, flush=True)


with fake_server(FakeEngine(max_num_seqs=16, token_delay_s=token_delay_s), grace_s=grace_s) as served:
    status = served.server.run_until_signal(ready=ready)
sys.exit(status)
