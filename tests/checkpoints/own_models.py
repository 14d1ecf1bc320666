"""Modules as users write them, for ``own_models:NAME``."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from jserve.models.llama import LlamaConfig, rms_norm
from jserve.models.rope import apply_rope, inverse_frequencies
from jserve.testing.models import TINY_LLAMA, tiny_llama


@dataclass(frozen=True)
class Inner:
    heads: int
    scale: float = 0.5


@dataclass(frozen=True)
class Config:
    width: int
    inner: Inner
    max_position: int = 64
    names: tuple[str, ...] = ()

    def __post_init__(self):
        if self.width % 2:
            raise ValueError("width is odd")


class MyModel(nnx.Module):
    """Layers of flax, a dropout, axes declared on the table only."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.config = config
        self.num_layers = 2
        width = config.width
        axes = nnx.with_partitioning(nnx.initializers.normal(1.0), ("vocab", "embed"))
        self.table = nnx.Embed(16, width, rngs=rngs, param_dtype=dtype, embedding_init=axes)
        self.qkv = nnx.List([nnx.Linear(width, 3 * width, rngs=rngs, param_dtype=dtype) for _ in range(2)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def embed(self, tokens, step):
        return self.dropout(self.table(tokens))

    def layer(self, i, x, step):
        q, k, v = jnp.split(self.qkv[i](x).reshape(x.shape[0], 3, -1), 3, axis=1)
        return x + step.attend(i, q, k, v, scale=self.config.inner.scale)[:, 0]

    def logits(self, x):
        return self.table.attend(x)


def with_dict(config: dict, rngs):
    return MyModel(Config(width=config["width"], inner=Inner(heads=1)), rngs=rngs)


def without_config(rngs):
    return MyModel(Config(width=4, inner=Inner(heads=1)), rngs=rngs)


class Endless(MyModel):
    """No length, and logits of another shape than the contract's."""

    def __init__(self, rngs):
        super().__init__(Config(width=4, inner=Inner(heads=1)), rngs=rngs)
        self.config = self.config.inner
        self.scale = self.config.scale

    def layer(self, i, x, step):
        q, k, v = jnp.split(self.qkv[i](x).reshape(x.shape[0], 3, -1), 3, axis=1)
        return x + step.attend(i, q, k, v, scale=self.scale)[:, 0]

    def logits(self, x):
        return super().logits(x)[0]


def without_length(rngs):
    return Endless(rngs)


class Tables(MyModel):
    """Plain arrays, of JAX and of numpy, beside its parameters, and a Variable that is no Param."""

    def __init__(self, rngs):
        super().__init__(Config(width=4, inner=Inner(heads=1)), rngs=rngs)
        self.waves = nnx.data(jnp.sin(jnp.arange(256.0)).reshape(64, 4))
        self.mask = np.arange(16) % 3 > 0
        self.shift = nnx.Variable(jnp.arange(4.0))

    def embed(self, tokens, step):
        x = self.table(tokens) + self.waves[step.positions] + self.shift[...][None]
        return jnp.where(jnp.asarray(self.mask)[tokens][:, None], x, -x)


class Transforms(MyModel):
    """A transform of NNX before attend, and one after it."""

    def __init__(self, rngs):
        super().__init__(Config(width=4, inner=Inner(heads=1)), rngs=rngs)
        self.out = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def layer(self, i, x, step):
        heads = nnx.remat(lambda qkv, x: qkv(x))(self.qkv[i], x) if i else self.qkv[i](x)
        q, k, v = jnp.split(heads.reshape(x.shape[0], 3, -1), 3, axis=1)
        return x + nnx.jit(lambda out, x: out(x))(self.out[i], step.attend(i, q, k, v, scale=0.5)[:, 0])


class After(Transforms):
    """A transform after attend alone."""

    def layer(self, i, x, step):
        q, k, v = jnp.split(self.qkv[i](x).reshape(x.shape[0], 3, -1), 3, axis=1)
        return x + nnx.remat(lambda out, x: out(x))(self.out[i], step.attend(i, q, k, v, scale=0.5)[:, 0])


class Fails(Tables):
    """In programs only: these are of more rows than the first trace."""

    def layer(self, i, x, step):
        if x.shape[0] > 7:
            raise KeyError("rows")
        return super().layer(i, x, step)


class Counts(Tables):
    """Changes a variable while it runs."""

    def layer(self, i, x, step):
        self.shift[...] += 1
        return super().layer(i, x, step)


class Encoder(MyModel):
    """Hidden states, and no logits."""

    logits = None


def encoder(rngs):
    return Encoder(Config(width=4, inner=Inner(heads=1)), rngs=rngs)


def odd_config(config: int):
    raise NotImplementedError


def wants_more(width, depth, rngs):
    raise NotImplementedError


def raises():
    raise RuntimeError("no such luck")


def gives_a_dict():
    return {}


SEVEN = 7


class LinenLayer(nn.Module):
    config: LlamaConfig

    def setup(self):
        c = self.config
        heads, kv_heads, size = c.num_heads, c.num_kv_heads, c.head_dim
        width, inner = c.hidden_size, c.intermediate_size

        def param(name, axes, *shape):
            return self.param(name, nn.with_partitioning(nn.initializers.normal(), axes), shape)

        self.attn_norm = param("attn_norm", ("embed",), width)
        self.q = param("q", ("heads", "head_dim", "embed"), heads, size, width)
        self.k = param("k", ("kv_heads", "head_dim", "embed"), kv_heads, size, width)
        self.v = param("v", ("kv_heads", "head_dim", "embed"), kv_heads, size, width)
        self.o = param("o", ("embed", "heads", "head_dim"), width, heads, size)
        self.mlp_norm = param("mlp_norm", ("embed",), width)
        self.gate = param("gate", ("mlp", "embed"), inner, width)
        self.up = param("up", ("mlp", "embed"), inner, width)
        self.down = param("down", ("embed", "mlp"), width, inner)

    def __call__(self, i, x, step):
        c = self.config
        h = rms_norm(x, self.attn_norm, c.rms_norm_eps)
        frequencies = inverse_frequencies(c.head_dim, c.rope_theta, None)
        q, k, v = (jnp.einsum("td,hkd->thk", h, w) for w in (self.q, self.k, self.v))
        q, k = (apply_rope(part, step.positions, frequencies) for part in (q, k))
        x = x + jnp.einsum("thk,dhk->td", step.attend(i, q, k, v, scale=c.head_dim**-0.5), self.o)
        h = rms_norm(x, self.mlp_norm, c.rms_norm_eps)
        return x + (jax.nn.silu(h @ self.gate.T) * (h @ self.up.T)) @ self.down.T


class LinenLlama(nn.Module):
    config: LlamaConfig

    @property
    def num_layers(self):
        return self.config.num_layers

    def setup(self):
        c = self.config
        init = nn.with_logical_partitioning(nn.initializers.normal(), ("vocab", "embed"))
        self.table = self.param("table", init, (c.vocab_size, c.hidden_size))
        self.layers = [LinenLayer(c) for _ in range(c.num_layers)]
        self.norm = self.param("norm", nn.initializers.ones, (c.hidden_size,))
        self.head = self.param("head", init, (c.vocab_size, c.hidden_size))

    def embed(self, tokens, step):
        return self.table[tokens]

    def layer(self, i, x, step):
        return self.layers[i](i, x, step)

    def logits(self, x):
        return rms_norm(x, self.norm, self.config.rms_norm_eps) @ self.head.T


class LinenEndless(nn.Module):
    """No length, and no axes."""

    num_layers: int = 1

    def setup(self):
        self.table = nn.Embed(16, 4)

    def embed(self, tokens, step):
        return self.table(tokens)

    def layer(self, i, x, step):
        q = x[:, None]
        return x + step.attend(i, q, q, q, scale=1.0)[:, 0]

    def logits(self, x):
        return self.table.attend(x)


def linen_without_length():
    return LinenEndless()


def linen_llama():
    return LinenLlama(LlamaConfig(**TINY_LLAMA))


def linen_values():
    """``tiny_llama``'s values under the Linen module's names."""
    params = tiny_llama()[1]
    layers = {f"layers_{i}": layer for i, layer in params["layers"].items()}
    return {"table": params["token_embedding"]["weight"], "norm": params["norm"], "head": params["head"], **layers}
