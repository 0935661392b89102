"""A work in a store: its target has the files of one process, cut alike, through kills, doubles and bad answers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import save
from store_serving import KINDS, SECRET, Served, serving
from test_store_servers import azurite, bucket, google, moto  # noqa: F401  # fixtures

import statekit
from statekit.cli.main import main
from statekit.conversion.convert import convert
from statekit.conversion.plan import Plan
from statekit.errors import CommitError, CorruptError, StatekitError, TargetExistsError, UsageError
from statekit.files.claims import claim_target
from statekit.files.objects import Objects
from statekit.files.source import checkpoint_place
from statekit.files.stage import Stage
from statekit.files.store_home import StoreHome, _Held, bucket_of
from statekit.files.tree import WORK, StoredPlace
from statekit.scale import parts, running
from statekit.scale.brought import packed
from statekit.scale.engine import carry_out
from statekit.scale.folder import WorkFolder
from statekit.scale.store_site import StoreSite
from statekit.scale.work import Work, split
from statekit.tensors.tree import walk
from statekit.testing.works import Flaky

CUT = 800
CUTTABLE = {
    **dict.fromkeys(("statekit", "dcp", "t5x", "tf-bundle", "accelerate"), "s3"),
    **dict.fromkeys(("safetensors", "hf-trainer", "dcp-safetensors", "megatron"), "gs"),
    "orbax": "gs",
}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    pytest.importorskip("obstore")
    with serving("s3", {}) as (address, served):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, SECRET)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", SECRET)
        for name in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
            monkeypatch.setenv(name, address)
        yield served


def planned(to: str = "statekit", target: str = "s3://bucket/there") -> Plan:
    return statekit.plan(KINDS[to][0], target, to=to, require="lossy")


def below(served: Served, top: str) -> dict[str, bytes]:
    return {name.removeprefix(top): data for name, data in served.files.items() if name.startswith(top)}


def expected(served: Served, to: str = "statekit", scheme: str = "s3") -> dict[str, bytes]:
    """Returns what one process writes, cut alike."""
    convert(planned(to, f"{scheme}://bucket/one/there"), task_bytes=CUT)
    return below(served, "one/there/")


@pytest.fixture
def work(store: Served) -> Iterator[Work]:
    with split(planned(), "s3://bucket/there.work", CUT) as made:
        yield made


def done(work: Work) -> None:
    for number in work.missing():
        work.run(number)


@pytest.mark.parametrize("to", CUTTABLE)
def test_workers_in_a_store_write_what_one_process_writes(to: str, store: Served) -> None:
    target = f"{CUTTABLE[to]}://bucket/there"
    with split(planned(to, target), f"{target}.work", CUT) as work:
        assert len(work.tasks) > 1
        carry_out(work, Flaky(work, seed=1))  # each attempt twice, three in ten killed, in any order
        assert not work.missing() and not work.status().finished
        report = work.finish()
        assert work.status().finished and work.finish().files == report.files
    files = expected(store, to, CUTTABLE[to])
    if to == "orbax":  # tensorstore names a database's files at random
        assert not statekit.diff(target, f"{CUTTABLE[to]}://bucket/one/there").first
        assert len({name.split("/")[2] for name in below(store, "there/") if "ocdbt.process_" in name}) == 4
    else:
        assert below(store, "there/") == files
    assert statekit.check(target).passed and report.verified == len(report.plan.entries)
    with Work(f"{target}.work") as again:
        again.drop()
    assert not [name for name in store.files if name.startswith(("there.work", WORK))]


@pytest.mark.parametrize(
    "to", ["hf-trainer", *(pytest.param(to, marks=pytest.mark.slow) for to in ("statekit", "orbax", "dcp"))]
)
def test_a_kill_before_any_request_that_writes_loses_one_task(
    to: str, store: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same commands go on, wherever a process ended: split, the tasks, finish."""

    class Killed(BaseException):
        pass

    scheme = CUTTABLE[to]
    whole, kills, writing = expected(store, to, scheme), 0, [0]
    create, target = Objects.create, f"{scheme}://bucket/there"

    def is_whole() -> bool:
        if to != "orbax":
            return below(store, "there/") == whole
        return (
            statekit.check(target).passed and not statekit.diff(target, f"{scheme}://bucket/one/there").first
        )

    def dying(objects: Objects, name: str, data: Any) -> Any:
        writing[0] -= 1
        if writing[0] < 0:
            raise Killed
        return create(objects, name, data)

    def carried_out() -> None:
        with split(planned(to, target), f"{target}.work", CUT) as work:
            done(work)
            work.finish()

    monkeypatch.setattr(Objects, "create", dying)
    for count in range(100):
        writing[0] = count
        try:
            carried_out()
        except Killed:
            kills += 1
            if below(store, WORK) or not below(store, "there/"):  # one of the last is after the claim is gone
                with pytest.raises(StatekitError):
                    statekit.inspect(target)
        else:
            break
        writing[0] = 10**6
        carried_out()
        assert is_whole(), f"killed before request {count}"
        assert not below(store, WORK), "a claim hides the target"
        with Work(f"{target}.work") as work:
            work.drop()
        for name in [*store.files]:
            if not name.startswith("one/"):
                assert name.startswith("there/"), f"{name} is left after a kill before request {count}"
                del store.files[name]
    assert kills > 10


@pytest.mark.parametrize("fault", ["busy", "lost"])
def test_a_store_that_is_busy_or_whose_answers_get_lost_is_asked_again(fault: str, store: Served) -> None:
    whole, store.fault = expected(store), fault
    with split(planned(), "s3://bucket/there.work", CUT) as work:
        done(work)
        work.finish()
    assert below(store, "there/") == whole


def test_a_store_that_changes_bytes_fails_the_task_and_keeps_none_of_them(work: Work, store: Served) -> None:
    store.fault = "other"
    with pytest.raises(StatekitError):
        work.run(0)
    store.fault = ""
    assert not below(store, "there/")
    done(work)
    work.finish()
    assert statekit.check("s3://bucket/there").passed


def test_a_part_whose_objects_are_gone_or_changed_is_done_again(work: Work, store: Served) -> None:
    """An object of another state and equal bytes counts: another attempt has put it again."""
    done(work)
    part = work.part(0)
    assert part is not None
    name = f"there/{next(iter(part.files))}"
    sound = store.files[name]
    store.tag = '"another"'
    assert work.missing() == []
    store.tag = ""
    store.files[name] = sound[:-1] + bytes([sound[-1] ^ 1])
    assert work.missing() == [0] and work.part(0) is None
    with pytest.raises(UsageError, match="changed since"):
        work.finish()
    del store.files[name]
    assert work.missing() == [0]
    work.run(0)
    work.finish()
    assert store.files[name] == sound and statekit.check("s3://bucket/there").passed


def test_nobody_else_writes_or_reads_the_target_of_a_work(work: Work, store: Served) -> None:
    done(work)
    with pytest.raises(TargetExistsError, match=r"work status s3://bucket/there\.work"):
        convert(planned())
    with pytest.raises(StatekitError, match="being written"):
        statekit.inspect("s3://bucket/there")
    assert main(["sweep", "s3://bucket"]) == 0
    assert work.missing() == []
    with pytest.raises(TargetExistsError), split(planned(), "s3://bucket/another.work", CUT):
        pass
    assert not below(store, "another.work")
    with split(planned(), "s3://bucket/there.work", CUT) as again:
        assert again.missing() == []
    with pytest.raises(UsageError, match="Another work"):
        split(planned(), "s3://bucket/there.work", 2 * CUT)
    work.finish()
    assert statekit.check("s3://bucket/there").passed


def test_a_work_whose_claim_was_swept_stops_and_is_split_again(work: Work, store: Served) -> None:
    work.run(0)
    store.moments = ("2001-01-01T00:00:00.000Z", *2 * ("Mon, 01 Jan 2001 00:00:00 GMT",))
    assert main(["sweep", "s3://bucket", "--idle-hours", "0"]) == 0
    assert not below(store, "there/") and work.missing() == [task.number for task in work.tasks]
    with pytest.raises(CommitError, match="taken over"):
        work.run(0)
    with split(planned(), "s3://bucket/there.work", CUT) as again:
        done(again)
        again.finish()
    assert statekit.check("s3://bucket/there").passed


def test_a_claim_is_taken_while_other_processes_of_the_work_write(store: Served) -> None:
    objects = bucket_of(cast(StoredPlace, checkpoint_place("s3://bucket/there")))[0]
    objects.mark = "ours"
    objects.create("there/part", b"1")
    assert claim_target(objects, "there", (), "s3://bucket/there.work").mark == "ours"
    objects.mark = "another"
    objects.create("elsewhere/part", b"1")
    objects.mark = "ours"
    with pytest.raises(TargetExistsError):
        claim_target(objects, "elsewhere", (), "s3://bucket/there.work")


def test_drop_removes_the_objects_of_a_work_whose_claim_somebody_deleted(work: Work, store: Served) -> None:
    work.run(0)
    for name in [*below(store, WORK)]:
        del store.files[f"{WORK}{name}"]
    with pytest.raises(CommitError, match="taken over"):
        work.run(1)
    work.drop()
    assert not store.files


def test_drop_removes_what_the_work_put_and_nothing_else(work: Work, store: Served) -> None:
    work.run(0)
    store.files["there/mine"] = store.files["there.work/notes.txt"] = b"mine"
    with pytest.raises(CommitError, match="other files") as left:
        work.drop()
    assert "notes.txt" in f"{left.value}"
    assert store.files == {"there/mine": b"mine", "there.work/notes.txt": b"mine"}


def test_places_that_do_not_go_together_are_refused(store: Served, tmp_path: Path) -> None:
    for target, place in (
        ("s3://bucket/there", tmp_path / "work"),
        (f"{tmp_path / 'there'}", "s3://bucket/there.work"),
        ("s3://bucket/there", "s3://other/there.work"),
    ):
        with pytest.raises(UsageError, match="different places"):
            split(planned(target=target), place, CUT)
    with pytest.raises(UsageError, match="in each other"):
        split(planned(), "s3://bucket/there/work", CUT)
    store.fault = "unconditional"
    with pytest.raises(UsageError, match="conditional"):
        split(planned(), "s3://bucket/there.work", CUT)
    assert not store.files


def test_the_command_line_carries_a_work_out_in_a_store(
    store: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = f"{KINDS['statekit'][0]}", "s3://bucket/there"
    options = ["--to", "statekit", "--require", "lossy", "--task-bytes", f"{CUT}"]
    assert main(["work", "split", source, target, *options]) == 0
    assert "work run s3://bucket/there.work" in capsys.readouterr().out
    assert main(["work", "run", "s3://bucket/there.work", "--shard", "0/2"]) == 0
    assert main(["work", "status", "s3://bucket/there.work"]) == 1
    command = [sys.executable, "-m", "statekit", "convert", source, target, *options, "--on", "processes:2"]
    subprocess.run([*command, "--quiet"], check=True)
    assert below(store, "there/") == expected(store) and not below(store, "there.work")


def test_orbax_restores_what_many_workers_put(store: Served, tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    with split(planned("orbax", "gs://bucket/there"), "gs://bucket/there.work", CUT) as work:
        carry_out(work, Flaky(work, seed=2))
        work.finish()
    for name, data in below(store, "there/").items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    statekit.convert(KINDS["orbax"][0], tmp_path / "one", to="orbax", require="lossy")
    trees = [
        ocp.PyTreeCheckpointer().restore(top / "checkpoint_4" / "state")
        for top in (tmp_path, tmp_path / "one")
    ]
    leaves = [dict(walk(tree)) for tree in trees]
    assert leaves[0].keys() == leaves[1].keys() != set()
    assert all(np.array_equal(leaf, leaves[1][path]) for path, leaf in leaves[0].items())


def test_what_joins_the_parts_is_that_of_the_first_finish(store: Served) -> None:
    """What Orbax' databases are joined by has random names, and a killed finish has put some of it."""
    with split(planned("orbax", "gs://bucket/there"), "gs://bucket/there.work", CUT) as work:
        done(work)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(StoreHome, "publish", lambda home, files: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                work.finish()
        first = below(store, "there/")
        assert any(name.endswith("state/manifest.ocdbt") for name in first)
        joined = store.files["there.work/joined"]
        for forged in (
            joined[:-1],
            packed([("elsewhere/file", "", 0)], [b"1"]),
            packed([("there/../file", "", 0)], [b"1"]),
        ):
            store.files["there.work/joined"] = forged
            with pytest.raises(CorruptError, match="was changed"):
                work.finish()
        store.files["there.work/joined"] = joined
        work.finish()
    assert first.items() <= below(store, "there/").items()
    assert statekit.check("gs://bucket/there").passed


@pytest.mark.parametrize(("store", "to"), [("s3", "orbax"), ("s3", "statekit"), ("az", "dcp")])
@pytest.mark.usefixtures("bucket")
def test_servers_of_others_hold_a_work(store: str, to: str) -> None:
    """moto and azurite, as in test_store_servers.py."""
    target = f"{store}://bucket/work-{to}"
    with split(planned(to, target), f"{target}.work", CUT) as work:
        carry_out(work, Flaky(work, seed=1))
        work.finish()
        work.drop()
    convert(planned(to, f"{target}-one"), task_bytes=CUT)
    assert statekit.check(target).passed and not statekit.diff(target, f"{target}-one").first
    with pytest.raises(StatekitError):
        Work(f"{target}.work")


def test_a_part_in_many_requests_is_one_object(store: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statekit.files.objects.PART_BYTES", 2**18)
    values = {f"layer.{i}.weight": np.full(2**18, i, np.float32) for i in range(3)}
    store.files["run/model.safetensors"] = save(values, {"format": "pt"})
    plan = statekit.plan("s3://bucket/run", "s3://bucket/there", to="safetensors", require="lossy")
    with split(plan, "s3://bucket/there.work", 2**20) as work:
        for number in 2 * work.missing():
            assert running.run(work, number).attempt
        work.finish()
    assert statekit.check("s3://bucket/there").passed and not store.parts
    assert any("uploadId" in request for request in store.requests)


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch, store: Served) -> Callable[[str, float], Plan]:
    """Gives plans of large tensors, whose objects go in parts."""
    monkeypatch.setattr("statekit.files.objects.PART_BYTES", 2**18)

    def of(name: str, value: float) -> Plan:
        values = {f"layer.{i}.weight": np.full(2**18, i + value, np.float32) for i in range(2)}
        store.files[f"{name}/model.safetensors"] = save(values, {"format": "pt"})
        return statekit.plan(f"s3://bucket/{name}", "s3://bucket/there", to="safetensors", require="lossy")

    return of


def test_an_upload_that_ends_late_changes_no_target_of_another_work(
    in_parts: Callable[[str, float], Plan], store: Served
) -> None:
    """A worker of a work that was given up, on a machine that stood still. Seen red: the target had its values."""
    with split(in_parts("first", 0), "s3://bucket/there.work", 2**20) as late:
        send_tail = _Held.send_tail

        def standing_still(output: _Held) -> None:
            with pytest.MonkeyPatch.context() as once:
                once.setattr(_Held, "send_tail", send_tail)
                late.drop()
                with split(in_parts("second", 100), "s3://bucket/there.work", 2**20) as other:
                    done(other)
                    other.finish()
            send_tail(output)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_Held, "send_tail", standing_still)
            with pytest.raises(CommitError, match="taken over"):
                late.run(0)
    assert statekit.check("s3://bucket/there").passed


def test_a_large_file_takes_the_place_of_nobodys_object(
    in_parts: Callable[[str, float], Plan], store: Served
) -> None:
    with split(in_parts("first", 0), "s3://bucket/there.work", 2**20) as work:
        part = work.run(0)
        name = f"there/{next(iter(part.files))}"
        del store.files[name], store.marks[name]
        store.files[name] = b"mine"
        with pytest.raises(TargetExistsError):
            work.run(0)
        assert store.files[name] == b"mine"
        del store.files[name]
        done(work)
        work.finish()
    assert statekit.check("s3://bucket/there").passed


@pytest.mark.parametrize("to", ["statekit", "orbax"])
def test_names_above_the_target_that_end_like_an_attempts(to: str, store: Served) -> None:
    """Trackers call runs so. Seen red: finish deleted its own work."""
    target = f"gs://bucket/run-{'0123456789abcdef' * 2}/there"
    with split(planned(to, target), f"{target}.work", CUT) as work:
        done(work)
        files = work.finish().files
        assert work.finish().files == files and work.missing() == []
        work.drop()
    assert statekit.check(target).passed


def test_an_attempt_that_fails_leaves_anothers_objects(work: Work, store: Served) -> None:
    """Seen red: they were deleted, and the task that was done was missing."""
    publish, failing = parts.publish, [True]

    def beside_a_failing_one(*arguments: Any) -> Any:
        if failing.pop() if failing else False:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(
                    Stage, "prove", lambda stage, reopen: _raise(CommitError("It cannot be read again."))
                )
                with pytest.raises(CommitError):
                    running.run(work, 0)
        return publish(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(running, "publish", beside_a_failing_one)
        work.run(0)
    assert 0 not in work.missing()


def _raise(error: Exception) -> Any:
    raise error


def test_a_work_that_is_dropped_beside_its_workers_leaves_nothing(work: Work, store: Served) -> None:
    """Seen red: the folder and the target's name could never be used again."""
    prove = Stage.prove

    def dropped(stage: Stage, reopen: Any) -> Any:
        with Work("s3://bucket/there.work") as other:
            other.drop()
        return prove(stage, reopen)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Stage, "prove", dropped)
        with pytest.raises(CommitError, match="taken over"):
            work.run(0)
    assert not below(store, "there/") and not below(store, "there.work/parts")
    for name in [*store.files]:
        assert name.startswith("there.work/attempts/"), name  # the note of why it failed
        del store.files[name]
    with split(planned(), "s3://bucket/there.work", CUT) as again:
        done(again)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("statekit.files.store_home.check_held", lambda objects, claim: again.drop())
            with pytest.raises(CommitError, match="taken over"):
                again.finish()
    assert not below(store, "there")


def test_a_drop_that_was_killed_is_given_again(store: Served) -> None:
    class Killed(BaseException):
        pass

    delete, kills = Objects.delete, 0
    for count in range(20):
        with split(planned(), "s3://bucket/there.work", CUT) as work:
            work.run(0)
        left = [count]

        def dying(*arguments: Any, left: list[int] = left) -> list[str]:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return delete(*arguments)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Objects, "delete", dying)
            try:
                Work("s3://bucket/there.work").drop()
            except Killed:
                kills += 1
            else:
                break
        Work("s3://bucket/there.work").drop()
        assert not store.files
    assert kills > 3


def test_objects_of_another_state_are_read_once(work: Work, store: Served) -> None:
    done(work)
    store.tag = '"another"'
    assert work.missing() == []
    before = len(store.requests)
    assert work.missing() == [] and work.status().missing == []
    assert not [request for request in store.requests[before:] if request.startswith("GET /bucket/there/")]


def test_what_changes_after_the_part_records_were_read_is_seen(work: Work, store: Served) -> None:
    """Seen red: finish called it verified."""
    done(work)
    part = work.part(0)
    assert part is not None
    name, parts_of = f"there/{next(iter(part.files))}", WorkFolder.parts

    def changed(folder: WorkFolder) -> Any:
        records = parts_of(folder)
        store.files[name] = store.files[name][:-1] + bytes([store.files[name][-1] ^ 1])
        return records

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(WorkFolder, "parts", changed)
        with pytest.raises(CommitError, match="changed meanwhile"):
            work.finish()
    with pytest.raises(TargetExistsError):  # and takes away what is wrong
        work.run(0)
    done(work)
    work.finish()
    assert statekit.check("s3://bucket/there").passed


def test_two_processes_may_finish_a_work(work: Work, store: Served) -> None:
    """Seen red: the second said that another process has taken over."""
    done(work)
    joined = StoreSite.joined

    def finished_before(site: StoreSite, *arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as once:
            once.setattr(StoreSite, "joined", joined)
            with Work("s3://bucket/there.work") as other:
                other.finish()
        return joined(site, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StoreSite, "joined", finished_before)
        assert work.finish().verified
    assert statekit.check("s3://bucket/there").passed
