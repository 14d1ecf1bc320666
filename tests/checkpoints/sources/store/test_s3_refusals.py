"""What is said when a checkpoint in s3:// cannot be had."""

import sys
import time

import pytest
from buckets import leaves
from saving import assert_same, save_standard, save_steps

from jserve.checkpoints.open import open_checkpoint
from jserve.checkpoints.own.folder import open_arrays
from jserve.cli.main import main
from jserve.errors import SourceError


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
