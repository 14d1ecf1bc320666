"""Which files make up the weights: whatever does not fit is refused at once, with its file and sizes."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jserve.checkpoints.hf.shards import open_tensors, weight_files
from jserve.errors import CheckpointError, SourceError
from jserve.testing.hf import write_shards

A, B, C = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def tensors():
    return {f"t{i}": np.arange(1000 * i, 1000 * i + 500, dtype=np.float32) for i in range(6)}


@pytest.fixture
def folder(tmp_path, tensors):
    """t0 and t3 in the first shard, t1 and t4 in the second, t2 and t5 in the third."""
    made = tmp_path / "model"
    made.mkdir()
    write_shards(made, tensors, count=3)
    return made


def edit(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def problems(folder):
    with pytest.raises(CheckpointError) as error:
        open_tensors(folder)
    first, *rest = error.value.message.splitlines()
    assert first == f"the weights in {folder} are not whole:"
    return [line.strip() for line in rest]


def test_shards_are_read_together(folder, tensors):
    found = open_tensors(folder)
    assert found.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(found[name].read(), values)
    assert [path.name for path in weight_files(folder)] == [INDEX, A, B, C]


def test_a_missing_shard_and_one_cut_short_are_told_together(folder):
    (folder / A).unlink()
    whole = (folder / B).read_bytes()
    (folder / B).write_bytes(whole[:-1024])
    assert problems(folder) == [
        f"{folder / A} cannot be read: No such file or directory",
        f"{folder / B} has {len(whole) - 1024} bytes; its header says {len(whole)}",
    ]


def test_an_index_that_names_what_is_not_there_or_elsewhere(folder):
    edit(folder, lambda index: index.update(t9=B, t0=B))
    assert problems(folder) == [
        f"tensor t0 is to be in {B} by {INDEX}; it is in {A}",
        f"tensor t9 is to be in {B} by {INDEX}; no file holds it",
    ]


def test_a_tensor_that_the_index_leaves_out(folder):
    edit(folder, lambda index: index.pop("t4"))
    assert problems(folder) == [f"tensor t4 in {B} is not in {INDEX}"]


def test_a_tensor_that_is_there_twice(folder, tensors):
    save_file({name: tensors[name] for name in ("t2", "t5", "t0")}, folder / C)
    assert problems(folder) == [f"tensor t0 is in {A} and in {C}"]


def test_an_extra_shard_that_the_index_leaves_out(folder, tensors):
    extra = folder / "model-00004-of-00004.safetensors"
    save_file({"t9": tensors["t0"]}, extra)
    save_file({"t9": tensors["t0"]}, folder / "model.safetensors")
    size = extra.stat().st_size
    assert problems(folder) == [
        f"{extra} ({size} bytes) is not in {INDEX}",
        f"{folder / 'model.safetensors'} ({size} bytes) is not in {INDEX}",
    ]


def test_files_that_are_no_shards_may_lie_beside(folder, tensors):
    for name in ("adapter_model.safetensors", "consolidated.safetensors"):
        save_file({"t0": tensors["t1"]}, folder / name)
    np.testing.assert_array_equal(open_tensors(folder)["t0"].read(), tensors["t0"])


def test_odd_names_of_shards_and_folders_in_the_repository(folder, tensors):
    (folder / "sub dir").mkdir()
    (folder / A).rename(folder / "sub dir" / "ü 1.safetensors")
    edit(folder, lambda index: index.update(t0="sub dir/ü 1.safetensors", t3="sub dir/ü 1.safetensors"))
    np.testing.assert_array_equal(open_tensors(folder)["t3"].read(), tensors["t3"])


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "a/../../etc/x.safetensors", "/etc/x.safetensors", "../../w", "a\\b.safetensors", ""]
)
@pytest.mark.parametrize("there", [True, False])
def test_an_index_may_not_lead_out_of_the_folder_whether_or_not_something_is_there(folder, name, there):
    if there:
        (folder.parent / "x.safetensors").write_bytes((folder / A).read_bytes())
        (folder.parent.parent / "w").write_bytes(b"x")
    edit(folder, lambda index: index.update(t0=name))
    with pytest.raises(SourceError) as error:
        open_tensors(folder)
    assert error.value.message.startswith(f"{folder / INDEX}: {name!r} is not a name inside the folder")


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "w.pt", "a.pkl"])
def test_an_index_that_names_a_pickle(folder, name, there):
    if there:
        (folder / name).write_bytes(b"x")
    edit(folder, lambda index: index.update(t0=name))
    with pytest.raises(SourceError, match="is a pickle by its name"):
        open_tensors(folder)


def test_an_index_that_names_another_kind_of_file(folder):
    edit(folder, lambda index: index.update(t0="config.json"))
    with pytest.raises(SourceError, match=r"names the file 'config\.json'; only \.safetensors files are read"):
        open_tensors(folder)


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"weight_map": {"a": 3}}', b"\xff\xfe", b"{}"])
def test_a_damaged_index(folder, data):
    (folder / INDEX).write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{INDEX} is damaged"):
        open_tensors(folder)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_out_of_the_folder(folder, there):
    target = folder.parent / "elsewhere.safetensors"
    data = (folder / A).read_bytes()
    (folder / A).unlink()
    if there:
        target.write_bytes(data)
    (folder / A).symlink_to(target)
    with pytest.raises(SourceError, match="is a link that leads out of the checkpoint's folder"):
        open_tensors(folder)


def test_links_of_the_hubs_cache_work(folder, tensors, tmp_path):
    snapshot, blobs = tmp_path / "models--org--name" / "snapshots" / "abc", tmp_path / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    np.testing.assert_array_equal(open_tensors(snapshot)["t5"].read(), tensors["t5"])


def test_one_file_without_an_index(tmp_path, tensors):
    save_file(tensors, tmp_path / "odd name.safetensors")
    assert open_tensors(tmp_path).keys() == tensors.keys()
    save_file({"t0": tensors["t1"]}, tmp_path / "model.safetensors")
    assert open_tensors(tmp_path).keys() == {"t0"}
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_files_that_hold_no_tensor(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    assert problems(tmp_path) == ["no file holds a tensor"]
    (tmp_path / INDEX).write_text('{"weight_map": {}}')
    (tmp_path / "model.safetensors").unlink()
    assert problems(tmp_path) == ["no file holds a tensor"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "holds no weights: looked for model.safetensors and model.safetensors.index.json"),
        ([A], f"holds the shard {A} and no {INDEX}"),
        (["a.safetensors", "b.safetensors"], "holds 2 .safetensors files (a.safetensors, b.safetensors) and neither"),
        (["pytorch_model.bin", "config.json"], "holds its weights as pickles only (pytorch_model.bin)"),
    ],
)
def test_folders_without_weights_that_are_read(tmp_path, names, words):
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(SourceError) as error:
        open_tensors(tmp_path)
    assert words in error.value.message
