"""Targets in object stores: whole or not there, whatever fails, whoever is killed, and never over anything else."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from store_serving import _S3, KINDS, SECRET, T5X, TARGETS, Served, serving

import statekit
from statekit.cli.main import DONE, main
from statekit.conversion import registry
from statekit.conversion.contracts import HasEntries
from statekit.errors import (
    CommitError,
    CorruptError,
    FormatError,
    NotFoundError,
    TargetExistsError,
    UsageError,
)
from statekit.files.claims import ranks
from statekit.files.manifest import FILE
from statekit.files.tree import WORK
from statekit.tensors.digest import tensor_digests

KILLS = 50


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    pytest.importorskip("obstore")
    with serving("s3", {}) as (address, served):
        named = {
            "ACCESS_KEY_ID": SECRET,
            "SECRET_ACCESS_KEY": SECRET,
            "REGION": "us-east-1",
            "ENDPOINT_URL": address,
        }
        for name, value in named.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield served


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A store that speaks as Google's does to obstore: the same, but for its names of conditions and metadata."""
    pytest.importorskip("obstore")
    with serving("s3", {}) as (address, served):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        yield served


def digests(place: str | Path) -> list[str]:
    """Returns the digests of a checkpoint's tensors, whatever their names are."""
    with statekit.open(place) as opened:
        return sorted(dict(tensor_digests(opened.checkpoint.tensors, lambda name, size: None)).values())


def written(target: str, **options: Any) -> None:
    statekit.convert(T5X, target, **options)


def few(*names: str) -> list[Any]:
    """Returns all containers as cases, of which few are for every day."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in TARGETS]


@pytest.mark.parametrize("to", TARGETS)
def test_a_target_in_a_store_is_that_of_a_disk(store: Served, tmp_path: Path, to: str) -> None:
    near, far = tmp_path / TARGETS[to], f"s3://bucket/deep/{TARGETS[to]}"
    for target in (f"{near}", far):
        written(target, to=to)
    names = (
        {"": near.read_bytes()}
        if near.is_file()
        else {
            f"/{file.relative_to(near).as_posix()}": file.read_bytes()
            for file in near.rglob("*")
            if file.is_file()
        }
    )
    assert {name.removeprefix(f"deep/{TARGETS[to]}"): data for name, data in store.files.items()} == names
    assert digests(near) == digests(far)
    assert not any(SECRET.encode() in data for data in store.files.values())


def test_orbax_reads_what_was_written_into_a_store(store: Served, tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    written("s3://bucket/run", to="orbax")
    for name, data in store.files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with ocp.CheckpointManager(
        tmp_path / "run",
        options=ocp.CheckpointManagerOptions(step_prefix="checkpoint"),
        item_names=("state",),
    ) as manager:
        step = manager.latest_step()
        assert step == 4
        restored = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    assert restored is not None


def test_orbax_goes_into_googles_store_and_is_read_there(
    google: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", os.environ["STORAGE_EMULATOR_HOST"])
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", SECRET)
    written(f"{tmp_path / 'run'}", to="orbax")
    written("gs://bucket/run", to="orbax")
    assert digests("gs://bucket/run") == digests(tmp_path / "run")
    statekit.convert("gs://bucket/run", tmp_path / "again", to="statekit")
    assert {*digests(tmp_path / "again")} <= {*digests(tmp_path / "run")}
    assert any(request.startswith("GET /storage/v1/b/bucket/o/") for request in google.requests)


def test_opening_a_database_takes_requests_by_files_and_not_by_arrays(store: Served, tmp_path: Path) -> None:
    import torch

    params = {f"layer{i}.weight": torch.nn.Parameter(torch.ones(2, 2)) for i in range(60)}
    optimizer = torch.optim.AdamW(params.values())
    sum(param.sum() for param in params.values()).backward()  # type: ignore[union-attr]  # a sum of tensors is no int
    optimizer.step()
    torch.save({"model": params, "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    far = "s3://bucket/run"
    statekit.convert(tmp_path / "run.pt", far, to="orbax", require="lossy", assume_defaults=True)
    store.requests.clear()
    statekit.open(far).close()
    assert len(store.requests) <= 2 + 4 * len(store.files)


def test_torch_loads_through_fsspec_what_was_written(store: Served, tmp_path: Path) -> None:
    import obstore.fsspec
    import torch
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    obstore.fsspec.register("s3")
    far = "s3://bucket/run"
    source, _ = KINDS["dcp"]
    statekit.convert(source, far, to="dcp")
    statekit.convert(source, tmp_path / "run", to="dcp")

    def loaded(reader: Any) -> dict[str, Any]:
        state: dict[str, Any] = {}
        planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]  # torch has no types there
        state_dict_loader._load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
        return state

    options = {"client_options": {"allow_http": True}}
    theirs, ours = loaded(FsspecReader(far, **options)), loaded(FileSystemReader(tmp_path / "run"))

    def flat(tree: Any, at: str = "") -> dict[str, Any]:
        if not isinstance(tree, dict):
            return {at: tree}
        return {name: leaf for key, part in tree.items() for name, leaf in flat(part, f"{at}/{key}").items()}

    near = flat(ours)
    assert flat(theirs).keys() == near.keys() and len(near) > 10
    for name, leaf in flat(theirs).items():
        same = torch.equal(leaf, near[name]) if isinstance(leaf, torch.Tensor) else leaf == near[name]
        assert same, name


def test_what_a_target_is_found_by_is_put_when_all_else_was_read_again(store: Served) -> None:
    written("s3://bucket/run", to="dcp")
    requests = [request.replace("%2F", "/").partition("?")[0] for request in store.requests]
    data = max(number for number, request in enumerate(requests) if request == "GET /bucket/run/__0_0.distcp")
    entries = [requests.index(f"PUT /bucket/run/{name}") for name in (FILE, ".metadata")]
    assert data < entries[0] < entries[1]
    assert requests[entries[1] :].count(f"DELETE /bucket/{WORK}run/claim-0001.json") <= 1


def test_a_database_that_changes_while_it_is_read_is_named(store: Served) -> None:
    written("s3://bucket/run", to="orbax")
    manifest = next(name for name in store.files if name.endswith("manifest.ocdbt"))
    with statekit.open("s3://bucket/run") as opened:
        tensor = next(iter(opened.checkpoint.tensors.values()))
        tensor.read()
        store.files[manifest] += b"another"
        with pytest.raises(CorruptError, match="changed while it was read") as caught:
            tensor.read()
    assert f"{caught.value.place}".endswith(manifest)


def test_a_target_that_exists_stays_as_it_is(store: Served) -> None:
    store.files["run/notes.txt"] = b"mine"
    for replace, error in ((False, TargetExistsError), (True, UsageError)):
        with pytest.raises(error, match="another name"):
            statekit.convert(statekit.plan(T5X, "s3://bucket/run", to="statekit"), replace=replace)
    assert store.files == {"run/notes.txt": b"mine"}


@pytest.mark.parametrize("fault", ["busy", "lost"])
def test_a_store_that_is_busy_or_loses_answers_is_asked_again(store: Served, fault: str) -> None:
    store.fault = fault
    written("s3://bucket/run", to="statekit")
    store.fault = ""
    assert {*digests("s3://bucket/run")} < {*digests(T5X)}  # which has placeholders too
    assert not any(WORK in name for name in store.files)


def test_a_store_without_conditions_is_refused(store: Served) -> None:
    store.fault = "unconditional"
    with pytest.raises(UsageError, match="no conditional writes"):
        written("s3://bucket/run", to="statekit")
    assert store.files == {}


@pytest.mark.parametrize("target", ["run", "run.pt"])
def test_other_bytes_than_were_sent_are_noticed_and_removed(
    store: Served, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaging(number: int) -> None:
        store.fault = "other" if number == 5 else ""  # the first four claim the target, and probe the store

    store.on_write = damaging
    with pytest.raises(CommitError):
        written(f"s3://bucket/{target}", to="statekit" if target == "run" else "torch")
    assert store.files == {}


def test_parts_make_one_object(store: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statekit.files.objects.PART_BYTES", 4096)
    written("s3://bucket/run.pt", to="torch")
    assert {*digests("s3://bucket/run.pt")} < {*digests(T5X)} and not store.parts
    assert sum("partNumber" in request for request in store.requests) > 1


def test_what_another_process_writes_is_neither_read_nor_written(
    store: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = {"pid": 1, "host": "elsewhere", "machine": "another"}
    claim = {"mark": "m", "target": "runs/1", "entries": [FILE], "owner": owner, "begun": 0.0}
    store.files[f"runs/{WORK}1/claim-0001.json"] = json.dumps(claim).encode()
    store.files |= {"runs/1/a": b"half", "runs/1/b": b"foreign"}
    store.marks |= {"runs/1/a": "m", f"runs/{WORK}1/claim-0001.json": "m"}
    with pytest.raises(TargetExistsError, match="process 1 on elsewhere"):
        written("s3://bucket/runs/1", to="statekit")
    with pytest.raises(FormatError, match="being written"):
        statekit.open("s3://bucket/runs/1")
    assert main(["sweep", "s3://bucket/runs"]) == DONE and "idle" in capsys.readouterr().out
    assert len(store.files) == 3
    assert main(["sweep", "s3://bucket/runs", "--idle-hours", "100000", "--json"]) == DONE
    assert main(["sweep", "s3://bucket/runs", "--idle-hours", "0", "--json"]) == DONE
    assert store.files == {"runs/1/b": b"foreign"}


CLAIM = {"mark": "m", "target": "runs/1", "entries": [FILE], "owner": {}, "begun": 0.0}


@pytest.mark.parametrize(
    "record",
    [
        {**CLAIM, "target": "prod/1"},
        {**CLAIM, "target": ""},
        {**CLAIM, "begun": 1e15},
        {**CLAIM, "begun": 10**400},
        {**CLAIM, "begun": float("nan")},
        {**CLAIM, "owner": [["pid", 1]]},
        {**CLAIM, "mark": "\ud800"},
        [],
        "[" * 60_000,
    ],
    ids=lambda record: f"{record!r:.60}",
)
def test_a_forged_claim_removes_nothing_and_is_named(
    store: Served, record: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = f"runs/{WORK}1/claim-0001.json"
    text = record if isinstance(record, str) else json.dumps(record)
    store.files |= {"prod/1/x": b"precious", "runs/1/a": b"half", claim: text.encode()}
    store.marks |= dict.fromkeys(store.files, "m")
    before = dict(store.files)
    assert main(["sweep", "s3://bucket/runs", "--idle-hours", "0"]) == DONE
    assert "kept" in capsys.readouterr().out
    with pytest.raises(TargetExistsError):
        written("s3://bucket/runs/1", to="statekit")
    assert store.files == before


def test_a_forged_claim_beside_a_complete_object_removes_nothing(
    store: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: it was removed, as it carries the claim's mark. An object is put whole or not at all."""
    written("s3://bucket/runs/run.pt", to="torch")
    (mark,) = {mark for name, mark in store.marks.items() if name == "runs/run.pt"}
    claim = f"runs/{WORK}run.pt/claim-0001.json"
    store.files[claim] = json.dumps({**CLAIM, "mark": mark, "target": "runs/run.pt"}).encode()
    store.marks[claim] = mark
    assert main(["sweep", "s3://bucket/runs", "--idle-hours", "0"]) == DONE
    assert "completed" in capsys.readouterr().out
    assert [*store.files] == ["runs/run.pt"]


def row(name: str, size: int = 5) -> str:
    """Returns an object as a listing has it."""
    moment = "<LastModified>2026-11-27T12:00:00.000Z</LastModified>"
    return f'<Contents><Key>{name}</Key><Size>{size}</Size><ETag>"x"</ETag>{moment}</Contents>'


LIES: dict[str, tuple[str, str]] = {
    "larger objects": (r"<Size>(\d+)</Size>", r"<Size>1\1</Size>"),
    "huge objects": (r"<Size>\d+</Size>", "<Size>4611686018427387904</Size>"),
    "empty objects": (r"<Size>\d+</Size>", "<Size>0</Size>"),
    "each object twice": (r"(<Contents>.*?</Contents>)", r"\1\1"),
    "other states": (r"<ETag>.*?</ETag>", "<ETag>other</ETag>"),
    "objects that nobody asked for": (
        "</List",
        row("prod/x") + row("run/../prod/x") + row("run/.") + "</List",
    ),
    "odd names": (
        "</List",
        row("run//") + row("run//x") + row("/") + row("run/a&#10;b") + row("run") + "</List",
    ),
    "no listing": (r".*", ""),
}
"""What a listing says wrong -> a pattern in it, and what stands in its place."""


@pytest.mark.parametrize("lie", LIES)
def test_a_listing_that_lies_is_no_crash_and_nothing_else_is_read(
    lie: str,
    store: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store.files |= {f"run/{p.relative_to(T5X)}": p.read_bytes() for p in T5X.rglob("*") if p.is_file()}
    honest = _S3.listed
    monkeypatch.setattr(
        _S3, "listed", lambda *asked: re.sub(*LIES[lie], honest(*asked).decode(), flags=re.DOTALL).encode()
    )
    for line in (["inspect"], ["check"], ["convert", f"{tmp_path / 'x.pt'}"]):
        assert main([line[0], "s3://bucket/run", *line[1:]]) in range(4)
    shown = capsys.readouterr()
    assert "itself has failed" not in shown.out + shown.err
    assert not any("prod" in request.partition("?")[0] for request in store.requests)


def test_the_hub_is_no_target() -> None:
    assert main(["convert", f"{T5X}", "hf://owner/name/run"]) != DONE


class Converting:
    """A process that converts in processes of its own, which can be killed."""

    def __init__(self, process: subprocess.Popen[str], store: Served) -> None:
        self._process, self._store = process, store

    def convert(
        self,
        target: str,
        to: str,
        killed_at: int | None = None,
        killed_after: float | None = None,
    ) -> str:
        """Converts; returns how it ended.

        Args:
            target: The target's address.
            to: Its container.
            killed_at: The process is killed when the store gets the request of this number.
            killed_after: The process is killed after so many seconds.
        """
        assert self._process.stdin and self._process.stdout
        self._store.writes, victim = 0, [0]

        def kill() -> None:
            with suppress(ProcessLookupError):  # it may have ended meanwhile
                signal.pidfd_send_signal(victim[0], signal.SIGKILL)

        self._store.on_write = lambda number: kill() if number == killed_at else None
        order = [f"{KINDS[to][0]}", target, {"to": to, "require": "lossy"}]
        print(json.dumps(order), file=self._process.stdin, flush=True)
        # A number may be another process's when this one has ended; a descriptor never is.
        victim[0] = os.pidfd_open(int(self._process.stdout.readline()))
        print(file=self._process.stdin, flush=True)
        timer = threading.Timer(killed_after or 0.0, kill)
        if killed_after is not None:
            timer.start()
        ended = str(json.loads(self._process.stdout.readline()))
        timer.cancel()
        if timer.is_alive():
            timer.join()
        os.close(victim[0])
        self._store.on_write = int
        return ended


@pytest.fixture
def converting(store: Served) -> Iterator[Converting]:
    command = [sys.executable, f"{Path(__file__).parent / 'converting_to_stores.py'}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Converting(process, store)
        assert process.stdin
        process.stdin.close()


def entries_in(files: Mapping[str, bytes], to: str) -> list[str]:
    """Returns the files by which readers find a target."""
    container = registry.container(to)
    rank = ranks((FILE, *(container.entries if isinstance(container, HasEntries) else ())))
    return [name for name in files if rank(name) >= 0 and WORK not in name]


@pytest.mark.parametrize("to", few("dcp"))
def test_a_killed_conversion_leaves_nothing_that_is_read_and_can_be_done_again(
    store: Served, converting: Converting, to: str, request: pytest.FixtureRequest
) -> None:
    name = TARGETS[to]
    assert converting.convert(f"s3://bucket/whole/{name}", to) == "done"
    whole = {key.removeprefix("whole/"): data for key, data in store.files.items()}
    last = store.writes
    values = digests(f"s3://bucket/whole/{name}")
    step = 1 if request.node.get_closest_marker("slow") else max(1, last // 3)
    for number in range(1, last + 1, step):
        store.files.clear()
        far = f"s3://bucket/{name}"
        assert converting.convert(far, to, killed_at=number) == "killed"
        there = {key: data for key, data in store.files.items() if WORK not in key}
        if entries_in(store.files, to) and registry.container(to).target_kind == "folder":
            # Native readers find it by these, and the manifest is the first of them.
            data = {key for key in whole if key not in entries_in(whole, to)}
            assert data <= there.keys(), number
        try:
            assert digests(far) == values, number
            assert there.keys() == whole.keys()
        except (NotFoundError, FormatError):
            pass
        ended = converting.convert(far, to)
        assert ended == "done" or "The target exists" in ended, (number, ended)
        assert {key.removeprefix("whole/"): data for key, data in store.files.items()} == whole, number


def written_alike(files: Mapping[str, bytes], to: str) -> dict[str, bytes]:
    """Returns the files that every conversion writes alike; tensorstore draws the names in a database."""
    if to != "orbax":
        return dict(files)
    return {name: b"" for name in files if "ocdbt" not in name and "/d/" not in name}


@pytest.mark.slow
@pytest.mark.parametrize("to", KINDS)
def test_fifty_kills_at_random_moments_leave_nothing_torn(
    store: Served, converting: Converting, to: str
) -> None:
    name = KINDS[to][1]
    far, seconds = f"s3://bucket/{name}", []
    for _ in range(3):
        store.files.clear()
        began = time.monotonic()
        assert converting.convert(far, to) == "done"
        seconds.append(time.monotonic() - began)
    whole, values = dict(store.files), digests(far)
    entries = entries_in(whole, to)
    draw, kills, seen = random.Random(to), 0, set[str]()
    while kills < KILLS:
        store.files.clear()
        ended = converting.convert(far, to, killed_after=draw.uniform(0, min(seconds)))
        kills += ended == "killed"
        there = {key: data for key, data in store.files.items() if WORK not in key}
        if there.keys() & {*entries} and registry.container(to).target_kind == "folder":
            # Native readers find it by these, so that all the rest must be there.
            assert written_alike(whole, to).keys() - {*entries} <= there.keys(), kills
        seen.add("entries" if there.keys() & {*entries} else "data" if there else "nothing")
        with suppress(NotFoundError, FormatError):
            assert digests(far) == values, kills
        ended = converting.convert(far, to)
        assert ended == "done" or "The target exists" in ended, (kills, ended)
        assert digests(far) == values and not any(WORK in key for key in store.files), kills
        assert written_alike(store.files, to) == written_alike(whole, to), kills
    assert {"nothing", "data"} & seen, "no kill fell into the conversion"
