"""What the engine learns of a module, and what it refuses."""

import jax.numpy as jnp
import pytest
from flax import nnx

from jserve.errors import UnsupportedModel
from jserve.models.contract import LayerCache, trace_layer_caches
from jserve.testing.models import tiny_llama


class Odd(nnx.Module):
    """Layer i attends once with each number of ``calls[i]``."""

    def __init__(self, calls, *, own_cache=True):
        self.num_layers = len(calls)
        self.calls = calls
        self.own_cache = own_cache
        self.table = nnx.Param(jnp.ones((8, 4)))

    def embed(self, tokens, step):
        return self.table[...][tokens]

    def layer(self, i, x, step):
        for number in self.calls[i]:
            x = self.attend(number, x, step)
        return x

    def attend(self, number, x, step):
        q = x[:, None]
        return step.attend(number, q, *((q, q) if self.own_cache else (None, None)), scale=1.0)[:, 0]

    def logits(self, x):
        return x @ self.table[...].T


class Whole(nnx.Module):
    def __call__(self, tokens):
        return tokens


def trace(module):
    graphdef, state = nnx.split(module)
    return trace_layer_caches(graphdef, nnx.to_pure_dict(state))


def test_every_layers_cache_and_the_width_of_the_head():
    layer = LayerCache(num_kv_heads=1, head_dim=4, num_heads=1, dtype=jnp.float32)
    assert trace(Odd(((0,), (1,), (2,)))) == ([layer] * 3, 8)
    graphdef, params = tiny_llama(vocab_size=100)
    assert trace_layer_caches(graphdef, params)[1] == 100


class Early(Odd):
    def embed(self, tokens, step):
        return self.attend(0, super().embed(tokens, step), step)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Odd(((0,), ())), "layer 1 did not call step.attend"),
        (Odd(((), (1,))), "layer 0 did not call step.attend"),
        (Odd(((0,), (0,))), "layer 1 called step.attend with the number 0"),
        (Odd(((1,), (0,))), "layer 0 called step.attend with the number 1"),
        (Odd(((0,), (1, 1))), "layer 1 called step.attend twice"),
        (Odd(((0,), (1, 2))), "layer 1 called step.attend with the number 2"),
        (Early(((0,), (1,))), "step.attend was called outside of the layers"),
    ],
)
def test_a_layer_attends_once_and_with_its_own_number(module, words):
    with pytest.raises(UnsupportedModel, match=f"{words}; each layer must call it exactly once, with its own number"):
        trace(module)


def test_what_is_not_built_and_what_is_not_of_the_contract_is_named():
    with pytest.raises(UnsupportedModel, match="layer 0 reads another layer's cache"):
        trace(Odd(((0,),), own_cache=False))
    with pytest.raises(UnsupportedModel, match="Whole has no num_layers, embed, layer, logits"):
        trace(Whole())
