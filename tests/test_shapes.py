"""Shapes and types are checked at run time: annotations of array code are held against every call in these tests."""

import ast
import dataclasses
import importlib
import inspect
import typing
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jserve.engine.forward import Batch
from jserve.engine.sampler import _keep_best
from jserve.models.contract import Query, Step
from jserve.models.linear import linear
from jserve.models.norms import rms_norm
from jserve.models.rope import apply_rope, inverse_frequencies

ROOT = Path(__file__).parent.parent


def annotated_modules():
    """Every module of the project that imports jaxtyping."""
    for package in ("jserve", "pallas_kernels", "sharding"):
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if any(isinstance(node, ast.ImportFrom) and node.module == "jaxtyping" for node in ast.walk(tree)):
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


def batch(**changes):
    ints = {"page_table": (2, 3), "kv_lens": (2,), "cu_q_lens": (3,), "distribution": (3,), "positions": (5,)}
    arrays = {name: jnp.zeros(shape, jnp.int32) for name, shape in ints.items()}
    return Batch(**{**arrays, "valid": jnp.ones(5, bool), **changes})


def query(**changes):
    arrays = {"q": jnp.zeros((5, 4, 8)), "k": jnp.zeros((5, 2, 8)), "v": jnp.zeros((5, 2, 8)), "sinks": jnp.zeros(4)}
    return Query(**{**arrays, "layer": 0, "scale": 1.0, "window": None, "soft_cap": None, **changes})


WRONG = {
    "a norm of another width": lambda: rms_norm(jnp.zeros((2, 8)), jnp.ones(4), 1e-5),
    "a norm of integers": lambda: rms_norm(jnp.zeros((2, 8), jnp.int32), jnp.ones(8), 1e-5),
    "activations without tokens": lambda: linear(jnp.zeros(()), jnp.zeros(())),
    "positions of other tokens": lambda: apply_rope(jnp.zeros((3, 2, 8)), jnp.zeros(4, jnp.int32), np.ones(4)),
    "an odd head": lambda: inverse_frequencies(7, 10000.0, None),
    "values of other heads": lambda: query(v=jnp.zeros((5, 1, 8))),
    "keys of other tokens": lambda: query(k=jnp.zeros((4, 2, 8))),
    "sinks of other heads": lambda: query(sinks=jnp.zeros(2)),
    "positions that are floats": lambda: Step(positions=jnp.zeros(2), valid=jnp.ones(2, bool), answer=lambda q: q.q),
    "as many bounds as sequences": lambda: batch(cu_q_lens=jnp.zeros(2, jnp.int32)),
    "validity of other tokens": lambda: batch(valid=jnp.ones(4, bool)),
    "needs of other rows": lambda: _keep_best(jnp.zeros((2, 8)), jnp.zeros((2, 8)), jnp.zeros(3), jnp.ones(2, bool)),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_a_wrong_shape_or_dtype_raises(call):
    with pytest.raises(TypeCheckError):
        call()


def test_what_is_right_passes():
    assert rms_norm(jnp.ones((2, 8)), jnp.ones(8), 1e-5).shape == (2, 8)
    assert batch().cu_q_lens.shape == (3,)
    assert query(k=None, v=None, sinks=None).q.shape == (5, 4, 8)


@pytest.mark.parametrize("name", list(annotated_modules()))
def test_every_module_with_shapes_is_checked_and_its_annotations_can_be_read(name):
    """An annotation that cannot be resolved would silently not be checked."""
    module = importlib.import_module(name)
    assert type(module.__spec__.loader).__name__ == "_JaxtypingLoader", f"add {name} to CHECKED in tests/conftest.py"
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == name]
    for value in own:
        typing.get_type_hints(value)
        if inspect.isclass(value):
            for method in vars(value).values():
                # What dataclass writes has the fields' annotations, seen above in the modules that they stand in.
                written = dataclasses.is_dataclass(value) and getattr(method, "__name__", "") == "__init__"
                if inspect.isfunction(method) and not written:
                    typing.get_type_hints(method)
