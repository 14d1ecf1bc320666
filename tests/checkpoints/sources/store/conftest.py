"""An S3 on loopback: moto's server, in this process, with every request written down."""

import hashlib
import json
import re
import sys
import threading
import urllib.request
from pathlib import Path
from urllib.parse import parse_qs

import obstore
import pytest
from moto.s3.models import s3_backends
from obstore.store import S3Store

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "orbax")]

KEY = "tests-own-key"


class Store:
    """A bucket of one test. ``requests`` are (method, key or query) of what was asked since ``forget``."""

    def __init__(self, server, bucket):
        self.url, self.bucket, self._server = server.url, bucket, server
        headers = {"Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/20200101/us-east-1/s3/aws4_request"}
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{bucket}", headers=headers, method="PUT")).close()
        keys = {"access_key_id": KEY, "secret_access_key": "secret"}
        self._client = S3Store(
            bucket, config={"endpoint": self.url, "region": "us-east-1", **keys}, client_options={"allow_http": True}
        )

    @property
    def uri(self):
        return f"s3://{self.bucket}"

    @property
    def requests(self):
        return [
            (method, path.removeprefix(f"/{self.bucket}/"))
            for method, path in self._server.requests
            if path.startswith(f"/{self.bucket}")
        ]

    @property
    def got(self):
        """Keys of the objects whose bytes were asked for."""
        return [path for method, path in self.requests if method == "GET" and not path.startswith(f"/{self.bucket}")]

    def deny(self, *keys):
        """Until ``deny()``: refuse what begins so."""
        self._server.denied = tuple(f"/{self.bucket}/{key}" for key in keys)
        self._server.allowed, self._server.etags = "", True

    def end_right_at(self, folder):
        """Until ``deny()``: refuse to read and to list all but what is in ``folder``."""
        self._server.allowed = f"/{self.bucket}/{folder}/"

    def forget_etags(self):
        """Until ``deny()``: give none."""
        self._server.etags = False

    def date(self, key, when):
        """Say of ``key`` that it was written at ``when``."""
        s3_backends["123456789012"]["aws"].get_object(self.bucket, key).last_modified = when

    def forget(self):
        self._server.requests.clear()

    def put(self, key, data):
        obstore.put(self._client, key, data)

    def put_raw(self, key, data):
        """With a key that no client would write."""
        s3_backends["123456789012"]["aws"].put_object(self.bucket, key, data)

    def delete(self, key):
        obstore.delete(self._client, key)

    def upload(self, folder, prefix=""):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put("/".join(filter(None, [prefix, path.relative_to(folder).as_posix()])), path.read_bytes())


class _Server:
    def __init__(self):
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log(self, *arguments):
                pass

        self.requests = []
        self.denied, self.allowed, self.etags = (), "", True
        self._app = DomainDispatcherApplication(create_backend_app)
        self._http = make_server("127.0.0.1", 0, self._count, threaded=True, request_handler=Quiet)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def _count(self, environ, start_response):
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        path = environ["PATH_INFO"]
        asked = f"{path}/{''.join(parse_qs(environ['QUERY_STRING']).get('prefix', []))}"
        denied = (self.denied and path.startswith(self.denied)) or not asked.startswith(self.allowed)
        if denied or KEY not in environ.get("HTTP_AUTHORIZATION", ""):
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>InvalidAccessKeyId</Code><Message>unknown</Message></Error>"]
        return self._app(environ, start_response) if self.etags else self._without_etags(environ, start_response)

    def _without_etags(self, environ, start_response):
        answers = []
        body = b"".join(self._app(environ, lambda status, headers, *rest: answers.append((status, headers))))
        body = re.sub(rb"<ETag>.*?</ETag>", b"", body)
        ((status, headers),) = answers
        headers = {name.lower(): value for name, value in headers if name.lower() != "etag"}
        start_response(status, list((headers | ({"content-length": str(len(body))} if body else {})).items()))
        return [body]

    def stop(self):
        self._http.shutdown()
        self._thread.join(30)
        self._http.server_close()


@pytest.fixture(scope="session")
def s3_server():
    server = _Server()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server, monkeypatch, tmp_path, request):
    """A new bucket, and the environment that leads to it and to nothing else."""
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_SKIP_SIGNATURE", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws-credentials"))
    store = Store(s3_server, f"bucket-{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]}")
    store.forget()
    yield store
    store.deny()


@pytest.fixture(scope="module")
def params():
    from flax import nnx
    from saving import Tiny

    return nnx.to_pure_dict(nnx.state(Tiny(nnx.Rngs(0)), nnx.Param))


@pytest.fixture(scope="module")
def llama_run(tmp_path_factory):
    """A run with its settings and its tokenizer above a folder of steps."""
    from saving import save_steps
    from trees import LLAMA, hf_weights, nested

    from jserve.testing.tokenizer import ByteTokenizer

    root = tmp_path_factory.mktemp("llama") / "tiny-llama"
    config = LLAMA | {"vocab_size": 260}
    save_steps(root / "steps", {1: nested(hf_weights(config))})
    (root / "config.json").write_text(json.dumps(config))
    (root / "tokenizer.json").write_text(ByteTokenizer().to_json())
    return root
