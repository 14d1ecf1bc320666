"""Memory and time of restoring an Orbax checkpoint, beside Orbax itself. By hand, on an idle machine.

    python tests/benchmarks/bench_restore.py [--folder DIR] [--rounds 3] [--json FILE]

A Llama of 2.3 GB in bfloat16, 0.53 GB of which are its table, is written to DIR by StandardCheckpointer: with arrays of
each layer, and with layers stacked on axis 0 and on axis 1. Every restore is a process of its own, whose peak is what
the kernel calls VmHWM. Asked is that this peak, less that of a tiny model of one layer (what Python and JAX take), is
no more than

    what the devices hold + max(the largest parameter as it is served, 512 MB).

On a CPU what the devices hold is host memory too. Times are of the restore alone, with the files in the page cache;
"times Orbax" is ours over that of StandardCheckpointer.restore of the same files on the same mesh in the same dtype,
one after the other, the median of the pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from jserve.checkpoints.arrays.tree import flatten, nest
from jserve.checkpoints.open import open_checkpoint
from sharding import MeshSpec, param_shardings

LARGE = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
TINY = LARGE | {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
TREES: dict[str, int | None] = {"a layer each": None, "stacked, axis 0": 0, "stacked, axis 1": 1}
"""And the axis that layers are stacked on."""
DEVICES, DTYPES = (1, 8), ("float32", "bfloat16")
ALLOWED = 512 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "bench_restore")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="trees whose names hold this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_child(**json.loads(options.child))))
        return
    base = _run(folder=_written(options.folder, "tiny", TINY, None), devices=1, dtype="float32", by="jserve")
    found = []
    for name, axis in TREES.items():
        if options.only not in name:
            continue
        folder = _written(options.folder, f"axis-{axis}", LARGE, axis)
        for devices in DEVICES:
            for dtype in DTYPES:
                rounds = []
                for _ in range(options.rounds):
                    _read_all(folder)
                    rounds.append(
                        [_run(folder=folder, devices=devices, dtype=dtype, by=by) for by in ("jserve", "orbax")]
                    )
                found.append(_row(name, devices, dtype, base["peak"], rounds))
                print(json.dumps(found[-1]), flush=True)
    _print(found)
    if options.json:
        options.json.write_text(json.dumps({"base": base, "rows": found}, indent=1), encoding="utf-8")


def _row(name: str, devices: int, dtype: str, base: int, rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    ours = [pair[0] for pair in rounds]
    over = max(run["peak"] for run in ours) - base
    allowed = ours[0]["held"] + max(ours[0]["largest"], ALLOWED)
    return {
        "tree": name,
        "devices": devices,
        "dtype": dtype,
        "held": ours[0]["held"],
        "peak": over,
        "allowed": allowed,
        "holds": over <= allowed,
        "orbax_peak": max(pair[1]["peak"] for pair in rounds) - base,
        "seconds": statistics.median(run["seconds"] for run in ours),
        "times_orbax": statistics.median(pair[0]["seconds"] / pair[1]["seconds"] for pair in rounds),
    }


def _print(found: list[dict[str, Any]]) -> None:
    print("| tree | devices | dtype | devices hold | peak | allowed | Orbax's peak | seconds | times Orbax |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in found:
        held, peak, allowed, theirs = (f"{row[key] / 1e9:.2f} GB" for key in ("held", "peak", "allowed", "orbax_peak"))
        print(
            f"| {row['tree']} | {row['devices']} | {row['dtype']} | {held} | {peak} | {allowed} | {theirs} "
            f"| {row['seconds']:.1f} | {row['times_orbax']:.2f} |"
        )


def _run(**asked: Any) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", json.dumps({**asked, "folder": str(asked["folder"])})]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _child(*, folder: str, devices: int, dtype: str, by: str, axis: int | None = None) -> dict[str, Any]:
    if by == "write":
        _write(Path(folder), axis)
        return {}
    jax.config.update("jax_num_cpu_devices", devices)
    checkpoint = open_checkpoint(folder)
    asked = _asked(checkpoint, devices, dtype)
    begin = time.perf_counter()
    if by == "jserve":
        params = jax.block_until_ready(checkpoint.restore(asked))
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            params = jax.block_until_ready(checkpointer.restore(checkpoint.path / "params", _as_stored(folder, asked)))
    seconds = time.perf_counter() - begin
    arrays = jax.tree.leaves(params)
    return {
        "seconds": seconds,
        "peak": _peak(),
        "held": sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards),
        "largest": max(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(asked)),
    }


def _asked(checkpoint: Any, devices: int, dtype: str) -> Any:
    _, state = checkpoint.abstract(np.dtype(dtype) if dtype == "float32" else jax.numpy.bfloat16)
    shardings = param_shardings(state, MeshSpec(tensor=devices).build())
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nnx.to_pure_dict(state),
        shardings,
    )


def _as_stored(folder: str, asked: Any) -> dict[str, Any]:
    """What Orbax is asked for: the tree as it lies there, each stack split as its layers are."""
    axis = json.loads((Path(folder) / "axis.json").read_text())
    leaves = flatten(asked)
    if axis is None:
        return nest(leaves)
    stored: dict[tuple[str, ...], Any] = {}
    count = 1 + max(int(path[1]) for path in leaves if path[0] == "layers")
    for path, leaf in leaves.items():
        if path[0] != "layers":
            stored[path] = leaf
            continue
        shape = (*leaf.shape[:axis], count, *leaf.shape[axis:])
        spec = list(leaf.sharding.spec) + [None] * (len(leaf.shape) - len(leaf.sharding.spec))
        spec.insert(axis, None)
        sharding = jax.sharding.NamedSharding(leaf.sharding.mesh, jax.sharding.PartitionSpec(*spec))
        stored[path[0], *path[2:]] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
    return nest(stored)


def _written(root: Path, name: str, config: dict[str, Any], axis: int | None) -> Path:
    """The folder ``name`` of ``root``, written where it is not there yet."""
    folder = root / name
    if not (folder / "params" / "_METADATA").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "axis.json").write_text(json.dumps(axis), encoding="utf-8")
        _run(folder=folder, devices=1, dtype="bfloat16", by="write", axis=axis)
    return folder


def _write(folder: Path, axis: int | None) -> None:
    from jserve.checkpoints.hf.families import HF_FAMILIES
    from jserve.models.registry import build_abstract, family

    config = json.loads((folder / "config.json").read_text())
    found = HF_FAMILIES[config["model_type"]]
    _, state = build_abstract(family(found.family), found.config(config), jax.numpy.bfloat16)
    rng = np.random.default_rng(0)
    count, leaves = config["num_hidden_layers"], {}
    for path, leaf in flatten(state).items():
        if path[0] != "layers" or axis is None or path[1] == "0":
            leaves[path] = rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype)
    if axis is not None:
        for path in [path for path in leaves if path[0] == "layers"]:
            leaves[path[0], *path[2:]] = np.stack([leaves.pop(path)] * count, axis)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "params", nest(leaves))


def _read_all(folder: Path) -> None:
    """Into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(16 << 20):
                    pass


def _peak() -> int:
    """Of this process, in bytes. Not getrusage's: that counts what the parent held when it started this one."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


if __name__ == "__main__":
    main()
