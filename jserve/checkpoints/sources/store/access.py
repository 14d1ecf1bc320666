"""How buckets are reached: endpoint, region and credentials, from where the clouds' own tools look for them.

Two libraries read a bucket: obstore the small files, TensorStore the arrays. Each looks for credentials in its own
order, and only some of the usual places; so it is decided here once, and both are told.

    S3    AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION, AWS_DEFAULT_REGION, else the profile's;
          AWS_SKIP_SIGNATURE, AWS_ACCESS_KEY_ID ..., the keys of AWS_PROFILE (or of "default"), then the machine's role
    GCS   STORAGE_EMULATOR_HOST or GOOGLE_BASE_URL; GOOGLE_SKIP_SIGNATURE, GOOGLE_BEARER_TOKEN,
          GOOGLE_APPLICATION_CREDENTIALS, what ``gcloud auth application-default login`` left, the machine's account
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jserve.checkpoints.sources.uri import StoreSource
from jserve.errors import SourceError

__all__ = ["CONNECT_TIMEOUT_S", "Access", "find_access"]

CONNECT_TIMEOUT_S = 10
_STALL_S = 20
"""A transfer that brings next to nothing for so long is given up, and tried again."""
_MACHINE_ROLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


@dataclass(frozen=True, kw_only=True)
class Access:
    """The same way to a bucket, said to both libraries."""

    kvstore: Mapping[str, Any]
    """TensorStore's specification of the bucket, without a path."""
    options: Mapping[str, Any] = field(repr=False)
    """obstore's configuration of its store."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What TensorStore takes from the process's environment and from nowhere else."""
    endpoint: str | None
    """None for the cloud's own."""
    identity: str
    """In words: who asks."""

    def set_environment(self) -> None:
        """Of the process. Limits that the user has set stay as they are."""
        os.environ.update(self.environment)
        os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", str(CONNECT_TIMEOUT_S))
        os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(_STALL_S))
        os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")


def find_access(source: StoreSource, environment: Mapping[str, str]) -> Access:
    """How ``source`` is reached by what ``environment`` says. Nothing is asked over a network.

    Raises SourceError for a profile that is not there, or that has no keys of its own.
    """
    return _s3(source, environment) if source.scheme == "s3" else _gcs(source, environment)


def _s3(source: StoreSource, env: Mapping[str, str]) -> Access:
    profile = _Profile.read(env)
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or profile.get("endpoint_url")
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or profile.get("region") or "us-east-1"
    kvstore: dict[str, Any] = {"driver": "s3", "bucket": source.bucket, "aws_region": region}
    options: dict[str, Any] = {"region": region}
    if endpoint:
        endpoint = endpoint.rstrip("/")
        kvstore["endpoint"] = options["endpoint"] = endpoint
        options["virtual_hosted_style_request"] = False
    if _is_on(env.get("AWS_SKIP_SIGNATURE")):
        kind, identity = {"type": "anonymous"}, "nobody (AWS_SKIP_SIGNATURE)"
        options["skip_signature"] = True
    elif env.get("AWS_ACCESS_KEY_ID") and env.get("AWS_SECRET_ACCESS_KEY"):
        kind, identity = {"type": "environment"}, "AWS_ACCESS_KEY_ID"
        options |= {"access_key_id": env["AWS_ACCESS_KEY_ID"], "secret_access_key": env["AWS_SECRET_ACCESS_KEY"]}
        if token := env.get("AWS_SESSION_TOKEN"):
            options["session_token"] = token
    elif profile.is_asked_for or (profile.values and not any(env.get(name) for name in _MACHINE_ROLES)):
        kind, identity = profile.kind(), f"the profile {profile.name}"
        options |= profile.keys(source)
    else:
        kind, identity = {"type": "default"}, "the machine's role"
    kvstore["aws_credentials"] = kind
    return Access(kvstore=kvstore, options=options, endpoint=endpoint, identity=identity)


@dataclass(frozen=True, kw_only=True)
class _Profile:
    """A section of AWS's shared files, the one of the credentials over the one of the config."""

    name: str
    is_asked_for: bool
    files: tuple[Path, Path]
    """Credentials, config."""
    values: Mapping[str, str]

    @classmethod
    def read(cls, env: Mapping[str, str]) -> _Profile:
        asked = env.get("AWS_PROFILE") or env.get("AWS_DEFAULT_PROFILE")
        name = asked or "default"
        home = Path(env.get("HOME") or Path.home()) / ".aws"
        credentials = Path(env.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials").expanduser()
        config = Path(env.get("AWS_CONFIG_FILE") or home / "config").expanduser()
        section = name if name == "default" else f"profile {name}"
        values = _section(config, section) | _section(credentials, name)
        if asked and not values:
            raise SourceError(
                f"AWS_PROFILE is {asked}, and neither {credentials} nor {config} has it",
                fix="name a profile that is there, or unset AWS_PROFILE",
            )
        return cls(name=name, is_asked_for=asked is not None, files=(credentials, config), values=values)

    def get(self, name: str) -> str | None:
        return self.values.get(name)

    def kind(self) -> dict[str, str]:
        names = ("credentials_file", "config_file")
        there = {name: str(path) for name, path in zip(names, self.files, strict=True) if path.is_file()}
        return {"type": "profile", "profile": self.name, **there}

    def keys(self, source: StoreSource) -> dict[str, str]:
        """Its static keys, which both libraries can use."""
        names = {
            "aws_access_key_id": "access_key_id",
            "aws_secret_access_key": "secret_access_key",
            "aws_session_token": "session_token",
        }
        found = {ours: self.values[theirs] for theirs, ours in names.items() if theirs in self.values}
        if "access_key_id" not in found or "secret_access_key" not in found:
            raise SourceError(
                f"{source}: the profile {self.name} has no aws_access_key_id with aws_secret_access_key; profiles that "
                "get their keys elsewhere (single sign-on, a role, a program) are not followed",
                fix=f'eval "$(aws configure export-credentials --profile {self.name} --format env)"',
            )
        return found


def _section(path: Path, name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, configparser.Error, UnicodeDecodeError) as error:
        raise SourceError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
    return dict(parser.items(name)) if parser.has_section(name) else {}


def _gcs(source: StoreSource, env: Mapping[str, str]) -> Access:
    endpoint = env.get("STORAGE_EMULATOR_HOST") or env.get("GOOGLE_BASE_URL")
    options: dict[str, Any] = {}
    environment = {}
    if endpoint:
        endpoint = (endpoint if "://" in endpoint else f"http://{endpoint}").rstrip("/")
        options["base_url"] = environment["TENSORSTORE_GCS_HTTP_URL"] = endpoint
    if token := env.get("GOOGLE_BEARER_TOKEN"):
        identity = "GOOGLE_BEARER_TOKEN"
        options["bearer_token"] = environment["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = token
    elif _is_on(env.get("GOOGLE_SKIP_SIGNATURE")) or (endpoint and not env.get("GOOGLE_APPLICATION_CREDENTIALS")):
        identity = "nobody"
        options["skip_signature"] = True
        if endpoint:  # TensorStore has no switch for that, and would look for a machine's account
            environment["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "anonymous"
    else:
        identity = env.get("GOOGLE_APPLICATION_CREDENTIALS") or "gcloud's default credentials or the machine's account"
    return Access(
        kvstore={"driver": "gcs", "bucket": source.bucket},
        options=options,
        environment=environment,
        endpoint=endpoint,
        identity=identity,
    )


def _is_on(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "on")
