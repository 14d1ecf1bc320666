"""The tokenizer and the chat template of a Hugging Face style folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from jserve.errors import CheckpointError, UnsupportedModel
from jserve.shown import shown
from jserve.text.hf_files import MAX_SETTINGS_BYTES, MAX_VOCABULARY_BYTES, HfFiles, Member
from jserve.text.hf_tokens import add_declared_tokens, end_ids, named_token
from jserve.text.pre_tokenizers import PRE_TOKENIZERS
from jserve.text.sentencepiece import build_backend
from jserve.text.sentencepiece_file import parse_sentencepiece
from jserve.text.tokenizer import Tokenizer

__all__ = ["HfText", "has_tokenizer", "is_vocabulary", "read_hf_tokenizer"]

CONFIG = "tokenizer_config.json"
_JSON, _PIECES, _VOCAB, _MERGES = "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"
_BYTE_LEVEL: Mapping[str, str] = {"GPT2Tokenizer": "gpt-2", "CodeGenTokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
"""``tokenizer_class``, without "Fast" at its end, to how text is cut."""
_END = "<|endoftext|>"
_SETTINGS = (
    CONFIG,
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
)
"""Beside the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class HfText:
    """What a folder says about text."""

    tokenizer: Tokenizer
    chat_template: str | None
    """The template's source."""


def has_tokenizer(folder: Path, *, member: Member = Path.joinpath) -> bool:
    """Whether ``read_hf_tokenizer`` would find a vocabulary there."""
    return _found(HfFiles(folder, member)) is not None


def is_vocabulary(name: str) -> bool:
    """Whether a file of this name can be the ``vocabulary`` of ``read_hf_tokenizer``."""
    return name.endswith((".json", ".model")) and name not in _SETTINGS


def read_hf_tokenizer(
    folder: Path, *, vocabulary: str | None = None, of_encoder: bool = False, member: Member = Path.joinpath
) -> HfText:
    """Read ``tokenizer.json``, else ``tokenizer.model``, else ``vocab.json`` with ``merges.txt``, and their settings.

    ``vocabulary`` is the file to read instead: a .json of ``tokenizers``, a .model of SentencePiece, or ``vocab.json``.
    ``of_encoder``: texts may end with tokens of the tokenizer's own; a model that generates could not go on there.
    ``member`` finds each file, and may refuse links.
    Raises CheckpointError that names every file and entry that is damaged or contradicts another, UnsupportedModel for
    what is not built.
    """
    files = HfFiles(folder, member)
    file = vocabulary or _found(files)
    if file is None:
        raise CheckpointError(
            f"{folder} has no tokenizer: none of {_JSON}, {_PIECES}, or {_VOCAB} with {_MERGES}",
            fix="copy the tokenizer's files into the folder",
        )
    is_pieces = file.endswith(".model")
    read = _read_vocabulary(files, file)
    backend = read.backend
    add_declared_tokens(files, backend, in_raw_text=is_pieces)
    eos = end_ids(files, backend, own=read.eos_id)
    bos = _bos_id(files, read)
    try:
        prefix, suffix = _surroundings(backend)
    except Exception as error:  # tokenizers raises nothing narrower
        files.fail(file, f"no text can be tokenized with it: {error}")
    if len(prefix) > 1:
        raise UnsupportedModel(
            f"{folder}: the tokenizer puts {len(prefix)} tokens in front of a text; at most 1 is built"
        )
    if prefix and bos is not None and prefix[0] != bos:
        files.note(file, f"it puts token {prefix[0]} in front of a text, and {CONFIG} names {bos} as bos_token")
    add_bos = bool(prefix)
    if is_pieces or file == _VOCAB:
        # Such a vocabulary has no rule of its own. SentencePiece's models are used with BOS where nothing is said.
        add_bos = files.flag(CONFIG, "add_bos_token", default=is_pieces and bos is not None)
        if add_bos and bos is None:
            files.note(CONFIG, "add_bos_token is true, and there is no bos_token")
        if files.flag(CONFIG, "add_eos_token", default=False):
            raise UnsupportedModel(f"{folder / CONFIG}: add_eos_token is true; prompts that end with EOS are not built")
    template = _chat_template(files)
    files.finish()
    if suffix and not of_encoder:
        raise UnsupportedModel(
            f"{folder / file} puts {', '.join(map(str, map(backend.id_to_token, suffix)))} behind every text; prompts "
            "that end so are not built",
            fix="take it out of the post_processor there, if the model is to go on behind a prompt",
        )
    return HfText(
        tokenizer=Tokenizer(backend, eos_ids=eos, bos_id=prefix[0] if prefix else bos, add_bos=add_bos),
        chat_template=template,
    )


@dataclass(frozen=True, kw_only=True)
class _Vocabulary:
    """What the vocabulary's file gives: its ids are those that count where the settings name none."""

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_id: int | None = None


def _read_vocabulary(files: HfFiles, file: str) -> _Vocabulary:
    try:
        if file.endswith(".model"):
            return _from_sentencepiece(files, file)
        return _Vocabulary(backend=_from_vocabulary(files) if file == _VOCAB else _from_json(files, file))
    except CheckpointError as error:
        if files.problems:  # Then it names its file already.
            raise
        raise type(error)(f"{files.folder / file}: {error.message}", fix=error.fix) from None


def _bos_id(files: HfFiles, vocabulary: _Vocabulary) -> int | None:
    named = named_token(files, "bos_token")
    if named is None:
        return vocabulary.bos_id
    content, name = named
    token_id: int | None = vocabulary.backend.token_to_id(content)
    if token_id is None:
        files.note(name, f"bos_token is {content!r}, which is no token of the vocabulary")
    return token_id


def _found(files: HfFiles) -> str | None:
    """The file that the vocabulary is read from, where none is named."""
    for name in (_JSON, _PIECES):
        if files.has(name):
            return name
    return _VOCAB if files.has(_VOCAB) and files.has(_MERGES) else None


def _from_json(files: HfFiles, file: str) -> tokenizers.Tokenizer:
    text = files.text(file, limit=MAX_VOCABULARY_BYTES)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # The backend raises bare Exception for whatever it cannot read.
        files.fail(file, f"not a tokenizer: {error}")
    backend.no_truncation()
    backend.no_padding()
    cut = backend.pre_tokenizer
    if isinstance(cut, pre_tokenizers.ByteLevel):  # as transformers has it, the settings win over the vocabulary's file
        cut.add_prefix_space = files.flag(CONFIG, "add_prefix_space", default=cut.add_prefix_space)
        backend.pre_tokenizer = cut
    # The backend gives added tokens ids without gaps, whatever the file says.
    listed = files.parsed(file, text).get("added_tokens")
    for token in listed if isinstance(listed, list) else []:
        content, token_id = token.get("content"), token.get("id")
        if (found := backend.token_to_id(content)) != token_id:
            files.note(file, f"added token {content!r} has the id {token_id}, and {found} in the vocabulary")
    return backend


def _from_sentencepiece(files: HfFiles, file: str) -> _Vocabulary:
    # As transformers has it: "legacy" tokenizers put a space behind every special token.
    legacy = files.flag(CONFIG, "legacy", default=True)
    data = files.read(file, limit=MAX_VOCABULARY_BYTES)
    parsed = parse_sentencepiece(data, prefix="every_part" if legacy else "first_part")
    return _Vocabulary(backend=build_backend(parsed.model), bos_id=parsed.bos_id, eos_id=parsed.eos_id)


def _from_vocabulary(files: HfFiles) -> tokenizers.Tokenizer:
    name = files.settings(CONFIG).get("tokenizer_class") or "GPT2Tokenizer"
    kind = _BYTE_LEVEL.get(str(name).removesuffix("Fast"))
    if kind is None:
        raise UnsupportedModel(
            f"tokenizer_class is {shown(name)}; classes read from {_VOCAB} are {', '.join(_BYTE_LEVEL)}",
            fix=f"save the tokenizer as {_JSON} with transformers' save_pretrained",
        )
    vocab = files.parsed(_VOCAB, files.text(_VOCAB, limit=MAX_VOCABULARY_BYTES))
    if strange := next((token for token, i in vocab.items() if type(i) is not int or i < 0), None):
        files.fail(_VOCAB, f"{strange!r} is {shown(vocab[strange])}; it must be an id")
    if len(set(vocab.values())) != len(vocab):
        files.fail(_VOCAB, "two tokens have one id")
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=_merges(files)))
    except CheckpointError:
        raise
    except Exception as error:  # The backend raises bare Exception, here for merges of tokens that do not exist.
        files.fail(_MERGES, f"it does not fit {_VOCAB}: {error}")
    PRE_TOKENIZERS[kind].put_on(backend, add_prefix_space=files.flag(CONFIG, "add_prefix_space", default=False))
    if _END in vocab:  # Special in all of these classes, declared or not.
        backend.add_special_tokens([_END])
    return backend


def _merges(files: HfFiles) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for i, line in enumerate(files.text(_MERGES, limit=MAX_VOCABULARY_BYTES).split("\n")):
        line = line.removesuffix("\r")
        if not line or (i == 0 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            files.fail(_MERGES, f"line {i + 1} is {shown(line)}; it must be two tokens with a space between")
        merges.append((left, right))
    return merges


def _surroundings(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the backend's post-processor puts in front of a text and behind it."""
    # A text that has tokens in every vocabulary but odd ones.
    text = next((char for char in "a0. " if backend.encode(char, add_special_tokens=False).ids), "")
    whole: list[int] = backend.encode(text, add_special_tokens=True).ids
    plain: list[int] = backend.encode(text, add_special_tokens=False).ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start]), tuple(whole[start + len(plain) :])
    return (), ()


def _chat_template(files: HfFiles) -> str | None:
    """A file of its own comes before the configuration; of several by name, the default one."""
    if files.has("chat_template.jinja"):
        return files.text("chat_template.jinja", limit=MAX_SETTINGS_BYTES)
    for name in ("chat_template.json", CONFIG):
        value: Any = files.settings(name).get("chat_template")
        if value is None:
            continue
        if isinstance(value, str):
            return value
        named = _named_templates(value)
        if named is None:
            files.note(name, f"chat_template is {shown(value)}; it must be a text, or a list of named ones")
            return None
        if "default" not in named and len(named) != 1:
            files.note(name, f"chat_template has {', '.join(named) or 'none'}; one must be named default")
            return None
        return named.get("default", next(iter(named.values())))
    return None


def _named_templates(value: Any) -> dict[str, str] | None:
    items = list(value.items()) if isinstance(value, Mapping) else None
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        items = [(item.get("name"), item.get("template")) for item in value]
    if items is None or not all(isinstance(name, str) and isinstance(text, str) for name, text in items):
        return None
    return dict(items)
