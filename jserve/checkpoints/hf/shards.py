"""Which .safetensors files make up a folder's weights, and their tensors together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.hf.safetensors import read_tensor_file
from jserve.checkpoints.json_file import read_json_file
from jserve.checkpoints.names import PICKLES, member_path, resolve_member
from jserve.checkpoints.problems import raise_all
from jserve.errors import SourceError

__all__ = ["INDEX_NAME", "SINGLE_NAME", "open_tensors", "read_index", "single_name", "weight_files"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_SHARD = re.compile(r".+-(\d+)-of-(\d+)\.safetensors")
_MAX_INDEX_BYTES = 64 << 20


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_index(path: Path) -> dict[str, str]:
    """The shard of each tensor, by their names. Every name stays inside the folder and ends in .safetensors.

    Raises CheckpointError where the file is damaged, and SourceError for names that lead elsewhere.
    """
    weight_map = read_json_file(path, _Index, what="index", max_bytes=_MAX_INDEX_BYTES).weight_map
    for name in dict.fromkeys(weight_map.values()):
        try:
            member_path(name, of="the folder")
        except SourceError as error:
            raise SourceError(f"{path}: {error.message}", fix=error.fix) from None
        if not name.endswith(_SUFFIX):
            raise SourceError(f"{path} names the file {name!r}; only {_SUFFIX} files are read")
    return weight_map


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, and the index before them; they need not exist.

    Raises SourceError where the folder has none, or where it cannot be told which of them are meant.
    """
    index = _index(folder)
    shards = [resolve_member(folder, name) for name in _names(folder, index)]
    return shards if index is None else [folder / INDEX_NAME, *shards]


def open_tensors(folder: Path) -> dict[str, LazyArray]:
    """Every tensor of ``folder``, still to be read.

    Raises CheckpointError that lists all that is wrong: files that are missing, cut short or damaged, tensors that
    are missing, lie in another file than the index says, or are there twice, and shards that the index leaves out.
    """
    index = _index(folder)
    names = _names(folder, index)
    paths = [resolve_member(folder, name) for name in names]
    with ThreadPoolExecutor(8) as pool:
        files = dict(zip(names, pool.map(read_tensor_file, paths), strict=True))
    wrong = [problem for file in files.values() for problem in file.problems]
    holders: dict[str, list[str]] = {}
    for shard, file in files.items():
        for name in file.tensors:
            holders.setdefault(name, []).append(shard)
    wrong += [f"tensor {name} is in {' and in '.join(found)}" for name, found in holders.items() if len(found) > 1]
    if index is not None:
        wrong += _misplaced(index, holders, {shard for shard, file in files.items() if file.problems})
        wrong += _unlisted(folder, set(index.values()))
    if not holders and not wrong:
        wrong.append("no file holds a tensor")
    raise_all(f"the weights in {folder} are not whole:", wrong)
    return {name: tensor for file in files.values() for name, tensor in file.tensors.items()}


def _index(folder: Path) -> dict[str, str] | None:
    path = resolve_member(folder, INDEX_NAME)
    return read_index(path) if path.exists() or path.is_symlink() else None


def _names(folder: Path, index: Mapping[str, str] | None) -> list[str]:
    if index is not None:
        return sorted(set(index.values()))
    return [single_name(str(folder), [path.name for path in folder.iterdir()])]


def single_name(folder: str, names: Sequence[str]) -> str:
    """The one file of the weights in a folder that holds ``names`` and no index. ``folder`` stands in errors.

    Raises SourceError where it has none, or where it cannot be told which of them is meant.
    """
    names = sorted(names)
    found = [name for name in names if name.endswith(_SUFFIX)]
    shards = [name for name in found if (match := _SHARD.fullmatch(name)) and int(match[2]) > 1]
    if shards:
        raise SourceError(f"{folder} holds the shard {shards[0]} and no {INDEX_NAME}", fix=f"fetch {INDEX_NAME} too")
    if SINGLE_NAME in found:
        return SINGLE_NAME
    if len(found) == 1:
        return found[0]
    if found:
        raise SourceError(
            f"{folder} holds {len(found)} {_SUFFIX} files ({', '.join(found[:5])}) and neither {SINGLE_NAME} nor "
            f"{INDEX_NAME}"
        )
    pickles = [name for name in names if Path(name).suffix in PICKLES]
    if pickles:
        raise SourceError(
            f"{folder} holds its weights as pickles only ({', '.join(pickles[:5])}); pickles run code when they are "
            "loaded and are never read",
            fix="save the model again as safetensors, where you trust it",
        )
    raise SourceError(f"{folder} holds no weights: looked for {SINGLE_NAME} and {INDEX_NAME}")


def _misplaced(index: Mapping[str, str], holders: Mapping[str, list[str]], broken: set[str]) -> Iterator[str]:
    """Where index and shards tell different things; shards that cannot be read are told of already."""
    for name, shard in index.items():
        found = holders.get(name, [])
        if shard not in found and shard not in broken:
            where = f"it is in {found[0]}" if found else "no file holds it"
            yield f"tensor {name} is to be in {shard} by {INDEX_NAME}; {where}"
    for name, found in holders.items():
        if name not in index:
            yield f"tensor {name} in {found[0]} is not in {INDEX_NAME}"


def _unlisted(folder: Path, listed: set[str]) -> Iterator[str]:
    """Files named as shards are. Others, such as an adapter's, may lie beside."""
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        if path.name not in listed and (path.name == SINGLE_NAME or _SHARD.fullmatch(path.name)):
            yield f"{path} ({path.stat().st_size} bytes) is not in {INDEX_NAME}"
