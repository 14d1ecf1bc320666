"""A tiny engine to test on, and a sink that gathers what it says."""

import threading
from collections import defaultdict
from dataclasses import dataclass, field

import jax
from flax import nnx

from jserve.config import ServeConfig
from jserve.engine.build import EngineModel, build_engine
from jserve.request import FinishReason, Request, ResolvedSampling, TokenDelta
from jserve.testing.models import tiny_llama
from sharding import MeshSpec, param_shardings

VOCAB = 256


def make_engine(store=None, *, mesh="", model=None, load=None, compile_progress=None, max_len=512, **settings):
    """An engine of ``tiny_llama`` (or ``model``) whose few programs compile quickly."""
    graphdef, params = model or tiny_llama()
    built = MeshSpec.parse(mesh).build()
    state = nnx.split(nnx.merge(graphdef, params))[1]
    shardings = param_shardings(state, built)
    shapes = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), params, shardings)
    config = ServeConfig(**{"max_num_seqs": 4, "max_num_tokens": 32, "num_pages": 64, "page_size": 8, **settings})
    return build_engine(
        EngineModel(
            graphdef=graphdef,
            param_shapes=shapes,
            load=load or (lambda: jax.tree.map(jax.device_put, params, shardings)),
            max_len=max_len,
            vocab_size=VOCAB,
            built_in=model is None,
        ),
        config,
        mesh=built,
        store=store,
        compile_progress=compile_progress,
    )


def request(name, prompt, max_tokens=16, *, deadline=None, **options):
    values = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 1,
        "n": 1,
        "min_tokens": 0,
        "stop_ids": (),
        "logprobs": None,
    }
    sampling = ResolvedSampling(max_tokens=max_tokens, **{**values, **options})
    return Request(request_id=str(name), prompt_ids=tuple(prompt), sampling=sampling, arrival=0.0, deadline=deadline)


@dataclass
class Listener:
    """A sink that gathers, and checks that a choice ends once and says nothing after."""

    deltas: list[TokenDelta] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    first: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    choices: int = 1
    faults: list[str] = field(default_factory=list)

    def __call__(self, deltas):
        for delta in deltas:
            if delta.choice in self.reasons:
                self.faults.append(f"choice {delta.choice} spoke after its end")
            self.deltas.append(delta)
            self.tokens[delta.choice].extend(delta.token_ids)
            self.logprobs[delta.choice].extend(delta.logprobs or ())
            if delta.finish_reason is not None:
                self.reasons[delta.choice] = delta.finish_reason
        self.first.set()
        if len(self.reasons) == self.choices:
            self.over.set()

    def wait(self):
        assert self.over.wait(60), "no end within 60 s"
        assert not self.faults
        return self


def submit(engine, *requests):
    listeners = [Listener(choices=r.sampling.n) for r in requests]
    for one, listener in zip(requests, listeners, strict=True):
        engine.submit(one, listener)
    return listeners


def run(engine, *requests):
    return [listener.wait() for listener in submit(engine, *requests)]
