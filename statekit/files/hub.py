"""Reads checkpoints in repositories of the Hugging Face Hub, `hf://owner/name@revision/path`.

The revision is resolved to a commit first, and each read is of that commit. The token is the one that huggingface_hub
finds itself.

Source: huggingface_hub 1.0, "Interact with the Hub through the Filesystem API" for addresses; `HfApi.repo_info`,
`HfApi.list_repo_tree`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

from statekit.errors import FormatError, NotFoundError, UsageError
from statekit.files.ahead import ReadAhead
from statekit.files.tree import Facts, StoredPlace, address_of, copying, fill

_KINDS = {"datasets": "dataset", "models": "model"}


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
        raise UsageError(
            "The address names no repository.",
            place=text,
            expected="hf://OWNER/NAME, hf://OWNER/NAME@REVISION/PATH or hf://datasets/OWNER/NAME",
        )
    name, _, revision = parts[1].partition("@")
    tree = HubTree(f"{parts[0]}/{name}", kind, revision or None, text)
    return StoredPlace(ReadAhead(tree), PurePosixPath(*parts[2:]))


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
            entries = list(
                api.list_repo_tree(repository, recursive=True, repo_type=kind, revision=self._commit)
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
        with self._asking(facts.name):
            answer = self._utils.get_session().get(address, headers=headers, follow_redirects=True)
            self._utils.hf_raise_for_status(answer)
        data = answer.content if answer.status_code == 206 else answer.content[start : start + len(into)]
        fill(into, data, start, f"{self.place}/{facts.name}")

    def _facts(self, entry: Any) -> Facts:
        if not hasattr(entry, "size"):
            return Facts(entry.path, "folder")
        return Facts(entry.path, "file", entry.size, f"{self._commit}:{entry.blob_id}")

    @contextmanager
    def _asking(self, name: str) -> Iterator[None]:
        """Turns what the library raises into an error of ours; its texts may hold signed addresses."""
        errors = self._errors
        place = f"{self.place}/{name}".rstrip("/")
        try:
            yield
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
        except (errors.HTTPError, OSError) as error:
            raise FormatError(
                "The Hub can't be read.", place=place, found=type(error).__name__, remedy="try again"
            ) from None
