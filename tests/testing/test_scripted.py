"""The scripted model follows its table, through the whole of a Llama."""

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.models.naive import naive_logits
from jserve.testing.scripted import follow, scripted_llama
from jserve.testing.tokenizer import EOS_ID, VOCAB_SIZE, ByteTokenizer


def test_it_says_its_script():
    script = ByteTokenizer().encode("ABCDEFGHIJ", add_special=False)
    graphdef, params = scripted_llama(follow(script, vocab_size=VOCAB_SIZE, end=EOS_ID))
    logits = np.asarray(naive_logits(graphdef, params, script))
    assert logits.argmax(-1).tolist() == [*script[1:], EOS_ID]


def test_the_margin_is_as_asked():
    table = np.random.default_rng(0).integers(0, 64, 64).tolist()
    graphdef, params = scripted_llama(table, margin=20.0, num_layers=2, dtype=jnp.bfloat16)
    logits = np.asarray(naive_logits(graphdef, params, range(64)), np.float32)
    assert logits.argmax(-1).tolist() == table
    ordered = np.sort(logits, -1)
    np.testing.assert_allclose(ordered[:, -1], 20.0, rtol=0.02)
    np.testing.assert_array_equal(ordered[:, :-1], 0.0)


def test_a_script_that_cannot_be_followed_is_refused():
    with pytest.raises(ValueError, match="comes twice"):
        follow([1, 2, 1], vocab_size=4, end=0)
    with pytest.raises(ValueError, match=r"0\.\.2"):
        scripted_llama([0, 1, 3])
