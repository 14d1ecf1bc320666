"""From the environment to what both libraries are told; nothing is asked over a network."""

import pytest
import tensorstore as ts
from obstore.store import GCSStore, S3Store

from jserve.checkpoints.sources.store.access import find_access
from jserve.checkpoints.sources.uri import parse_store
from jserve.errors import SourceError

S3, GS = parse_store("s3://bucket/run"), parse_store("gs://bucket/run")
KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}


@pytest.fixture
def home(tmp_path):
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[own]\naws_access_key_id = a\naws_secret_access_key = b%c\n")
    (tmp_path / ".aws" / "config").write_text(
        "[profile own]\nregion = eu-west-1\nendpoint_url = https://store.example\n[profile sso]\nsso_session = x\n"
    )
    return {"HOME": str(tmp_path)}


CASES = [
    ({}, "default", {}, "the machine's role"),
    ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/t"}, "default", {}, "the machine's role"),
    (KEYS, "environment", {"access_key_id": "k", "secret_access_key": "s"}, "AWS_ACCESS_KEY_ID"),
    (
        KEYS | {"AWS_SESSION_TOKEN": "t", "AWS_PROFILE": "own"},
        "environment",
        {"session_token": "t"},
        "AWS_ACCESS_KEY_ID",
    ),
    ({"AWS_PROFILE": "own"}, "profile", {"access_key_id": "a", "secret_access_key": "b%c"}, "the profile own"),
    (KEYS | {"AWS_SKIP_SIGNATURE": "true"}, "anonymous", {"skip_signature": True}, "nobody (AWS_SKIP_SIGNATURE)"),
]


@pytest.mark.parametrize(("env", "kind", "options", "identity"), CASES)
def test_who_asks_s3(home, env, kind, options, identity):
    access = find_access(S3, home | env)
    assert access.kvstore["aws_credentials"]["type"] == kind
    assert access.options.items() >= options.items()
    assert access.identity == identity
    ts.KvStore.Spec({**access.kvstore, "path": "run/"})
    S3Store("bucket", config=dict(access.options))


@pytest.mark.parametrize(
    ("env", "endpoint", "region"),
    [
        ({}, None, "us-east-1"),
        ({"AWS_DEFAULT_REGION": "a"}, None, "a"),
        ({"AWS_DEFAULT_REGION": "a", "AWS_REGION": "b"}, None, "b"),
        ({"AWS_ENDPOINT_URL": "http://one/", "AWS_ENDPOINT_URL_S3": "http://two/"}, "http://two", "us-east-1"),
        ({"AWS_PROFILE": "own"}, "https://store.example", "eu-west-1"),
        ({"AWS_PROFILE": "own", "AWS_ENDPOINT_URL": "http://one", "AWS_REGION": "b"}, "http://one", "b"),
    ],
)
def test_where_s3_is(home, env, endpoint, region):
    access = find_access(S3, home | env)
    assert access.endpoint == access.kvstore.get("endpoint") == access.options.get("endpoint") == endpoint
    assert access.kvstore["aws_region"] == access.options["region"] == region


def test_profiles_that_cannot_be_used(home):
    with pytest.raises(SourceError, match=r"AWS_PROFILE is none, and neither .*credentials nor .*config has it"):
        find_access(S3, home | {"AWS_PROFILE": "none"})
    with pytest.raises(SourceError, match="the profile sso has no aws_access_key_id") as error:
        find_access(S3, home | {"AWS_PROFILE": "sso"})
    assert error.value.fix == 'eval "$(aws configure export-credentials --profile sso --format env)"'


@pytest.mark.parametrize(
    ("env", "options", "environment"),
    [
        ({}, {}, {}),
        ({"GOOGLE_APPLICATION_CREDENTIALS": "/k.json"}, {}, {}),
        ({"GOOGLE_SKIP_SIGNATURE": "1"}, {"skip_signature": True}, {}),
        ({"GOOGLE_BEARER_TOKEN": "t"}, {"bearer_token": "t"}, {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "t"}),
        (
            {"STORAGE_EMULATOR_HOST": "localhost:1"},
            {"base_url": "http://localhost:1", "skip_signature": True},
            {"TENSORSTORE_GCS_HTTP_URL": "http://localhost:1", "GOOGLE_AUTH_TOKEN_FOR_TESTING": "anonymous"},
        ),
    ],
)
def test_gs(env, options, environment):
    access = find_access(GS, env)
    assert (access.options, access.environment) == (options, environment)
    assert access.kvstore == {"driver": "gcs", "bucket": "bucket"}
    ts.KvStore.Spec({**access.kvstore, "path": "run/"})
    GCSStore("bucket", config=dict(access.options))
