"""s3:// through real clients: what is restored, what is asked for, and what is said when it cannot be had."""

import errno
import json
import sys
import time
from dataclasses import asdict
from pathlib import PurePosixPath

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import own_models
import pytest
from flax import nnx, serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from saving import WRITERS, Tiny, assert_same, save, save_standard, save_steps, shapes
from trees import LLAMA, hf_weights, nested

from jserve import LLM, SamplingParams
from jserve.checkpoints.convert import convert
from jserve.checkpoints.hf.safetensors import read_tensor_file
from jserve.checkpoints.inspection.inspect import inspect
from jserve.checkpoints.open import open_checkpoint
from jserve.checkpoints.orbax.fit import fit_tree
from jserve.checkpoints.own.folder import open_arrays
from jserve.checkpoints.own.report import inspect_own
from jserve.checkpoints.sources.store import bucket, copy_whole, plan
from jserve.cli.main import main
from jserve.errors import CheckpointError, SourceError
from jserve.models.naive import naive_generate
from jserve.models.own import for_serving
from jserve.progress import SILENT
from jserve.testing.gguf import write_tiny_gguf
from jserve.testing.tokenizer import ByteTokenizer


class Notes:
    def __init__(self):
        self.notes = []

    def note(self, message):
        self.notes.append(message)

    def start(self, *arguments):
        pass

    advance = start

    def done(self):
        pass


@pytest.fixture(scope="module")
def params():
    return nnx.to_pure_dict(nnx.state(Tiny(nnx.Rngs(0)), nnx.Param))


def leaves(opened, params):
    return fit_tree(opened.saved.tree, shapes(params), where="s3").leaves


def data_keys(keys):
    """Of objects that hold values of arrays, or say where they are."""
    names = [PurePosixPath(key) for key in keys]
    return [str(key) for key in names if "d" in key.parts or key.name == "manifest.ocdbt" or key.name[:1].isdigit()]


# --- restored ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", WRITERS)
def test_whoever_wrote_it(tmp_path, s3, params, writer):
    WRITERS[writer](tmp_path / "ck", params)
    s3.upload(tmp_path / "ck", "runs/a b/ck")
    assert_same(leaves(open_arrays(f"{s3.uri}/runs/a b/ck"), params), params)


@pytest.mark.parametrize("devices", [1, 2])
def test_onto_devices_as_from_a_folder(tmp_path, s3, params, devices):
    save_steps(tmp_path / "run", {3: params})
    s3.upload(tmp_path / "run", "run")
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("tensor",))
    wanted = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape,
            jnp.bfloat16,
            sharding=NamedSharding(mesh, PartitionSpec(*[None] * (a.ndim - 1), "tensor")),
        ),
        params,
    )
    near, far = open_arrays(str(tmp_path / "run")).restore(wanted), open_arrays(f"{s3.uri}/run").restore(wanted)
    jax.tree.map(np.testing.assert_array_equal, far, near)
    assert jax.tree.all(jax.tree.map(lambda a, w: a.sharding == w.sharding, far, wanted))


def test_the_bucket_itself_may_be_the_checkpoint(tmp_path, s3, params):
    save_standard(tmp_path / "ck", params)
    s3.upload(tmp_path / "ck")
    for uri in (s3.uri, f"{s3.uri}/"):
        assert_same(leaves(open_arrays(uri), params), params)


def test_flaxs_msgpack_file_is_copied(s3, params):
    for step in (5, 10):
        s3.put(f"run/checkpoint_{step}", serialization.to_bytes(jax.tree.map(lambda a, step=step: a * step, params)))
    s3.forget()
    assert_same(leaves(open_arrays(f"{s3.uri}/run"), params), jax.tree.map(lambda a: a * 10, params))
    assert s3.got == ["run/checkpoint_10"]
    assert_same(leaves(open_arrays(f"{s3.uri}/run/checkpoint_5"), params), jax.tree.map(lambda a: a * 5, params))


@pytest.fixture(scope="module")
def llama_run(tmp_path_factory):
    """A run with its settings and its tokenizer above a folder of steps."""
    root = tmp_path_factory.mktemp("llama") / "tiny-llama"
    config = LLAMA | {"vocab_size": 260}
    save_steps(root / "steps", {1: nested(hf_weights(config))})
    (root / "config.json").write_text(json.dumps(config))
    (root / "tokenizer.json").write_text(ByteTokenizer().to_json())
    return root


def same_model(found, wanted):
    assert found.leaves.keys() == wanted.leaves.keys()
    for path, leaf in found.leaves.items():
        np.testing.assert_array_equal(leaf.read(), wanted.leaves[path].read(), err_msg=".".join(path))


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


# --- steps ------------------------------------------------------------------------------------------------------------


def test_the_newest_finished_step(tmp_path, s3, params):
    save_steps(tmp_path / "run", {n: jax.tree.map(lambda a, n=n: a + n, params) for n in (1, 3, 9, 12)})
    (tmp_path / "run" / "12" / "commit_success.txt").unlink()
    s3.upload(tmp_path / "run", "run")
    s3.forget()
    progress = Notes()
    opened = open_arrays(f"{s3.uri}/run", progress=progress)
    assert opened.saved.layout.step == "9"
    assert f"{s3.uri}/run: step 12 is passed over, it is unfinished" in "\n".join(progress.notes)
    assert_same(leaves(opened, params), jax.tree.map(lambda a: a + 9, params))
    assert not [key for key in data_keys(s3.got) if not key.startswith("run/9/")]
    assert not [key for key in s3.got if key.startswith("run/12/")]
    with pytest.raises(SourceError, match=rf"{s3.uri}/run/12 is unfinished: it has no commit_success.txt"):
        open_arrays(f"{s3.uri}/run/12")


def test_steps_of_usual_names_come_first_and_rivals_are_refused(tmp_path, s3, params):
    """Also beyond the few newest steps that are looked into."""
    run = tmp_path / "run"
    for name in ("1", "backup_2024", "best_30", "best_31", "best_32", "best_33"):
        save_standard(run / name, params)
    s3.upload(run, "run")
    assert open_arrays(f"{s3.uri}/run").saved.layout.step == "1"
    for name in ("40", "41", "42", "43", "checkpoint_3"):
        save_standard(run / name, params)
    s3.upload(run, "run")
    with pytest.raises(SourceError, match="2 kinds of names, the newest of each 43, checkpoint_3"):
        open_arrays(f"{s3.uri}/run")


def test_a_copy_beside_the_steps_does_not_hide_them(tmp_path, s3, params):
    save_steps(tmp_path / "run", {n: jax.tree.map(lambda a, n=n: a + n, params) for n in (1, 3)})
    save_standard(tmp_path / "run" / "best", params)
    s3.upload(tmp_path / "run", "run")
    opened = open_arrays(f"{s3.uri}/run")
    assert opened.saved.layout.step == "3"
    assert_same(leaves(opened, params), jax.tree.map(lambda a: a + 3, params))


def test_a_damaged_step_is_passed_over(tmp_path, s3, params):
    save_steps(tmp_path / "run", {3: params, 9: params})
    s3.upload(tmp_path / "run", "run")
    s3.put("run/9/default/manifest.ocdbt", b"x")
    progress = Notes()
    assert open_arrays(f"{s3.uri}/run", progress=progress).saved.layout.step == "3"
    assert any(f"{s3.uri}/run/9/default is damaged" in note for note in progress.notes)


def test_a_newer_step_is_seen_at_the_next_start(tmp_path, s3, params):
    save_steps(tmp_path / "run", {3: params})
    s3.upload(tmp_path / "run", "run")
    assert open_arrays(f"{s3.uri}/run").saved.layout.step == "3"
    save_steps(tmp_path / "run", {9: params})
    s3.upload(tmp_path / "run", "run")
    assert open_arrays(f"{s3.uri}/run").saved.layout.step == "9"


# --- said in the user's names -----------------------------------------------------------------------------------------


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


# --- nothing else is asked for ----------------------------------------------------------------------------------------


def test_only_what_is_needed_is_fetched(tmp_path, s3):
    tree = {"params": {"w": jnp.arange(64.0).reshape(8, 8), "v": jnp.ones(4)}, "opt_state": {"mu": jnp.zeros((8, 8))}}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    args = jax.tree.map(lambda a: ocp.SaveArgs(chunk_byte_size=128), tree)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "ck", args=ocp.args.PyTreeSave(tree, save_args=args))
    s3.upload(tmp_path / "ck", "ck")
    s3.put("ck/logs/events.out", b"x" * 1000)
    s3.forget()
    opened = open_arrays(f"{s3.uri}/ck")
    assert data_keys(s3.got) == []
    assert sum(method == "GET" and path == f"/{s3.bucket}" for method, path in s3.requests) == 1  # one listing
    s3.forget()
    kernel = opened.saved.tree["params", "w"]
    np.testing.assert_array_equal(kernel.read((slice(4, 8), slice(0, 8))), np.arange(32.0, 64).reshape(4, 8))
    chunks = [key for key in s3.got if not key.endswith(".zarray")]
    everything = {path.name for path in (tmp_path / "ck" / "params.w").iterdir()} - {".zarray"}
    assert chunks
    assert len(set(chunks)) == len(chunks) < len(everything)
    assert all(key.startswith("ck/params.w/") for key in chunks)


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [True, False])
def test_a_lost_or_damaged_chunk_is_named(tmp_path, s3, params, cut):
    save(tmp_path / "ck", params, use_ocdbt=False)
    s3.upload(tmp_path / "ck", "ck")
    s3.put("ck/layers.1.kernel/0.0", b"x") if cut else s3.delete("ck/layers.1.kernel/0.0")
    opened = open_arrays(f"{s3.uri}/ck")
    with pytest.raises(CheckpointError, match=f"{s3.uri}/ck is damaged at layers.1.kernel: "):
        opened.restore(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params))


def test_files_that_change_under_a_conversion(tmp_path, s3, llama_run, monkeypatch):
    s3.upload(llama_run, "run")
    from jserve.checkpoints import convert as module

    def write(*arguments, **keywords):
        s3.put("run/steps/1/default/d/other", b"new")

    monkeypatch.setattr(module, "_write_orbax", write)
    with pytest.raises(SourceError, match=rf"{s3.uri}/run/steps/1/default/d/other changed while it was converted"):
        convert(f"{s3.uri}/run/steps", tmp_path / "out")


# --- names (C63) ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../other/w", "/etc/w", "a/../../w", "w.pkl"])
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
        with pytest.raises(SourceError, match=r"is not a name inside|is a pickle by its name"):
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


def test_a_damaged_copy_is_made_again(tmp_path, s3, params, cache_home):
    save_standard(tmp_path / "ck", params)
    s3.upload(tmp_path / "ck", "ck")
    open_arrays(f"{s3.uri}/ck")
    (copy,) = cache_home.rglob("_METADATA")
    copy.write_bytes(b"x")
    assert_same(leaves(open_arrays(f"{s3.uri}/ck"), params), params)


# --- what cannot be had -----------------------------------------------------------------------------------------------


def test_nothing_is_there(s3):
    with pytest.raises(SourceError, match=rf"{s3.uri}/none does not exist: no key begins with none"):
        open_arrays(f"{s3.uri}/none")
    s3.put("some/notes.md", b"x")
    with pytest.raises(SourceError, match=rf"{s3.uri}/some holds no Flax checkpoint; looked for"):
        open_arrays(f"{s3.uri}/some")
    with pytest.raises(SourceError, match=rf"{s3.uri}/some holds no checkpoint: looked for jserve.json"):
        open_checkpoint(f"{s3.uri}/some")


def test_a_missing_bucket(s3, capsys):
    assert main(["inspect", "s3://no-such-bucket/ck"]) == 4
    said = capsys.readouterr().err
    assert f"s3://no-such-bucket does not exist at {s3.url}" in said
    assert "JS-CKP-02" in said


def test_wrong_keys(s3, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    with pytest.raises(SourceError, match=r"/ck may not be read by AWS_ACCESS_KEY_ID: InvalidAccessKeyId") as error:
        open_arrays(f"{s3.uri}/ck")
    assert "AWS_PROFILE" in error.value.fix


def test_keys_that_lose_their_right_say_nothing_of_the_step(tmp_path, s3, params, monkeypatch):
    save_steps(tmp_path / "run", {3: params, 9: params})
    s3.upload(tmp_path / "run", "run")
    from jserve.checkpoints.sources.store.mirror import Mirror

    base = Mirror.base.fget
    anonymous = property(lambda self: {**base(self), "aws_credentials": {"type": "anonymous"}})
    monkeypatch.setattr(Mirror, "base", anonymous)
    with pytest.raises(SourceError, match=rf"{s3.uri}/run/9/default cannot be read: PERMISSION_DENIED"):
        open_arrays(f"{s3.uri}/run")


def test_a_right_that_ends_at_the_checkpoint_is_enough(tmp_path, s3, params):
    save_standard(tmp_path / "ck", params)
    s3.upload(tmp_path / "ck", "team/run/ck")
    s3.deny("team/run/ck/_METADATA")
    with pytest.raises(SourceError, match=r"/team/run/ck/_METADATA may not be read by AWS_ACCESS_KEY_ID: InvalidAcc"):
        open_arrays(f"{s3.uri}/team/run/ck")
    s3.deny("team/run/config.json", "team/config.json", "team/run/tokenizer.json")
    assert_same(leaves(open_arrays(f"{s3.uri}/team/run/ck"), params), params)


def test_no_network(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    begun = time.monotonic()
    with pytest.raises(SourceError, match=r"/ck cannot be reached at http://127.0.0.1:9: no answer"):
        open_arrays(f"{s3.uri}/ck")
    assert time.monotonic() - begun < 30


def test_without_obstore(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(SourceError, match="s3://bucket/ck needs obstore, which is not installed") as error:
        open_arrays("s3://bucket/ck")
    assert error.value.fix == "pip install obstore"


def test_keys_of_a_profile(tmp_path, s3, params, monkeypatch):
    save_standard(tmp_path / "ck", params)
    s3.upload(tmp_path / "ck", "ck")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "research")
    (tmp_path / "aws-credentials").write_text(
        "[research]\naws_access_key_id = tests-own-key\naws_secret_access_key = secret\n"
    )
    (tmp_path / "aws-config").write_text(f"[profile research]\nregion = eu-west-1\nendpoint_url = {s3.url}\n")
    assert_same(leaves(open_arrays(f"{s3.uri}/ck"), params), params)


# --- served -----------------------------------------------------------------------------------------------------------


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
