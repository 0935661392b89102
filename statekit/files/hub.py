"""Reads checkpoints in repositories of the Hugging Face Hub, `hf://owner/name@revision/path`.

The revision is resolved to a commit first, and each read is of that commit. The token is the one that huggingface_hub
finds itself.

Source: huggingface_hub 1.0, "Interact with the Hub through the Filesystem API" for addresses; `HfApi.repo_info`,
`HfApi.list_repo_tree`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

from statekit.errors import FormatError, NotFoundError, RefusedError, StatekitError, UsageError
from statekit.files.ahead import ReadAhead
from statekit.files.tree import Facts, StoredPlace, address_of, copying, fill

_KINDS = {"datasets": "dataset", "models": "model"}
_COMMIT = re.compile("[0-9a-f]{40,64}")
_MOST_ENTRIES = 200_000
"""Files and folders of a repository; the Hub itself advises at most half as many."""


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
            from huggingface_hub import HfApi, errors, hf_hub_url, utils
        except ModuleNotFoundError:
            raise UsageError(
                "Reading from the Hub needs the library huggingface_hub.",
                place=text,
                remedy=f"pip install 'statekit[remote]', or copy it first: {copying(text)}",
            ) from None
        start = f"hf://{'' if kind == 'model' else f'{kind}s/'}{repository}"
        self.place = f"{start}@{revision}" if revision else start
        self._errors, self._url, self._utils = errors, hf_hub_url, utils
        self._repository, self._kind, api = repository, kind, HfApi()
        with self._asking(""):
            self._commit = api.repo_info(repository, repo_type=kind, revision=revision).sha
            if not _COMMIT.fullmatch(f"{self._commit}"):
                raise FormatError(
                    "The Hub names no commit of a revision.", place=self.place, found=f"{self._commit}"
                )
            tree = api.list_repo_tree(repository, recursive=True, repo_type=kind, revision=self._commit)
            entries = list(islice(tree, _MOST_ENTRIES + 1))
        if len(entries) > _MOST_ENTRIES:
            raise RefusedError(
                "A repository has too many files.", place=self.place, expected=f"at most {_MOST_ENTRIES}"
            )
        self._folders: dict[str, dict[str, Facts]] = {"": {}}
        for entry in entries:
            facts = self._facts(entry)
            folder, _, last = facts.name.rpartition("/")
            self._folders.setdefault(folder, {})[last] = facts

    def facts(self, name: str) -> Facts | None:
        folder, _, last = name.rpartition("/")
        return self._folders.get(folder, {}).get(last) if name else Facts("", "folder")

    def names(self, folder: str) -> Sequence[str]:
        return sorted(self._folders.get(folder, ()))

    def read_into(self, facts: Facts, start: int, into: memoryview) -> None:
        address = self._url(self._repository, facts.name, repo_type=self._kind, revision=self._commit)
        headers = {**self._utils.build_hf_headers(), "Range": f"bytes={start}-{start + len(into) - 1}"}
        headers["Accept-Encoding"] = "identity"
        session, data = self._utils.get_session(), bytearray()
        with (
            self._asking(facts.name),
            session.stream("GET", address, headers=headers, follow_redirects=True) as answer,
        ):
            if answer.is_error:
                answer.read()
            self._utils.hf_raise_for_status(answer)
            is_part = answer.status_code == 206
            before = 0 if is_part else start  # a server that knows no parts sends all from the first byte on
            for block in answer.iter_raw():
                data += block[before:]
                before = max(before - len(block), 0)
                if len(data) > len(into):
                    break
        fill(into, memoryview(data if is_part else data[: len(into)]), start, f"{self.place}/{facts.name}")

    def _facts(self, entry: Any) -> Facts:
        """Returns what the Hub's listing says of a file or folder."""
        if not hasattr(entry, "size"):
            return Facts(entry.path, "folder")
        if type(entry.size) is not int or entry.size < 0:
            raise FormatError(
                "The Hub says no size of a file.", place=f"{self.place}/{entry.path}", found=entry.size
            )
        return Facts(entry.path, "file", entry.size, f"{self._commit}:{entry.blob_id}")

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
        except (
            errors.HTTPError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ) as error:  # what it sent is no answer
            raise FormatError(
                "The Hub can't be read.", place=place, found=type(error).__name__, remedy="try again"
            ) from None
