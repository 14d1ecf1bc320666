"""Serve an NNX module whose parameters were saved by plain Orbax, as any Flax program saves them.

    python examples/serve_nnx_checkpoint.py [FOLDER]

Makes a small Llama with random weights, saves its state to FOLDER (by default a temporary one), forgets it, restores
it into an abstract module, and serves that over gRPC and Flight for one question. A module of your own takes the
place of Llama when it has the three methods of jserve/models/contract.py.
"""

import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

from jserve.client import Client
from jserve.config import ServeConfig
from jserve.load import load
from jserve.models.llama import Llama, LlamaConfig
from jserve.progress import ConsoleProgress
from jserve.request import SamplingParams
from jserve.serving.server import Server
from jserve.testing.tokenizer import VOCAB_SIZE, ByteTokenizer

CONFIG = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=256,
)


def make() -> Llama:
    return Llama(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0))


def save(folder: Path) -> None:
    """What a training program does when it is done."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, nnx.state(make()))


def restore(folder: Path) -> Llama:
    graphdef, abstract = nnx.split(nnx.eval_shape(make))
    with ocp.StandardCheckpointer() as checkpointer:
        return nnx.merge(graphdef, checkpointer.restore(folder, abstract))


def main(folder: Path) -> None:
    save(folder)
    module = restore(folder)
    config = ServeConfig(
        grpc_address="127.0.0.1:0", flight_address="127.0.0.1:0", metrics_address="", max_num_seqs=2, max_num_tokens=32
    )
    # The parameters are the module's own; None says so. jserve.LLM((module, None, ByteTokenizer())) takes the same.
    with ConsoleProgress() as progress:
        loaded = load(config, model=(module, None, ByteTokenizer()), progress=progress)
    try:
        with Server(config, loaded.frontend, loaded.engine, loaded.metrics) as server:
            doors = server.start()
            print(f"{loaded.served.name} is served: gRPC {doors.grpc}, Flight {doors.flight}")
            with Client(doors.grpc) as client:
                for delta in client.generate("Random weights say: ", SamplingParams(temperature=0, max_tokens=24)):
                    print(delta.text, end="", flush=True)
            print()
    finally:
        loaded.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch) / "state")
