"""A module in one piece, ``__call__(tokens, positions, attend)``, through the engine: as one in layers."""

import jax.numpy as jnp
import pytest
from flax import nnx
from harness import make_engine, request, run

from jserve.errors import MeshError, UnsupportedModel
from jserve.models.contract import Step, all_logits, trace_layer_caches
from jserve.models.naive import naive_generate
from jserve.testing.models import tiny_llama

PROMPTS = [list(range(5, 50)), [7], [1, 2, 3]]


class WholeLlama(nnx.Module):
    max_position = 512

    def __init__(self, inner, numbers=lambda i: i):
        self.inner = inner
        self.numbers = numbers

    def __call__(self, tokens, positions, attend):
        def answer(query):
            return attend(self.numbers(query.layer), query.q, query.k, query.v, scale=query.scale)

        step = Step(positions=positions, valid=jnp.ones(tokens.shape, bool), answer=answer)
        return all_logits(self.inner, tokens, step)


def parts(**options):
    graphdef, state = nnx.split(WholeLlama(nnx.merge(*tiny_llama()), **options))
    return graphdef, nnx.to_pure_dict(state)


@pytest.fixture(scope="module")
def greedy():
    return [naive_generate(*tiny_llama(), prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("mesh", ["", "tensor=2"])
def test_greedy_tokens_equal_those_of_the_module_in_layers(mesh, greedy, store):
    engine = make_engine(store, mesh=mesh, model=parts(), max_num_seqs=3, max_num_tokens=16)
    try:
        outs = run(engine, *(request(i, prompt, 12) for i, prompt in enumerate(PROMPTS)))
    finally:
        engine.close()
    assert [one.tokens[0] for one in outs] == greedy


def test_it_has_a_naive_twin_too(greedy):
    assert naive_generate(*parts(), PROMPTS[2], 12) == greedy[2]


def test_stages_are_refused_in_words():
    with pytest.raises(MeshError, match=r"only __call__\(tokens, positions, attend\): its layers cannot lie on stages"):
        make_engine(mesh="stage=2", model=parts())


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (lambda i: i + 1, r"with the numbers \[1, 2\]; call it once for each layer, numbered from 0"),
        (lambda i: 0, "layer 0 called step.attend twice"),
    ],
)
def test_its_layers_are_numbered_from_0_and_ask_once(numbers, words):
    with pytest.raises(UnsupportedModel, match=words):
        trace_layer_caches(*parts(numbers=numbers))
