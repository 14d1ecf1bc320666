"""Words that cannot be understood: one line that says why, one that says how, exit status 2."""

import json
import os
import re
import subprocess
import sys

import pytest

from jserve import __version__
from jserve.cli.main import GROUPS, VERBS, main


def test_help_is_grouped_and_names_every_verb(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for group, verbs in GROUPS.items():
        assert f"\n{group}:\n" in out
        for verb in verbs:
            assert f"\n  {verb} " in out


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from jserve.cli.main import main; main(['--help']);"
        "heavy = {'jax', 'numpy', 'grpc', 'pyarrow', 'tyro', 'rich', 'msgspec'} & set(sys.modules);"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_and_has_json(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    captured = capsys.readouterr()
    assert f"usage: jserve {verb}" in captured.out
    assert "--json" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("verb", ["convert", "inspect", "serve"])
def test_whoever_takes_a_model_names_every_kind_of_uri(verb, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    shown = capsys.readouterr().out
    assert [scheme for scheme in ("pypi://", "hf://", "gs://", "s3://") if scheme not in shown] == []


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_the_version_is_told_as_people_ask_for_it(word, capsys):
    assert main([word, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jserve"] == __version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: no command given; try: jserve demo"),
        (["serv"], "error: unknown command 'serv'; did you mean serve?"),
        (["--versio"], "error: unknown command '--versio'; did you mean version?"),
        (["zzz"], "error: unknown command 'zzz'; there are: demo, serve, generate, bench, convert, inspect, version"),
        (["serve", "--max-num-seq", "3"], "error: unknown option --max-num-seq; did you mean --max-num-seqs?"),
        (["serve", "--max_num_seq=3"], "error: unknown option --max-num-seq; did you mean --max-num-seqs?"),
        (["serve", "--zzz"], "error: unknown option --zzz"),
        (["serve", "--max-num-seqs", "many"], "error: --max-num-seqs: 'many' is not a whole number"),
        (["serve", "--max-model-len", "1.5"], "error: --max-model-len: '1.5' is not a whole number"),
        (["serve", "--dtype", "float16"], "error: invalid choice 'float16' for argument '--dtype'."),
        (["serve", "a", "b"], "error: unexpected: b; text with spaces needs quotes"),
        (["generate"], "error: PROMPT is missing"),
        (["generate", ""], "error: the PROMPT is empty"),
        (["generate", "--temp", "0", "hi"], "error: unknown option --temp; did you mean --temperature?"),
        (["generate", "--temperature", "hot", "hi"], "error: --temperature: 'hot' is not a number"),
        (["generate", "--no-json", "hi"], "error: unknown option --no-json; did you mean --json?"),
        (["convert", "a.gguf"], "error: DST is missing"),
        (["bench", "m.gguf", "--address", "h:1"], "error: give a MODEL to start a server, or --address"),
        (["bench", "--streams", "0"], "error: --streams is 0; it must be 1 or more"),
        (["bench", "--requests", "0"], "error: --requests is 0; it must be 1 or more"),
    ],
)
def test_a_mistake_is_one_line_and_a_usage_line(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    first, usage = captured.err.splitlines()
    assert first.startswith(message)
    assert usage.startswith("usage: jserve ")
    assert captured.out == ""


@pytest.mark.parametrize("verb", VERBS)
def test_a_usage_line_leaves_no_option_out(verb, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out.partition("options")[2])) - {"--help"}
    assert main([verb, "--zzz"]) == 2
    usage = capsys.readouterr().err.splitlines()[-1].partition(";")[0]
    assert "[options]" in usage or options <= set(re.findall(r"--[a-z-]+", usage))


def test_a_reader_that_leaves_early_is_no_error(jserve):
    shell = f"{sys.executable} -m jserve.cli.main serve --print-config | head -1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("model ")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("redirect", "status", "message"),
    [
        (">&-", 0, ""),
        ("<&-", 0, ""),
        ("2>&-", 0, ""),
        (">/dev/full", 1, "error: cannot write the output: No space left on device\n"),
    ],
)
def test_odd_streams_are_no_traceback(redirect, status, message):
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-m", "jserve.cli.main", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (status, message)


def test_text_that_the_terminal_cannot_write_is_escaped():
    code = (
        "import sys; from jserve.cli import main as m;"
        "m._run = lambda arguments: print(chr(233), chr(0xFFFD)) or 0; sys.exit(m.main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        timeout=60,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\\xe9 \\ufffd\n", b"")
