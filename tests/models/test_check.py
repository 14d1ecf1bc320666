"""Every kind of fault that the contract checker knows, planted; and modules without fault, which it leaves alone."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jserve import LLM, SamplingParams
from jserve.models.check import check_contract
from jserve.models.naive import naive_generate
from jserve.models.own import for_serving, length_of
from jserve.progress import SILENT
from jserve.testing.models import tiny_llama

V, D, H, K, DH, LONGEST = 24, 8, 4, 2, 4, 32


def param(rngs, shape, axes):
    return nnx.Param(jax.random.normal(rngs.params(), shape) * 0.3, out_sharding=axes, eager_sharding=False)


class Good(nnx.Module):
    """Learned positions, grouped-query attention, no feed-forward."""

    num_layers = 3
    max_position = LONGEST

    def __init__(self, rngs):
        self.table = param(rngs, (V, D), ("vocab", "embed"))
        self.places = param(rngs, (LONGEST, D), (None, "embed"))
        self.q = nnx.List([param(rngs, (D, H, DH), ("embed", "heads", "head_dim")) for _ in range(3)])
        self.kv = nnx.List([param(rngs, (D, K, DH), ("embed", "kv_heads", "head_dim")) for _ in range(3)])
        self.o = nnx.List([param(rngs, (H, DH, D), ("heads", "head_dim", "embed")) for _ in range(3)])

    def embed(self, tokens, step):
        return self.table[...][tokens] + self.places[...][step.positions]

    def heads(self, i, x):
        kv = jnp.einsum("td,dkh->tkh", x, self.kv[i][...])
        return jnp.einsum("td,dnh->tnh", x, self.q[i][...]), kv, kv

    def layer(self, i, x, step):
        seen = step.attend(i, *self.heads(i, x), scale=0.5)
        return x + jnp.einsum("tnh,nhd->td", seen, self.o[i][...])

    def logits(self, x):
        return x @ self.table[...].T


class Whole(nnx.Module):
    """The same in one piece."""

    max_position = LONGEST

    def __init__(self, rngs, kind=Good):
        self.inner = kind(rngs)

    def __call__(self, tokens, positions, attend):
        inner = self.inner
        x = inner.table[...][tokens] + inner.places[...][positions]
        for i in self.numbers():
            x = x + jnp.einsum("tnh,nhd->td", attend(i, *inner.heads(i, x), scale=0.5), inner.o[i][...])
        return inner.logits(x)

    def numbers(self):
        return range(3)


class LinenGood(nn.Module):
    num_layers: int = 2
    max_position: int = LONGEST

    def setup(self):
        def axes(*names):
            return nn.with_partitioning(nn.initializers.normal(0.3), names)

        self.table = nn.Embed(V, D, embedding_init=axes("vocab", "embed"))
        self.places = self.param(
            "places", nn.with_logical_partitioning(nn.initializers.normal(0.3), (None, "embed")), (LONGEST, D)
        )
        self.qkv = [nn.Dense(3 * D, use_bias=False, kernel_init=axes("embed", "mlp")) for _ in range(2)]

    def embed(self, tokens, step):
        return self.table(tokens) + self.places[step.positions]

    def layer(self, i, x, step):
        q, k, v = jnp.split(self.qkv[i](x)[:, None], 3, axis=-1)
        return x + step.attend(i, q, k, v, scale=0.3)[:, 0]

    def logits(self, x):
        return self.table.attend(x)


@pytest.mark.parametrize(
    "module",
    [Good(nnx.Rngs(0)), Whole(nnx.Rngs(0)), nnx.eval_shape(lambda: Good(nnx.Rngs(0))), LinenGood()],
    ids=["layers", "whole", "without values", "linen"],
)
def test_a_module_that_keeps_the_contract_comes_out_clean(module):
    assert check_contract(module, vocab_size=V) == []


class LinenWithConfig(LinenGood):
    max_position: int | None = None
    config: Any = None


@pytest.mark.parametrize("config", [{"max_position": 16}, SimpleNamespace(max_position=16)], ids=["dict", "object"])
def test_a_length_may_stand_on_the_config_of_either_kind_of_module(config):
    module = Good(nnx.Rngs(0))
    module.max_position, module.config = None, config
    for kind in (module, LinenWithConfig(config=config)):
        assert length_of(for_serving(kind)) == 16
        assert check_contract(kind) == []


def test_our_llama_comes_out_clean_by_graph_and_by_module():
    graphdef, params = tiny_llama(tie_embeddings=True)
    assert check_contract(graphdef, params, vocab_size=256) == []
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    assert check_contract(nnx.merge(graphdef, half)) == []


def test_the_module_of_the_docs_comes_out_clean():
    """As its reader would run it: in no context, on no mesh."""
    text = (Path(__file__).parents[2] / "docs" / "bring_your_own.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)[1]
    names = {"__name__": "docs"}
    exec(code, names)  # noqa: S102  (our own page)
    module = names["MyModel"](rngs=nnx.Rngs(0))
    assert check_contract(module) == []
    assert check_contract(module, vocab_size=1000) == []
    graphdef, state = nnx.split(module)
    settings = {"max_num_seqs": 1, "max_num_tokens": 8, "num_pages": 8, "max_model_len": 32, "program_store": False}
    with LLM(module, None, None, progress=SILENT, **settings) as llm:
        (out,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))
    assert out.token_ids == naive_generate(graphdef, nnx.to_pure_dict(state), [1, 2, 3], 4)


# --- faults -----------------------------------------------------------------------------------------------------------


def faulty(name, where, what, *, severity="error"):
    """Register a kind of Good that has one fault."""

    def register(kind):
        FAULTS.append(pytest.param(kind, severity, where, what, id=name))
        return kind

    return register


FAULTS: list = []


@faulty("no method", "module", "it has no logits, and no __call__")
class _NoLogits(Good):
    logits = None


@faulty("no layers", "module", "it has no num_layers")
class _NoLayers(Good):
    num_layers = None


@faulty("no length", "module", "has no max_position")
class _NoLength(Good):
    max_position = None


@faulty("embed shape", "embed", "it gives float32 [1, 7, 8]")
class _Batch(Good):
    def embed(self, tokens, step):
        return super().embed(tokens, step)[None]


@faulty("embed dtype", "embed", "it gives int32 [T, 1]")
class _Ints(Good):
    def embed(self, tokens, step):
        return tokens[:, None]


@faulty("layer shape", "layer 0", "it takes float32 [T, 8] and gives float32 [T, 16]")
class _Wider(Good):
    def layer(self, i, x, step):
        x = super().layer(i, x, step)
        return jnp.concatenate([x, x], axis=1)


@faulty("layer dtype", "layer 0", "it takes float32 [T, 8] and gives bfloat16 [T, 8]")
class _Narrower(Good):
    def layer(self, i, x, step):
        return super().layer(i, x, step).astype(jnp.bfloat16)


@faulty("logits shape", "logits", "of 1 rows it gives float32 [24]")
class _LastOnly(Good):
    def logits(self, x):
        return super().logits(x)[-1] if x.shape[0] == 1 else super().logits(x)


@faulty("logits dtype", "logits", "logits are bfloat16", severity="warning")
class _Coarse(Good):
    def logits(self, x):
        return super().logits(x).astype(jnp.bfloat16)


@faulty("attend not called", "layer 0 to 2", "it calls attend 0 times")
class _Deaf(Good):
    def layer(self, i, x, step):
        return x + 1


@faulty("attend twice", "layer 1", "it calls attend 2 times")
class _Twice(Good):
    def layer(self, i, x, step):
        return super().layer(i, super().layer(i, x, step) if i == 1 else x, step)


@faulty("wrong number", "layer 1, 2", "it calls attend with the number 0")
class _Zero(Good):
    def layer(self, i, x, step):
        return super().layer(0, x, step)


@faulty("attend in embed", "embed", "it calls attend")
class _Early(Good):
    def embed(self, tokens, step):
        x = super().embed(tokens, step)
        return x + step.attend(0, *self.heads(0, x), scale=1.0)[:, 0, :1]


@faulty("attend in a scan", "layer 0", "it calls attend inside of jax.jit")
class _Rematerialized(Good):
    def layer(self, i, x, step):
        return jax.checkpoint(lambda x: super(_Rematerialized, self).layer(i, x, step))(x)


@faulty("scale", "layer 0 to 2", "attend is not given scale")
class _NoScale(Good):
    def layer(self, i, x, step):
        return x + jnp.einsum("tnh,nhd->td", step.attend(i, *self.heads(i, x)), self.o[i][...])


@faulty("heads", "layer 0 to 2", "4 query heads cannot share 3 KV heads evenly")
class _Uneven(Good):
    def heads(self, i, x):
        q, k, _ = super().heads(i, x)
        k = jnp.concatenate([k, k[:, :1]], axis=1)
        return q, k, k


@faulty("flat heads", "layer 0", "attend's q has the shape [T, 16]")
class _Flat(Good):
    def heads(self, i, x):
        q, k, v = super().heads(i, x)
        return q.reshape(x.shape[0], -1), k, v


@faulty("value in an if", "layer 0", "TracerBoolConversionError")
class _Branches(Good):
    def layer(self, i, x, step):
        return super().layer(i, x if x.sum() > 0 else -x, step)


@faulty("raises", "layer 0", "it raised ValueError: nonsense")
class _Raises(Good):
    def layer(self, i, x, step):
        raise ValueError("nonsense")


@faulty("sequences in embed", "embed", "rows of one sequence depend on those of another")
class _MeanEmbed(Good):
    def embed(self, tokens, step):
        x = super().embed(tokens, step)
        real = jnp.where(step.valid[:, None], x, 0.0)
        return x + 0.01 * real.mean(axis=0, keepdims=True)


@faulty("sequences before attend", "layer 1 before attend (k)", "rows of one sequence depend on those of another")
class _Normalizes(Good):
    def heads(self, i, x):
        q, k, v = super().heads(i, x)
        return q, (k / (1 + jnp.abs(k[:9]).max()) if i == 1 else k), v


@faulty("sequences after attend", "layer 2", "rows of one sequence depend on those of another")
class _Blends(Good):
    def layer(self, i, x, step):
        x = super().layer(i, x, step)
        return x + 0.1 * jnp.where(step.valid[:, None], x, 0.0).sum(axis=0, keepdims=True) if i == 2 else x


@faulty("sequences in logits", "logits", "rows of one sequence depend on those of another")
class _Competes(Good):
    def logits(self, x):
        out = super().logits(x)
        return out - out[:8].max()


@faulty("padding", "layer 0", "real rows depend on what stands in rows of padding")
class _SeesPadding(Good):
    def layer(self, i, x, step):
        x = super().layer(i, x, step)
        return x + 0.1 * jnp.where(step.valid[:, None], 0.0, x).sum(axis=0, keepdims=True)


@faulty("NaN in padding", "layer 0", "real rows depend on NaN in rows of padding")
class _MultipliesPadding(Good):
    def layer(self, i, x, step):
        x = super().layer(i, x, step)
        nothing = x * (1 - step.valid[:, None].astype(x.dtype)) * 0.0
        return x + nothing.sum(axis=0, keepdims=True)


@faulty("token shift", "layer 0 before attend (q)", "tokens of a sequence depend on each other without attend")
class _Shifts(Good):
    def heads(self, i, x):
        # The first row, and with it the only one that is another sequence's, is left alone.
        q, k, v = super().heads(i, x)
        return q.at[2].add(q[1]), k, v


def own_attention(q, k, v, seen):
    """Attention of the module's own, beside the engine's: ``seen`` [T, T] says which rows see which."""
    scores = jnp.where(seen[None], jnp.einsum("tkh,skh->kts", q[:, : k.shape[1]], k), -jnp.inf)
    return jnp.einsum("kts,skh->tkh", jax.nn.softmax(scores, axis=-1), v)


class _AttendsItself(Good):
    """Mixes q with what its own attention gives, before it asks the engine's."""

    def layer(self, i, x, step):
        q, k, v = self.heads(i, x)
        if i == 1:
            mixed = own_attention(q, k, jnp.where(step.valid[:, None, None], v, 0.0), self.seen(step))
            q = q + jnp.concatenate([mixed, mixed], axis=1)
        return x + jnp.einsum("tnh,nhd->td", step.attend(i, q, k, v, scale=0.5), self.o[i][...])


def same_sequence(step):
    """Sequences told apart by where positions stop to go up by one, as a clever module might."""
    begins = jnp.diff(step.positions, prepend=step.positions[:1]) != 1
    number = jnp.cumsum(begins)
    return number[:, None] == number[None]


@faulty("attention across sequences", "layer 1 before attend (q)", "rows of one sequence depend on those of another")
class _SeesAll(_AttendsItself):
    def seen(self, step):
        return step.valid[None] & jnp.ones_like(step.valid)[:, None]


@faulty("attention that is not causal", "layer 1 before attend (q)", "tokens depend on those that come after them")
class _NotCausal(_AttendsItself):
    def seen(self, step):
        return same_sequence(step)


@faulty("attention without the cache", "layer 1 before attend (q)", "tokens of a sequence depend on each other without")
class _NoCache(_AttendsItself):
    def seen(self, step):
        return same_sequence(step) & (step.positions[:, None] >= step.positions[None])


@faulty("logits of ints", "logits", "of 7 rows it gives int32 [T, 24]")
class _Rounded(Good):
    def logits(self, x):
        return super().logits(x).astype(jnp.int32)


@faulty("scale by place", "layer 0", "scale and the rest go by name: scale=...")
class _ByPlace(Good):
    def layer(self, i, x, step):
        return x + jnp.einsum("tnh,nhd->td", step.attend(i, *self.heads(i, x), 0.5), self.o[i][...])


@faulty("array index in a layer", "layer 2 before attend (q)", "a row's result depends on where it stands in the step")
class _CountsLate(Good):
    def heads(self, i, x):
        q, k, v = super().heads(i, x)
        return (q + 0.01 * jnp.arange(x.shape[0], dtype=q.dtype)[:, None, None] if i == 2 else q), k, v


@faulty("array index", "embed", "a row's result depends on where it stands in the step")
class _Counts(Good):
    def embed(self, tokens, step):
        return self.table[...][tokens] + self.places[...][jnp.arange(tokens.shape[0])]


@faulty("number of rows", "layer 0", "a row's result depends on how many rows there are")
class _Scales(Good):
    def layer(self, i, x, step):
        return super().layer(i, x, step) / x.shape[0]


@faulty("positions", "module", "step.positions changes nothing", severity="warning")
class _NoPositions(Good):
    def embed(self, tokens, step):
        return self.table[...][tokens]


@faulty("no axes", "parameters", "1 of 11 declare no logical axes, 0.0 MB that every device", severity="warning")
class _Bare(Good):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.table = nnx.Param(self.table[...])


@faulty("unknown axes", "table", "its logical axes ('vocab', 'width') are not all known: width")
class _Unknown(Good):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.table = param(rngs, (V, D), ("vocab", "width"))


@faulty("axes of another rank", "table", "it has 2 dimensions and the 1 logical axes ('vocab',)")
class _Short(Good):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.table = param(rngs, (V, D), ("vocab",))


@faulty("not finite", "layer 1", "its result is not finite")
class _Infinite(Good):
    def layer(self, i, x, step):
        return super().layer(i, x, step) / (1.0 if i != 1 else 0.0)


@faulty("variable", "module", "running it changes its variables calls")
class _Remembers(Good):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = nnx.Variable(jnp.zeros(()))

    def embed(self, tokens, step):
        self.calls[...] += 1
        return super().embed(tokens, step)


@faulty("attribute", "module", "running it changes its attributes")
class _Notes(Good):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.seen = 0

    def embed(self, tokens, step):
        self.seen += 1
        return super().embed(tokens, step)


CALLS = itertools.count()


@faulty("global", "layer 0", "the same input gives another result when it runs again")
class _Global(Good):
    def layer(self, i, x, step):
        return super().layer(i, x, step) + float(next(CALLS))


@faulty("whole, number twice", "__call__", "it calls attend with the numbers [0, 0, 2]")
class _WholeTwice(Whole):
    def numbers(self):
        return (0, 0, 2)


@faulty("whole, leak", "layer 1 before attend (k)", "rows of one sequence depend on those of another")
class _WholeLeaks(Whole):
    def __init__(self, rngs):
        super().__init__(rngs, _Normalizes)


@pytest.mark.parametrize(("kind", "severity", "where", "what"), FAULTS)
def test_a_fault_is_told_alone_and_where_it_is(kind, severity, where, what):
    found = check_contract(kind(nnx.Rngs(0)))
    assert [(one.severity, one.where) for one in found] == [(severity, where)], found
    assert what in found[0].what
    assert found[0].fix
    assert str(found[0]).startswith(f"{severity}: {where}: ")


def test_the_tokenizer_must_fit_the_head():
    (found,) = check_contract(Good(nnx.Rngs(0)), vocab_size=V + 1)
    assert (found.where, found.what) == ("logits", "they are 24 wide and the tokenizer has 25 ids")


def test_given_parameters_are_those_that_run():
    module = nnx.eval_shape(lambda: Good(nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(Good(nnx.Rngs(0))))
    params["o"][1] = jnp.full((H, DH, D), jnp.nan)
    (found,) = check_contract(module, params)
    assert (found.where, found.what) == ("layer 1", "its result is not finite (NaN or infinity)")
    np.testing.assert_equal(nnx.to_pure_dict(nnx.state(module))["table"].shape, (V, D))


def test_a_short_model_is_checked_within_its_length():
    class Short(Good):
        max_position = 3

        def __init__(self, rngs):
            super().__init__(rngs)
            self.places = param(rngs, (3, D), (None, "embed"))

    assert check_contract(Short(nnx.Rngs(0))) == []


class NoLinen(nn.Module):
    num_layers: int = 1

    @nn.compact
    def __call__(self, x):
        return x


def test_a_linen_module_of_another_form_is_told_what_to_change():
    (found,) = check_contract(NoLinen())
    assert found.what == "the Linen module NoLinen has no embed, layer, logits"
    assert "__call__(tokens, positions, attend), @nn.compact or not" in found.fix


def test_what_is_no_module_is_said():
    (found,) = check_contract({"a": 1})
    assert found.what == "dict is neither a flax.nnx.Module nor a flax.linen.Module"
