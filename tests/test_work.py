"""One plan, many workers: any cut, order, number of workers and accident gives what one process writes, cut alike."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save
from store_serving import SECRET, serving

import statekit
from goldens import GOLDEN
from statekit.cli.main import main
from statekit.conversion.convert import convert
from statekit.conversion.plan import Plan
from statekit.engines.slurm import Slurm, ranges
from statekit.errors import (
    CommitError,
    CorruptError,
    FormatError,
    NotFoundError,
    TargetExistsError,
    UsageError,
)
from statekit.files.manifest import FILE
from statekit.files.store import ListedTree
from statekit.files.tree import Facts, Place
from statekit.scale import disk_site, folder, parts, running, site
from statekit.scale.engine import Outcome, Pool, Processes, carry_out, shard
from statekit.scale.work import Work, split
from statekit.tensors.digest import json_digest
from statekit.tensors.tree import walk
from statekit.testing.works import Flaky, split_alike

SOURCE = GOLDEN / "torch_formats" / "adamw_legacy" / "checkpoint" / "checkpoint.pt"
CUT = 300
CUTTABLE = ["statekit", "dcp", "safetensors", "hf-trainer", "accelerate"]
OF_T5X = GOLDEN / "t5x" / "bf16_params" / "checkpoint" / "checkpoint_4"


def files(place: Path) -> dict[str, bytes]:
    return {
        path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()
    }


def folder_of(work: Work) -> Path:
    return Path(work.place)


def part_place(work: Work, number: int) -> Path:
    return folder_of(work) / parts.part_name(number)


def files_of(work: Work, part: parts.PartRecord) -> Path:
    assert isinstance(work.site, disk_site.DiskSite)
    return work.site.files_of(part.attempt)


def planned(target: Path, to: str = "statekit", **options: Any) -> Plan:
    target.parent.mkdir(exist_ok=True)
    return statekit.plan(SOURCE, target, to=to, require="lossy", **options)


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    with split(planned(tmp_path / "there"), tmp_path / "work", CUT) as made:
        yield made


def expected(tmp_path: Path, to: str = "statekit", **options: Any) -> dict[str, bytes]:
    """Returns what one process writes, cut alike."""
    convert(planned(tmp_path / "one" / "there", to, **options), task_bytes=CUT)
    return files(tmp_path / "one" / "there")


@pytest.mark.parametrize("to", CUTTABLE)
def test_tasks_in_any_order_give_the_files_of_one_process(to: str, tmp_path: Path) -> None:
    with split(planned(tmp_path / "many" / "there", to), tmp_path / "work", CUT) as work:
        assert len(work.tasks) > 1 and len({task.number for task in work.tasks}) == len(work.tasks)
        numbers = work.missing()
        random.Random(to).shuffle(numbers)
        for number in [*numbers, numbers[0]]:
            work.run(number)
        report = work.finish()
    assert files(tmp_path / "many" / "there") == expected(tmp_path, to)
    assert report.verified == len(report.plan.entries)
    assert statekit.check(tmp_path / "many" / "there").passed


@pytest.mark.parametrize("to", ["t5x", "tf-bundle", "orbax"])
def test_arrays_and_databases_are_cut_too(to: str, tmp_path: Path) -> None:
    plan = statekit.plan(OF_T5X, tmp_path / "there", to=to, require="lossy")
    with split(plan, tmp_path / "work", 800) as work:
        assert len(work.tasks) > 2
        for number in reversed(work.missing()):
            assert running.run(work, number).attempt == running.run(work, number).attempt  # a double
        report = work.finish()
    one = convert(statekit.plan(OF_T5X, tmp_path / "one", to=to, require="lossy"), task_bytes=800)
    assert statekit.check(tmp_path / "there").passed
    assert (report.source_digest, report.verified) == (one.source_digest, one.verified)
    if to != "orbax":  # tensorstore names a database's files at random
        assert files(tmp_path / "there") == files(tmp_path / "one")
    assert not statekit.diff(tmp_path / "there", tmp_path / "one").first


@pytest.mark.jax
@pytest.mark.slow
def test_a_source_may_be_named_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs a task stands elsewhere, and knows the source by its whole path."""
    monkeypatch.chdir(OF_T5X.parent)
    plan = statekit.plan(OF_T5X.name, tmp_path / "there", to="statekit", require="lossy")
    split(plan, tmp_path / "work").close()
    monkeypatch.chdir(tmp_path)
    with Work(tmp_path / "work") as work:
        for number in work.missing():
            work.run(number)
        work.finish()
    assert statekit.check(tmp_path / "there").passed


def test_orbax_restores_what_many_workers_wrote(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    plan = statekit.plan(OF_T5X, tmp_path / "checkpoint_4", to="orbax", require="lossy")
    with split(plan, tmp_path / "work", 800) as work:
        for number in work.missing():
            work.run(number)
        work.finish()
    convert(statekit.plan(OF_T5X, tmp_path / "one", to="orbax", require="lossy"))
    whole = next(path.parent for path in (tmp_path / "one").rglob("_METADATA"))
    cut = next(path.parent for path in (tmp_path / "checkpoint_4").rglob("_METADATA"))
    with ocp.PyTreeCheckpointer() as reader:
        restored, expected_tree = (reader.restore(place.resolve()) for place in (cut, whole))
    assert repr(restored) == repr(expected_tree)


def _read_by_torch(place: Path) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(place, place.with_suffix(".pt"))
    leaves = walk(torch.load(place.with_suffix(".pt"), weights_only=False))
    return {f"{path}": leaf.numpy() if hasattr(leaf, "numpy") else leaf for path, leaf in leaves}


def _read_by_safetensors(place: Path) -> dict[str, Any]:
    files = map(load_file, sorted(place.glob("*.safetensors")))
    return {name: value for tensors in files for name, value in tensors.items()}


def _read_by_tensorstore(place: Path) -> dict[str, Any]:
    tensorstore = pytest.importorskip("tensorstore")

    def read(array: Path) -> Any:
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{array}"}}
        return tensorstore.open(spec).result().read().result()

    return {f"{file.relative_to(place)}": read(file.parent) for file in place.rglob(".zarray")}


@pytest.mark.parametrize(
    ("to", "source", "read"),
    [
        pytest.param("dcp", SOURCE, _read_by_torch, marks=pytest.mark.slow),
        ("safetensors", SOURCE, _read_by_safetensors),
        ("t5x", OF_T5X, _read_by_tensorstore),
    ],
)
def test_the_formats_own_library_reads_what_many_workers_wrote(
    to: str, source: Path, read: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    many, one = tmp_path / "many" / "checkpoint_4", tmp_path / "one" / "checkpoint_4"
    for target in (many, one):
        target.parent.mkdir()
    with split(statekit.plan(source, many, to=to, require="lossy"), tmp_path / "work", CUT) as work:
        assert len(work.tasks) > 2
        for number in work.missing():
            work.run(number)
        work.finish()
    convert(statekit.plan(source, one, to=to, require="lossy"))
    values, whole = read(many), read(one)
    assert values and values.keys() == whole.keys()
    assert all(np.array_equal(value, whole[name]) for name, value in values.items())


def test_a_split_is_a_function_of_plan_and_bytes(tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        with split(planned(tmp_path / "there"), tmp_path / name, CUT) as work:
            texts.append((folder_of(work) / "work.json").read_bytes())
    assert texts[0] == texts[1]
    with split(planned(tmp_path / "there"), tmp_path / "a", CUT) as again:  # it goes on
        assert again.digest == json.loads(texts[0])["digest"]
    with pytest.raises(UsageError, match="Another work is in this folder"):
        split(planned(tmp_path / "there"), tmp_path / "a", CUT + 1)


def test_another_process_makes_the_same_plan_with_all_that_was_asked_for(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"rename": {"^embed": "words"}, "loss_scale": 3.0, "step_offset": "keep"}
    split(planned(tmp_path / "there", **asked), tmp_path / "work", CUT).close()
    with Work(tmp_path / "work") as work:
        for number in work.missing():
            work.run(number)
        report = work.finish()
    assert report.measured and report.measured == convert(planned(tmp_path / "one" / "x", **asked)).measured
    assert files(tmp_path / "there") == expected(tmp_path, **asked)


def test_two_attempts_at_once_give_one_part_record(work: Work) -> None:
    first = running.run(work, 0)
    second = running.run(work, 0)
    assert first.attempt == second.attempt
    assert [path.name for path in (folder_of(work) / "attempts").iterdir() if path.is_dir()] == [
        first.attempt
    ]


def test_attempts_that_wrote_different_bytes_are_refused(work: Work) -> None:
    part = work.run(0)
    place = part_place(work, 0)
    document = json.loads(place.read_text())
    name = next(iter(document["tensors"]))
    document["tensors"][name]["blake3"] = "0" * 64
    place.write_text(json.dumps(_sealed(document)))
    with pytest.raises(CorruptError, match="Two attempts at a task wrote different bytes") as refused:
        running.run(work, 0)
    assert part.attempt in str(refused.value)


def _sealed(document: dict[str, Any]) -> dict[str, Any]:
    fields = {key: value for key, value in document.items() if key != "digest"}
    return {**fields, "digest": json_digest(fields)}


def _all_but_finish(work: Work) -> None:
    for number in work.missing():
        work.run(number)


def _torn(work: Work) -> str:
    place = part_place(work, 0)
    place.write_bytes(place.read_bytes()[:-40])
    return "task 0"


def _forged(work: Work) -> str:
    place = part_place(work, 0)
    place.write_text(place.read_text().replace('"blake3": "', '"blake3": "0', 1))
    return "task 0"


def _of_another_work(work: Work) -> str:
    document = json.loads(part_place(work, 0).read_text())
    part_place(work, 0).write_text(json.dumps(_sealed({**document, "work": "0" * 64})))
    return "of another work"


def _of_another_task(work: Work) -> str:
    shutil.copy(part_place(work, 1), part_place(work, 0))
    return "of another task"


def _deleted(work: Work) -> str:
    part_place(work, 0).unlink()
    return "isn't done @ task 0"


def _without_files(work: Work) -> str:
    part = work.part(0)
    assert part is not None
    shutil.rmtree(files_of(work, part))
    return "isn't there"


def _file_changed(work: Work) -> str:
    part = work.part(0)
    assert part is not None
    path = files_of(work, part) / next(iter(part.files))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return "was changed since"


def _leads_out(work: Work) -> str:
    document = json.loads(part_place(work, 0).read_text())
    part_place(work, 0).write_text(json.dumps(_sealed({**document, "attempt": "../../elsewhere"})))
    return "names files elsewhere"


ACCIDENTS = [
    _torn, _forged, _of_another_work, _of_another_task, _deleted, _without_files, _file_changed, _leads_out,
]  # fmt: skip


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_a_part_that_cannot_be_trusted_is_refused_by_name_and_done_again(accident: Any, work: Work) -> None:
    _all_but_finish(work)
    said = accident(work)
    with pytest.raises(UsageError, match=said):
        work.finish()
    assert not work.target.exists()
    assert work.missing() == [0] and work.status().missing == [0]
    work.run(0)
    work.finish()
    assert statekit.check(work.target).passed


def test_a_forged_record_of_another_shape_is_refused(work: Work) -> None:
    _all_but_finish(work)
    document = json.loads(part_place(work, 0).read_text())
    document["tensors"] = {f"{name}x": entry for name, entry in document["tensors"].items()}
    part_place(work, 0).write_text(json.dumps(_sealed(document)))
    with pytest.raises(UsageError, match="has other tensors than the task"):
        work.finish()


@pytest.mark.parametrize("name", [FILE, "sitecustomize.py"])
def test_a_forged_record_of_a_file_that_no_task_writes_is_refused(name: str, work: Work) -> None:
    _all_but_finish(work)
    part = work.part(0)
    assert part is not None
    file = files_of(work, part) / name
    file.write_text("{}")
    document = json.loads(part_place(work, 0).read_text())
    document["files"][name] = {"bytes": 2, "blake3": "0" * 64, "changed": file.stat().st_mtime_ns}
    part_place(work, 0).write_text(json.dumps(_sealed(document)))
    with pytest.raises(UsageError, match=f"doesn't write: {name}"):
        work.finish()
    assert not work.target.exists()


@pytest.mark.parametrize("record", [None, [], "x", [[0, 1]] * 99, [[0, [1]]], [[-1, 2]], {"0": 1}])
def test_a_forged_record_of_a_section_is_refused_before_it_is_joined(record: Any, tmp_path: Path) -> None:
    with split(planned(tmp_path / "there", "dcp"), tmp_path / "work", CUT) as work:
        _all_but_finish(work)
        document = json.loads(part_place(work, 0).read_text())
        document["records"] = dict.fromkeys(document["records"], record)
        part_place(work, 0).write_text(json.dumps(_sealed(document)))
        with pytest.raises(UsageError, match=r"records/__0_0\.distcp"):
            work.finish()


@pytest.mark.parametrize("fields", [{"asked": "x"}, {"asked": [], "values": 1}, {"values": -1}, {"other": 1}])
def test_a_forged_measure_is_refused(fields: Any, work: Work) -> None:
    _all_but_finish(work)
    document = json.loads(part_place(work, 0).read_text())
    part_place(work, 0).write_text(json.dumps(_sealed({**document, "measured": [fields]})))
    with pytest.raises(UsageError, match="part record can't be trusted"):
        work.finish()


@pytest.mark.parametrize("task", [[], ["write", [], 1], ["write", 5], 7, ["write", -1, 1]])
def test_a_forged_task_is_refused_by_every_verb(task: Any, work: Work) -> None:
    place = folder_of(work) / site.DOCUMENT
    document = json.loads(place.read_text())
    place.write_text(json.dumps(_sealed({**document, "tasks": [task, *document["tasks"][1:]]})))
    with pytest.raises(FormatError, match="tasks/0"):
        Work(folder_of(work))


@pytest.mark.parametrize(
    "request_fields",
    [
        {"maps": {}},
        {"maps": {"map": 1, "config": {}, "rename": {}}},
        {"maps": {"map": None, "config": {}, "rename": {"a": 1}}},
        {"changes": {"other": 1}},
        {"options": {"hparams": 1}},
        {"options": {"param_names": [[1]]}},
        {"options": {"variant": 1}},
        {"options": {"optimizer": []}},
        {"options": {"container": 3}},
        {"options": {"source": "elsewhere"}},
        {"source": "\ud800"},
        {"target": "a\0b"},
    ],
    ids=str,
)
def test_a_forged_request_is_refused_by_a_typed_error(request_fields: Any, work: Work) -> None:
    place = folder_of(work) / site.DOCUMENT
    document = json.loads(place.read_text())
    forged = {**document, "request": {**document["request"], **request_fields}}
    place.write_text(json.dumps(_sealed(forged)))
    with pytest.raises((FormatError, UsageError)), Work(folder_of(work)) as opened:
        assert opened.tasks


def test_a_part_record_of_endless_seconds_is_refused(work: Work) -> None:
    _all_but_finish(work)
    document = json.loads(part_place(work, 0).read_text())
    part_place(work, 0).write_text(json.dumps(_sealed({**document, "seconds": 10**400})))
    with pytest.raises(UsageError, match="part record can't be trusted"):
        work.finish()


def test_a_folder_that_was_there_becomes_its_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work").chmod(0o755)
    with split(planned(tmp_path / "there"), tmp_path / "work", CUT) as work:
        assert folder_of(work).stat().st_mode & 0o777 == 0o700


def test_a_dropped_work_leaves_the_files_that_somebody_else_put_there(work: Work) -> None:
    _all_but_finish(work)
    (folder_of(work) / "notes.txt").write_text("mine")
    with pytest.raises(CommitError, match="somebody put other files there") as error:
        work.drop()
    assert "notes.txt" in f"{error.value}" and files(folder_of(work)) == {"notes.txt": b"mine"}


def test_a_dropped_work_takes_nothing_from_its_own_folders_that_no_attempt_wrote(
    work: Work, tmp_path: Path
) -> None:
    _all_but_finish(work)
    (folder_of(work) / "parts" / "screws.json").write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    shutil.move(folder_of(work) / "attempts", elsewhere)
    (folder_of(work) / "attempts").symlink_to(elsewhere)
    written = files(elsewhere)
    with pytest.raises(CommitError, match="somebody put other files there"):
        work.drop()
    assert files(folder_of(work)) == {"parts/screws.json": b"mine"} and files(elsewhere) == written != {}


@pytest.mark.parametrize("tasks", ["0-99999999999999", "9" * 5000, "0-" + "9" * 5000, "1-", "x", ""])
def test_a_list_of_tasks_that_the_work_has_not_is_refused(
    tasks: str, work: Work, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in (tasks, "-"):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{tasks}\n"))
        assert main(["work", "run", f"{folder_of(work)}", "--tasks", given]) == 2
        assert "list of tasks is invalid" in capsys.readouterr().err
    assert main(["work", "run", f"{folder_of(work)}", "--shard", f"0/{'9' * 5000}"]) == 2


def test_bits_that_flip_after_the_proof_are_found_by_reading_again(work: Work) -> None:
    _all_but_finish(work)
    part = work.part(1)
    assert part is not None
    path = files_of(work, part) / next(iter(part.files))
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(CommitError, match="other values than were written"):
        work.finish(again=True)
    assert not work.target.exists()


def test_a_source_that_changes_between_split_and_run_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source.pt"
    shutil.copy(SOURCE, source)
    split(
        statekit.plan(source, tmp_path / "there", to="statekit", require="lossy"), tmp_path / "w", CUT
    ).close()
    os.utime(source, ns=(1, 1))
    with Work(tmp_path / "w") as work, pytest.raises(CorruptError, match="changed after the work was split"):
        work.run(0)


def test_a_source_that_changes_while_a_task_reads_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source.pt"
    shutil.copy(SOURCE, source)
    plan = statekit.plan(source, tmp_path / "there", to="statekit", require="lossy")
    with split(plan, tmp_path / "w", CUT) as work:
        work.run(0)
        os.utime(source, ns=(1, 1))
        with pytest.raises(CorruptError, match="changed while a task read it"):
            work.run(1)
        assert 1 in work.missing()


def test_a_worker_of_other_libraries_is_refused_before_it_reads(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statekit.scale.fingerprint._zlib", lambda: "0.0")
    with Work(folder_of(work)) as other, pytest.raises(UsageError, match=r"zlib 0\.0"):
        other.run(0)


def test_a_task_that_is_killed_leaves_nothing_that_counts(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(running, "publish", kill)  # after the data, before the part record
        with pytest.raises(Killed):
            work.run(0)
    assert 0 in work.missing() and work.status().failed == {0: "Killed: "}
    _all_but_finish(work)
    work.finish()
    assert statekit.check(work.target).passed


def test_a_full_disk_fails_a_task_and_keeps_what_is_done(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    work.run(0)
    with monkeypatch.context() as patched:
        patched.setattr("statekit.files.durable._Output.write", full)
        with pytest.raises(CommitError, match="No space left"):
            work.run(1)
    assert work.part(0) and 1 in work.missing() and "No space left" in work.status().failed[1]
    assert len([path for path in (folder_of(work) / "attempts").iterdir() if path.is_dir()]) == 1
    _all_but_finish(work)
    work.finish()
    assert statekit.check(work.target).passed


def test_a_store_that_denies_or_changes_fails_the_task_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    values = {f"layer.{i}.weight": np.full(3 * 2**20, i, np.float32) for i in range(3)}
    with serving("s3", {"run/model.safetensors": save(values, {"format": "pt"})}) as (address, served):
        served.tag = '"1"'
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION", "ENDPOINT_URL"):
            monkeypatch.setenv(
                f"AWS_{name}", {"REGION": "us-east-1", "ENDPOINT_URL": address}.get(name, SECRET)
            )
        planned_ = statekit.plan("s3://bucket/run", tmp_path / "there", to="safetensors", require="lossy")
        split(planned_, tmp_path / "work", 2**24).close()
        fetched, read_into = [0], ListedTree.read_into

        def counted(tree: ListedTree, facts: Facts, start: int, into: memoryview) -> None:
            fetched[0] += len(into)
            read_into(tree, facts, start, into)

        monkeypatch.setattr(ListedTree, "read_into", counted)
        with Work(tmp_path / "work") as work:
            work.run(0)
            assert fetched[0] <= 12 * 2**20 + 2**17  # nothing of the next task
            served.fault = "denied"  # as when credentials expire in a long job
            with pytest.raises(FormatError, match="AWS_ACCESS_KEY_ID") as caught:
                work.run(1)
            served.fault = ""
            assert SECRET not in f"{caught.value} {work.status().failed}" and work.missing() == [1, 2]
            work.run(1)
        with Work(tmp_path / "work") as work:
            assert work.opened
            served.tag = '"2"'
            with pytest.raises(CorruptError, match="changed while it was read") as changed:
                work.run(2)
            assert f"{changed.value.place}".startswith("s3://bucket/run/")


def test_a_worker_asks_a_store_for_nothing_that_the_split_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    torch = pytest.importorskip("torch")
    params = {f"layer{i}.weight": torch.zeros(200, 200) for i in range(12)}
    state = {
        i: {"step": torch.tensor(1.0), "exp_avg": weight + 0, "exp_avg_sq": weight + 0}
        for i, weight in enumerate(params.values())
    }
    group = {"params": [*state], "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    options = dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False)
    group |= {**options, "decoupled_weight_decay": True, "foreach": None, "fused": None}
    torch.save({"model": params, "optimizer": {"state": state, "param_groups": [group]}}, tmp_path / "run.pt")
    with serving("s3", {"run.pt": (tmp_path / "run.pt").read_bytes()}) as (address, served):
        named = {"REGION": "us-east-1", "ENDPOINT_URL": address}
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION", "ENDPOINT_URL"):
            monkeypatch.setenv(f"AWS_{name}", named.get(name, SECRET))
        planned_ = statekit.plan("s3://bucket/run.pt", tmp_path / "there", to="statekit", require="lossy")
        split(planned_, tmp_path / "work", 2**20).close()
        assert len(served.requests) > 12  # a request for each count: tensors lie between them
        for torn in (False, True):
            served.requests.clear()
            if torn:
                brought = tmp_path / "work" / site.BROUGHT
                brought.write_bytes(brought.read_bytes()[:-1])
            with Work(tmp_path / "work") as work:
                assert work.opened
                reads = sum("list-type" not in asked for asked in served.requests)
                assert reads > 12 if torn else not reads
                work.run(0)
        served.tag = '"2"'  # as large, and written in the same second
        with (
            pytest.raises(CorruptError, match="changed after the work was split"),
            Work(tmp_path / "work") as work,
        ):
            assert work.opened
        work.drop()
        assert not (tmp_path / "work").exists()


def test_the_command_that_finish_names_does_what_is_missing(work: Work) -> None:
    work.run(0)
    with pytest.raises(UsageError, match="are missing") as caught:
        work.finish()
    assert main(shlex.split(f"{caught.value.remedy}")[1:]) == 0
    assert work.finish().verified


def test_finish_is_done_once_and_says_the_same_again(work: Work) -> None:
    _all_but_finish(work)
    first = work.finish()
    before = files(Path(work.target))
    again = work.finish()
    assert (again.source_digest, again.files) == (first.source_digest, first.files)
    assert files(Path(work.target)) == before and work.missing() == []
    assert work.status().finished


def test_an_attempt_that_outlives_the_finish_changes_nothing(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: it made its folder anew, and all tasks were missing again."""
    _all_but_finish(work)
    publish = parts.publish

    def late(*arguments: Any) -> Any:
        work.finish()
        return publish(*arguments)

    monkeypatch.setattr(running, "publish", late)
    counting = work.part(0)
    assert running.run(work, 0) == counting
    assert work.status().finished and work.missing() == []
    shutil.rmtree(folder_of(work) / "attempts")
    with pytest.raises(CommitError):  # one that begins
        running.run(work, 0)
    assert statekit.check(work.target).passed
    work.drop()
    assert not folder_of(work).exists()


def test_finish_that_is_killed_is_given_again(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    _all_but_finish(work)
    with monkeypatch.context() as patched:
        patched.setattr("statekit.files.homes.LocalHome._take_name", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            work.finish()
    assert not work.target.exists()
    work.finish()
    assert statekit.check(work.target).passed


def test_a_target_that_came_into_being_is_not_replaced(work: Work) -> None:
    _all_but_finish(work)
    Path(work.target).mkdir()
    (Path(work.target) / "mine").write_text("x")
    with pytest.raises(TargetExistsError):
        work.finish()
    assert (Path(work.target) / "mine").read_text() == "x"


def test_one_file_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for to in ("torch", "flax"):
        with pytest.raises(UsageError, match=r"a container of many files: .*statekit"):
            split(planned(tmp_path / "x.pt", to), tmp_path / "w", CUT)


def test_a_damaged_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave --on out"):
        split(planned(tmp_path / "there", accept_damaged=True), tmp_path / "w", CUT)


def test_a_manifest_of_the_source_is_proven_by_tasks_of_their_own(tmp_path: Path) -> None:
    source = tmp_path / "source"
    convert(planned(source))
    with split(
        statekit.plan(source, tmp_path / "there", to="dcp", require="lossy"), tmp_path / "w", CUT
    ) as work:
        shard_file = next(source.glob("*.safetensors"))
        times = shard_file.stat()
        data = bytearray(shard_file.read_bytes())
        data[-1] ^= 1
        shard_file.write_bytes(data)
        os.utime(shard_file, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(CorruptError):
            _all_but_finish(work)


@pytest.mark.parametrize("seed", range(2))
def test_a_third_of_killed_attempts_and_doubles_change_nothing(seed: int, tmp_path: Path) -> None:
    split_alike(lambda target: planned(target, "dcp"), tmp_path, CUT * (seed + 1), seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("to", [*CUTTABLE, "t5x", "tf-bundle", "orbax"])
def test_no_accident_changes_what_any_container_writes(to: str, seed: int, tmp_path: Path) -> None:
    source = OF_T5X if to in ("t5x", "tf-bundle", "orbax") else SOURCE
    split_alike(
        lambda target: statekit.plan(source, target, to=to, require="lossy"),
        tmp_path,
        random.Random(seed).choice([1, 200, 800, 10**9]),
        seed,
        same_bytes=to != "orbax",
    )


def test_a_task_that_always_fails_leaves_the_others_done(work: Work) -> None:
    engine = Flaky(work, 0, 0.0)
    plain = engine.wait
    failed = 0

    def wait(seconds: float) -> list[Outcome]:
        nonlocal failed
        if 0 in engine.begun:
            engine.begun.remove(0)
            failed += 1
            return [Outcome(0, "no memory")]
        return plain(seconds)

    engine.wait = wait  # type: ignore[method-assign]
    with pytest.raises(CommitError, match="no memory @ task 0"):
        carry_out(work, engine)
    assert failed == 4 and work.missing() == [0]


def test_processes_carry_a_work_out_and_a_killed_one_is_replaced(tmp_path: Path) -> None:
    ended: list[Outcome] = []

    class Killing(Processes):
        def pool(self, work: Place, missing: int) -> Pool:
            pool = super().pool(work, missing)
            start, wait = pool.start, pool.wait

            def start_and_kill(number: int) -> None:
                start(number)
                if number == 1:
                    killed = next(worker for worker in pool._workers if worker.task == 1)  # type: ignore[attr-defined]
                    killed.process.kill()

            def noted(seconds: float) -> list[Outcome]:
                outcomes = wait(seconds)
                ended.extend(outcomes)
                return outcomes

            pool.start, pool.wait = start_and_kill, noted  # type: ignore[method-assign]
            return pool

    with split(planned(tmp_path / "there"), tmp_path / "work", CUT) as work:
        first, second = work.missing()[:2]
        for number in work.missing()[2:]:
            work.run(number)
        with pytest.raises(CommitError, match="task 1"):
            carry_out(work, Killing(2))
        assert work.missing() == [second] == [1] and first not in work.missing()
        carry_out(work, Processes(2))
        work.finish()
    assert [one.error for one in ended if one.task == 1] == ["its worker was killed by SIGKILL"] * 4
    assert files(tmp_path / "there") == expected(tmp_path)


def test_the_verbs_of_work_do_what_convert_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, target = tmp_path / "w", tmp_path / "there.statekit"
    asked = ["work", "split", f"{SOURCE}", f"{target}", "--require", "lossy", "--work", f"{place}"]
    assert main([*asked, "--task-bytes", f"{CUT}", "--json"]) == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    assert main(["work", "status", f"{place}", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["missing"] == [task["number"] for task in tasks]
    assert main(["work", "run", f"{place}", "--tasks", "0-1"]) == 0
    assert main(["work", "run", f"{place}", "--shard", "0/1", "--quiet"]) == 0
    assert main(["work", "finish", f"{place}", "--json"]) == 0
    assert main(["work", "status", f"{place}"]) == 0
    assert main(["work", "drop", f"{place}"]) == 0
    assert not place.exists() and statekit.check(target).passed
    assert main(["work", "run", f"{place}"]) == 3
    assert "This folder holds no work" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "share"),
    [
        ({"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "5"}, (2, 4)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, (0, 2)),
        ({"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": "3"}, (1, 3)),
    ],
)
def test_a_scheduler_says_which_share_is_mine(
    variables: dict[str, str], share: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert shard("auto") == share


@pytest.mark.parametrize("text", ["auto", "3/3", "-1/2", "a/b", "1"])
def test_a_share_that_nobody_names_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        shard(text)


def test_slurm_gets_an_array_of_what_is_missing(work: Work) -> None:
    work.run(1)
    array = Slurm(folder_of(work), work.missing()).array()
    assert f"--array={ranges(work.missing())}" in array and "1" not in ranges(work.missing()).split("-")
    assert "--dependency=afterany:12" in Slurm(folder_of(work), []).finish("12")
    with pytest.raises(UsageError, match="more tasks than an array"):
        Slurm(folder_of(work), range(2000)).array()


def test_more_tasks_than_an_array_holds_are_split_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For shares, torchrun and processes. Seen red: half of the text, and exit code 2."""
    monkeypatch.setattr("statekit.engines.slurm.MOST_IN_ARRAY", 2)
    options = ["--to", "statekit", "--require", "lossy", "--task-bytes", f"{CUT}"]
    assert main(["work", "split", f"{SOURCE}", f"{tmp_path / 'there'}", *options]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "more tasks than an array of SLURM holds" in shown and "work finish" in shown


def test_a_place_without_a_work_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="This folder holds no work"):
        Work(tmp_path)
    (tmp_path / "work.json").write_text("{}")
    with pytest.raises(Exception, match="This isn't the document of a work"):
        Work(tmp_path)


assert folder.FORMAT == "statekit-work"  # a stored name
