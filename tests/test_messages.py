"""The typed messages, the settings and the errors keep their promises."""

import importlib
import inspect
import subprocess
import sys

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


@pytest.mark.parametrize("module", ["jserve.request", "jserve.errors", "jserve.config", "jserve.engine.contract"])
def test_the_messages_import_no_jax(module):
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_dataclasses_are_frozen_and_keyword_only():
    module = importlib.import_module("jserve.request")
    for name in module.__all__:
        cls = getattr(module, name)
        if inspect.isclass(cls) and hasattr(cls, "__dataclass_params__"):
            assert cls.__dataclass_params__.frozen, name
