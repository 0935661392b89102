"""Servers on this machine that speak as S3 and the Hugging Face Hub do, as far as reading goes, and can fail."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

SECRET = "AKIASECRETOFTHESTORE"
"""What a server repeats in its errors, as real ones do with a key."""


class Served:
    """A server's files and what it does wrong.

    Attributes:
        files: Bytes by name.
        fault: `short`, `denied`, `broken` or "": what a read gets.
        requests: Method and path of each request.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files, self.fault = dict(files), ""
        self.requests: list[str] = []

    def etag(self, name: str) -> str:
        return f'"{hashlib.md5(self.files[name]).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    served: Served

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": f"{len(body)}", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def file(self, name: str, **headers: str) -> None:
        """Sends a file, or the part of it that is asked for."""
        data = self.served.files.get(name)
        if data is None:
            return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        start, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = data[int(start) : int(last) + 1 if last else None]
        if self.served.fault == "short":
            part = part[:-1]
        total = f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}"
        self.answer(206 if "Range" in self.headers else 200, part, Content_Range=total, **headers)
        return None


class _S3(_Handler):
    def do_GET(self) -> None:
        address = urlsplit(self.path)
        _, _, name = unquote(address.path).split("/", 2) if address.path.count("/") > 1 else ("", "", "")
        self.served.requests.append(f"{self.command} {self.path}")
        query = parse_qs(address.query)
        if self.served.fault in ("denied", "broken"):
            status, code = (
                (403, "InvalidAccessKeyId") if self.served.fault == "denied" else (400, "InvalidRequest")
            )
            self.answer(
                status,
                f"<Error><Code>{code}</Code><AWSAccessKeyId>{SECRET}</AWSAccessKeyId></Error>".encode(),
            )
        elif "list-type" in query:
            self.answer(200, self.listed(query.get("prefix", [""])[0], "delimiter" in query))
        elif name in self.served.files and self.headers.get(
            "If-Match", self.served.etag(name)
        ) != self.served.etag(name):
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        else:
            etag = self.served.etag(name) if name in self.served.files else ""
            self.file(name, ETag=etag, Last_Modified="Fri, 27 Nov 2026 12:00:00 GMT")

    do_HEAD = do_GET

    def is_stale(self, name: str) -> bool:
        pinned = self.headers.get("If-Match")
        return pinned is not None and name in self.served.files and pinned != self.served.etag(name)

    def listed(self, prefix: str, by_folder: bool) -> bytes:
        rows, folders = [], set()
        for name in sorted(name for name in self.served.files if name.startswith(prefix)):
            first, slash, _ = name[len(prefix) :].partition("/")
            if by_folder and slash:
                folders.add(f"{prefix}{first}/")
                continue
            size, etag = len(self.served.files[name]), escape(self.served.etag(name))
            rows.append(
                f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size><ETag>{etag}</ETag>"
                "<LastModified>2026-11-27T12:00:00.000Z</LastModified></Contents>"
            )
        rows += [
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in sorted(folders)
        ]
        return (
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>".encode()
        )


class _Hub(_Handler):
    commit = "c0ffee" * 6 + "c0ff"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.served.requests.append(f"{self.command} {path}")
        if "/resolve/" in path:
            _, _, rest = path.partition("/resolve/")
            revision, _, name = rest.partition("/")
            return self.file(name) if revision == self.commit else self.answer(404)
        if "/tree/" in path:
            names = self.served.files
            rows: list[dict[str, Any]] = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in names.items()
            ]
            folders = {n.rpartition("/")[0] for n in names if "/" in n}
            rows += [{"type": "directory", "path": folder, "oid": "0" * 40} for folder in folders]
            return self.answer(200, json.dumps(rows).encode(), Content_Type="application/json")
        if path.startswith("/api/models/owner/name"):
            body = json.dumps({"id": "owner/name", "sha": self.commit}).encode()
            return self.answer(200, body, Content_Type="application/json")
        return self.answer(404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


@contextmanager
def serving(kind: str, files: Mapping[str, bytes]) -> Iterator[tuple[str, Served]]:
    """Serves files as `s3` or as `hub` on this machine; yields the address and what is served."""
    served = Served(files)
    handler = type("Handler", (_S3 if kind == "s3" else _Hub,), {"served": served})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
