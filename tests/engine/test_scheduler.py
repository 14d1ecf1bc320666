"""The scheduler against a device of plain Python: any traffic ends, in order, with every page back."""

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.engine.buckets import Buckets
from jserve.engine.choice import ChoiceState, Emitted
from jserve.engine.scheduler import Scheduler, SchedulerConfig
from jserve.request import FinishReason, Request, ResolvedSampling

PAGE = 8
STOP = 7


def config(**changes):
    values = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_tokens": 16,
        "page_size": PAGE,
        "num_pages": 12,
        "max_steps": 6,
    }
    values |= changes
    buckets = Buckets.build(max_num_seqs=values["max_num_seqs"], max_num_tokens=values["max_num_tokens"])
    return SchedulerConfig(**values, buckets=buckets)


def request(name, prompt=3, max_tokens=4, *, n=1, deadline=None, min_tokens=0, stop_ids=(STOP,)):
    sampling = ResolvedSampling(
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=0,
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_ids=stop_ids,
        logprobs=None,
    )
    return Request(
        request_id=name, prompt_ids=tuple(range(100, 100 + prompt)), sampling=sampling, arrival=0.0, deadline=deadline
    )


class Device:
    """Does what the compiled step does, in order: caches of real tokens, stop tests, early leave.

    The model: the next token is a hash of all tokens before it, so a lost, stale or misplaced cache entry shows.
    """

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.page_size = scheduler.config.page_size
        self.cache = {}
        self.slots = {}

    @staticmethod
    def next_token(context):
        return random.Random(str(context)).choice([1, 2, 3, 4, 5, 6, STOP] + [9] * 8)

    def run(self, plan):
        rows = plan.arrays.rows
        emitted = [[] for _ in plan.rows]
        started = [self.slots.get(int(rows.slot[0, 0, r]), {}).get("live", False) for r in range(len(plan.rows))]
        steps = 1 if plan.kind == "mixed" else int(plan.arrays.steps[0, 0])
        for _ in range(steps):
            now = [self.slots.get(int(rows.slot[0, 0, r]), {}).get("live", False) for r in range(len(plan.rows))]
            if plan.kind == "decode" and (
                not any(now)
                or (plan.arrays.leave_early[0, 0] and any(a and not b for a, b in zip(started, now, strict=True)))
            ):
                break
            for r, row in enumerate(plan.rows):
                token = self.row(plan, r, row)
                if token is not None:
                    emitted[r].append(token)
        return [Emitted(tokens=tuple(tokens)) for tokens in emitted]

    def row(self, plan, r, row):
        rows, slot = plan.arrays.rows, int(plan.arrays.rows.slot[0, 0, r])
        table = rows.page_table[0, 0, r]
        if plan.kind == "mixed" and plan.arrays.start[0, 0, r] >= 0:
            start = int(plan.arrays.start[0, 0, r])
            at = int(plan.arrays.cu_q_lens[0, 0, r])
            tokens = [int(t) for t in plan.arrays.tokens[0, 0, at : at + row.q_len]]
            state = {"context": start, "generated": int(plan.arrays.generated[0, 0, r]), "live": True, "last": None}
            self.slots[slot] = state
        else:
            state = self.slots[slot]
            if not state["live"]:
                return None
            tokens = [state["last"]]
        for token in tokens:
            page = int(table[state["context"] // self.page_size])
            assert page >= 0, "a write without a page"
            self.cache[page, state["context"] % self.page_size] = token
            state["context"] += 1
        if plan.kind == "mixed" and not plan.arrays.samples[0, 0, r]:
            return None
        context = [self.cache[int(table[p // self.page_size]), p % self.page_size] for p in range(state["context"])]
        token = self.next_token(context)
        if token == STOP and state["generated"] < int(rows.min_tokens[0, 0, r]):
            token = 9
        state["last"] = token
        state["generated"] += 1
        stops = set(rows.stop_ids[0, 0, r].tolist()) - {-1}
        state["live"] = not (token in stops or state["generated"] >= int(rows.max_tokens[0, 0, r]))
        return token


def expected(req):
    context, out = list(req.prompt_ids), []
    while len(out) < req.sampling.max_tokens:
        token = Device.next_token(context + out)
        if token == STOP and len(out) < req.sampling.min_tokens:
            token = 9
        out.append(token)
        if token in req.sampling.stop_ids:
            break
    return out


def drive(scheduler, requests, *, depth=2, seed=0, cancel=()):
    """Run to the end with up to ``depth`` plans in flight; returns tokens and reasons a choice."""
    rng, device = random.Random(seed), Device(scheduler)
    tokens, reasons, flight, order = defaultdict(list), {}, [], []
    arrivals, live, turn = list(requests), {}, 0
    while arrivals or not scheduler.idle or flight:
        turn += 1
        assert turn < 5000, "no progress"
        while arrivals and rng.random() < 0.5:
            req = arrivals.pop(0)
            live[req.request_id] = scheduler.add(req)
        for name in cancel:
            if name in live and rng.random() < 0.1:
                for choice in live.pop(name):
                    if choice.state is not ChoiceState.ENDED:
                        reasons[choice.key] = FinishReason.CANCELLED
                        scheduler.end(choice)
        scheduler.check()
        plan = scheduler.plan(float(turn), max_steps=rng.randint(1, 6))
        scheduler.check()
        if plan is not None:
            assert sum(row.q_len for row in plan.rows) <= (plan.bucket if plan.kind == "mixed" else 10**9)
            order += [row.choice.key for row in plan.rows if row.start == 0 and row.choice.key not in order]
            flight.append((plan, device.run(plan)))
        if flight and (plan is None or len(flight) >= depth):
            done, emitted = flight.pop(0)
            for choice, result, reason in scheduler.apply(done, emitted):
                tokens[choice.key] += result.tokens
                if reason is not None:
                    assert choice.key not in reasons, "two ends"
                    reasons[choice.key] = reason
            scheduler.check()
    assert scheduler.pages.in_use == 0
    return tokens, reasons, order


traffic = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=8
)


@settings(max_examples=150, deadline=None)
@given(traffic, st.integers(8, 20), st.integers(1, 3), st.integers(0, 2**16))
def test_any_traffic_ends_with_the_right_tokens(mix, num_pages, depth, seed):
    scheduler = Scheduler(config(num_pages=num_pages))
    requests = [request(str(i), p, m, n=n, min_tokens=low) for i, (p, m, n, low) in enumerate(mix)]
    tokens, reasons, order = drive(scheduler, requests, depth=depth, seed=seed)
    for req in requests:
        want = expected(req)
        for index in range(req.sampling.n):
            assert tokens[req.request_id, index] == want
            stopped = want[-1] == STOP
            assert reasons[req.request_id, index] is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert order == [(r.request_id, i) for r in requests for i in range(r.sampling.n)], "first come, first served"


@settings(max_examples=80, deadline=None)
@given(traffic, st.integers(0, 2**16))
def test_cancelled_ones_leave_nothing_behind(mix, seed):
    requests = [request(str(i), p, m, n=n) for i, (p, m, n, _) in enumerate(mix)]
    names = [r.request_id for r in requests[::2]]
    tokens, reasons, _ = drive(Scheduler(config(num_pages=9)), requests, seed=seed, cancel=names)
    for req in requests:
        for index in range(req.sampling.n):
            want = expected(req)
            if reasons[req.request_id, index] is FinishReason.CANCELLED:
                assert tokens[req.request_id, index] == want[: len(tokens[req.request_id, index])]
            else:
                assert tokens[req.request_id, index] == want


def test_preemption_happens_and_the_oldest_is_spared():
    scheduler = Scheduler(config(num_pages=8, max_num_seqs=3))
    requests = [request(str(i), 20, 30, stop_ids=()) for i in range(3)]
    tokens, _, _ = drive(scheduler, requests)
    assert scheduler.preemptions > 0
    assert all(tokens[r.request_id, 0] == expected(r) for r in requests)


def test_a_deadline_in_the_queue_costs_no_prefill():
    scheduler = Scheduler(config())
    (choice,) = scheduler.add(request("late", deadline=5.0))
    assert scheduler.expire(4.9) == []
    assert scheduler.expire(5.0) == [choice]
    assert scheduler.plan(5.0, max_steps=1) is None
    assert scheduler.idle


def test_decode_goes_on_beside_chunked_prefill():
    scheduler = Scheduler(config(max_num_tokens=8))
    device = Device(scheduler)
    scheduler.add(request("a", 2, 50, stop_ids=()))
    first = scheduler.plan(0.0, max_steps=4)
    scheduler.apply(first, device.run(first))
    scheduler.add(request("b", 20, 4))
    plans = [scheduler.plan(1.0, max_steps=4) for _ in range(3)]
    assert [[row.q_len for row in plan.rows] for plan in plans] == [[1, 7], [1, 7], [1, 6]]
    assert [plan.rows[1].samples for plan in plans] == [False, False, True]


def test_the_head_of_the_queue_is_never_overtaken():
    scheduler = Scheduler(config(num_pages=8))
    scheduler.add(request("big", 40, 8))
    scheduler.add(request("bigger", 40, 8))
    scheduler.add(request("small", 1, 1))
    for turn in range(3):
        plan = scheduler.plan(float(turn), max_steps=1)
        assert {row.choice.request.request_id for row in plan.rows} == {"big"}


@pytest.mark.parametrize(
    ("seqs", "tokens", "growth", "decode", "mixed"),
    [
        (32, 512, 2, (1, 2, 4, 8, 16, 32), (32, 64, 128, 256, 512)),
        (32, 512, 4, (1, 2, 8, 32), (32, 64, 128, 256, 512)),
        (1, 16, 2, (1,), (16,)),
        (6, 100, 2, (1, 3, 6), (32, 50, 100)),
    ],
)
def test_buckets(seqs, tokens, growth, decode, mixed):
    buckets = Buckets.build(max_num_seqs=seqs, max_num_tokens=tokens, decode_growth=growth)
    assert (buckets.decode, buckets.mixed) == (decode, mixed)
    assert buckets.decode_for(seqs) == seqs
    assert buckets.mixed_for(1) == mixed[0]


def test_what_a_preempted_choice_gave_back_is_not_for_younger_ones():
    scheduler = Scheduler(config(num_pages=6))
    device = Device(scheduler)
    (old,) = scheduler.add(request("old", 15, 20, stop_ids=()))
    (young,) = scheduler.add(request("young", 30, 4))
    scheduler.add(request("late", 1, 1))
    turn = 0.0
    while scheduler.preemptions == 0:
        plan = scheduler.plan(turn, max_steps=1)
        scheduler.apply(plan, device.run(plan))
        turn += 1
    assert young.state is ChoiceState.WAITING
    assert [row.choice for row in plan.rows] == [old]
