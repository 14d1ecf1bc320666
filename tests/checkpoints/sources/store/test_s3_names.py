"""Names of s3://: those that users read, and those that are not followed."""

import json
from dataclasses import asdict
from pathlib import PurePosixPath

import jax.numpy as jnp
import numpy as np
import own_models
import pytest
from buckets import Notes, data_keys, leaves
from flax import nnx, serialization
from safetensors.numpy import save_file
from saving import assert_same, save, save_standard, save_steps
from trees import LLAMA, hf_weights, nested

from jserve.checkpoints.convert import convert
from jserve.checkpoints.inspection.inspect import inspect
from jserve.checkpoints.open import open_checkpoint
from jserve.checkpoints.own.folder import open_arrays
from jserve.checkpoints.own.model import open_own
from jserve.checkpoints.own.report import inspect_own
from jserve.checkpoints.sources.store import bucket, plan
from jserve.config import ServeConfig
from jserve.errors import CheckpointError, SourceError
from jserve.load.mesh import build_mesh
from jserve.load.source import find_source
from jserve.progress import SILENT
from jserve.testing.gguf import write_tiny_gguf
from jserve.testing.tokenizer import ByteTokenizer


def same_names(report):
    """Of files: no report says where copies are."""
    for text in (str(report), json.dumps(asdict(report))):
        assert "object-stores" not in text
        assert "xdg" not in text
    return str(report).splitlines()


def test_no_report_names_a_copy(tmp_path, s3, llama_run, params):
    s3.upload(llama_run / "steps", "bare")
    lines = same_names(inspect(f"{s3.uri}/bare"))
    assert any(f"{s3.uri}/bare holds arrays and no word on the model" in line for line in lines)
    s3.put("bare/config.json", (llama_run / "config.json").read_bytes())
    lines = same_names(inspect(f"{s3.uri}/bare"))
    put = f"  fix: put into {s3.uri}/bare its tokenizer.json (or tokenizer.model) and tokenizer_config.json"
    assert put in lines
    assert any(line.endswith(f", from {s3.uri}/bare/config.json") for line in lines)
    s3.put("bare/tokenizer.json", b"{}")
    assert any(f"{s3.uri}/bare" in line for line in same_names(inspect(f"{s3.uri}/bare")))

    convert(str(llama_run / "steps"), tmp_path / "hf", to="safetensors")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    s3.upload(tmp_path / "hf", "hf")
    report = inspect(f"{s3.uri}/hf")
    assert report.path == f"{s3.uri}/hf"
    assert f"  fix: put into {s3.uri}/hf its" in "\n".join(same_names(report))
    s3.put("hf/config.json", b'{"model_type": "mamba"}')
    assert f"{s3.uri}/hf/config.json" in inspect(f"{s3.uri}/hf").problem.message
    same_names(inspect(f"{s3.uri}/hf"))

    write_tiny_gguf(tmp_path / "t.gguf", metadata={"split.count": 3, "split.no": 1})
    s3.put("files/t.gguf", (tmp_path / "t.gguf").read_bytes())
    report = inspect(f"{s3.uri}/files/t.gguf")
    assert report.path == f"{s3.uri}/files/t.gguf"
    assert f"{s3.uri}/files/t.gguf" in report.problem.message
    same_names(report)
    with pytest.raises(CheckpointError, match=f"{s3.uri}/files/t.gguf"):
        convert(f"{s3.uri}/files/t.gguf", tmp_path / "out")

    s3.put("flax/checkpoint_5", serialization.to_bytes(params))
    report = inspect(f"{s3.uri}/flax")
    assert report.path == f"{s3.uri}/flax"
    same_names(report)


@pytest.mark.parametrize("flax", [False, True])
def test_no_report_of_a_module_names_a_copy(tmp_path, s3, flax):
    config = own_models.Config(width=8, inner=own_models.Inner(heads=1))
    with nnx.use_eager_sharding(False):
        module = own_models.MyModel(config, rngs=nnx.Rngs(3))
    if flax:
        s3.put("run/checkpoint", serialization.to_bytes(nnx.to_pure_dict(nnx.state(module, nnx.Param))))
    else:
        save_standard(tmp_path / "ck", nnx.state(module))
        s3.upload(tmp_path / "ck", "run/ck")
    s3.put("run/config.json", json.dumps({"width": 8, "inner": {"heads": 1}}).encode())
    s3.put("run/tokenizer.json", ByteTokenizer().to_json().encode())
    uri = f"{s3.uri}/run" if flax else f"{s3.uri}/run/ck"
    report = inspect_own("own_models:MyModel", checkpoint=uri, tokenizer=None, check=False)
    assert (report.path, report.config_path) == (uri, f"{s3.uri}/run/config.json")
    assert report.tokenizer == f"{s3.uri}/run"
    same_names(report)


def refused(opening, *arguments, **keywords):
    """The message of what is raised, and its fix; neither says where copies are."""
    with pytest.raises(CheckpointError) as error:
        opening(*arguments, **keywords)
    said = f"{error.value.message} {error.value.fix}"
    assert "object-stores" not in said
    return said


def test_no_error_after_opening_names_a_copy(tmp_path, s3, llama_run):
    weights = hf_weights(LLAMA)
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], np.nan)
    save_standard(tmp_path / "ck", nested(weights))
    s3.upload(tmp_path / "ck", "nan")
    s3.put("nan/config.json", json.dumps(LLAMA).encode())
    assert f"{s3.uri}/nan: norm holds values that are not finite" in refused(convert, f"{s3.uri}/nan", tmp_path / "out")

    (tmp_path / "tied").mkdir()
    save_file(hf_weights(LLAMA), tmp_path / "tied" / "model.safetensors")
    s3.upload(tmp_path / "tied", "tied")
    s3.put("tied/config.json", json.dumps(LLAMA | {"tie_word_embeddings": True}).encode())
    checkpoint = open_checkpoint(f"{s3.uri}/tied")
    said = refused(checkpoint.restore, checkpoint.abstract("float32")[1])
    assert f"{s3.uri}/tied: tensor lm_head.weight differs" in said

    s3.upload(llama_run, "run")
    s3.put("run/generation_config.json", b'{"temperature": -1}')
    config = ServeConfig(model=f"{s3.uri}/run/steps")
    _, mesh = build_mesh("")
    said = refused(find_source, config, mesh, model=None, tokenizer=None, progress=SILENT)
    assert f"the sampling defaults of {s3.uri}/run/steps are not allowed" in said


def test_no_error_of_what_stands_beside_a_module_names_a_copy(tmp_path, s3):
    with nnx.use_eager_sharding(False):
        module = own_models.MyModel(own_models.Config(width=8, inner=own_models.Inner(heads=1)), rngs=nnx.Rngs(3))
    save_standard(tmp_path / "ck", nnx.state(module))
    s3.upload(tmp_path / "ck", "run")
    s3.put("run/config.json", json.dumps({"width": 8, "inner": {"heads": 1}}).encode())
    s3.put("run/generation_config.json", b'{"temperature": "x"}')
    own = {"checkpoint": f"{s3.uri}/run", "tokenizer": None, "progress": SILENT}
    for opening, options in (
        (inspect_own, {"check": False}),
        (open_own, {"dtype": None, "default_dtype": "float32"}),
    ):
        said = refused(opening, "own_models:MyModel", **own, **options)
        assert f"{s3.uri}/run/generation_config.json: temperature is 'x'" in said


@pytest.mark.parametrize("name", ["../../other/w", "/etc/w", "a/../../w"])
def test_arrays_whose_names_climb_are_refused(tmp_path, s3, name):
    save(tmp_path / "ck", {"w": jnp.ones(4)}, use_ocdbt=False)
    path = tmp_path / "ck" / "_METADATA"
    metadata = json.loads(path.read_text())
    (leaf,) = metadata["tree_metadata"].values()
    leaf["key_metadata"][0]["key"] = name
    path.write_text(json.dumps(metadata))
    s3.upload(tmp_path / "ck", "run/ck")
    for uri in (f"{s3.uri}/run/ck", str(tmp_path / "ck")):
        s3.forget()
        with pytest.raises(SourceError, match="is not a name inside"):
            open_arrays(uri)
        assert data_keys(s3.got) == []


def test_an_object_whose_name_climbs_is_refused(tmp_path, s3, params):
    save_standard(tmp_path / "ck", params)
    s3.upload(tmp_path / "ck", "ck")
    s3.put_raw("ck/../config.json", b"{}")
    with pytest.raises(SourceError, match=rf"{s3.uri}/ck holds an object whose name is no path inside it: 'ck/\.\./'"):
        open_arrays(f"{s3.uri}/ck")


def test_weights_that_are_pickles_are_refused_and_not_fetched(s3):
    s3.put("hf/config.json", json.dumps(LLAMA).encode())
    s3.put("hf/pytorch_model.bin", b"\x80\x04.")
    s3.forget()
    with pytest.raises(SourceError, match=rf"{s3.uri}/hf holds its weights as pickles only"):
        open_checkpoint(f"{s3.uri}/hf")
    assert s3.got == ["hf/config.json"]


def test_a_folder_may_be_called_as_a_pickle_is_and_a_file_may_not(tmp_path, s3, params):
    save_standard(tmp_path / "ck", params)
    s3.upload(tmp_path / "ck", "run.ckpt")
    assert_same(leaves(open_arrays(f"{s3.uri}/run.ckpt"), params), params)
    s3.put("model.pt", b"\x80\x04.")
    s3.forget()
    for opening in (open_arrays, open_checkpoint):
        with pytest.raises(SourceError, match=rf"{s3.uri}/model.pt is a pickle by its name"):
            opening(f"{s3.uri}/model.pt")
    assert s3.got == []


def test_what_is_listed_and_copied_is_bounded(tmp_path, s3, params, monkeypatch):
    save_steps(tmp_path / "run", dict.fromkeys(range(1, 7), params))
    s3.upload(tmp_path / "run", "run")
    s3.forget()
    progress = Notes()
    open_arrays(f"{s3.uri}/run", progress=progress)
    assert f"{s3.uri}/run has 6 finished steps; the newest 4 are looked into" in progress.notes
    assert {PurePosixPath(key).parts[1] for key in s3.got} == {"3", "4", "5", "6"}
    assert {PurePosixPath(key).parts[1] for key in data_keys(s3.got)} == {"6"}
    monkeypatch.setattr(plan, "_MAX_STEPS", 5)
    with pytest.raises(SourceError, match=rf"{s3.uri}/run holds 6 steps; at most 5 are looked through") as error:
        open_arrays(f"{s3.uri}/run")
    assert error.value.fix == f"name the step, such as {s3.uri}/run/6"
    monkeypatch.setattr(plan, "_MAX_FILE_BYTES", 10)
    with pytest.raises(SourceError, match=r"run/6/.* bytes; it is none of a checkpoint's small files"):
        open_arrays(f"{s3.uri}/run/6")
    monkeypatch.setattr(bucket, "_MAX_CHILDREN", 2)
    with pytest.raises(SourceError, match=rf"{s3.uri}/run holds 6 names; at most 2 are looked through"):
        open_arrays(f"{s3.uri}/run")
