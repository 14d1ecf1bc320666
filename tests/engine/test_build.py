"""Starts that cannot work end before they cost anything, with numbers and words."""

import jax
import jax.numpy as jnp
import pytest
from harness import VOCAB, make_engine
from jax.errors import JaxRuntimeError

from jserve.engine.executor import Executor
from jserve.errors import CheckpointError, ConfigError, MeshError, OutOfMemory, UnsupportedModel
from jserve.testing.models import tiny_llama


def test_a_mesh_that_does_not_divide_or_is_not_built_is_refused_with_numbers():
    with pytest.raises(ValueError, match="tensor=3 does not divide"):
        make_engine(mesh="tensor=3")
    with pytest.raises(MeshError, match="stage"):
        make_engine(mesh="stage=2")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_tokens": 4}, "must exceed max_num_seqs"),
        ({"max_model_len": 513}, "limit of 512"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        make_engine(**settings)


def test_a_tokenizer_wider_than_the_head_is_refused():
    with pytest.raises(UnsupportedModel, match=f"the tokenizer has {VOCAB} ids and the model's head only 100"):
        make_engine(model=tiny_llama(vocab_size=100))


def test_a_pool_too_small_for_the_asked_length_is_refused_with_the_arithmetic():
    with pytest.raises(OutOfMemory, match=r"4 pages of 8 tokens.*64 tokens needs 8") as caught:
        make_engine(num_pages=4, max_model_len=64)
    assert "--max-model-len 32" in caught.value.fix


def test_too_many_pages_are_refused_before_anything_compiles(monkeypatch):
    monkeypatch.setattr("jserve.engine.memory._system_bytes", lambda: 2**30)
    heard = []
    with pytest.raises(OutOfMemory, match="1000000 pages of 8 tokens take"):
        make_engine(num_pages=10**6, compile_progress=heard.append)
    assert heard == []


@pytest.mark.parametrize("stage", ["allocate", "dispatch"])
def test_a_device_that_runs_out_of_memory_during_the_start_says_so(store, monkeypatch, stage, caplog):
    def full(*_):
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setattr(Executor, stage, full)
    with pytest.raises(OutOfMemory, match=r"64 pages\) a device: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"):
        make_engine(store)


def test_weights_that_cannot_be_had_end_the_start_before_the_last_program_is_compiled():
    def load():
        raise CheckpointError("an array is damaged")

    heard = []
    with pytest.raises(CheckpointError, match="an array is damaged"):
        make_engine(load=load, compile_progress=heard.append)
    assert [now.done for now in heard] in ([], [0])


def test_weights_that_give_no_finite_numbers_are_no_model():
    graphdef, params = tiny_llama()
    damaged = jax.tree.map(lambda a: a.at[(0,) * a.ndim].set(jnp.nan), params)
    with pytest.raises(CheckpointError, match="the model's first logits are not finite numbers") as caught:
        make_engine(model=(graphdef, damaged))
    assert "jserve inspect --check" in caught.value.fix
