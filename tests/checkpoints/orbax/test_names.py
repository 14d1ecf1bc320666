"""Names in a checkpoint that lead elsewhere, and pickles, are refused alike whether or not anything is there."""

import json
import shutil

import pytest
from saving import assert_same, save, save_steps, shapes
from trees import LLAMA, hf_weights, nested

from jserve.checkpoints.orbax.beside import read_text
from jserve.checkpoints.orbax.fit import fit_tree
from jserve.checkpoints.orbax.open import open_orbax
from jserve.checkpoints.orbax.saved import open_saved
from jserve.checkpoints.own.folder import read_own_text
from jserve.errors import SourceError
from jserve.testing.tokenizer import ByteTokenizer


def lead_out(path, tmp_path, *, there):
    """Move ``path`` out of its checkpoint, or away, and leave a link."""
    outside = tmp_path / "outside" / path.name
    outside.parent.mkdir()
    if there:
        shutil.move(path, outside)
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    path.symlink_to(outside)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    ("name", "ocdbt"),
    [("_METADATA", True), ("manifest.ocdbt", True), ("d", True), ("_CHECKPOINT_METADATA", True), ("norm.bias", False)],
)
def test_links_out_of_a_tree(tmp_path, params, name, ocdbt, there):
    save(tmp_path / "ck", params, use_ocdbt=ocdbt)
    lead_out(tmp_path / "ck" / name, tmp_path, there=there)
    if not there and name in ("_METADATA", "manifest.ocdbt"):
        # A link to nothing is no file; what then is missing is said, and nothing was followed.
        with pytest.raises(SourceError.__base__):
            open_saved(tmp_path / "ck")
        return
    with pytest.raises(SourceError, match=rf"ck/{name} is a link that leads out of the checkpoint's folder"):
        open_saved(tmp_path / "ck")


@pytest.mark.parametrize("name", ["9", "9/default"])
def test_a_step_that_is_a_link_out_is_passed_over(tmp_path, params, name):
    save_steps(tmp_path / "run", {3: params, 9: params})
    lead_out(tmp_path / "run" / name, tmp_path, there=True)
    saved = open_saved(tmp_path / "run")
    assert saved.layout.step == "3"
    assert "is a link that leads out" in "".join(saved.layout.damaged)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("name", ["../outside/w", "/etc/passwd", "a/../../w", "C:w", "a\\..\\w"])
def test_arrays_whose_names_climb(tmp_path, params, name, there):
    save(tmp_path / "ck", {"w": params["norm"]["bias"]}, use_ocdbt=False)
    if there:
        shutil.copytree(tmp_path / "ck" / "w", tmp_path / "outside" / "w")
    path = tmp_path / "ck" / "_METADATA"
    metadata = json.loads(path.read_text())
    (leaf,) = metadata["tree_metadata"].values()
    leaf["key_metadata"][0]["key"] = name
    path.write_text(json.dumps(metadata))
    with pytest.raises(SourceError, match="is not a name inside"):
        open_saved(tmp_path / "ck")


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_files_of_a_tokenizer_that_are_links_out(tmp_path, name, there):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer.json").write_text(ByteTokenizer().to_json())
    (tmp_path / "run" / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (tmp_path / "run" / "chat_template.jinja").write_text("hi")
    assert read_text([tmp_path / "run"])[0].chat_template == "hi"
    lead_out(tmp_path / "run" / name, tmp_path, there=there)
    with pytest.raises(SourceError, match=rf"run/{name} is a link that leads out of the checkpoint's folder"):
        read_text([tmp_path / "run"])
    with pytest.raises(SourceError, match=rf"run/{name} is (a link that leads out|no tokenizer: it does not exist)"):
        read_own_text(tmp_path / "run" / "tokenizer.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_files_beside_the_arrays_that_are_links_out(tmp_path, name):
    save_steps(tmp_path / "run", {1: nested(hf_weights(LLAMA))})
    (tmp_path / "run" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "run" / "generation_config.json").write_text("{}")
    lead_out(tmp_path / "run" / name, tmp_path, there=True)
    with pytest.raises(SourceError, match=rf"run/{name} is a link that leads out of the checkpoint's folder"):
        open_orbax(tmp_path / "run", source="run")


def test_ordinary_links_work(tmp_path, params):
    save_steps(tmp_path / "real", {9: params})
    (tmp_path / "run").symlink_to("real")
    (tmp_path / "real" / "10").symlink_to("9")
    assert_same(fit_tree(open_saved(tmp_path / "run").tree, shapes(params), where="run").leaves, params)
