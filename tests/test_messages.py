"""The typed messages, the settings and the errors keep their promises."""

import dataclasses
import importlib

import pytest

from jserve import errors
from jserve.config import ServeConfig, load_toml, resolve
from jserve.errors import ConfigError


def test_every_error_is_in_the_tree_with_its_code():
    tree = errors.__doc__
    for name in errors.__all__:
        cls = getattr(errors, name)
        assert name in tree
        if "JS-" in tree.split(name, 1)[1].split("\n", 1)[0]:
            assert cls.code in tree.split(name, 1)[1].split("\n", 1)[0], name
    codes = [getattr(errors, n).code for n in errors.__all__ if n not in ("RequestError", "StartError")]
    assert len(codes) == len(set(codes))


def test_later_layers_win_and_origins_are_remembered():
    config, origins = resolve(
        ("file a.toml", {"mesh": "tensor=2", "max_num_seqs": 4}), ("command line", {"max_num_seqs": 8})
    )
    assert (config.mesh, config.max_num_seqs) == ("tensor=2", 8)
    assert origins["mesh"] == "file a.toml"
    assert origins["max_num_seqs"] == "command line"
    assert origins["dtype"] == "default"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_num_seq": 3}, "did you mean max_num_seqs"),
        ({"max_num_seqs": 0}, "greater than 0"),
        ({"max_num_seqs": "many"}, r"max_num_seqs \(file x.toml\) is 'many': Expected `int`, got `str`"),
        ({"page_size": 1.5}, r"page_size \(file x.toml\) is 1.5: Expected `int | null`, got `float`"),
        ({"page_size": 24}, "power of two"),
        ({"dtype": "float16"}, "float16"),
        ({"memory_fraction": 1.5}, "memory_fraction"),
    ],
)
def test_bad_settings_are_named(values, words):
    with pytest.raises(ConfigError, match=words):
        resolve(("file x.toml", values))


def test_toml_file(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text('max-num-seqs = 3\nmesh = "tensor=2"\n')
    assert resolve(("file", load_toml(path)))[0] == ServeConfig(max_num_seqs=3, mesh="tensor=2")
    path.write_text("max-num-seqs = \n")
    with pytest.raises(ConfigError, match=r"serve\.toml"):
        load_toml(path)


MESSAGES = {
    f"{module}.{name}": value
    for module in ("jserve.request", "jserve.config", "jserve.engine.contract")
    for name, value in vars(importlib.import_module(module)).items()
    if dataclasses.is_dataclass(value) and value.__module__ == module
}


@pytest.mark.parametrize("cls", MESSAGES.values(), ids=MESSAGES)
def test_messages_are_frozen_and_keyword_only(cls):
    assert cls.__dataclass_params__.frozen
    assert cls.__match_args__ == (), "fields that may be given by position"
    with pytest.raises(TypeError, match="positional argument"):
        cls(None)
