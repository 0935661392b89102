"""Reads checkpoints in repositories of the Hugging Face Hub, `hf://owner/name@revision/path`.

The revision is resolved to a commit first, and each read is of that commit. The token is the one that huggingface_hub
finds itself. The requests are ours, through the library's session: the library waits for ever, and reads all of an
answer, of a redirect's and of an error's.

Source: huggingface_hub 1.0, "Interact with the Hub through the Filesystem API" for addresses; `HfApi.repo_info`,
`HfApi.list_repo_tree` and `utils.http_backoff` for requests; huggingface.co/docs/hub/api.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from statekit.errors import (
    CorruptError,
    FormatError,
    NotFoundError,
    RefusedError,
    StatekitError,
    UsageError,
    extra,
)
from statekit.files.ahead import ReadAhead
from statekit.files.tree import Facts, StoredPlace, address_of, copying, fill

_KINDS = {"datasets": "dataset", "models": "model"}
_COMMIT = re.compile("[0-9a-f]{40,64}")
_PART = re.compile(r"bytes (\d+)-\d+/(?:(\d+)|\*)")
_MOST_ENTRIES = 200_000
"""Files and folders of a repository; the Hub itself advises at most half as many."""
_SECONDS, _PART_SECONDS = 60.0, 300.0
"""How long the Hub may take for its next bytes, and for a whole page of a listing; and for a part of a file."""
_FAILED_SECONDS = 60.0
"""How long a file that could not be read is not asked for again."""
_MOST_BYTES, _MOST_PAGES = 2**24, 1000
"""Bytes of a page of a listing, which is JSON, and pages of a listing; the Hub sends a thousand entries in each."""
_MOST_VALUES = 2_000_000
"""Lists, names and values of such a page: in memory each takes many times its bytes."""
_BUSY, _PAUSES = (408, 429, 500, 502, 503, 504), (1.0, 2.0, 4.0, 8.0, 8.0)
"""What the Hub answers when it may answer later, and seconds between requests then."""
_DROPPED = {"ConnectError", "ReadError", "WriteError", "CloseError", "RemoteProtocolError"}
"""Errors of a connection that ended, in whichever library the Hub's has its session of."""
_MOST_ANSWERS = 20
"""Redirects and answers of a busy Hub to one request."""


def in_hub(text: str) -> StoredPlace:
    """Returns the place at an address on the Hub, in a tree of its own.

    Raises:
        UsageError: The address names no repository, has a password or a query, or huggingface_hub isn't installed.
        NotFoundError: There is no such repository or revision, or it isn't open to the user.
    """
    _, first, rest = address_of(text)
    parts = [first, *PurePosixPath(rest).parts]
    kind = _KINDS[parts.pop(0)] if first in _KINDS else "model"
    if len(parts) < 2:
        raise _no_repository(text)
    name, marked, revision = parts[1].partition("@")
    if marked and set(revision) <= {"."}:  # none, or a step in the Hub's own addresses
        raise _no_repository(text)
    tree = HubTree(f"{parts[0]}/{name}", kind, revision or None, text)
    return StoredPlace(ReadAhead(tree), PurePosixPath(*parts[2:]))


def _no_repository(text: str) -> UsageError:
    return UsageError(
        "The address names no repository.",
        place=text,
        expected="hf://OWNER/NAME, hf://OWNER/NAME@REVISION/PATH or hf://datasets/OWNER/NAME",
    )


class HubTree:
    """A repository at a commit, listed once.

    Args:
        repository: `owner/name`.
        kind: `model` or `dataset`.
        revision: A branch, a tag or a commit; the main branch if None.
        text: The address as the user gave it.
    """

    def __init__(self, repository: str, kind: str, revision: str | None, text: str) -> None:
        try:
            from huggingface_hub import constants, errors, hf_hub_url, utils
        except ModuleNotFoundError:
            raise UsageError(
                "Reading from the Hub needs the library huggingface_hub.",
                place=text,
                remedy=f"{extra('remote')}, or copy it first: {copying(text)}",
            ) from None
        start = f"hf://{'' if kind == 'model' else f'{kind}s/'}{repository}"
        self.place = f"{start}@{revision}" if revision else start
        self._errors, self._url, self._utils = errors, hf_hub_url, utils
        self._repository, self._kind = repository, kind
        self._commit: str | None = None
        self._failures: dict[str, tuple[float, FormatError]] = {}
        with self._asking(""):
            utils.validate_repo_id(repository)
        self._endpoint = constants.ENDPOINT.rstrip("/")
        about = f"{self._endpoint}/api/{kind}s/{repository}"
        answer, _ = self._json(f"{about}/revision/{quote(revision, safe='')}" if revision else about)
        self._commit = answer.get("sha") if isinstance(answer, dict) else None
        if not _COMMIT.fullmatch(f"{self._commit}"):
            raise FormatError(
                "The Hub names no commit of a revision.", place=self.place, found=f"{self._commit}"[:80]
            )
        self._folders: dict[str, dict[str, Facts]] = {"": {}}
        for row in self._rows(f"{about}/tree/{self._commit}?recursive=true"):
            facts = self._facts(row)
            folder, _, last = facts.name.rpartition("/")
            self._folders.setdefault(folder, {})[last] = facts

    def facts(self, name: str) -> Facts | None:
        folder, _, last = name.rpartition("/")
        return self._folders.get(folder, {}).get(last) if name else Facts("", "folder")

    def names(self, folder: str) -> Sequence[str]:
        return sorted(self._folders.get(folder, ()))

    def read_into(self, facts: Facts, start: int, into: memoryview) -> None:
        until, failure = self._failures.get(facts.name, (0.0, None))
        if failure and time.monotonic() < until:
            raise failure
        try:
            self._read_into(facts, start, into)
        except FormatError as error:  # detection reads a file a dozen times, and each would wait as long
            self._failures[facts.name] = time.monotonic() + _FAILED_SECONDS, error
            raise

    def _read_into(self, facts: Facts, start: int, into: memoryview) -> None:
        with self._asking(facts.name):
            for pause in _PAUSES:
                try:
                    return self._read_part(facts, start, into)
                except Exception as error:  # a connection may drop once in hours
                    if type(error).__name__ not in _DROPPED:
                        raise
                    time.sleep(pause)
            self._read_part(facts, start, into)

    def _read_part(self, facts: Facts, start: int, into: memoryview) -> None:
        data = bytearray()
        parts = {"Range": f"bytes={start}-{start + len(into) - 1}"}
        where = {"repo_type": self._kind, "revision": self._commit}
        with closing(self._answer(self._url(self._repository, facts.name, **where), parts)) as answer:
            is_part = answer.status_code == 206
            self._check_part(facts, start, answer)
            before = 0 if is_part else start  # a server that knows no parts sends all from the first byte on
            for block in self._blocks(answer, _PART_SECONDS):
                data += block[before:]
                before = max(before - len(block), 0)
                if len(data) > len(into):
                    break
        fill(into, memoryview(data if is_part else data[: len(into)]), start, f"{self.place}/{facts.name}")

    def _check_part(self, facts: Facts, start: int, answer: Any) -> None:
        """Refuses an answer that says itself that it is of another part, or of a file of another size."""
        named = _PART.match(answer.headers.get("Content-Range", "")) if answer.status_code == 206 else None
        if named and (int(named[1]) != start or int(named[2] or facts.size) != facts.size):
            raise CorruptError(
                "The Hub answers with another part of a file.",
                place=f"{self.place}/{facts.name}",
                expected=f"bytes from {start} on, of {facts.size}",
                found=named[0][:80],
                remedy="ask without the proxy or mirror between",
            )

    def _rows(self, address: str | None) -> Iterator[Any]:
        """Yields the rows of a listing, page by page."""
        count = pages = 0
        while address:
            page, address = self._json(address)
            count, pages = count + len(page) if isinstance(page, list) else count, pages + 1
            if count > _MOST_ENTRIES or pages > _MOST_PAGES:
                raise RefusedError(
                    "A repository has too many files.", place=self.place, expected=f"at most {_MOST_ENTRIES}"
                )
            yield from page if isinstance(page, list) else [None]

    def _json(self, address: str) -> tuple[Any, str | None]:
        """Returns what the Hub says at an address, and where it goes on."""
        data = bytearray()
        with self._asking(""), closing(self._answer(address, {})) as answer:
            for block in self._blocks(answer, _SECONDS):
                data += block
                if len(data) > _MOST_BYTES:
                    break
            if len(data) > _MOST_BYTES or sum(map(data.count, b"[{,")) > _MOST_VALUES:
                raise FormatError(
                    "The Hub's answer is too large.",
                    place=self.place,
                    expected=f"at most {_MOST_BYTES} bytes, and {_MOST_VALUES} values",
                )
            return json.loads(data), answer.links.get("next", {}).get("url")

    def _answer(self, address: str, headers: Mapping[str, str]) -> Any:
        """Returns an answer whose head alone was read. The request asks for an uncompressed body."""
        session = self._utils.get_session()
        token = None if address.startswith(f"{self._endpoint}/") else False  # a listing may go on elsewhere
        sent = {**self._utils.build_hf_headers(token=token), **headers, "Accept-Encoding": "identity"}
        request = session.build_request("GET", address, headers=sent, timeout=_SECONDS)
        pauses = iter(_PAUSES)
        for _ in range(_MOST_ANSWERS):
            answer = session.send(request, stream=True, follow_redirects=False)
            commit = answer.headers.get("X-Repo-Commit", self._commit)
            if self._commit not in (None, commit):
                answer.close()
                raise CorruptError(
                    "The Hub answers of another state.",
                    place=self.place,
                    expected=self._commit,
                    found=commit[:80],
                )
            pause = next(pauses, 0.0) if answer.status_code in _BUSY else 0.0
            if answer.next_request is None and not pause:
                break
            answer.close()
            time.sleep(pause)
            request = answer.next_request or request
        if answer.is_success:
            return answer
        answer.close()
        codes = {name: answer.headers.get(name, "") for name in ("X-Error-Code", "X-Error-Message")}
        self._utils.hf_raise_for_status(
            type(answer)(answer.status_code, headers=codes, request=answer.request)
        )
        raise FormatError("The Hub can't be read.", place=self.place, found=f"status {answer.status_code}")

    def _blocks(self, answer: Any, seconds: float) -> Iterator[bytes]:
        """Yields an answer's body as it comes."""
        end = time.monotonic() + seconds
        for block in answer.iter_raw():
            if time.monotonic() > end:
                raise FormatError(
                    "The Hub's answer doesn't end.",
                    place=self.place,
                    expected=f"at most {seconds:.0f} seconds",
                )
            yield block

    def _facts(self, row: Any) -> Facts:
        """Returns what the Hub's listing says of a file or folder."""
        texts = [row.get(key) for key in ("type", "path", "oid")] if isinstance(row, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise FormatError("The Hub can't be read.", place=self.place, found="a row of another form")
        kind, path, identity = map(str, texts)
        if kind != "file":
            return Facts(path, "folder")
        size = row.get("size")
        if type(size) is not int or size < 0:
            raise FormatError("The Hub says no size of a file.", place=f"{self.place}/{path}", found=size)
        return Facts(path, "file", size, f"{self._commit}:{identity}")

    @contextmanager
    def _asking(self, name: str) -> Iterator[None]:
        """Turns what the library raises into an error of ours; its texts may hold signed addresses."""
        errors = self._errors
        place = f"{self.place}/{name}".rstrip("/")
        try:
            yield
        except StatekitError:
            raise
        except (
            errors.RepositoryNotFoundError,
            errors.RevisionNotFoundError,
            errors.EntryNotFoundError,
        ) as error:
            raise NotFoundError(
                "The Hub has no such repository, revision or file, or it isn't open to you.",
                place=place,
                found=type(error).__name__,
                remedy="check the name; a private repository needs HF_TOKEN or `hf auth login`",
            ) from None
        except errors.HFValidationError:
            raise _no_repository(self.place) from None
        except errors.OfflineModeIsEnabled:
            raise FormatError(
                "The Hub isn't asked: this process is offline.",
                place=place,
                found="HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE",
                remedy="unset both, or give a folder of this machine",
            ) from None
        except Exception as error:  # the session has errors of its own, and what it sent may be no answer
            raise FormatError(
                "The Hub can't be read.", place=place, found=type(error).__name__, remedy="try again"
            ) from None
