"""Trains `my_model.MyModel` to add numbers, on sums that it makes up, and saves it as any Flax user would.

python train.py            about a minute on a CPU; writes ./checkpoint
python train.py --steps 20 --out elsewhere
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tokenizers
from flax import nnx
from my_model import MyConfig, MyModel
from tokenizers import decoders, models, pre_tokenizers, trainers

from jserve.models.naive import dense_logits

BATCH = 256
LENGTH = 9  # tokens of "99+99=198"


def all_sums() -> tuple[list[str], list[str]]:
    """The sums of two numbers below 100 in a random order: those to learn from, and 500 to be tested on."""
    pairs = np.random.default_rng(0).permutation(100 * 100)
    texts = [f"{a}+{b}={a + b}" for a, b in zip(*divmod(pairs, 100), strict=True)]
    return texts[500:], texts[:500]


def make_tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    """Every digit is a token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=32, special_tokens=["<eos>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> tuple[jax.Array, jax.Array]:
    """Int32 [B, LENGTH + 1]: each text, its end, and more ends up to the length; and float32 [B, LENGTH], 1 where the
    token after is one of the answer or its end."""
    end, equals = tokenizer.token_to_id("<eos>"), tokenizer.token_to_id("=")
    rows = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    tokens = np.asarray([row + [end] * (LENGTH + 1 - len(row)) for row in rows], np.int32)
    before = tokens[:, :-1]
    is_answer = (np.cumsum(before == equals, axis=1) > 0) & (before != end)
    return jnp.asarray(tokens), jnp.asarray(is_answer, jnp.float32)


def logits_of(model: MyModel, tokens: jax.Array) -> jax.Array:
    """The logits after each token but the last: [B, T + 1] -> [B, T, V]."""
    return jax.vmap(lambda row: dense_logits(model, row))(tokens[:, :-1])


def loss_of(model: MyModel, tokens: jax.Array, is_answer: jax.Array) -> jax.Array:
    """Mean loss over the answers: what stands before "=" is random and cannot be learnt."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(model, tokens), tokens[:, 1:])
    return (losses * is_answer).sum() / is_answer.sum()


@nnx.jit
def train_step(model: MyModel, optimizer: nnx.Optimizer, tokens: jax.Array, is_answer: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, tokens, is_answer)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def count_right(model: MyModel, tokens: jax.Array, is_answer: jax.Array) -> jax.Array:
    """How many answers are right in every token."""
    right = logits_of(model, tokens).argmax(axis=-1) == tokens[:, 1:]
    return (right | (is_answer == 0)).all(axis=1).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("checkpoint"))
    options = parser.parse_args()

    texts, unseen = all_sums()
    tokenizer = make_tokenizer(texts)
    # Rounded up, so that a mesh can cut it evenly; ids that the tokenizer does not have are never chosen.
    config = MyConfig(vocab_size=-(-tokenizer.get_vocab_size() // 16) * 16)
    with nnx.use_eager_sharding(False):  # the axes are names only; there is no mesh here
        model = MyModel(config, rngs=nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, options.steps // 10, options.steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)

    rng, begun = np.random.default_rng(1), time.monotonic()
    for step in range(1, options.steps + 1):
        batch = encode(tokenizer, [texts[i] for i in rng.integers(0, len(texts), BATCH)])
        loss = train_step(model, optimizer, *batch)
        if step % max(1, options.steps // 10) == 0:
            print(f"step {step:5}  loss {loss:.4f}  {time.monotonic() - begun:.0f} s", flush=True)

    right = count_right(model, *encode(tokenizer, unseen))
    print(f"{right} of {len(unseen)} sums that it never saw are right")

    out = options.out.resolve()
    with ocp.CheckpointManager(out, options=ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
        manager.save(options.steps, args=ocp.args.StandardSave(nnx.state(model)), force=True)
        manager.wait_until_finished()
    (out / "config.json").write_text(json.dumps(asdict(config), indent=2))
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    print(f"saved {out}")


if __name__ == "__main__":
    main()
