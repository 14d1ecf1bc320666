"""A server process for the life-cycle tests: serves a FakeEngine until signalled.

Arguments: the grace in seconds, the seconds of one token. Prints its gRPC address once signals are caught.
"""

import sys

from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_server import fake_server

grace_s, token_delay_s = map(float, sys.argv[1:])
with fake_server(FakeEngine(max_num_seqs=16, token_delay_s=token_delay_s), grace_s=grace_s) as served:
    status = served.server.run_until_signal(ready=lambda: print(served.grpc, flush=True))
sys.exit(status)
