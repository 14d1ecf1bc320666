"""What the engine learns of a module, and what it refuses."""

import jax.numpy as jnp
import pytest
from flax import nnx

from jserve.errors import UnsupportedModel
from jserve.models.contract import LayerCache, trace_layer_caches
from jserve.testing.models import tiny_llama


class Odd(nnx.Module):
    """Layers that attend, or do not, as they are told."""

    def __init__(self, calls, *, own_cache=True):
        self.num_layers = len(calls)
        self.calls = calls
        self.own_cache = own_cache
        self.table = nnx.Param(jnp.ones((8, 4)))

    def embed(self, tokens, step):
        return self.table[...][tokens]

    def layer(self, i, x, step):
        if self.calls[i] is None:
            return x
        q = x[:, None]
        return step.attend(self.calls[i], q, *((q, q) if self.own_cache else (None, None)), scale=1.0)[:, 0]

    def logits(self, x):
        return x @ self.table[...].T


class Whole(nnx.Module):
    def __call__(self, tokens):
        return tokens


def trace(module):
    graphdef, state = nnx.split(module)
    return trace_layer_caches(graphdef, nnx.to_pure_dict(state))


def test_every_layers_cache_and_the_width_of_the_head():
    layer = LayerCache(num_kv_heads=1, head_dim=4, num_heads=1, window=None, dtype=jnp.float32)
    assert trace(Odd((0, 1, 2))) == ([layer] * 3, 8)
    graphdef, params = tiny_llama(vocab_size=100)
    assert trace_layer_caches(graphdef, params)[1] == 100


@pytest.mark.parametrize("calls", [(0, None), (None, 1), (0, 0), (1, 2)])
def test_a_layer_that_does_not_attend_with_its_own_number_is_refused(calls):
    with pytest.raises(UnsupportedModel, match="each of layers 0 to 1 must call it"):
        trace(Odd(calls))


def test_what_is_not_built_and_what_is_not_of_the_contract_is_named():
    with pytest.raises(UnsupportedModel, match="layer 0 reads another layer's cache"):
        trace(Odd((0,), own_cache=False))
    with pytest.raises(UnsupportedModel, match="Whole has no num_layers, embed, layer, logits"):
        trace(Whole())
