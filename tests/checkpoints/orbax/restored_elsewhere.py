"""A process with as many CPU devices as asked for, which restores a checkpoint on meshes of its own.

    python restored_elsewhere.py FOLDER DEVICES     prints, for each mesh, what each parameter's devices hold, as JSON

Everything that is logged or warned of goes to stderr.
"""

import hashlib
import json
import sys

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jserve.checkpoints.arrays.tree import flatten
from jserve.checkpoints.open import open_checkpoint
from jserve.checkpoints.own.folder import open_arrays


def main(folder, devices):
    jax.config.update("jax_num_cpu_devices", devices)
    answers = []
    for shape in ((devices,), (2, 2)) if devices == 4 else ((devices,),):
        mesh = Mesh(np.array(jax.devices()).reshape(shape), ("rows", "columns")[: len(shape)])
        wanted = jax.tree.map(
            lambda leaf, mesh=mesh: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split(leaf.shape, mesh)),
            nnx.to_pure_dict(open_checkpoint(folder).abstract(np.float32)[1]),
        )
        for restored in (open_checkpoint(folder).restore(wanted), open_arrays(folder).restore(wanted)):
            answers.append({".".join(path): told(array) for path, array in flatten(restored).items()})
    print(json.dumps(answers))


def split(shape, mesh):
    """Each axis of the mesh on the next dimension that it divides."""
    spec = [None] * len(shape)
    for axis, size in mesh.shape.items():
        at = next((i for i, length in enumerate(shape) if spec[i] is None and length % size == 0), None)
        if at is not None:
            spec[at] = axis
    return NamedSharding(mesh, PartitionSpec(*spec))


def told(array):
    sizes = sorted({shard.data.size for shard in array.addressable_shards})
    return [len(array.sharding.device_set), sizes, digest(np.asarray(array))]


def digest(values):
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
