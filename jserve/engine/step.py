"""The compiled programs: everything between two host decisions in one device call.

    mixed    T tokens of prompts and running choices: embed, layers with cache write, sample, stop tests, append
    decode   the same for one token a row, in a while loop of up to ``steps`` passes

Both take and give back the pools and the slot state (donated, so nothing is copied).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Float32, Int32, Shaped

from jserve.engine.forward import Batch, Layers, Pools
from jserve.engine.plan import DecodeArrays, MixedArrays, RowArrays
from jserve.engine.sampler import SamplingRows, sample
from jserve.engine.state import CacheLayout, SlotState
from jserve.models.contract import is_whole
from jserve.models.own import is_transforms
from jserve.request import MAX_LOGPROBS

__all__ = ["Outputs", "Programs"]


class Outputs(NamedTuple):
    """What a dispatch brings to the host, for ``N`` steps and ``R`` rows; ``L`` is MAX_LOGPROBS."""

    emitted: Int32[Array, " R"]  # tokens that each row brought
    token: Int32[Array, "N R"]
    logprob: Float32[Array, "N R"]
    top_ids: Int32[Array, "N R L"]
    top_logprobs: Float32[Array, "N R L"]


_Carry = tuple[Int32[Array, ""], Pools, SlotState, Outputs]
"""What goes from one step of a decode program to the next: how many there were, and what they made."""


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Builds the two step functions for one model on one mesh."""

    graphdef: Any
    layout: CacheLayout
    mesh: Mesh
    vocab_size: int
    max_steps: int

    def mixed(self, params: Any, pools: Pools, state: SlotState, plan: MixedArrays) -> tuple[Pools, SlotState, Outputs]:
        """One step of prompts and running choices together."""
        plan, state = jax.tree.map(lambda a: a[0, 0], plan), jax.tree.map(lambda a: a[0], state)
        rows, num_tokens = plan.rows, plan.tokens.shape[0]
        num_rows = rows.slot.shape[0]
        real = jnp.arange(num_rows) < plan.distribution[2]
        decode = real & (plan.start < 0)
        at = jnp.minimum(rows.slot, state.live.shape[0] - 1)
        live = real & (~decode | state.live[at])
        start = jnp.where(decode, state.context[at], plan.start)
        generated = jnp.where(decode, state.generated[at], plan.generated)
        q_lens = plan.cu_q_lens[1:] - plan.cu_q_lens[:-1]
        kv_lens = jnp.where(live, start + q_lens, 0)

        token = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.searchsorted(plan.cu_q_lens, token, side="right").astype(jnp.int32) - 1
        row = jnp.clip(row, 0, num_rows - 1)
        valid = (token < plan.cu_q_lens[-1]) & live[row]
        positions = jnp.where(valid, start[row] + token - plan.cu_q_lens[row], 0)
        tokens = jnp.where(decode[row], state.last_token[at[row]], plan.tokens)
        batch = Batch(
            positions=positions,
            valid=valid,
            page_table=rows.page_table,
            kv_lens=kv_lens,
            cu_q_lens=plan.cu_q_lens,
            distribution=plan.distribution,
        )
        last = jnp.maximum(plan.cu_q_lens[1:] - 1, 0)
        logits, pools = self._forward(params, pools, tokens, batch, select=last)

        samples = live & plan.samples
        sampled = sample(
            logits,
            _sampling_rows(rows, position=kv_lens, generated=generated, live=samples),
            vocab_size=self.vocab_size,
        )
        state = _advance(state, rows, sampled.token, context=kv_lens, generated=generated, live=live, samples=samples)
        outputs = Outputs(samples.astype(jnp.int32), *(part[None] for part in sampled))
        return pools, jax.tree.map(lambda a: a[None], state), outputs

    def decode(
        self, params: Any, pools: Pools, state: SlotState, plan: DecodeArrays
    ) -> tuple[Pools, SlotState, Outputs]:
        """Up to ``plan.steps`` steps of one token a row; ends when no row is live, or early if asked."""
        plan, state = jax.tree.map(lambda a: a[0, 0], plan), jax.tree.map(lambda a: a[0], state)
        rows = plan.rows
        num_rows = rows.slot.shape[0]
        real = rows.slot < state.live.shape[0]
        at = jnp.minimum(rows.slot, state.live.shape[0] - 1)
        shape = (self.max_steps, num_rows)
        outputs = Outputs(
            emitted=jnp.zeros((num_rows,), jnp.int32),
            token=jnp.zeros(shape, jnp.int32),
            logprob=jnp.zeros(shape, jnp.float32),
            top_ids=jnp.zeros((*shape, MAX_LOGPROBS), jnp.int32),
            top_logprobs=jnp.zeros((*shape, MAX_LOGPROBS), jnp.float32),
        )
        started = real & state.live[at]
        every_row = jnp.arange(num_rows + 1, dtype=jnp.int32)
        all_rows = jnp.full((3,), num_rows, jnp.int32)

        def go_on(carry: _Carry) -> Bool[Array, ""]:
            step, _, state, _ = carry
            live = real & state.live[at]
            ended = (started & ~live).any()
            return (step < plan.steps) & live.any() & ~(plan.leave_early & ended)

        def body(carry: _Carry) -> _Carry:
            step, pools, state, outputs = carry
            live = real & state.live[at]
            context = state.context[at]
            kv_lens = jnp.where(live, context + 1, 0)
            batch = Batch(
                positions=jnp.where(live, context, 0),
                valid=live,
                page_table=rows.page_table,
                kv_lens=kv_lens,
                cu_q_lens=every_row,
                distribution=all_rows,
            )
            logits, pools = self._forward(params, pools, state.last_token[at], batch, select=None)
            generated = state.generated[at]
            sampled = sample(
                logits,
                _sampling_rows(rows, position=kv_lens, generated=generated, live=live),
                vocab_size=self.vocab_size,
            )
            state = _advance(state, rows, sampled.token, context=kv_lens, generated=generated, live=live, samples=live)
            outputs = Outputs(
                outputs.emitted + live.astype(jnp.int32),
                *(whole.at[step].set(part) for whole, part in zip(outputs[1:], sampled, strict=True)),
            )
            return step + 1, pools, state, outputs

        _, pools, state, outputs = jax.lax.while_loop(go_on, body, (jnp.int32(0), pools, state, outputs))
        return pools, jax.tree.map(lambda a: a[None], state), outputs

    def _forward(
        self,
        params: Any,
        pools: Pools,
        tokens: Int32[Array, " T"],
        batch: Batch,
        *,
        select: Int32[Array, " R"] | None,
    ) -> tuple[Float[Array, "_ V"], Pools]:
        """Logits of the selected tokens (all where None), and the pools with this step's K and V."""

        def run(*, grouped: bool) -> tuple[Float[Array, "_ V"], Pools]:
            model = nnx.merge(self.graphdef, params)  # each time: a transform that failed leaves one in pieces
            layers = Layers(model=model, batch=batch, layout=self.layout, mesh=self.mesh, grouped=grouped)
            if is_whole(model):
                every, after = layers.in_one_piece(tokens, pools)
                return every if select is None else every[select], after
            x, after = layers(model.embed(tokens, layers.outside), pools)
            return model.logits(x if select is None else x[select]), after

        try:
            return run(grouped=True)
        except TraceContextError as error:
            if not is_transforms(error):
                raise
        return run(grouped=False)

    def function(self, kind: str) -> Callable[..., tuple[Pools, SlotState, Outputs]]:
        return self.mixed if kind == "mixed" else self.decode


def _sampling_rows(
    rows: RowArrays, *, position: Int32[Array, " R"], generated: Int32[Array, " R"], live: Bool[Array, " R"]
) -> SamplingRows:
    shared = {name: getattr(rows, name) for name in SamplingRows._fields if name in RowArrays._fields}
    return SamplingRows(**shared, position=position, generated=generated, live=live)


def _advance(
    state: SlotState,
    rows: RowArrays,
    token: Int32[Array, " R"],
    *,
    context: Int32[Array, " R"],
    generated: Int32[Array, " R"],
    live: Bool[Array, " R"],
    samples: Bool[Array, " R"],
) -> SlotState:
    """Write back where each live row stands; ``samples`` rows append ``token`` and meet the stop tests."""
    generated = generated + samples.astype(jnp.int32)
    stopped = (rows.stop_ids == token[:, None]).any(axis=-1) & (generated > rows.min_tokens)
    ended = samples & (stopped | (generated >= rows.max_tokens))
    slot = jnp.where(live, rows.slot, state.live.shape[0])  # rows that are not live write nowhere

    def put(old: Shaped[Array, " N"], new: Shaped[Array, " R"]) -> Shaped[Array, " N"]:
        return old.at[slot].set(new, mode="drop")

    return SlotState(
        last_token=put(state.last_token, token),
        context=put(state.context, context),
        generated=put(state.generated, generated),
        live=put(state.live, live & ~ended),
    )
