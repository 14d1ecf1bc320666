"""The tokens that a Hugging Face style folder names beside its vocabulary: added ones, special ones, ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jserve.shown import shown
from jserve.text.hf_files import HfFiles

__all__ = ["add_declared_tokens", "configured_ends", "end_ids", "named_token"]

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_declared_tokens(files: HfFiles, backend: tokenizers.Tokenizer, *, in_raw_text: bool) -> None:
    """Give ``backend`` the added tokens that the files declare; tokens named for a role become special.

    ``in_raw_text`` looks for all of them before normalizing, whatever they say: behind a normalizer that puts spaces in
    front of texts they would not be found. A token that is declared under another id than it has is a problem.
    """
    special = {token.content: token for token in _special_tokens(files)}
    declared: dict[int, tuple[str, AddedToken]] = {}
    for content, token_id in files.settings(ADDED).items():
        if _is_id(token_id):
            declared[token_id] = (ADDED, special.get(content, AddedToken(content, normalized=False, special=False)))
        else:
            files.note(ADDED, f"{content!r} is {shown(token_id)}; it must be an id")
    for token_id, value in _decoder(files).items():
        token = _token(value, in_raw_text=in_raw_text)
        if token is None:
            files.note(
                CONFIG, f"added_tokens_decoder[{token_id}] is {shown(value)}; it must have a text as its content"
            )
        else:
            declared[token_id] = (CONFIG, token)
    # At once: the backend makes its index of added tokens anew with every call.
    backend.add_tokens([token for _, (_, token) in sorted(declared.items(), key=itemgetter(0))])
    for token_id, (name, token) in sorted(declared.items(), key=itemgetter(0)):
        if (found := backend.token_to_id(token.content)) != token_id:
            files.note(name, f"{token.content!r} has the id {token_id} there, and {found} in the vocabulary")
    already = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    # A role without a token in the vocabulary, such as padding, is not needed.
    named = [token for content, token in special.items() if content not in already]
    backend.add_tokens([token for token in named if backend.token_to_id(token.content) is not None])


def named_token(files: HfFiles, entry: str) -> tuple[str, str] | None:
    """The text of a token by its role, such as ``bos_token``, and the file that says so; None where none does."""
    for name in (CONFIG, MAP):
        value = files.settings(name).get(entry)
        if value is None:
            continue
        token = _token(value)
        if token is not None:
            return token.content, name
        files.note(name, f"{entry} is {shown(value)}; it must be a text, or have one as its content")
    return None


def end_ids(files: HfFiles, backend: tokenizers.Tokenizer, *, own: int | None) -> list[int]:
    """Ids that end a text, each once: the tokenizer's own, which templates write, then those of the configurations.

    ``own`` is the vocabulary's, for files that name none.
    """
    ids: dict[int, None] = {}
    if (named := named_token(files, "eos_token")) is not None:
        content, name = named
        own = backend.token_to_id(content)
        if own is None:
            files.note(name, f"eos_token is {content!r}, which is no token of the vocabulary")
    if own is not None:
        ids[own] = None
    configured = {name: files.settings(name) for name in ("generation_config.json", "config.json")}
    found, problems = configured_ends(configured, known=lambda token_id: backend.id_to_token(token_id) is not None)
    for name, problem in problems:
        files.note(name, problem)
    return list(dict.fromkeys([*ids, *found]))


def configured_ends(
    configured: Mapping[str, Mapping[str, Any]], *, known: Callable[[int], bool]
) -> tuple[list[int], list[tuple[str, str]]]:
    """Ids that end a text by the settings of the files ``configured``, each once, in the order of the files; and by
    the file's name what is said there that is no id, or one that is not ``known``."""
    ids: dict[int, None] = {}
    problems = []
    for name, entry, value in _named_ends(configured):
        for token_id in value if isinstance(value, list) else [value]:
            if not _is_id(token_id) or not known(token_id):
                problems.append((name, f"{entry} names {shown(token_id)}, which is no token id of the vocabulary"))
            else:
                ids[token_id] = None
    return list(ids), problems


def _named_ends(configured: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    for name, settings in configured.items():
        nested = settings.get("text_config")
        for prefix, part in (("", settings), ("text_config.", nested if isinstance(nested, Mapping) else {})):
            if part.get("eos_token_id") is not None:
                yield name, f"{prefix}eos_token_id", part["eos_token_id"]


def _special_tokens(files: HfFiles) -> Iterator[AddedToken]:
    """Tokens named for a role; the later ones count."""
    for name in (MAP, CONFIG):
        settings = files.settings(name)
        values = [settings[entry] for entry in _NAMED if settings.get(entry) is not None]
        for entry in _LISTS:
            listed = settings.get(entry) or []
            values += (
                list(listed.values()) if isinstance(listed, Mapping) else listed if isinstance(listed, list) else []
            )
        for value in values:
            token = _token(value, special=True)
            if token is not None:
                yield token


def _decoder(files: HfFiles) -> dict[int, Any]:
    value = files.settings(CONFIG).get("added_tokens_decoder") or {}
    if not isinstance(value, Mapping) or not all(key.isdecimal() for key in value):
        files.note(CONFIG, f"added_tokens_decoder is {shown(value)}; it must be an object of tokens by their ids")
        return {}
    return {int(key): token for key, token in value.items()}


def _token(value: Any, *, special: bool = False, in_raw_text: bool = False) -> AddedToken | None:
    """A token as files write it, a text or an object; None where it is neither."""
    if isinstance(value, str) and value:
        return AddedToken(value, normalized=False, special=special)
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str) or not value["content"]:
        return None
    flags = {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
    if special:
        flags["special"] = True
    if in_raw_text:
        flags["normalized"] = False
    return AddedToken(value["content"], **flags)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
