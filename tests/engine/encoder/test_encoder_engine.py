"""The engine of encoders: vectors that depend on nothing but their text, and what ends a text early."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jserve.config import ServeConfig
from jserve.engine.encoder.build import EncoderModel, build_encoder
from jserve.engine.store import ProgramStore
from jserve.errors import (
    Cancelled,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    EngineFailed,
    InvalidRequest,
    MeshError,
    OutOfMemory,
    PromptTooLong,
    QueueFull,
)
from jserve.models.pooling import Pooling
from jserve.request import TextRequest
from jserve.testing.models import tiny_bert
from sharding import MeshSpec, param_shardings

MAX_LEN = 48
MEAN = Pooling(how="mean", normalize=True)
RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(1, 64, length).tolist() for length in [1, 2, 15, 16, 17, 31, 32, 33, 48, 5, 5, 40]]


def make_encoder(
    store=None, *, mesh="", load=None, params=None, pooling=MEAN, built_in=True, progress=None, **settings
):
    graphdef, made = tiny_bert()
    params = params or made
    built = MeshSpec.parse(mesh).build()
    state = nnx.split(nnx.merge(graphdef, params))[1]
    shardings = param_shardings(state, built)
    shapes = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), params, shardings)
    return build_encoder(
        EncoderModel(
            graphdef=graphdef,
            param_shapes=shapes,
            load=load or (lambda: jax.tree.map(jax.device_put, params, shardings)),
            max_len=MAX_LEN,
            vocab_size=64,
            pooling=pooling,
            built_in=built_in,
        ),
        ServeConfig(**{"max_num_tokens": 128, **settings}),
        mesh=built,
        store=store,
        compile_progress=progress,
    )


class Listener:
    """Gathers what sinks hear, by the text's id."""

    def __init__(self, count):
        self.heard = {}
        self.count = count
        self.over = threading.Event()

    def sink(self, name):
        def hear(encoded):
            assert name not in self.heard, "a text was answered twice"
            self.heard[name] = encoded
            if len(self.heard) == self.count:
                self.over.set()

        return hear

    def wait(self):
        assert self.over.wait(60)
        return self.heard


def embed(engine, texts):
    listener = Listener(len(texts))
    for i, ids in enumerate(texts):
        engine.submit(TextRequest(request_id=str(i), token_ids=tuple(ids)), listener.sink(i))
    heard = listener.wait()
    assert all(heard[i].error is None for i in heard)
    return np.stack([heard[i].vector for i in range(len(texts))])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return ProgramStore(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="module")
def engine(store):
    built = make_encoder(store)
    yield built
    built.close()


@pytest.fixture(scope="module")
def solo(engine):
    """Each text's vector, computed alone."""
    return np.concatenate([embed(engine, [ids]) for ids in TEXTS])


def held(engine):
    """Keep the engine's thread in a sink: what is submitted meanwhile waits. Call the result to let go."""
    entered, go = threading.Event(), threading.Event()

    def sink(encoded):
        entered.set()
        go.wait(60)

    engine.submit(TextRequest(request_id="held", token_ids=(1,)), sink)
    assert entered.wait(60)
    return go.set


def test_vectors_are_float32_and_of_length_one(engine, solo):
    assert engine.dimensions == 32
    assert solo.shape == (len(TEXTS), 32)
    assert solo.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(solo, axis=1), 1.0, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 10, 100])
def test_a_vector_depends_on_its_own_text_only(engine, solo, n):
    order = RNG.integers(0, len(TEXTS), n)
    vectors = embed(engine, [TEXTS[i] for i in order])
    assert vectors.shape == (n, 32)
    np.testing.assert_allclose(vectors, solo[order], atol=1e-5)


def test_rows_of_a_group_do_not_keep_the_group(engine):
    listener = Listener(1)
    engine.submit(TextRequest(request_id="own", token_ids=(1, 2)), listener.sink("own"))
    assert listener.wait()["own"].vector.base is None


def test_padding_may_be_nan(store, solo):
    _, params = tiny_bert()
    params["embed"]["word"] = params["embed"]["word"].at[0].set(jnp.nan)  # id 0 is what rows are padded with
    engine = make_encoder(store, params=params)
    try:
        np.testing.assert_allclose(embed(engine, TEXTS), solo, atol=1e-5)
    finally:
        engine.close()


def test_nothing_compiles_after_ready_and_all_is_stored(engine, store, solo):
    before = engine.stats().compilations  # counted over the process: other engines were built meanwhile
    embed(engine, TEXTS)
    assert engine.stats().compilations == before
    heard = []
    again = make_encoder(store, progress=heard.append)
    try:
        assert (heard[-1].done, heard[-1].total, heard[-1].stored) == (7, 7, 7)
        np.testing.assert_allclose(embed(again, TEXTS), solo, atol=1e-5)
        assert again.stats().compilations == 0
    finally:
        again.close()


def test_pooling_and_foreign_code_have_programs_of_their_own(store, solo):
    heard = []
    engine = make_encoder(
        store,
        pooling=Pooling(how="cls", normalize=False),
        built_in=False,
        max_model_len=16,
        max_num_tokens=16,
        progress=heard.append,
    )
    try:
        assert heard[-1].stored == 0
        assert engine.limits.max_model_len == 16
        assert not np.allclose(embed(engine, TEXTS[:3]), solo[:3])
    finally:
        engine.close()


@pytest.mark.parametrize("mesh", ["tensor=2", "tensor=4"])
def test_sharded_over_tensor(solo, mesh):
    engine = make_encoder(mesh=mesh, max_num_seqs=2)
    try:
        np.testing.assert_allclose(embed(engine, TEXTS), solo, atol=1e-5)
    finally:
        engine.close()


def test_stats(engine):
    before = engine.stats()
    embed(engine, TEXTS[:3])
    after = engine.stats()
    assert after.prompt_tokens - before.prompt_tokens == 1 + 2 + 15
    assert 1 <= after.dispatches - before.dispatches <= 3
    assert (after.waiting, after.running, after.output_tokens, after.ready) == (0, 0, 0, True)
    assert after.last_progress >= before.last_progress


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        ((), InvalidRequest, "no token"),
        ((1,) * (MAX_LEN + 1), PromptTooLong, "49 tokens; the limit is 48"),
        ((64,), InvalidRequest, r"must be in 0..63; got 64..64"),
        ((-1,), InvalidRequest, r"must be in 0..63"),
    ],
)
def test_what_can_never_run_is_refused(engine, ids, error, words):
    with pytest.raises(error, match=words):
        engine.submit(TextRequest(request_id="bad", token_ids=ids), lambda _: None)


def test_the_queue_is_bounded(store):
    engine = make_encoder(store, max_queue=2)
    try:
        let_go = held(engine)
        listener = Listener(2)
        for name in "ab":
            engine.submit(TextRequest(request_id=name, token_ids=(1,)), listener.sink(name))
        with pytest.raises(DuplicateRequest):
            engine.submit(TextRequest(request_id="a", token_ids=(1,)), listener.sink("a again"))
        with pytest.raises(QueueFull, match="2 texts are waiting"):
            engine.submit(TextRequest(request_id="c", token_ids=(1,)), listener.sink("c"))
        assert engine.stats().waiting == 2
        let_go()
        listener.wait()
    finally:
        engine.close()


def test_cancel_and_deadline_cost_nothing(engine):
    let_go = held(engine)
    dispatches = engine.stats().dispatches
    listener = Listener(3)
    engine.submit(TextRequest(request_id="gone", token_ids=(1,)), listener.sink("gone"))
    late = TextRequest(request_id="late", token_ids=(1,), deadline=time.monotonic() - 1)
    engine.submit(late, listener.sink("late"))
    engine.cancel("gone")
    engine.cancel("never there")
    assert isinstance(listener.heard["gone"].error, Cancelled)
    engine.submit(TextRequest(request_id="gone", token_ids=(2,)), listener.sink("its namesake"))
    let_go()
    heard = listener.wait()
    assert isinstance(heard["late"].error, DeadlineExceeded)
    assert heard["late"].first_scheduled is None
    assert heard["its namesake"].error is None
    assert engine.stats().dispatches == dispatches + 1


def test_a_sink_that_fails_harms_nobody(engine, caplog):
    def broken(encoded):
        raise RuntimeError("no ears")

    engine.submit(TextRequest(request_id="broken", token_ids=(1,)), broken)
    embed(engine, TEXTS[:2])
    assert "the sink of request broken failed" in caplog.text


def test_closing_a_device_that_hangs_ends_every_text(store, monkeypatch):
    monkeypatch.setattr("jserve.engine.thread._CLOSE_S", 0.1)
    engine = make_encoder(store)
    fetch, hangs, back = engine._executor.fetch, threading.Event(), threading.Event()

    def hang(running):
        hangs.set()
        back.wait(60)
        return fetch(running)

    monkeypatch.setattr(engine._executor, "fetch", hang)
    listener = Listener(2)
    for name in ("running", "waiting"):
        engine.submit(TextRequest(request_id=name, token_ids=(1, 2, 3)), listener.sink(name))
        assert hangs.wait(60)
    engine.close()
    assert listener.over.wait(10)
    assert {type(encoded.error) for encoded in listener.heard.values()} == {Cancelled}
    back.set()
    engine._thread.join(60)  # A device that comes back after all answers nobody twice: the listener checks.
    assert engine.fault is None


def test_close_ends_what_waits(store):
    engine = make_encoder(store)
    let_go = held(engine)
    listener = Listener(1)
    engine.submit(TextRequest(request_id="a", token_ids=(1,)), listener.sink("a"))
    closing = threading.Thread(target=engine.close)
    closing.start()
    let_go()
    closing.join()
    assert isinstance(listener.wait()["a"].error, Cancelled | None)
    assert not engine.stats().ready
    with pytest.raises(Draining):
        engine.submit(TextRequest(request_id="b", token_ids=(1,)), lambda _: None)


def test_a_failure_of_the_loop_fails_all(store, monkeypatch):
    engine = make_encoder(store)
    let_go = held(engine)
    listener = Listener(3)

    def broken(*_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine._executor, "dispatch", broken)
    for name in "abc":
        engine.submit(TextRequest(request_id=name, token_ids=(1,)), listener.sink(name))
    let_go()
    heard = listener.wait()
    assert all(isinstance(encoded.error, EngineFailed) for encoded in heard.values())
    engine.close()
    assert "incident" in engine.stats().failed
    assert str(engine.fault) == "the device is gone"
    with pytest.raises(EngineFailed):
        engine.submit(TextRequest(request_id="d", token_ids=(1,)), lambda _: None)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"num_pages": 4}, ConfigError, "has no KV cache"),
        ({"max_dispatch_ms": 20.0}, ConfigError, "max_dispatch_ms is 20, and this model is an encoder"),
        ({"max_model_len": 49}, ConfigError, "exceeds the model's limit of 48"),
        ({"max_num_tokens": 47}, ConfigError, "less than the 48 tokens"),
        ({"mesh": "stage=2"}, MeshError, "not built for encoders"),
        ({"memory_fraction": 1e-12}, OutOfMemory, "weights of 0.1 MiB a device exceed"),
    ],
)
def test_settings_that_cannot_be(settings, error, words):
    with pytest.raises(error, match=words):
        make_encoder(**settings)


def test_weights_that_cannot_be_read_end_the_start(store):
    def load():
        raise CheckpointError("damaged")

    with pytest.raises(CheckpointError, match="damaged"):
        make_encoder(store, load=load)
