"""gs:// through real clients, against a stand-in on loopback."""

import pytest
from gcs import Gcs
from saving import WRITERS, assert_same, save_steps, shapes

from jserve.checkpoints.orbax.fit import fit_tree
from jserve.checkpoints.own.folder import open_arrays
from jserve.errors import SourceError


@pytest.fixture
def gs(monkeypatch):
    server = Gcs("a-bucket")
    for name in ("GOOGLE_BASE_URL", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SKIP_SIGNATURE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "")  # put back as it was afterwards
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "a-token")
    yield server
    server.stop()


def upload(gs, folder, prefix):
    for path in folder.rglob("*"):
        if path.is_file():
            gs.objects[f"{prefix}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()


@pytest.mark.parametrize("writer", ["StandardCheckpointer", "PyTreeCheckpointer, without OCDBT"])
def test_restored_with_one_token_for_both_clients(tmp_path, gs, params, writer):
    WRITERS[writer](tmp_path / "ck", params)
    upload(gs, tmp_path / "ck", "run/a b")
    opened = open_arrays("gs://a-bucket/run/a b")
    assert_same(fit_tree(opened.saved.tree, shapes(params), where="gs").leaves, params)
    assert gs.tokens == {"Bearer a-token"}
    small = {key for method, interface, key in gs.requests if (method, interface) == ("GET", "xml")}
    assert small == {"?list", "run/a b/_METADATA", "run/a b/_CHECKPOINT_METADATA"}
    assert {interface for _, interface, key in gs.requests if key.endswith((".ocdbt", "/0.0"))} == {"json"}


def test_a_step_without_the_file_of_finished_ones(tmp_path, gs, params):
    save_steps(tmp_path / "run", {3: params, 9: params})
    (tmp_path / "run" / "9" / "commit_success.txt").unlink()
    upload(gs, tmp_path / "run", "run")
    assert open_arrays("gs://a-bucket/run").saved.layout.step == "3"
    with pytest.raises(SourceError, match=r"gs://a-bucket/run/9 is unfinished: it has no commit_success.txt"):
        open_arrays("gs://a-bucket/run/9")


def test_what_is_not_there(gs):
    with pytest.raises(SourceError, match="gs://a-bucket/none does not exist"):
        open_arrays("gs://a-bucket/none")
    with pytest.raises(SourceError, match=r"gs://another does not exist at http://127.0.0.1"):
        open_arrays("gs://another/ck")
