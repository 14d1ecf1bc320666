"""What is known of a checkpoint or a module without serving it: facts for programs, and lines for reading."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jserve.checkpoints.inspection.spans import NUMBER, spanned
from jserve.checkpoints.orbax.peel import KEPT_OUT
from jserve.errors import CheckpointError
from jserve.models.finding import Finding
from jserve.progress import printable
from jserve.shown import shown

__all__ = [
    "ArrayReport",
    "EncoderReport",
    "FileReport",
    "InspectReport",
    "Missing",
    "Problem",
    "StepsReport",
    "UnfinishedStep",
]


@dataclass(frozen=True, kw_only=True)
class ArrayReport:
    """One array, as it is stored; of a module without a checkpoint, one parameter."""

    name: str
    shape: list[int]
    dtype: str
    """Of GGUF the kind of its blocks, such as Q4_K."""
    nbytes: int
    parameter: bool = True
    """False of what a train state has besides, such as the optimizer's state."""


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """A file of the weights."""

    name: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class UnfinishedStep:
    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class StepsReport:
    """The steps of a run."""

    taken: str
    finished: list[str]
    """Newest first."""
    unfinished: list[UnfinishedStep]
    damaged: list[str]
    """What is wrong with each step that was passed over."""

    def lines(self) -> list[tuple[str, str]]:
        """Rows of a name and a value."""
        rows = [("step", f"{self.taken} (finished: {_some(self.finished)})")]
        rows += [("unfinished", f"{step.name}: {step.why}") for step in self.unfinished]
        return rows + [("damaged", words) for words in self.damaged]


@dataclass(frozen=True, kw_only=True)
class EncoderReport:
    """How an encoder makes vectors."""

    pooling: str
    normalized: bool
    dimensions: int
    max_tokens: int
    """Of a text, special tokens included; the rest is cut off."""
    lowercase: bool

    def __str__(self) -> str:
        kind = f"{self.pooling} pooling{', normalized' if self.normalized else ''}"
        lower = ", made lower case" if self.lowercase else ""
        return f"{self.dimensions} dimensions, {kind}; texts of up to {self.max_tokens} tokens{lower}"


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Something that a served model has as a rule and this one has not."""

    what: str
    effect: str
    fix: str

    def __str__(self) -> str:
        return f"missing: {self.what}: {self.effect}\n  fix: {self.fix}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why the MODEL, as it was given, is not served."""

    code: str
    message: str
    fix: str | None

    def lines(self, begin: str) -> str:
        return f"{begin}: {self.message}" + (f"\n  fix: {self.fix}" if self.fix else "")


@dataclass(frozen=True, kw_only=True)
class InspectReport:
    """Plain values all through, so that ``dataclasses.asdict`` of it is JSON. ``str`` of it is for reading: control
    characters in names are escaped there."""

    name: str
    model: str
    """As it was asked for."""
    own: bool = False
    """Whether MODEL is a module of one's own, package.module:Class."""
    path: str | None
    """Of the checkpoint; None of a module without one."""
    layout: str
    """What it is stored as, in words: format, writer, version."""
    source: str | None = None
    """The MODEL that it came from first."""
    files: list[FileReport] = field(default_factory=list)
    """Where the weights are in files that have names of their own: safetensors, GGUF."""
    steps: StepsReport | None = None
    item: str | None = None
    """Of a step, the item that is read, out of ``items``."""
    items: list[str] = field(default_factory=list)
    stacked_axes: list[int] = field(default_factory=list)
    """The axis that layers are stacked on, or the two that it may be; empty where each has arrays of its own."""
    family: str | None = None
    """None of modules of one's own, and where it is not known."""
    names: str | None = None
    """Of a tree that Orbax or Flax saved: whose names it has, in words, where they are known."""
    config: dict[str, Any] | None = None
    config_path: str | None = None
    """The file that the settings were read from, where that is not the checkpoint itself."""
    max_position: int | None = None
    """Most tokens of a sequence."""
    encoder: EncoderReport | None = None
    parameters: int
    nbytes: int
    """Of the parameters, as they are stored."""
    absent: list[str] = field(default_factory=list)
    """Arrays of which pieces are not stored and read as their fill value: left out by the writer, or lost."""
    other_nbytes: int = 0
    """Of all else: with these it is the size of everything that was saved."""
    arrays: list[ArrayReport]
    tokenizer: str | None = None
    """Where it was read from, if not from the checkpoint itself."""
    vocab_size: int | None = None
    """Tokens of the tokenizer; None where there is none."""
    eos_ids: list[int] = field(default_factory=list)
    bos_id: int | None = None
    add_bos: bool = False
    chat_template: bool = False
    generation: dict[str, int | float] = field(default_factory=dict)
    """Sampling defaults that are served."""
    not_built: dict[str, Any] = field(default_factory=dict)
    """Settings that the checkpoint has for sampling and that change nothing here."""
    digests: str | None = None
    """What is known of the files' contents; None without files."""
    findings: list[Finding] | None = None
    """Of a module of one's own, what the contract checker found; None: not checked."""
    missing: list[Missing] = field(default_factory=list)
    problem: Problem | None = None
    serve: str | None
    """The command that serves it; None where none does."""

    @property
    def failed(self) -> bool:
        """Whether it is damaged, breaks the contract or cannot be served by any command."""
        wrong = self.problem is not None and (self.serve is None or self.problem.code == CheckpointError.code)
        return wrong or any(finding.severity == "error" for finding in self.findings or ())

    def __str__(self) -> str:
        rows = [("module", self.model)] if self.own else []
        rows += [("layout", self.layout), ("path", self.path or "no --checkpoint given")]
        rows += [] if self.source in (None, self.model) else [("source", str(self.source))]
        rows += [] if self.steps is None else self.steps.lines()
        if self.item is not None:
            others = [item for item in self.items if item != self.item]
            rows.append(("item", self.item + (f" (others: {', '.join(others)})" if others else "")))
        if self.files:
            size = sum(file.nbytes for file in self.files)
            rows.append(("files", f"{_some([file.name for file in self.files])}, {_mb(size)}"))
        rows += self._model_rows()
        rows += [("tokenizer", self._tokenizer())]
        if self.encoder is None:
            defaults = ", ".join(f"{key} {value}" for key, value in self.generation.items())
            rows += [("chat template", "there" if self.chat_template else "missing"), ("defaults", defaults or "none")]
        if self.not_built:
            settings = ", ".join(f"{key} {shown(value)}" for key, value in self.not_built.items())
            rows.append(("not built", f"{settings}; elsewhere other tokens may be chosen"))
        rows += [] if self.digests is None else [("digests", self.digests)]
        rows += [("contract", self._contract())] if self.own else []
        tree = [_one_line(line) for line in _tree(self.arrays)]
        lines = [_one_line(self.name), *(f"  {key:<14} {value}" for key, value in rows), "  arrays", *tree]
        told = [*map(str, self.findings or ()), *map(str, self.missing)]
        if self.problem is not None:
            told.append(self.problem.lines(f"error {self.problem.code}" if self.failed else "not served by itself"))
        return printable("\n".join([*lines, *told, *([] if self.serve is None else ["", self.serve])]))

    def _model_rows(self) -> list[tuple[str, str]]:
        rows = []
        if not self.own:
            rows.append(("family", self.family or "not known"))
        rows += [("names", self.names)] if self.names else []
        values = ", ".join(f"{key} {value}" for key, value in (self.config or {}).items())
        if self.config_path is not None:
            values = f"{values}, from {self.config_path}" if values else self.config_path
        if values or self.own:
            rows.append(("config", values or "the code's"))
        if self.max_position is not None:
            rows.append(("length", f"{self.max_position:,} tokens"))
        if self.encoder is not None:
            rows.append(("vectors", str(self.encoder)))
        kinds: dict[str, int] = {}
        for array in self.arrays:
            if array.parameter:
                kinds[array.dtype] = kinds.get(array.dtype, 0) + array.nbytes
        count = sum(array.parameter for array in self.arrays)
        words = f"{self.parameters:,} in {count} arrays, {_mb(self.nbytes)} ({', '.join(sorted(kinds))})"
        if self.stacked_axes:
            words += f", layers stacked on axis {' or '.join(map(str, self.stacked_axes))}"
        rows.append(("parameters", words))
        if self.absent:
            rows.append(("not stored", f"pieces of {_some(self.absent)}: left out as equal to the fill value, or lost"))
        if others := [array for array in self.arrays if not array.parameter]:
            heads = list(dict.fromkeys(_head(array.name) for array in others))
            total = _mb(self.nbytes + self.other_nbytes)
            rows.append(("besides", f"{_some(heads)}: {len(others)} arrays, {_mb(self.other_nbytes)}; {total} in all"))
        return rows

    def _tokenizer(self) -> str:
        if self.vocab_size is None:
            return "missing"
        where = "" if self.tokenizer is None else f"{self.tokenizer}, "
        bos = "no BOS" if self.bos_id is None else f"BOS {self.bos_id} ({'' if self.add_bos else 'not '}added)"
        return f"{where}{self.vocab_size} tokens, EOS {self.eos_ids}, {bos}"

    def _contract(self) -> str:
        if self.findings is None:
            why = "--check runs it on tiny inputs" if self.problem is None else "the checkpoint is not served with it"
            return f"not checked ({why})"
        counts = {kind: sum(f.severity == kind for f in self.findings) for kind in ("error", "warning")}
        words = [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items() if count]
        values = "random" if self.path is None else "the checkpoint's"
        return f"{', '.join(words) or 'kept'}, run with {values} parameters"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(map(_one_line, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _one_line(name: str) -> str:
    """A name out of a file makes no lines of its own."""
    return name.replace("\n", "\\n")


def _head(name: str) -> str:
    """The part of a train state that an array is in."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part in KEPT_OUT), len(parts))
    return ".".join(parts[: at + 1])


def _tree(arrays: list[ArrayReport]) -> list[str]:
    """One line an array; those of layers (and experts) that are alike share one, and so does all that is no
    parameter."""
    groups: dict[tuple[tuple[str, ...], str, str], list[list[int]]] = {}
    for array in arrays:
        if array.parameter:
            key = (tuple(NUMBER.split(array.name)), array.dtype, str(array.shape))
            groups.setdefault(key, []).append([int(number) for number in NUMBER.findall(array.name)])
    shown = [(spanned(around, numbers), f"{dtype} {shape}") for (around, dtype, shape), numbers in groups.items()]
    heads: dict[str, list[ArrayReport]] = {}
    for array in arrays:
        if not array.parameter:
            heads.setdefault(_head(array.name), []).append(array)
    for head, inside in heads.items():
        one = f"{inside[0].dtype} {inside[0].shape}" if len(inside) == 1 else f"{len(inside)} arrays"
        shown.append((head, f"{one}, {_mb(sum(array.nbytes for array in inside))}, not read"))
    width = max((len(name) for name, _ in shown), default=0)
    return [f"    {name:<{width}}  {what}" for name, what in shown]
