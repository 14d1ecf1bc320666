"""`jserve inspect` of what Orbax and Flax saved: of a known family, of one that only its names tell, and of neither."""

import json
import shlex
from dataclasses import asdict

import jax.numpy as jnp
import numpy as np
import pytest
from saving import WRITERS, save, save_standard, save_steps, train_state
from trees import LLAMA, QWEN3, flax_names, hf_weights, maxtext

from jserve.checkpoints.inspection.inspect import inspect
from jserve.cli.main import main
from jserve.errors import CheckpointError, SourceError
from jserve.testing.tokenizer import ByteTokenizer


@pytest.mark.parametrize("name", WRITERS)
def test_whatever_was_saved_is_described_without_a_word_on_the_model(written, name):
    folder = written(name)
    report = inspect(str(folder), check=True)
    assert (report.family, report.parameters, report.nbytes) == (None, 100, 400)
    assert report.digests == "all values finite"
    assert report.other_nbytes == sum(array.nbytes for array in report.arrays if not array.parameter)
    assert report.layout.startswith("Flax msgpack file" if name.startswith("msgpack") else "Orbax checkpoint")
    assert report.problem.code == "JS-CKP-03"
    assert "config.json (Hugging Face's) or jserve.json is missing" in report.problem.message
    assert not report.failed
    assert str(report).splitlines()[-1] == f"jserve serve package.module:Class --checkpoint {shlex.quote(str(folder))}"
    json.dumps(asdict(report))


def test_a_run_of_maxtext_with_its_steps_and_its_optimizer(tmp_path, capsys):
    config = LLAMA | {"vocab_size": ByteTokenizer().vocab_size}
    tree = maxtext(config, hf_weights(config), scan_axis=1)
    state = {"params": {"params": tree}, "opt_state": {"mu": tree, "nu": tree}, "step": 7}
    save_steps(tmp_path / "run" / "ck", {3: state, 23: state})
    (tmp_path / "run" / "ck" / "24.orbax-checkpoint-tmp-1").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    (tmp_path / "run" / "tokenizer.json").write_text(ByteTokenizer().to_json())
    assert main(["inspect", str(tmp_path / "run" / "ck")]) == 0
    lines = capsys.readouterr().out.splitlines()
    size = sum(leaf.nbytes for leaf in hf_weights(config).values())
    assert "  layout         Orbax checkpoint, OCDBT, zarr" in lines
    assert "  step           23 (finished: 23, 3)" in lines
    assert any(line.startswith("  unfinished     24.orbax-checkpoint-tmp-1: its name has ") for line in lines)
    assert "  family         llama" in lines
    assert "  names          MaxText's, of a llama or mistral" in lines
    assert any(
        line.startswith("  config ") and line.endswith(f"from {tmp_path / 'run' / 'config.json'}") for line in lines
    )
    words = f"{size // 4:,} in 12 arrays, {size / 1e6:.1f} MB (float32), layers stacked on axis 1"
    assert f"  parameters     {words}" in lines
    assert any(line.split()[:5] == ["besides", "opt_state,", "step:", "25", "arrays,"] for line in lines)
    assert any(line.split()[:4] == ["opt_state", "24", "arrays,", f"{2 * size / 1e6:.1f}"] for line in lines)
    assert any(
        line.split() == ["params.params.decoder.layers.mlp.wo.kernel", "float32", "[12,", "3,", "8]"] for line in lines
    )
    assert "missing: end of text: nothing ends a text but max_tokens and stop strings" in lines
    assert lines[-1] == f"jserve serve {tmp_path / 'run' / 'ck'}"


def test_names_tell_which_config_to_copy(tmp_path):
    weights = hf_weights(QWEN3)
    save_standard(tmp_path / "a" / "b" / "ck", train_state(flax_names(weights))["model"])
    report = inspect(str(tmp_path / "a" / "b" / "ck"))
    assert report.names == "Hugging Face's, of a qwen3"
    assert report.problem.fix.startswith("copy the model's config.json there, or ")
    (tmp_path / "a" / "b" / "config.json").write_text(json.dumps(QWEN3))
    report = inspect(str(tmp_path / "a" / "b" / "ck"))
    assert (report.family, report.problem, report.stacked_axes) == ("qwen3", None, [])
    assert report.nbytes == sum(leaf.nbytes for leaf in weights.values())
    assert report.other_nbytes == 2 * report.nbytes + 8


def test_a_config_of_another_size_is_damage_and_all_is_shown_besides(tmp_path, capsys):
    save_standard(tmp_path / "ck", flax_names(hf_weights(LLAMA)))
    (tmp_path / "ck" / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 20}))
    assert main(["inspect", str(tmp_path / "ck")]) == 4
    out = capsys.readouterr().out
    assert "error JS-CKP-01: " in out
    assert "token_embedding.weight: wanted [20, 8] in tensor model.embed_tokens.weight, found [16, 8]" in out
    assert "model.layers.0-2.mlp.down_proj.kernel" in out


def test_a_config_of_ones_own_is_no_damage(tmp_path):
    save_standard(tmp_path / "ck", {"a": np.ones((2, 3), np.float32)})
    (tmp_path / "ck" / "config.json").write_text('{"width": 3}')
    (tmp_path / "ck" / "tokenizer.json").write_text(ByteTokenizer().to_json())
    report = inspect(str(tmp_path / "ck"))
    assert "has the model_type None" in report.problem.message
    assert "write it as a module of your own" in report.problem.fix
    assert (report.config_path, report.vocab_size) == (str(tmp_path / "ck" / "config.json"), 258)
    assert not report.failed


def test_check_reads_all_that_was_saved(tmp_path):
    tree = {"params": {"a": jnp.ones((4, 4)), "b": jnp.full((3,), jnp.nan)}, "opt_state": {"mu": jnp.ones((64, 64))}}
    save(tmp_path / "ck", tree, use_ocdbt=False)
    with pytest.raises(CheckpointError, match=r"ck is damaged:\n  params\.b holds values that are not finite numbers$"):
        inspect(str(tmp_path / "ck"), check=True)
    assert inspect(str(tmp_path / "ck")).other_nbytes == 64 * 64 * 4
    (piece,) = [path for path in (tmp_path / "ck" / "opt_state.mu").iterdir() if path.name != ".zarray"]
    piece.write_bytes(piece.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"opt_state\.mu: .* is damaged at opt_state\.mu: "):
        inspect(str(tmp_path / "ck"), check=True)


def test_a_step_or_an_item_that_is_not_there_has_others(tmp_path):
    WRITERS["CheckpointManager, items"](tmp_path / "run", {"a": np.ones(3)})
    (tmp_path / "run" / "step_0012.orbax-checkpoint-tmp-3").mkdir()
    for path, words in (
        ("run/step_0010", r"run has the finished steps step_0009; unfinished: step_0012\.orbax-checkpoint-tmp-3"),
        ("run/step_0010/params", "run has the finished steps step_0009"),
        ("run/step_0009/parms", r"did you mean .*/run/step_0009/params\?"),
        ("rum", r"did you mean .*/run\?"),
    ):
        with pytest.raises(SourceError, match=f"{path} does not exist; {words}" if path == "rum" else words):
            inspect(str(tmp_path / path))
    WRITERS["v1, items"](tmp_path / "v1", {"a": np.ones(3)})
    with pytest.raises(SourceError, match=r"v1/weights does not exist; .*/v1 has the items model_params, x"):
        inspect(str(tmp_path / "v1" / "weights"))


def test_a_step_that_cannot_be_read_is_named_and_an_older_one_described(tmp_path):
    tree = {"a": {"b": np.ones((2, 3), np.float32)}}
    save_steps(tmp_path / "run", {1: tree, 2: tree, 3: tree})
    (tmp_path / "run" / "3" / "default" / "manifest.ocdbt").unlink()
    (tmp_path / "run" / "2" / "default" / "_METADATA").write_text("{")
    steps = inspect(str(tmp_path / "run")).steps
    assert (steps.taken, steps.finished) == ("1", ["3", "2", "1"])
    assert [line.partition(" is damaged: ")[0] for line in steps.damaged] == [
        str(tmp_path / "run" / "3" / "default"),
        str(tmp_path / "run" / "2" / "default" / "_METADATA"),
    ]
