"""A Google Cloud Storage of one bucket on loopback: the few calls that readers make, of both of its interfaces."""

import hashlib
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class Gcs:
    """``objects`` are bytes by their keys; ``requests`` are (method, interface, key)."""

    def __init__(self, bucket):
        self.bucket, self.objects, self.requests, self.tokens = bucket, {}, [], set()
        gcs = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                gcs.answer(self)

            do_HEAD = do_GET

            def log_message(self, *arguments):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def stop(self):
        self._http.shutdown()
        self._thread.join(30)
        self._http.server_close()

    def answer(self, call):
        parts = urlsplit(call.path)
        path, query = unquote(parts.path), {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.tokens.add(call.headers.get("Authorization"))
        json_api = f"/storage/v1/b/{self.bucket}/o/"
        if path.startswith(json_api):
            self._object(call, "json", path.removeprefix(json_api))
        elif path.strip("/") == self.bucket and "list-type" in query:
            self._list(call, query)
        elif path.startswith(f"/{self.bucket}/"):
            self._object(call, "xml", path.removeprefix(f"/{self.bucket}/"))
        else:
            self._send(call, 404, b"<Error><Code>NoSuchBucket</Code></Error>")

    def _list(self, call, query):
        prefix, slash = query.get("prefix", ""), query.get("delimiter")
        keys = sorted(key for key in self.objects if key.startswith(prefix))
        inner = {prefix + key[len(prefix) :].split("/")[0] + "/" for key in keys if slash and "/" in key[len(prefix) :]}
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size><ETag>{self._tag(key)}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in keys
            if not slash or "/" not in key[len(prefix) :]
        ) + "".join(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(inner))
        self.requests.append((call.command, "xml", "?list"))
        self._send(call, 200, f"<ListBucketResult>{rows}</ListBucketResult>".encode())

    def _object(self, call, interface, key):
        self.requests.append((call.command, interface, key))
        data = self.objects.get(key)
        if data is None:
            self._send(call, 404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        headers = {"ETag": self._tag(key), "x-goog-generation": "1"}
        wanted = call.headers.get("Range")
        if wanted is None:
            self._send(call, 200, data, headers)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = (int(first), int(last or len(data) - 1) + 1) if first else (len(data) - int(last), len(data))
        end = min(end, len(data))
        self._send(call, 206, data[start:end], headers | {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})

    def _tag(self, key):
        return f'"{hashlib.md5(self.objects[key]).hexdigest()}"'

    def _send(self, call, status, data, headers=()):
        call.send_response(status)
        for name, value in dict(headers, **{"Last-Modified": formatdate(usegmt=True)}).items():
            call.send_header(name, value)
        call.send_header("Content-Length", str(len(data)))
        call.end_headers()
        if call.command != "HEAD":
            call.wfile.write(data)
