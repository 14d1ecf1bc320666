"""Which arrays of a checkpoint ``inspect`` says a module of the user's own reads."""

import jax.numpy as jnp
import orbax.checkpoint as ocp

from jserve.checkpoints.own.report import inspect_own

MODULE = """
import jax.numpy as jnp
from flax import nnx

class Model(nnx.Module):
    def __init__(self):
        self.key = nnx.Param(jnp.ones((2, 3)))
        self.query = nnx.Param(jnp.ones((2, 3)))
"""


def test_parameters_with_names_of_a_train_state_are_told_as_read(tmp_path, monkeypatch):
    (tmp_path / "named_as_states.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ck", {name: jnp.ones((2, 3)) for name in ("key", "query")})
    report = inspect_own(
        "named_as_states:Model", checkpoint=str(tmp_path / "ck"), tokenizer=None, check=False, progress=None
    )
    assert report.problem is None
    assert {array.name: array.parameter for array in report.arrays} == {"key": True, "query": True}
    assert "not read" not in str(report)
