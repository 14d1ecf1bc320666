"""Every setting can be seen with its origin; the command line wins over the file, the file over the default."""

import dataclasses
import json

import pytest

from jserve.cli.main import main
from jserve.cli.settings import ServeOptions, digest
from jserve.config import ServeConfig, resolve


def _printed(arguments, capsys):
    assert main(["serve", "--print-config", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_origin_is_shown(tmp_path, capsys):
    file = tmp_path / "serve.toml"
    file.write_text('max-num-seqs = 3\nmesh = "tensor=2"\ninsecure = true\nprogram_store = false\n')
    shown = _printed(["m.gguf", "--config", str(file), "--max-num-seqs=8", "--no-insecure"], capsys)
    assert set(shown) == {field.name for field in dataclasses.fields(ServeConfig)}
    assert shown["model"] == {"value": "m.gguf", "origin": "command line"}
    assert shown["max_num_seqs"] == {"value": 8, "origin": "command line"}
    assert shown["insecure"] == {"value": False, "origin": "command line"}
    assert shown["mesh"] == {"value": "tensor=2", "origin": f"file {file}"}
    assert shown["program_store"] == {"value": False, "origin": f"file {file}"}
    assert shown["dtype"] == {"value": "auto", "origin": "default"}


def test_a_value_equal_to_the_default_still_comes_from_the_command_line(capsys):
    assert _printed(["--max-num-seqs", "32"], capsys)["max_num_seqs"]["origin"] == "command line"


def test_the_text_form_has_a_line_a_setting(capsys):
    assert main(["serve", "--print-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(dataclasses.fields(ServeConfig))
    assert all(line.endswith("# default") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size", "24"], "error JS-CFG-01: page_size is 24; it must be a power of two, 8 or more"),
        (["--grace-s", "nan"], "error JS-CFG-01: grace_s is nan; it must be 0 to 604800 seconds"),
        (["--grace-s", "inf"], "error JS-CFG-01: grace_s is inf; it must be 0 to 604800 seconds"),
        (["--max-dispatch-ms", "inf"], "error JS-CFG-01: max_dispatch_ms is inf; it must be a number greater than 0"),
        (["--memory-fraction", "nan"], "error JS-CFG-01: memory_fraction is nan; it must be in (0, 1]"),
        (["--max-message-mb", "2048"], "error JS-CFG-01: max_message_mb is 2048; gRPC allows 1 to 2047"),
        (["--config", "nowhere.toml"], "error JS-CFG-01: cannot read config file nowhere.toml"),
    ],
)
def test_a_setting_that_cannot_be_is_a_config_error(arguments, message, capsys):
    assert main(["serve", *arguments]) == 3
    assert capsys.readouterr().err.startswith(message)


def test_a_table_in_the_file_is_refused(tmp_path, capsys):
    file = tmp_path / "serve.toml"
    file.write_text("[serve]\nmax-num-seqs = 3\n")
    assert main(["serve", "--config", str(file)]) == 3
    assert capsys.readouterr().err.endswith("has a table [serve]; settings stand outside of tables\n")


def test_equal_settings_have_one_digest_however_they_were_given():
    given, _ = resolve(("keyword", {"max_num_seqs": ServeConfig().max_num_seqs}))
    assert digest(given) == digest(resolve()[0]) == digest(ServeConfig())
    assert digest(given) != digest(ServeConfig(max_num_seqs=3))


def test_an_unknown_setting_in_the_file_is_named(tmp_path, capsys):
    file = tmp_path / "serve.toml"
    file.write_text("max-num-seq = 3\n")
    assert main(["serve", "--config", str(file)]) == 3
    assert "did you mean max_num_seqs?" in capsys.readouterr().err


def test_every_setting_is_an_option_with_an_explanation(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    for field in dataclasses.fields(ServeOptions):
        if field.name != "model":
            assert f"--{field.name.replace('_', '-')}" in shown


def test_the_digest_tells_settings_apart():
    assert digest(ServeConfig()) == digest(ServeConfig())
    assert digest(ServeConfig()) != digest(ServeConfig(max_num_seqs=31))
    assert len(digest(ServeConfig())) == 12
