"""config.json as a user's dataclass, in which others lie inside dicts, lists and tuples."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import pytest

from jserve.checkpoints.own.config import read_config
from jserve.errors import CheckpointError


@dataclass(frozen=True)
class Head:
    size: int
    scale: float = 1.0


@dataclass(frozen=True)
class Config:
    heads: dict[str, Head] = field(default_factory=dict)
    named: Mapping[str, Head] | None = None
    layers: list[Head] = field(default_factory=list)
    pair: tuple[Head, int] | None = None
    many: tuple[Head, ...] = ()
    deep: dict[str, list[Head]] = field(default_factory=dict)
    others: Optional[Sequence[Head]] = None  # noqa: UP045 - as users still write it
    either: Head | dict[str, Head] | None = None
    plain: dict[str, Any] = field(default_factory=dict)


def read(tmp_path, values):
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_config(tmp_path / "config.json", Config)


def test_dataclasses_inside_dicts_lists_and_tuples(tmp_path):
    four = {"size": 4}
    values = {
        "heads": {"main": four},
        "named": {"size": four},
        "layers": [four, {"size": 2, "scale": 0.5}],
        "pair": [four, 3],
        "many": [four],
        "deep": {"a": [four]},
        "others": [four],
        "either": four,
        "plain": {"x": [1]},
    }
    head = Head(4)
    assert read(tmp_path, values) == Config(
        heads={"main": head},
        named={"size": head},
        layers=[head, Head(2, 0.5)],
        pair=(head, 3),
        many=(head,),
        deep={"a": [head]},
        others=[head],
        either=head,
        plain={"x": [1]},
    )
    assert read(tmp_path, {"named": None, "others": None}) == Config()


def test_what_is_wrong_inside_is_named_with_its_place(tmp_path):
    values = {
        "heads": {"main": {"sizes": 4}},
        "layers": [{"size": 1}, {"size": "two"}],
        "pair": [{"size": 1}],
        "deep": {"a": [{}]},
        "many": {"size": 1},
    }
    with pytest.raises(CheckpointError) as error:
        read(tmp_path, values)
    assert sorted(error.value.message.splitlines()[1:]) == [
        "  deep.a[0].size is missing",
        "  heads.main.size is missing",
        "  heads.main.sizes is not known; did you mean size?",
        "  layers[1].size is 'two': Expected `int`, got `str`",
        "  many is {'size': 1}: Expected `array`, got `object`",
        "  pair has 1 values; wanted 2",
    ]
