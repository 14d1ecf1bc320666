"""The engine beside a naive full recompute: whatever runs beside a request, its tokens are the same."""

import threading
import time

import jax
import numpy as np
import pytest
from flax import nnx
from harness import VOCAB, Listener, make_engine, request, run, submit

from jserve.engine.compiles import compilations
from jserve.engine.executor import Executor
from jserve.errors import (
    DuplicateRequest,
    EngineFailed,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
)
from jserve.models.naive import naive_generate, naive_logits
from jserve.request import FinishReason
from jserve.testing.models import tiny_llama
from jserve.testing.waiting import wait_for

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCAB, n).tolist() for n in (1, 2, 7, 8, 9, 31, 40, 90)]


@pytest.fixture(scope="module")
def greedy():
    graphdef, params = tiny_llama()
    return [[int(t) for t in naive_generate(graphdef, params, prompt, 16)] for prompt in PROMPTS]


def idle(engine):
    wait_for(lambda: not engine.stats().pages_in_use and not engine.stats().running)


def test_greedy_alone_and_together_equals_the_naive_recompute(engine, greedy):
    before = compilations.count
    alone = [run(engine, request(i, prompt))[0].tokens[0] for i, prompt in enumerate(PROMPTS)]
    together = [one.tokens[0] for one in run(engine, *(request(i, prompt) for i, prompt in enumerate(PROMPTS)))]
    assert alone == greedy
    assert together == greedy
    idle(engine)
    assert compilations.count == before


def test_a_small_pool_preempts_and_changes_nothing(store, greedy):
    engine = make_engine(store, num_pages=14, max_model_len=112)
    try:
        outs = run(engine, *(request(i, prompt) for i, prompt in enumerate(PROMPTS[::-1] * 2)))
        assert [one.tokens[0] for one in outs] == greedy[::-1] * 2
        assert engine.stats().preemptions > 0
        warm = 1
        assert engine.stats().prompt_tokens == warm + 2 * sum(map(len, PROMPTS)), "each once, however often computed"
        idle(engine)
    finally:
        engine.close()


def test_compiling_is_told_from_before_the_first_program_on(store, engine):
    heard = []
    make_engine(store, compile_progress=heard.append).close()
    total = heard[0].total
    assert total > 0
    assert [now.done for now in heard] == list(range(total + 1))
    assert (heard[0].stored, heard[-1].stored) == (0, total)


def test_a_seeded_draw_is_the_same_with_seven_neighbours(engine):
    options = {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "seed": 2**63 + 12345}
    (solo,) = run(engine, request("x", PROMPTS[6], **options))
    neighbours = [request(i, PROMPTS[i], temperature=0.7, seed=i) for i in range(7)]
    crowd = run(engine, *neighbours[:4], request("x", PROMPTS[6], **options), *neighbours[4:])
    assert crowd[4].tokens == solo.tokens
    (other,) = run(engine, request("x", PROMPTS[6], **{**options, "seed": 12345}))
    assert other.tokens != solo.tokens


def test_choices_are_distinct_repeatable_and_end_alone(engine):
    stops = (5, 17, 80, 200)

    def ask():
        (out,) = run(
            engine, request("n", PROMPTS[2], n=4, temperature=1.5, seed=3, stop_ids=(5, 17, 80, 200), max_tokens=24)
        )
        return out

    first, second = ask(), ask()
    assert first.tokens == second.tokens
    assert len({tuple(tokens) for tokens in first.tokens.values()}) == 4
    assert first.reasons == second.reasons
    for index in range(4):
        stopped = first.tokens[index][-1] in stops
        assert first.reasons[index] is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def test_stop_ids_end_and_min_tokens_holds_them_back(engine, greedy):
    want = greedy[3]
    stop = want[4]
    (out,) = run(engine, request("s", PROMPTS[3], stop_ids=(stop,)))
    assert out.tokens[0] == want[: want.index(stop) + 1]
    assert out.reasons[0] is FinishReason.STOP
    (held,) = run(engine, request("s", PROMPTS[3], stop_ids=(stop,), min_tokens=8))
    assert stop not in held.tokens[0][:8]
    assert len(held.tokens[0]) > 8


def test_logprobs_equal_the_naive_ones_and_do_not_depend_on_the_batch(engine):
    graphdef, params = tiny_llama()
    outs = run(engine, *(request(i, PROMPTS[i], logprobs=k) for i, k in ((5, 3), (6, 0), (7, 20))))
    for out, i, k in zip(outs, (5, 6, 7), (3, 0, 20), strict=True):
        tokens = out.tokens[0]
        logits = naive_logits(graphdef, params, [*PROMPTS[i], *tokens[:-1]])[len(PROMPTS[i]) - 1 :]
        want = np.asarray(jax.nn.log_softmax(logits))
        assert [entry.token_id for entry in out.logprobs[0]] == tokens
        for step, entry in enumerate(out.logprobs[0]):
            assert entry.logprob == pytest.approx(want[step, tokens[step]], abs=1e-4)
            assert len(entry.top) == k
            assert [value for _, value in entry.top] == pytest.approx(np.sort(want[step])[::-1][:k], abs=1e-4)


def test_cancel_at_any_moment_frees_everything(engine, greedy):
    for turn in range(24):
        requests = [request(f"c{turn}-{i}", PROMPTS[i], 200) for i in range(6)]
        listeners = submit(engine, *requests, request("kept", PROMPTS[4]))
        if turn % 3:
            listeners[0].first.wait(10)
        for one in requests:
            engine.cancel(one.request_id)
        for listener in listeners:
            listener.wait()
        assert {one.reasons[0] for one in listeners[:-1]} == {FinishReason.CANCELLED}
        assert listeners[-1].tokens[0] == greedy[4]
    idle(engine)


def test_an_id_is_free_again_once_its_request_has_ended(engine, greedy):
    (long,) = submit(engine, request("same", PROMPTS[0], 400))
    long.first.wait(10)
    with pytest.raises(DuplicateRequest, match="same"):
        engine.submit(request("same", PROMPTS[1]), Listener())
    engine.cancel("same")
    long.wait()
    assert run(engine, request("same", PROMPTS[1]))[0].tokens[0] == greedy[1]


def test_end_choice_is_quiet_and_spares_the_others(engine, greedy):
    told = threading.Event()

    class Ends(Listener):
        def __call__(self, deltas):
            super().__call__(deltas)
            if not told.is_set():
                told.set()
                engine.end_choice("quiet", 0)

    listener = Ends(choices=1)
    engine.submit(request("quiet", PROMPTS[1], 16, n=2), listener)
    listener.wait()
    assert list(listener.reasons) == [1]
    assert listener.tokens[1] == greedy[1]
    idle(engine)


def test_a_deadline_ends_a_request_in_the_queue_and_in_decode(engine):
    past = time.monotonic() - 1
    (late,) = run(engine, request("late", PROMPTS[7], deadline=past))
    assert (late.reasons[0], late.tokens[0]) == (FinishReason.DEADLINE, [])

    class Slow(Listener):
        """Holds the engine from its first tokens until the deadline is past, however quick the machine is."""

        def __call__(self, deltas):
            super().__call__(deltas)
            time.sleep(max(0.0, deadline - time.monotonic()))

    deadline = time.monotonic() + 0.5
    cut = Slow()
    engine.submit(request("cut", PROMPTS[0], 500, deadline=deadline), cut)
    assert cut.wait().reasons[0] is FinishReason.DEADLINE
    assert len(cut.tokens[0]) < 500


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (request("b", []), InvalidRequest),
        (request("b", [VOCAB]), InvalidRequest),
        (request("b", [-1]), InvalidRequest),
        (request("b", [1] * 500, 13), PromptTooLong),
        (request("b", [1], 0), InvalidRequest),
    ],
)
def test_what_can_never_run_is_refused_at_once(engine, bad, error):
    with pytest.raises(error):
        engine.submit(bad, Listener())
    assert engine.stats().waiting == 0


def test_prompt_and_output_fill_the_limit_exactly(engine):
    (full,) = run(engine, request("full", PROMPTS[7] * 5, 512 - 450))
    assert len(full.tokens[0]) == 62


def test_a_full_queue_refuses_with_a_time_to_come_back(store):
    engine = make_engine(store, max_queue=2)
    try:
        listeners, refused = [], []
        for i in range(40):
            listener = Listener()
            try:
                engine.submit(request(i, PROMPTS[2], 64), listener)
            except QueueFull as error:
                refused.append(error.retry_after_s)
            else:
                listeners.append(listener)
        assert refused
        assert min(refused) > 0
        for listener in listeners:
            listener.wait()
        assert run(engine, request("after", PROMPTS[0]))[0].reasons[0] is FinishReason.LENGTH
    finally:
        engine.close()


def test_a_sink_that_fails_ends_its_own_request_only(engine, greedy, caplog):
    def broken(_deltas):
        raise RuntimeError("listener broke")

    engine.submit(request("broken", PROMPTS[0], 400), broken)
    assert run(engine, request("fine", PROMPTS[5]))[0].tokens[0] == greedy[5]
    idle(engine)
    assert "listener broke" in caplog.text


def test_a_failing_device_ends_every_request_and_says_so(store, monkeypatch, caplog):
    engine = make_engine(store)
    running, waiting = submit(engine, request("a", PROMPTS[0], 500), request("b", PROMPTS[1], 500))
    running.first.wait(10)

    def broken(_plan):
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine._executor, "dispatch", broken)
    for listener in (running, waiting):
        assert listener.wait().reasons[0] is FinishReason.ERROR
        assert "incident" in listener.deltas[-1].error
        assert "device lost" not in listener.deltas[-1].error
    assert engine.stats().failed
    assert not engine.stats().ready
    with pytest.raises(EngineFailed):
        engine.submit(request("c", PROMPTS[0]), Listener())
    engine.close()


def test_close_ends_what_runs(store):
    engine = make_engine(store)
    (listener,) = submit(engine, request("a", PROMPTS[0], 500))
    listener.first.wait(10)
    engine.close()
    assert listener.wait().reasons[0] is FinishReason.CANCELLED


@pytest.mark.parametrize("own", [True, False])
def test_a_second_start_compiles_nothing_and_lowers_only_code_of_others(store, own, monkeypatch):
    def model():
        if own:
            return None
        graphdef, params = tiny_llama()
        module = nnx.merge(graphdef, params)
        module.helper = lambda x: x  # another one each time, as the functions of an nnx.Linear are in each process
        return nnx.graphdef(module), params

    make_engine(store, model=model()).close()
    seen, lowered, before = [], [], compilations.count
    lower = Executor._lower
    monkeypatch.setattr(Executor, "_lower", lambda self, *program: lowered.append(program) or lower(self, *program))
    engine = make_engine(store, model=model(), compile_progress=seen.append)
    engine.close()
    assert seen[-1].stored == seen[-1].total == 3
    assert compilations.count == before
    assert len(lowered) == (0 if own else 3)


@pytest.mark.parametrize("mesh", ["tensor=2"])
def test_a_tensor_mesh_gives_the_tokens_of_one_device(store, mesh, greedy):
    engine = make_engine(store, mesh=mesh)
    try:
        outs = run(engine, *(request(i, prompt) for i, prompt in enumerate(PROMPTS)))
        assert [one.tokens[0] for one in outs] == greedy
        assert engine.stats().compilations == 0
    finally:
        engine.close()
