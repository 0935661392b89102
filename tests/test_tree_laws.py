"""The laws of trees, for those in memory, on a disk, in buckets and on the Hub."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

import pytest
from store_serving import SECRET as KEY
from store_serving import Served, serving

from statekit.files.ahead import ReadAhead
from statekit.files.source import File, Files, checkpoint_place, listing
from statekit.files.tree import Facts, FileTree, StoredPlace
from statekit.testing import stores
from statekit.testing.stores import TREE_LAWS, MemoryTree, TreeTrial


@pytest.fixture
def serve() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("law", TREE_LAWS)
def test_a_tree_in_memory_obeys(law: str, ahead: bool) -> None:
    made: list[MemoryTree] = []

    def listed(files: Mapping[str, bytes]) -> FileTree:
        made.append(MemoryTree(dict(files)))
        return ReadAhead(made[-1]) if ahead else made[-1]

    def change(name: str, data: bytes) -> None:
        made[-1].data[name] = data

    if not ahead or law not in ("more_than_there_is_is_an_error",):  # which asks for no more than there is
        TREE_LAWS[law](TreeTrial(listed, change))


class LocalTree:
    """A folder of this machine, by what containers ask of it: lists of names, facts of files, and their bytes."""

    def __init__(self, folder: Path) -> None:
        self.place, self._folder, self._files = f"{folder}", folder, Files(checkpoint=folder)

    def facts(self, name: str) -> Facts | None:
        path = self._folder / name
        if path.is_file():
            file = self._files.source(path)
            return Facts(name, "file", file.size, f"{file.identity}")
        return Facts(name, "folder") if path.is_dir() else None

    def names(self, folder: str) -> list[str]:
        return [path.name for path in listing(self._folder / folder)]

    def read_into(self, facts: Facts, start: int, into: memoryview) -> None:
        place = self._folder / facts.name
        device, inode = literal_eval(facts.identity)
        File(place, facts.size, (device, inode), self._files).read_into(start, into)


@pytest.mark.parametrize("law", TREE_LAWS)
def test_a_folder_of_this_machine_obeys(law: str, tmp_path: Path) -> None:
    def listed(files: Mapping[str, bytes]) -> FileTree:
        for name, data in files.items():
            change(name, data)
        return LocalTree(tmp_path)

    def change(name: str, data: bytes) -> None:
        new = tmp_path / f"{name}.new"
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(data)
        new.rename(tmp_path / name)

    is_snapshot = law != "a_listing_is_a_snapshot"  # which a folder isn't: it is listed when it is asked
    TREE_LAWS[law](TreeTrial(listed, change if is_snapshot else None))


def remote(
    address: str, kind: str, serve: ExitStack, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> TreeTrial:
    """Returns the trial of a tree whose files a server on this machine has."""
    monkeypatch.setattr(stores, "SECRET", KEY)
    servers: list[Served] = []

    def listed(files: Mapping[str, bytes]) -> FileTree:
        endpoint, served = serve.enter_context(serving(kind, files))
        servers.append(served)
        if kind == "hub":
            from huggingface_hub import constants

            monkeypatch.setattr(constants, "ENDPOINT", endpoint)
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # whatever the machine says
            monkeypatch.setattr(
                constants,
                "HUGGINGFACE_CO_URL_TEMPLATE",
                f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
            )
        for name in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"):
            monkeypatch.setenv(name, endpoint)
        place = checkpoint_place(address)
        assert isinstance(place, StoredPlace) and place.path == PurePosixPath()
        return place.tree._tree if isinstance(place.tree, ReadAhead) else place.tree

    def change(name: str, data: bytes) -> None:
        servers[-1].files[name] = data

    def fail() -> None:
        servers[-1].fault = "denied"

    return TreeTrial(listed, change if changes else None, fail if kind == "s3" else None)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("law", TREE_LAWS)
def test_a_bucket_obeys(law: str, scheme: str, serve: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
        monkeypatch.setenv(f"AWS_{name}", "us-east-1" if name == "REGION" else KEY)
    TREE_LAWS[law](remote(f"{scheme}://bucket", "s3", serve, monkeypatch, changes=True))


@pytest.mark.parametrize("law", TREE_LAWS)
def test_the_hub_obeys(law: str, serve: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    TREE_LAWS[law](remote("hf://owner/name", "hub", serve, monkeypatch, changes=False))
