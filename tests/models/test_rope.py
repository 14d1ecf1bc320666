import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import UnsupportedModel
from jserve.models.rope import RopeScaling, apply_rope, inverse_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


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
    got = inverse_frequencies(64, 500000.0, RopeScaling.parse(LLAMA3))
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


@pytest.mark.parametrize(
    ("entries", "want"),
    [
        (None, None),
        ({"rope_type": "default"}, None),
        ({"type": "linear", "factor": 2.0}, RopeScaling(kind="linear", factor=2.0)),
        ({"rope_type": "linear", "type": "linear", "factor": 2.0}, RopeScaling(kind="linear", factor=2.0)),
        (LLAMA3, RopeScaling(kind="llama3", factor=32.0, original_max_position=8192)),
    ],
)
def test_hugging_face_spellings(entries, want):
    assert RopeScaling.parse(entries) == want


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"rope_type": "yarn", "factor": 2.0}, "'yarn' is not built; built: default, linear, llama3"),
        ({"factor": 2.0}, "names no kind"),
        ({"type": "linear"}, r"lacks \['factor'\]"),
        ({"type": "linear", "factor": 2.0, "beta": 1}, r"has \['beta'\]"),
        ({"type": "linear", "factor": 0}, "factor 0; it must be greater than 0"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "less than the second"),
    ],
)
def test_other_scalings_are_refused(entries, words):
    with pytest.raises(UnsupportedModel, match=words):
        RopeScaling.parse(entries)
