"""A module of one's own on the command line: inspected, checked, served, in processes of their own."""

import json
import os
from pathlib import Path

import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jserve.cli.child import server_process
from jserve.testing.models import tiny_llama
from jserve.testing.tokenizer import VOCAB_SIZE, ByteTokenizer

MODULE = """
from jserve.models.llama import Llama, LlamaConfig


class MyModel(Llama):
    def __init__(self, config: LlamaConfig, *, rngs, dtype):
        super().__init__(config, rngs=rngs, dtype=dtype)


class Leaks(MyModel):
    def logits(self, x):
        return super().logits(x - x.mean(axis=0, keepdims=True))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder: a module, and a checkpoint with its config and tokenizer."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "my_model_of_the_cli.py").write_text(MODULE)
    graphdef, params = tiny_llama(vocab_size=VOCAB_SIZE)
    module = nnx.merge(graphdef, params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "ck" / "state", nnx.state(module))
    (folder / "ck" / "config.json").write_text(json.dumps(module.config.to_dict()))
    (folder / "ck" / "tokenizer.json").write_text(ByteTokenizer().to_json())
    (folder / "ck" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    """Commands run in the user's folder, and still find this jserve."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.chdir(folder)


@pytest.mark.usefixtures("here")
def test_a_module_that_keeps_the_contract_ends_with_the_line_that_serves_it(jserve):
    done = jserve("inspect", "--check", "my_model_of_the_cli:MyModel", "--checkpoint", "ck/state")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "MyModel"
    assert "  contract       kept, run with the checkpoint's parameters" in lines
    assert any(line.startswith("  tokenizer ") and line.endswith("258 tokens, EOS [257], no BOS") for line in lines)
    assert lines[-1] == "jserve serve my_model_of_the_cli:MyModel --checkpoint ck/state"


@pytest.mark.usefixtures("here")
def test_a_fault_is_told_in_words_and_as_json_and_exits_with_4(jserve):
    done = jserve("inspect", "--check", "--json", "my_model_of_the_cli:Leaks", "--checkpoint", "ck/state")
    assert done.returncode == 4, done.stderr
    report = json.loads(done.stdout)
    padding, others = report["findings"]
    assert {finding["severity"] for finding in report["findings"]} == {"error"}
    assert (padding["where"], others["where"]) == ("logits", "logits")
    assert padding["what"] == "real rows depend on what stands in rows of padding"
    assert others["what"].startswith("rows of one sequence depend on those of another")


@pytest.mark.usefixtures("here")
def test_a_typo_and_options_of_another_model_are_one_line(jserve):
    done = jserve("inspect", "my_model_of_the_cli:MyModle")
    assert (done.returncode, done.stdout) == (3, "")
    assert "error JS-CFG-01: my_model_of_the_cli (" in done.stderr  # the plugins of accelerators may talk before
    assert "has no MyModle; did you mean MyModel?" in done.stderr
    done = jserve("inspect", "--checkpoint", "ck", "ck")
    assert done.returncode == 3
    assert done.stderr.startswith("error JS-CFG-01: --checkpoint goes with a MODEL of the form package.module:Class")


@pytest.mark.usefixtures("here")
def test_it_is_served_by_its_name(jserve, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = ("--max-num-seqs", "1", "--max-num-tokens", "16", "--max-model-len", "64")
    with server_process(["my_model_of_the_cli:MyModel", "--checkpoint", "ck/state", *small]) as ready:
        assert (ready["model"]["name"], ready["model"]["vocab_size"]) == ("MyModel", VOCAB_SIZE)
        done = jserve("generate", "--address", ready["addresses"]["grpc"], "--max-tokens", "5", "--json", "hello")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["usage"]["prompt_tokens"] == 5
