"""Servers on this machine that speak as S3 and the Hugging Face Hub do, as far as reading goes, and can fail."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

T5X = Path(__file__).parent / "golden" / "t5x" / "bf16_params" / "checkpoint" / "checkpoint_4"
GOLDEN = T5X.parents[3]
TARGETS = {
    "statekit": "run",
    "torch": "run.pt",
    "dcp": "run",
    "safetensors": "run",
    "flax": "run",
    "keras-h5": "run.weights.h5",
    "t5x": "run",
    "tf-bundle": "run",
    "accelerate": "run",
}
KINDS = {
    **{to: (T5X, name) for to, name in TARGETS.items()},
    "orbax": (T5X, "run"),
    "dcp-safetensors": (GOLDEN / "hf_adafactor" / "fixedlr_scale_beta1_wd" / "checkpoint", "run"),
    "hf-trainer": (GOLDEN / "hf_adafactor" / "fixedlr_scale_beta1_wd" / "checkpoint", "run"),
    "megatron": (GOLDEN / "torch_formats" / "adamw_megatron_core" / "checkpoint", "run"),
    "mxnet": (GOLDEN / "mxnet_folders" / "npy_beside_params" / "checkpoint", "run"),
    "keras": (GOLDEN / "keras" / "adamw_ema_schedule_clip" / "checkpoint" / "model.keras", "run.keras"),
    "deepspeed": (GOLDEN / "torch_formats" / "adamw_deepspeed_bf16_zero1" / "checkpoint", "run"),
}
"""A source and a target's name for every container that is written."""
SECRET = "AKIASECRETOFTHESTORE"
"""What a server repeats in its errors, as real ones do with a key."""


class Served:
    """A server's files and what it does wrong.

    Attributes:
        files: Bytes by name.
        marks: Metadata by name, for those that have it.
        parts: Parts of uploads that aren't complete; `coming` has their metadata.
        fault: `short`, `long`, `flood`, `whole`, `denied`, `broken` or "": what a read gets; `unpinned`: of
            whichever state the file has. `endless`: each page of a listing announces another. `busy`,
            `lost`, `unconditional`, `other`: each write is first answered 503; is done, but the answer gets lost; is
            done whatever the condition; stores other bytes.
        port: Where the server listens.
        is_over: Nobody asks any more.
        flooded: How many MiB of a flood were taken.
        tag: The ETag of each file in the place of its own.
        moments: When each file was changed: in a listing of S3, in one of Azure, and in a header.
        instead: What answers for the Hub, of `info`, `tree` or `resolve`, which are its addresses.
        commit: The commit that the Hub says each revision is.
        requests: Method and path of each request.
        on_write: Called before each request that writes, with its number.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files, self.fault = dict(files), ""
        self.marks: dict[str, str] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.coming: dict[str, str] = {}
        self.tag, self.port, self.is_over, self.flooded = "", 0, False, 0
        self.instead: dict[str, Callable[[Any], object]] = {}
        self.moments = ("2026-11-27T12:00:00.000Z", *2 * ("Fri, 27 Nov 2026 12:00:00 GMT",))
        self.commit: str | None = "c0ffee" * 6 + "c0ff"
        self.requests: list[str] = []
        self.writes = 0
        self.failed: set[str] = set()
        self.on_write: Callable[[int], object] = int
        self.lock = threading.Lock()

    def etag(self, name: str) -> str:
        return self.tag or f'"{hashlib.md5(self.files[name]).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    served: Served
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each small answer takes 40 ms

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
        if self.served.fault == "long":
            part += bytes(2**20)
        if self.served.fault == "flood":
            return self.flood(f"bytes {start}-{last}/{len(data)}", headers)
        if self.served.fault == "whole":
            return self.answer(200, data, **headers)
        total = f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}"
        if not data and "Range" in self.headers:
            return self.answer(416)
        self.answer(206 if "Range" in self.headers else 200, part, Content_Range=total, **headers)
        return None

    def flood(self, part: str, headers: Mapping[str, str]) -> None:
        """Sends 256 MiB for a part, and counts what is taken of them."""
        self.send_response(206)
        length = f"{256 * 2**20}"
        for name, value in {"Content-Range": part, "Content-Length": length, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.close_connection = True
        with suppress(OSError):
            for _ in range(256):
                self.wfile.write(bytes(2**20))
                self.served.flooded += 1

    def drip(self, status: int = 200, block: bytes = b" ", pause: float = 0.0, **headers: str) -> None:
        """Sends a body without end, as long as anybody takes it."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        with suppress(OSError):
            while not self.served.is_over:
                self.wfile.write(block)
                time.sleep(pause)


_GOOGLE = "/storage/v1/b/"
"""What addresses of Google's JSON interface begin with."""


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
        elif address.path.startswith(_GOOGLE):
            self.of_google(address.path.removeprefix(_GOOGLE), query)
        elif "list-type" in query:
            self.answer(200, self.listed(query.get("prefix", [""])[0], "delimiter" in query))
        elif "comp" in query:
            self.answer(200, self.listed_by_azure(query.get("prefix", [""])[0]))
        elif (
            name in self.served.files
            and self.served.fault != "unpinned"
            and self.headers.get("If-Match", self.served.etag(name)) != self.served.etag(name)
        ):
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        else:
            etag = self.served.etag(name) if name in self.served.files else ""
            marks = {
                f"x-{kind}-meta-statekit": mark
                for kind in ("amz", "goog")
                if (mark := self.served.marks.get(name))
            }
            self.file(name, ETag=etag, Last_Modified=self.served.moments[2], **marks)

    do_HEAD = do_GET

    def of_google(self, path: str, query: Mapping[str, list[str]]) -> None:
        """Answers tensorstore, which asks Google's store by JSON, with generations in the place of ETags.

        Source: cloud.google.com/storage/docs/json_api, Objects: get and list; tensorstore 0.1.86, driver `gcs`.
        """
        _, _, key = path.partition("/o")
        if key:
            name = unquote(key.removeprefix("/"))
            return self.file(name, x_goog_generation=self.generation(name))
        first, last = (query.get(name, [""])[0] for name in ("startOffset", "endOffset"))
        names = [name for name in sorted(self.served.files) if name >= first and not (last and name >= last)]
        items = [{"name": name, "generation": self.generation(name)} for name in names]
        return self.answer(200, json.dumps({"items": items}).encode(), Content_Type="application/json")

    def generation(self, name: str) -> str:
        data = self.served.files.get(name, b"")
        return f"{1 + int.from_bytes(hashlib.md5(data).digest()[:6], 'big')}"

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.written(body)

    do_POST = do_DELETE = do_PUT

    def written(self, body: bytes) -> None:
        """Does what a request writes, or fails at it."""
        served, address = self.served, urlsplit(self.path)
        served.requests.append(f"{self.command} {self.path}")
        served.writes += 1
        served.on_write(served.writes)
        is_first = self.path not in served.failed
        served.failed.add(self.path)
        if served.fault == "busy" and is_first:
            return self.answer(503, b"<Error><Code>SlowDown</Code></Error>")
        if served.fault == "other" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        with served.lock:
            status, text, headers = self.done(
                address.path.split("/", 2)[-1], parse_qs(address.query, True), body
            )
        if served.fault == "lost" and is_first:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return None
        return self.answer(status, text, **headers)

    def done(
        self, name: str, query: Mapping[str, list[str]], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        """Does what a request writes; returns the answer."""
        served, name = self.served, unquote(name)
        upload = query.get("uploadId", [""])[0]
        if self.command == "DELETE":
            served.parts.pop(upload, None) if upload else served.files.pop(name, None)
            return 204, b"", {}
        if "delete" in query:
            keys = re.findall("<Key>(.*?)</Key>", body.decode())
            for key in keys:
                served.files.pop(unescape(key), None)
            rows = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return 200, f"<DeleteResult>{rows}</DeleteResult>".encode(), {}
        if "uploads" in query:
            upload = f"{name}-{len(served.parts)}"
            served.parts[upload] = {}
            served.coming[upload] = self.mark()
            begun = f"<UploadId>{escape(upload)}</UploadId>"
            return 200, f"<InitiateMultipartUploadResult>{begun}</InitiateMultipartUploadResult>".encode(), {}
        if "partNumber" in query:
            served.parts[upload][int(query["partNumber"][0])] = body
            return 200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
        if upload:
            if upload not in served.parts:
                return 404, b"<Error><Code>NoSuchUpload</Code></Error>", {}
            served.files[name] = b"".join(data for _, data in sorted(served.parts.pop(upload).items()))
            served.marks[name] = served.coming.pop(upload)
            tag = f"<ETag>{escape(served.etag(name))}</ETag>"
            return 200, f"<CompleteMultipartUploadResult>{tag}</CompleteMultipartUploadResult>".encode(), {}
        is_new = (
            self.headers.get("If-None-Match") == "*" or self.headers.get("x-goog-if-generation-match") == "0"
        )
        if is_new and name in served.files and served.fault != "unconditional":
            return 412, b"<Error><Code>PreconditionFailed</Code></Error>", {}
        served.files[name], served.marks[name] = body, self.mark()
        return 200, b"", {"ETag": served.etag(name)}

    def mark(self) -> str:
        return self.headers.get("x-amz-meta-statekit") or self.headers.get("x-goog-meta-statekit") or ""

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
                f"<LastModified>{self.served.moments[0]}</LastModified></Contents>"
            )
        rows += [
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in sorted(folders)
        ]
        more = "false"
        if self.served.fault == "endless":
            more = "true"
            rows.append(f"<NextContinuationToken>{len(self.served.requests)}</NextContinuationToken>")
        return (
            f"<ListBucketResult><IsTruncated>{more}</IsTruncated>{''.join(rows)}</ListBucketResult>".encode()
        )

    def listed_by_azure(self, prefix: str) -> bytes:
        """Returns a listing of all below a prefix. Source: learn.microsoft.com, "List Blobs"."""
        rows = [
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{self.served.moments[1]}</Last-Modified>"
            f"<Content-Length>{len(data)}</Content-Length><Content-Type>a/b</Content-Type>"
            f"<Etag>{escape(self.served.etag(name))}</Etag></Properties></Blob>"
            for name, data in self.served.files.items()
            if name.startswith(prefix)
        ]
        return (
            f"<EnumerationResults><Blobs>{''.join(rows)}</Blobs><NextMarker/></EnumerationResults>".encode()
        )


class _Hub(_Handler):
    @property
    def commit(self) -> str | None:
        return self.served.commit

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.served.requests.append(f"{self.command} {path}")
        asked = next((kind for kind in ("resolve", "tree") if f"/{kind}/" in path), "info")
        if asked in self.served.instead:
            self.served.instead[asked](self)
            return None
        if "/resolve/" in path:
            _, _, rest = path.partition("/resolve/")
            revision, _, name = rest.partition("/")
            if revision != self.commit:
                return self.answer(404)
            if name not in self.served.files:
                return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=revision)
            return self.file(name, X_Repo_Commit=revision, ETag=self.served.etag(name))
        if "/tree/" in path:
            names = self.served.files
            rows: list[dict[str, Any]] = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in names.items()
            ]
            folders = {f"{folder}" for n in names for folder in PurePosixPath(n).parents if folder.parts}
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
    server.handle_error = lambda *of: None  # type: ignore[method-assign]  # of processes that were killed
    served.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", served
    finally:
        served.is_over = True
        server.shutdown()
        server.server_close()
        thread.join()
