import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import UnsupportedModel
from jserve.models.rope import RopeScaling, apply_rope, check_rope, inverse_frequencies

LLAMA3 = RopeScaling(kind="llama3", factor=32.0, original_max_position=8192)


def test_turns_pairs_of_dimensions_half_a_head_apart():
    x = np.arange(1, 9, dtype=np.float32).reshape(1, 2, 4)
    got = apply_rope(jnp.asarray(x), jnp.array([3]), inverse_frequencies(4, 100.0, None))
    for head in range(2):
        for pair, angle in enumerate([3.0, 0.3]):
            z = (x[0, head, pair] + 1j * x[0, head, pair + 2]) * np.exp(1j * angle)
            np.testing.assert_allclose(got[0, head, [pair, pair + 2]], [z.real, z.imag], rtol=1e-5)


def test_keeps_the_dtype_with_angles_in_float32():
    x = jnp.ones((1, 1, 4), jnp.bfloat16)
    got = apply_rope(x, jnp.array([1001]), inverse_frequencies(4, 10000.0, None))
    assert got.dtype == jnp.bfloat16
    # In bfloat16 position 1001 would be 1000.
    np.testing.assert_allclose(got[0, 0, 0].astype(jnp.float32), np.cos(1001) - np.sin(1001), atol=1e-2)


def test_linear_divides_every_frequency():
    scaled = inverse_frequencies(64, 10000.0, RopeScaling(kind="linear", factor=4.0))
    np.testing.assert_allclose(scaled, inverse_frequencies(64, 10000.0, None) / 4.0)


def test_llama3_by_its_definition_in_wavelengths():
    plain = inverse_frequencies(64, 500000.0, None)
    got = inverse_frequencies(64, 500000.0, LLAMA3)
    regions = set()
    for frequency, scaled in zip(plain, got, strict=True):
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4.0:
            regions.add("kept")
            want = frequency
        elif wavelength > 8192 / 1.0:
            regions.add("stretched")
            want = frequency / 32.0
        else:
            regions.add("between")
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            want = (1 - smooth) * frequency / 32.0 + smooth * frequency
        np.testing.assert_allclose(scaled, want, rtol=1e-12)
    assert regions == {"kept", "between", "stretched"}


def test_dimensions_behind_the_rotary_ones_stay():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 8)), jnp.float32)
    positions, frequencies = jnp.array([1, 5, 9], jnp.int32), inverse_frequencies(6, 100.0, None)
    got = apply_rope(x, positions, frequencies)
    np.testing.assert_array_equal(got[..., 6:], x[..., 6:])
    np.testing.assert_allclose(got[..., :6], apply_rope(x[..., :6], positions, frequencies), rtol=1e-6)
    with pytest.raises(ValueError, match="16 rotary dimensions do not fit heads of 8"):
        apply_rope(x, positions, np.ones(8))


def test_the_attention_factor_changes_lengths_of_what_rotates():
    x = jnp.ones((1, 1, 4), jnp.float32)
    plain, more = (apply_rope(x, jnp.array([3]), np.ones(1), factor) for factor in (1.0, 1.5))
    np.testing.assert_allclose(more[..., :2], 1.5 * plain[..., :2], rtol=1e-6)
    np.testing.assert_array_equal(more[..., 2:], plain[..., 2:])


YARN = RopeScaling(kind="yarn", factor=4.0, original_max_position=4096)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_keeps_what_turns_often_and_divides_what_turns_rarely(truncate):
    plain = inverse_frequencies(64, 10000.0, None)
    got = inverse_frequencies(64, 10000.0, dataclasses.replace(YARN, truncate=truncate)) / plain
    turns = 4096 * plain / (2 * np.pi)
    # Moved outwards to whole pairs, the bounds leave one pair of either side to the fade.
    np.testing.assert_allclose(got[turns > 32 * 1.34], 1.0, rtol=1e-12)
    np.testing.assert_allclose(got[turns < 1 / 1.34], 0.25, rtol=1e-12)
    fading = got[(got < 1.0) & (got > 0.25)]
    assert len(fading) > 8
    np.testing.assert_allclose(np.diff(fading, 2), 0.0, atol=1e-12)


def test_dynamic_and_longrope_are_chosen_by_the_longest_sequence():
    dynamic = RopeScaling(kind="dynamic", factor=2.0, original_max_position=100)
    for length in (0, 1, 100):
        got = inverse_frequencies(8, 10000.0, dynamic.for_length(length))
        np.testing.assert_allclose(got, inverse_frequencies(8, 10000.0, None))
    got = inverse_frequencies(8, 10000.0, dynamic.for_length(150))
    np.testing.assert_allclose(got, inverse_frequencies(8, 10000.0 * 2.0 ** (8 / 6), None))

    long = RopeScaling(kind="longrope", original_max_position=100, short_factors=(1.0, 2.0), long_factors=(3.0, 4.0))
    plain = inverse_frequencies(4, 10000.0, None)
    for length, factors in ((0, [1.0, 2.0]), (100, [1.0, 2.0]), (101, [3.0, 4.0])):
        got = inverse_frequencies(4, 10000.0, long.for_length(length))
        np.testing.assert_allclose(got, plain / factors, rtol=1e-6)
    assert YARN.for_length(9) == YARN


def test_how_far_a_scaling_reaches():
    assert YARN.reach(4096) == 16384
    assert YARN.reach(20000) == 20000
    assert RopeScaling(kind="dynamic", factor=2.0, original_max_position=100).reach(100) == 200
    assert LLAMA3.reach(131072) == 131072


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "linear", "factor": 0.0}, "factor of rope scaling is 0.0; allowed are"),
        ({"kind": "llama3", "low_freq_factor": 4.0}, "low_freq_factor 4.0 and high_freq_factor 4.0; the first must"),
        ({"kind": "yarn", "beta_fast": 1.0}, "beta_slow 1.0 and beta_fast 1.0; the first must"),
        ({"kind": "longrope", "short_factors": (1.0, -1.0)}, "a factor of longrope scaling is -1.0"),
    ],
)
def test_other_scalings_are_refused(fields, words):
    with pytest.raises(UnsupportedModel, match=words):
        RopeScaling(**fields)


@pytest.mark.parametrize(
    ("theta", "scaling", "words"),
    [
        (1.0, YARN, r"rope_theta 1.0, stretched by yarn scaling with factor 4.0 gives 8 rotary dimensions no finite"),
        (1e-30, None, r"rope_theta 1e-30 gives"),
    ],
)
def test_angles_that_are_not_finite_are_refused(theta, scaling, words):
    with pytest.raises(UnsupportedModel, match=words):
        check_rope(8, theta, scaling)


def test_scalings_that_do_not_fit_a_head_are_refused():
    with pytest.raises(UnsupportedModel, match="1 short and 0 long factors; 8 rotary dimensions want 4 of each"):
        RopeScaling(kind="longrope", short_factors=(1.0,)).check_dim(8)
    with pytest.raises(UnsupportedModel, match="wants 4 rotary dimensions or more; there are 2"):
        RopeScaling(kind="dynamic").check_dim(2)
