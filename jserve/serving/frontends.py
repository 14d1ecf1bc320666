"""The two kinds of frontend, told apart in words for callers who want the other one."""

from __future__ import annotations

from typing import TypeAlias

from jserve.errors import Unsupported
from jserve.serving.embed_frontend import EmbedFrontend
from jserve.serving.frontend import Frontend

__all__ = ["AnyFrontend", "need_embedder", "need_generator"]

AnyFrontend: TypeAlias = Frontend | EmbedFrontend


def need_generator(frontend: AnyFrontend) -> Frontend:
    """The frontend, where it generates. Raises Unsupported."""
    if isinstance(frontend, Frontend):
        return frontend
    raise Unsupported(f"{frontend.model.name!r} is an encoder: it embeds texts and generates none; call embed")


def need_embedder(frontend: AnyFrontend) -> EmbedFrontend:
    """The frontend, where it embeds. Raises Unsupported."""
    if isinstance(frontend, EmbedFrontend):
        return frontend
    raise Unsupported(f"no encoder is served here; {frontend.model.name!r} generates text, see Generate")
