"""The sampler against numpy that sorts, and its promises: nothing depends on neighbours, something always survives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.engine import sampler
from jserve.engine.sampler import SamplingRows, sample
from jserve.request import MAX_LOGPROBS, MAX_STOP_TOKENS

V, R = 64, 4

compiled = functools.cache(lambda vocab_size: jax.jit(lambda logits, rows: sample(logits, rows, vocab_size=vocab_size)))


def rows(number=R, **changes):
    values = {
        "key": np.stack([np.zeros(number), np.arange(number)], 1).astype(np.uint32),
        "choice": np.zeros(number, np.int32),
        "position": np.full(number, 5, np.int32),
        "generated": np.zeros(number, np.int32),
        "temperature": np.zeros(number, np.float32),
        "top_p": np.ones(number, np.float32),
        "min_p": np.zeros(number, np.float32),
        "top_k": np.zeros(number, np.int32),
        "min_tokens": np.zeros(number, np.int32),
        "stop_ids": np.full((number, MAX_STOP_TOKENS), -1, np.int32),
        "logprobs": np.zeros(number, bool),
        "live": np.ones(number, bool),
    }
    for name, value in changes.items():
        values[name] = np.broadcast_to(np.asarray(value, values[name].dtype), values[name].shape)
    return SamplingRows(**{name: jnp.asarray(value) for name, value in values.items()})


def logits(number=R, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(number, V)) * 3, jnp.float32)


def kept_by_sorting(scores, *, min_p, top_k, top_p):
    """Ids that survive: a stable sort, best first; min_p, then top_k, then top_p of what is left."""
    scores = np.asarray(scores, np.float64)
    order = np.argsort(-scores, kind="stable")
    keep = [i for i in order if scores[i] - scores.max() >= (np.log(min_p) if min_p > 0 else -np.inf)]
    if top_k:
        keep = keep[:top_k]
    weights = np.exp(scores[keep] - scores.max())
    before = np.cumsum(weights / weights.sum()) - weights / weights.sum()
    return {int(i) for i, mass in zip(keep, before, strict=True) if mass < top_p or i == order[0]}


kept_scores = jax.jit(sampler._kept_scores)


def survivors(x, values):
    return set(np.flatnonzero(np.isfinite(kept_scores(x, values)[0])).tolist())


@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [(0, 0, 1), (0, 1, 1), (0, 5, 1), (0, 0, 0.5), (0, 0, 0), (0.1, 0, 1), (1, 0, 1), (0.02, 7, 0.8), (0, 63, 0.999)],
)
def test_the_kept_set_is_that_of_a_sort(min_p, top_k, top_p):
    x = logits(1, seed=top_k)
    values = rows(1, temperature=1.0, min_p=min_p, top_k=top_k, top_p=top_p)
    assert survivors(x, values) == kept_by_sorting(x[0], min_p=min_p, top_k=top_k, top_p=top_p)


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1), (3, 1), (6, 1), (0, 0.3), (0, 0.01)])
def test_ties_are_kept_from_the_lowest_id_up(top_k, top_p):
    x = jnp.asarray(np.tile([1.0, 2.0, 2.0, 2.0, -0.0, 0.0, 2.0, 1.0], V // 8), jnp.float32)[None]
    values = rows(1, temperature=1.0, top_k=top_k, top_p=top_p)
    assert survivors(x, values) == kept_by_sorting(x[0], min_p=0, top_k=top_k, top_p=top_p)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 1e-30, 1e-8, 1e-4, 0.7, 1.0, 50.0]),
            st.sampled_from([0.0, 1e-9, 0.5, 0.999, 1.0]),
            st.sampled_from([0.0, 0.1, 0.9, 1.0]),
            st.sampled_from([0, 1, 2, 63, 64, 1000]),
        ),
        min_size=R,
        max_size=R,
    ),
    st.integers(0, 1000),
)
def test_a_token_always_survives_and_neighbours_do_not_matter(options, seed):
    temperature, top_p, min_p, top_k = (np.array(column) for column in zip(*options, strict=True))
    x, changes = logits(seed=seed), {"temperature": temperature, "top_p": top_p, "min_p": min_p, "top_k": top_k}
    together = compiled(V)(x, rows(**changes)).token
    assert ((together >= 0) & (together < V)).all()
    for r in range(R):
        alone = rows(**{name: np.broadcast_to(value[r], R) for name, value in changes.items()})
        alone = alone._replace(key=jnp.broadcast_to(rows().key[r], (R, 2)))
        assert int(compiled(V)(jnp.broadcast_to(x[r], (R, V)), alone).token[R - 1 - r]) == int(together[r])
        if temperature[r] == 0 or top_k[r] == 1 or top_p[r] <= 1e-9 or min_p[r] == 1 or 0 < temperature[r] < 1e-7:
            assert int(together[r]) == int(jnp.argmax(x[r]))


def test_draws_follow_the_distribution():
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    x = jnp.full((2000, V), -jnp.inf).at[:, :4].set(jnp.log(jnp.asarray(probabilities, jnp.float32))[None])
    token = np.asarray(compiled(V)(x, rows(2000, temperature=1.0)).token)
    shares = np.bincount(token, minlength=4)[:4] / 2000
    # 2,000 draws: the standard error is at most 0.0112; the seeds are fixed, so this is no gamble.
    np.testing.assert_allclose(shares, probabilities, atol=0.035)


def test_noise_depends_on_seed_choice_and_position_and_not_on_the_width():
    values = rows(temperature=1.0)
    base = sampler._noise(values, V)
    np.testing.assert_array_equal(sampler._noise(values, V + 19)[:, :V], base)
    for other in (
        values._replace(choice=values.choice + 1),
        values._replace(position=values.position + 1),
        values._replace(key=values.key + jnp.uint32(1)),
        values._replace(key=values.key.at[:, 0].add(jnp.uint32(1))),
    ):
        assert not np.isclose(sampler._noise(other, V), base).all(axis=1).any()


def test_a_padded_vocabulary_is_never_chosen_nor_listed():
    x = logits().at[:, 50:].set(100.0)
    out = compiled(50)(x, rows(temperature=[0, 1, 5, 0], logprobs=True))
    assert (out.token < 50).all()
    assert (out.top_ids < 50).all()
    inside = compiled(50)(x[:, :50], rows(temperature=[0, 1, 5, 0], logprobs=True))
    np.testing.assert_array_equal(out.token, inside.token)
    np.testing.assert_allclose(out.logprob, inside.logprob, rtol=1e-6)


def test_stop_ids_wait_for_min_tokens():
    x = logits()
    best = np.asarray(jnp.argmax(x, -1))
    stops = np.full((R, MAX_STOP_TOKENS), -1)
    stops[:, 0] = best
    out = compiled(V)(x, rows(stop_ids=stops, min_tokens=[2, 2, 2, 0], generated=[0, 1, 2, 0]))
    assert (np.asarray(out.token) == best).tolist() == [False, False, True, True]


def test_logprobs_are_of_the_raw_distribution():
    x = logits()
    out = compiled(V)(x, rows(temperature=0.3, top_k=2, logprobs=True))
    want = np.asarray(jax.nn.log_softmax(x))
    np.testing.assert_allclose(out.logprob, want[np.arange(R), out.token], rtol=1e-5)
    order = np.argsort(-want, axis=1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(out.top_ids, order)
    np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(want, order, 1), rtol=1e-5)


def test_greedy_takes_the_lowest_id_on_ties():
    x = jnp.zeros((R, V)).at[:, 3].set(1.0).at[:, 9].set(1.0)
    assert compiled(V)(x, rows()).token.tolist() == [3] * R
