"""Compilations are counted always, and logged while an engine that is ready watches."""

import jax
import jax.numpy as jnp

from jserve.engine.compiles import compilations


def test_a_compilation_is_counted_and_its_cause_logged_while_somebody_watches(caplog, monkeypatch):
    monkeypatch.setattr(compilations, "_watchers", 0)
    before = compilations.count
    compilations.watch()
    jax.jit(lambda x: x * 3 + before)(jnp.float32(1))
    compilations.unwatch()
    assert compilations.count > before
    assert "compilation after ready" in caplog.text
    assert "test_compiles.py" in caplog.text
    caplog.clear()
    jax.jit(lambda x: x * 5 + before)(jnp.float32(1))
    assert caplog.text == ""
