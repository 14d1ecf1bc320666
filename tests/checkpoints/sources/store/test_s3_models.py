"""Models in s3:// through real clients: opened, inspected, converted and served."""

import errno
import json
import shutil
from datetime import datetime
from pathlib import Path

import jax
import own_models
import pytest
from buckets import Notes, leaves, same_model
from flax import nnx, serialization
from saving import assert_same, save_standard, save_steps

from jserve import LLM, SamplingParams
from jserve.checkpoints.arrays.tree import nest
from jserve.checkpoints.convert import convert
from jserve.checkpoints.hf.safetensors import read_tensor_file
from jserve.checkpoints.inspection.inspect import inspect
from jserve.checkpoints.open import open_checkpoint
from jserve.checkpoints.own.folder import open_arrays
from jserve.checkpoints.own.report import inspect_own
from jserve.checkpoints.sources.store import copy_whole
from jserve.errors import CheckpointError, SourceError
from jserve.models.naive import naive_generate
from jserve.models.own import for_serving
from jserve.progress import SILENT
from jserve.testing.gguf import write_tiny_gguf

TINY_BERT = Path(__file__).parents[3] / "oracle" / "data" / "tiny_bert"


def test_a_model_is_opened_inspected_and_converted(tmp_path, s3, llama_run):
    s3.upload(llama_run, "team/tiny-llama")
    uri = f"{s3.uri}/team/tiny-llama/steps"
    near, far = open_checkpoint(str(llama_run / "steps")), open_checkpoint(uri)
    assert (far.name, far.family, far.layout, far.source) == ("tiny-llama", "llama", near.layout, uri)
    assert far.tokenizer.vocab_size == near.tokenizer.vocab_size
    same_model(far, near)
    report = inspect(uri, check=True)
    assert report.serve == f"jserve serve {uri}"
    assert report.digests == "all values finite"
    convert(uri, tmp_path / "converted")
    same_model(open_checkpoint(str(tmp_path / "converted")), near)
    s3.upload(tmp_path / "converted", "written")
    written = open_checkpoint(f"{s3.uri}/written")
    assert written.layout == "Orbax checkpoint (OCDBT) with jserve.json"
    same_model(written, near)
    assert inspect(f"{s3.uri}/written", check=True).digests == "all values finite"


def test_hugging_face_folders_and_gguf_files_are_copied_once(tmp_path, s3, llama_run):
    convert(str(llama_run / "steps"), tmp_path / "hf", to="safetensors")
    s3.upload(tmp_path / "hf", "hf")
    s3.put("hf/optimizer.pt", b"\x80\x04.")
    near = open_checkpoint(str(tmp_path / "hf"))
    progress = Notes()
    same_model(open_checkpoint(f"{s3.uri}/hf", progress=progress), near)
    assert any("copying 1 files" in note and " MB, into the cache" in note for note in progress.notes)
    assert "hf/optimizer.pt" not in s3.got
    s3.forget()
    same_model(open_checkpoint(f"{s3.uri}/hf"), near)
    assert s3.got == []
    write_tiny_gguf(tmp_path / "t.gguf")
    s3.put("files/t.gguf", (tmp_path / "t.gguf").read_bytes())
    same_model(open_checkpoint(f"{s3.uri}/files/t.gguf"), open_checkpoint(str(tmp_path / "t.gguf")))
    with pytest.raises(SourceError, match=r"is a folder with 1 GGUF file.*MODEL is one file") as error:
        open_checkpoint(f"{s3.uri}/files")
    assert error.value.fix == f"give the file: {s3.uri}/files/t.gguf"


def test_an_encoder_with_its_settings_above_a_step(tmp_path, s3):
    whole = open_checkpoint(str(TINY_BERT))
    save_steps(tmp_path / "run" / "steps", {1: nest({path: leaf.read() for path, leaf in whole.leaves.items()})})
    for file in TINY_BERT.rglob("*.json"):
        (tmp_path / "run" / file.relative_to(TINY_BERT)).parent.mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / "run" / file.relative_to(TINY_BERT))
    (tmp_path / "run" / "1_Pooling").rename(tmp_path / "run" / "pooling")
    modules = (tmp_path / "run" / "modules.json").read_text()
    (tmp_path / "run" / "modules.json").write_text(modules.replace("1_Pooling", "pooling"))
    s3.upload(tmp_path / "run", "run")
    near, far = open_checkpoint(str(tmp_path / "run" / "steps")), open_checkpoint(f"{s3.uri}/run/steps")
    assert far.encoder == near.encoder == whole.encoder
    same_model(far, whole)


def test_a_cache_without_hard_links(tmp_path, s3, llama_run, monkeypatch):
    convert(str(llama_run / "steps"), tmp_path / "hf", to="safetensors")
    s3.upload(tmp_path / "hf", "hf")

    def refused(*arguments):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(copy_whole.os, "link", refused)
    same_model(open_checkpoint(f"{s3.uri}/hf"), open_checkpoint(str(tmp_path / "hf")))


def test_a_copy_that_was_broken_off_goes_on_with_the_next_file(tmp_path, s3, llama_run, monkeypatch):
    convert(str(llama_run / "steps"), tmp_path / "hf", to="safetensors")
    tensors = read_tensor_file(tmp_path / "hf" / "model.safetensors").tensors
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "model-00001-of-00002.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00002.safetensors") | {"x": "sub/none.safetensors"}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    s3.upload(tmp_path / "hf", "hf")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"{s3.uri}/hf are not whole|none.safetensors"):
            open_checkpoint(f"{s3.uri}/hf")
    assert s3.got.count("hf/model-00001-of-00002.safetensors") == 1


def test_files_that_change_under_a_conversion(tmp_path, s3, llama_run, monkeypatch):
    s3.upload(llama_run, "run")
    from jserve.checkpoints import convert as module

    def write(*arguments, **keywords):
        s3.put("run/steps/1/default/d/other", b"new")

    monkeypatch.setattr(module, "_write_orbax", write)
    with pytest.raises(SourceError, match=rf"{s3.uri}/run/steps/1/default/d/other changed while it was converted"):
        convert(f"{s3.uri}/run/steps", tmp_path / "out")


def test_a_module_of_ones_own_is_served_from_a_bucket(tmp_path, s3):
    config = own_models.Config(width=8, inner=own_models.Inner(heads=1))
    with nnx.use_eager_sharding(False):
        module = own_models.MyModel(config, rngs=nnx.Rngs(3))
    save_standard(tmp_path / "run" / "ck", nnx.state(module))
    (tmp_path / "run" / "config.json").write_text(json.dumps({"width": 8, "inner": {"heads": 1}}))
    s3.upload(tmp_path / "run", "run")
    graphdef, state = nnx.split(for_serving(module))
    want = naive_generate(graphdef, nnx.to_pure_dict(state), [1, 2, 3], 12)
    small = {"max_num_seqs": 1, "max_num_tokens": 8, "num_pages": 8, "program_store": False, "progress": SILENT}
    with LLM("own_models:MyModel", checkpoint=f"{s3.uri}/run/ck", **small) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        assert llm.generate([1, 2, 3], greedy)[0].token_ids == want
    report = inspect_own("own_models:MyModel", checkpoint=f"{s3.uri}/run/ck", tokenizer=None, check=True)
    assert (report.failed, report.path) == (False, f"{s3.uri}/run/ck")
    assert report.serve == f"jserve serve own_models:MyModel --checkpoint {s3.uri}/run/ck"


def test_of_a_store_without_etags_what_was_written_later_is_copied_anew(tmp_path, s3, params):
    for day, added in ((1, 0.0), (2, 1.0)):
        tree = jax.tree.map(lambda a, added=added: a + added, params)
        s3.put("run/checkpoint", serialization.to_bytes(tree))
        s3.put("run/notes.json", f"{added}".encode())
        for key in ("run/checkpoint", "run/notes.json"):
            s3.date(key, datetime(2026, 1, day))
        s3.forget_etags()
        opened = open_arrays(f"{s3.uri}/run")
        assert_same(leaves(opened, params), tree)
        assert (opened.folder / "notes.json").read_text() == f"{added}"
        s3.deny()


def test_a_damaged_copy_is_made_again(tmp_path, s3, params, cache_home):
    save_standard(tmp_path / "ck", params)
    s3.upload(tmp_path / "ck", "ck")
    open_arrays(f"{s3.uri}/ck")
    (copy,) = cache_home.rglob("_METADATA")
    copy.write_bytes(b"x")
    assert_same(leaves(open_arrays(f"{s3.uri}/ck"), params), params)
