"""The service's jobs: leases that fence, ends that are one, tasks that may die, and what thinning refuses."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_targets import FOREIGN, facts, put
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from jsonschema import Draft202012Validator
from pydantic import ValidationError
from safetensors.numpy import save_file

import statekit
from goldens import GOLDEN
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.errors import CommitError, CorruptError, NotFoundError, RefusedError, UsageError
from statekit.service.catalogue import Catalogue
from statekit.service.database import Database, Ownership
from statekit.service.jobs import LEASE_SECONDS, MOST_ATTEMPTS, Jobs, Lease, Lost
from statekit.service.lineage import lineage_of
from statekit.service.options import MODELS
from statekit.service.records import ENDED, Job, Query
from statekit.service.server import _scan
from statekit.service.service import Service
from statekit.service.tasks.child import Answer, Child, Died, Zygote
from statekit.service.tasks.listener import Listener
from statekit.service.tasks.worker import Worker
from statekit.service.thinning import thin
from statekit.service.work import _written

pytestmark = pytest.mark.usefixtures("shared_zygotes")

T5X = GOLDEN / "t5x" / "momentum_f32" / "checkpoint" / "checkpoint_4"
TORCH = GOLDEN / "torch_formats" / "adamw_legacy" / "checkpoint" / "checkpoint.pt"


class Lab:
    """A root with two steps of a run, and the service's parts over it, in this process."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        for step in (4, 8):
            shutil.copytree(T5X, self.root / "run" / f"checkpoint_{step}")
        self.owner = Ownership(folder / "data")
        self.database = Database(folder / "data", migrate=True)
        self.catalogue = Catalogue(self.database, [self.root])
        self.catalogue.scan()
        self.jobs = Jobs(self.database)
        self.worker = Worker(self.database, self.catalogue, self.jobs)

    def number(self, path: str) -> int:
        (one,) = [item for item in self.catalogue.checkpoints(Query(sort="path")).items if item.path == path]
        return one.id

    def do(self, kind: str, subjects: list[int], **options: Any) -> Job:
        made = self.jobs.submit(kind, subjects, options)
        lease = self.jobs.lease("test")
        assert lease is not None and lease.job.id == made.id
        self.worker._do(lease)
        return self.jobs.job(made.id)

    def close(self) -> None:
        self.worker.close()
        self.database.close()
        self.owner.close()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab whose checkpoints no test changes."""
    made = Lab(tmp_path_factory.mktemp("lab"))
    yield made
    made.close()


def test_a_job_is_done_by_a_process_of_its_own_and_its_events_are_in_order(shared: Lab) -> None:
    job = shared.do("inspect", [shared.number("run/checkpoint_4")], stats=True)
    assert (job.state, job.attempts, job.fraction) == ("done", 1, 1.0)
    assert shared.jobs.result(job.id)["totals"]["parameters"] == 6
    events = shared.jobs.events(job.id)
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert [e.data["state"] for e in events if e.kind == "state"] == ["queued", "running", "done"]
    assert shared.jobs.events(job.id, after=1)[0].number == 2
    known = shared.jobs.earlier("inspect", job.subjects, {"stats": True})
    assert known is not None and known.id == job.id
    assert shared.jobs.earlier("inspect", job.subjects) is None


def test_one_parameter_is_looked_at_over_a_run_and_beside_another(shared: Lab) -> None:
    steps = [shared.number("run/checkpoint_4"), shared.number("run/checkpoint_8")]
    path = "token_embedder/embedding"
    one = shared.do("parameter", steps[:1], path=path, hparams={"beta1": 0.9})
    record = shared.jobs.result(one.id)
    assert record["path"] == path and {"values", "v_row", "v_col", "m"} == set(record["tensors"])
    run = shared.jobs.result(shared.do("parameter", steps, path=path).id)
    assert run["curves"]["rms(m)"] == [record["tensors"]["m"]["stats"]["rms"]] * 2
    apart = shared.jobs.result(shared.do("diff", steps, path=path, slot="v_row").id)
    assert apart["stats"]["norm"] == 0.0 and apart["bars"]["values"]


def test_what_a_verb_refuses_is_a_problem_with_its_parts(shared: Lab) -> None:
    job = shared.do("inspect", [shared.number("run/checkpoint_4")], filter="nothing*")
    assert job.state == "failed" and job.problem is not None
    assert (job.problem["kind"], job.problem["subject"]) == ("NotFoundError", "Nothing matches the filter.")
    assert job.problem["remedy"]


def test_a_scan_that_began_before_a_seal_takes_nothing_back(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seal() -> str:
        return lab.catalogue.checkpoint(number).seal

    number = lab.number("run/checkpoint_4")
    (scanner,) = lab.catalogue._scanners.values()
    before = {path for path in lab.root.rglob("*") if path.is_file()}
    seen = list(scanner.scan())
    assert lab.do("seal", [number]).state == "done"
    with monkeypatch.context() as patch:
        patch.setattr(scanner, "scan", lambda: iter(seen))
        lab.catalogue.scan()
    assert seal() == "sealed"
    lab.catalogue.scan()
    assert seal() == "sealed"
    for made in {path for path in lab.root.rglob("*") if path.is_file()} - before:
        made.unlink()
    lab.catalogue.scan()
    assert seal() == "unsealed"


def test_a_task_that_dies_ends_its_job_and_nothing_else(shared: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Child.ask

    def ask(child: Child, request: Any) -> None:
        asked(child, request)
        os.kill(child.pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(Child, "ask", ask)
        crashed = shared.do("check", [shared.number("run/checkpoint_4")])
    assert crashed.state == "crashed" and "SIGKILL" in str(crashed.problem)
    assert shared.do("check", [shared.number("run/checkpoint_4")]).state == "done"


def answering(patch: pytest.MonkeyPatch, *answers: Answer | Exception) -> None:
    """Has each task say just this, all at once."""

    def said(child: Child, seconds: float) -> Iterator[Answer]:
        for one in answers:
            if isinstance(one, Exception):
                raise one
            yield one

    patch.setattr(Child, "ask", lambda child, request: None)
    patch.setattr(Child, "answers", said)


def test_what_a_job_logs_before_its_end_is_kept(shared: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with the result, and no beat lies between them."""
    line, ended = Answer("log", {"line": "not proven"}), list[tuple[str, list[str]]]()
    for end in (Answer("result", {}), Answer("problem", {}), Died("was ended")):
        with monkeypatch.context() as patch:
            answering(patch, line, end)
            job = shared.do("inspect", [shared.number("run/checkpoint_4")], filter="of this test")
        kinds = [event.kind for event in shared.jobs.events(job.id)]
        assert kinds.index("log") < len(kinds) - 1
        ended.append((job.state, shared.jobs.log(job.id)))
    assert ended == [(state, ["not proven"]) for state in ("done", "failed", "crashed")]


def test_progress_takes_no_lines_of_the_log_away(shared: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statekit.service.jobs.MOST_LOGS", 3)
    job = shared.jobs.submit("check", [shared.number("run/checkpoint_4")])
    lease = shared.jobs.lease("test")
    assert lease is not None and lease.job.id == job.id
    for i in range(5):
        shared.jobs.heartbeat(lease, i / 5, f"{i}")
    shared.jobs.heartbeat(lease, 1.0, "", ["a", "b"])
    shared.jobs.finish(lease, "failed", lines=["c", "d"])
    assert shared.jobs.log(job.id) == ["a", "b", "c"]
    assert shared.jobs.log(job.id, 2) == ["b", "c"]


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (b"x" * 60_000, "more than a task may"),
        (b"[" * 40_000 + b"\n", "no task says"),
        (b"7\n", "no task says"),
    ],
    ids=["endless", "deep", "number"],
)
def test_a_task_that_says_what_none_says_is_ended(
    monkeypatch: pytest.MonkeyPatch, answers: bytes, said: str
) -> None:
    """As one may in which a checkpoint has the word."""
    monkeypatch.setattr("statekit.service.tasks.child.ANSWER_BYTES", 50_000)
    zygote, ended = Zygote(), list[int]()
    monkeypatch.setattr(zygote, "ended", lambda pid, seconds: ended.append(pid))
    pipes = [os.pipe() for _ in range(3)]
    child = Child(zygote, 2**30, (pipes[0][1], pipes[1][0], pipes[2][0]))  # a number that no process has
    os.write(pipes[1][1], answers)
    with pytest.raises(Died, match=said):
        list(child.answers(5.0))
    assert ended == [2**30]
    child.close()
    for file in (pipes[0][0], pipes[1][1], pipes[2][1]):
        os.close(file)


def test_a_job_that_outlasts_the_end_of_the_service_waits_for_its_next_start(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Child, "ask", lambda child, request: None)  # it works for ever
        patch.setattr("statekit.service.tasks.worker.BEAT_SECONDS", 0.05)
        lab.worker._stopped_at = time.monotonic() - 60
        stopped = lab.do("check", [lab.number("run/checkpoint_4")])
    assert (stopped.state, stopped.attempts) == ("queued", 0)


def test_a_task_has_no_more_memory_than_its_files_explain(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones get on with what the zygote has; blocks of 8 MiB aren't among that."""
    (lab.root / "large").mkdir()
    save_file({"w": np.ones((2048, 2048), np.float32)}, lab.root / "large" / "model.safetensors")
    lab.catalogue.scan()
    assert lab.do("inspect", [lab.number("large")], stats=True).state == "done"
    monkeypatch.setattr("statekit.service.tasks.worker.MEMORY", 2**20)
    job = lab.do("check", [lab.number("large")])
    assert job.state in ("failed", "crashed")


def test_a_repeated_request_is_one_job_and_another_one_under_its_key_is_refused(shared: Lab) -> None:
    number = shared.number("run/checkpoint_4")
    first = shared.jobs.submit("check", [number], idempotency_key="k")
    assert shared.jobs.submit("check", [number], idempotency_key="k").id == first.id
    with pytest.raises(UsageError, match="another request"):
        shared.jobs.submit("seal", [number], idempotency_key="k")
    assert shared.jobs.jobs(state="open").total == 1
    assert shared.jobs.cancel(first.id).state == "cancelled"
    assert shared.jobs.cancel(first.id).state == "cancelled"
    assert shared.jobs.lease("test") is None


@pytest.mark.parametrize(
    ("kind", "count", "options", "said"),
    [
        ("convert", 1, {}, "target"),
        ("convert", 1, {"target": "/tmp/x"}, "target"),
        ("convert", 1, {"target": {"root": 1, "path": "a.pt"}, "map": "../x.json"}, "map"),
        ("convert", 1, {"target": {"root": 1, "path": "a.pt"}, "like": "/etc/passwd"}, "like"),
        ("verify", 2, {"gradients": "/etc/passwd"}, "gradients"),
        ("diff", 1, {}, "subjects"),
        ("inspect", 1, {"follow_links": True}, "follow_links"),
        ("inspect", 1, {"budget": 2**60}, "budget"),
        ("nothing", 1, {}, "kind"),
    ],
)
def test_options_that_make_no_sense_or_name_files_are_refused(
    shared: Lab, kind: str, count: int, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        shared.jobs.submit(kind, [shared.number("run/checkpoint_4")] * count, options)
    with pytest.raises(NotFoundError):
        shared.jobs.submit("check", [999])


def test_a_checkpoint_named_twice_is_refused_with_its_number(shared: Lab) -> None:
    number = shared.number("run/checkpoint_4")
    with pytest.raises(UsageError, match=f"1000 times.*subjects: {number}"):
        shared.jobs.submit("doctor", [number] * 1000)


def test_a_target_outside_of_the_roots_is_a_problem_and_nothing_is_written(shared: Lab) -> None:
    for path in ("../out.pt", "/tmp/out.pt", "nowhere/out.pt"):
        job = shared.do("convert", [shared.number("run/checkpoint_4")], target={"root": 1, "path": path})
        assert job.state == "failed", path
    assert not (shared.root.parent / "out.pt").exists()


def test_a_conversion_of_a_job_and_one_of_the_command_line_are_in_the_lineage(lab: Lab) -> None:
    source = lab.number("run/checkpoint_4")
    assert lab.do("convert", [source], target={"root": 1, "path": "job.pt"}, to="torch").state == "done"
    assert lab.do("convert", [source], target={"root": 1, "path": "in"}, to="orbax").state == "done"
    statekit.convert(lab.root / "job.pt", lab.root / "line.pt", layout="statekit-torch", step_offset="reset")
    lab.catalogue.scan()
    line = lab.number("line.pt")
    lineage = lineage_of(lab.database, line)
    names = [node.checkpoint.path for node in lineage.nodes if node.checkpoint]
    assert names == ["run/checkpoint_4", "job.pt", "in/checkpoint_4", "line.pt"]
    edges = {(edge.source, edge.target): edge for edge in lineage.edges}
    of_job = edges[f"checkpoint-{source}", f"checkpoint-{lab.number('job.pt')}"]
    of_line = edges[f"checkpoint-{lab.number('job.pt')}", f"checkpoint-{line}"]
    assert of_job.job is not None and of_line.job is None
    assert edges[f"checkpoint-{source}", f"checkpoint-{lab.number('in/checkpoint_4')}"].job not in (
        None,
        of_job.job,
    )
    assert of_line.tool == f"statekit {statekit.__version__}"
    assert of_line.options["step_offset"]["asked"] == "reset"


def test_workers_carry_out_a_job_that_stays_one_job(lab: Lab) -> None:
    source = lab.number("run/checkpoint_4")
    job = lab.do("convert", [source], target={"root": 1, "path": "many"}, to="safetensors", on="processes:2")
    assert (job.state, job.attempts) == ("done", 1), job.problem
    statekit.convert(lab.root / "run" / "checkpoint_4", lab.root / "one", to="safetensors")
    ours, one = (statekit.check(lab.root / name) for name in ("many", "one"))
    assert ours.passed and one.passed
    digests = [
        json.loads((lab.root / name / "statekit.json").read_text())["tensors"] for name in ("many", "one")
    ]
    assert digests[0] == digests[1] and not (lab.root / ".many.work").exists()
    output = io.StringIO()
    planned = statekit.plan(lab.root / "run" / "checkpoint_4", lab.root / "other", to="safetensors")
    _written(planned, {"on": "processes:2"}, Listener(output))  # a job's events depend on how fast it is
    assert "tasks done" in output.getvalue()


@pytest.mark.parametrize("target", ["file.pt/x", "file.pt/x/y", "run/checkpoint_4/checkpoint/x"])
def test_a_target_below_a_file_is_an_error_of_the_job_at_once(target: str, shared: Lab) -> None:
    (shared.root / "file.pt").write_bytes(TORCH.read_bytes())
    said = {"root": shared.catalogue.roots()[0].id, "path": target}
    job = shared.do("convert", [shared.number("run/checkpoint_4")], to="torch", target=said)
    assert (job.state, job.attempts) == ("failed", 1) and job.problem is not None
    assert "folder" in job.problem["subject"] or "there" in job.problem["subject"]
    (shared.root / "file.pt").unlink()


def test_a_job_that_replaces_destroys_nothing_that_is_not_ours(shared: Lab) -> None:
    number, folder = shared.number("run/checkpoint_4"), shared.root / "targets"
    root = shared.catalogue.roots()[0].id
    for kind, to in zip(FOREIGN, cycle(("torch", "statekit")), strict=False):
        target = folder / "train.py"
        folder.mkdir()
        put(kind, shared.root / "run" / "checkpoint_4", target)
        before = facts(target)
        said = {"root": root, "path": "targets/train.py"}
        job = shared.do("convert", [number], to=to, target=said, replace=True)
        assert job.state == "failed" and facts(target) == before, (kind, to)
        assert (folder / "precious" / "train.py").read_text() == "precious"
        shutil.rmtree(folder)


@pytest.mark.slow
def test_thinning_destroys_nothing_that_lies_at_its_target(lab: Lab) -> None:
    old = lab.number("run/checkpoint_4")
    for number in (old, lab.number("run/checkpoint_8")):
        assert lab.do("seal", [number]).state == "done"
    lab.catalogue.scan()
    source = lab.root / "run" / "checkpoint_4"
    target = Path(lab.jobs.result(lab.do("thin", [old], dry_run=True).id)["target"])
    for kind in (*FOREIGN, "our file", "our folder"):
        put(kind, source, target)
        before, whole = facts(target), facts(source)
        assert lab.do("thin", [old]).state == "failed", kind
        assert (facts(target), facts(source)) == (before, whole), kind
        shutil.rmtree(target.with_name("precious"))
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink()
        target.with_name(f"{target.name}.statekit.json").unlink(missing_ok=True)


def test_thinning_keeps_the_weights_and_refuses_what_is_needed(lab: Lab) -> None:
    old, last = lab.number("run/checkpoint_4"), lab.number("run/checkpoint_8")

    def refusal(number: int) -> str:
        with pytest.raises(RefusedError) as refused:
            lab.jobs.submit("thin", [number])
        return refused.value.subject

    assert "unsealed" in refusal(old)
    for number in (old, last):
        assert lab.do("seal", [number]).state == "done"
    lab.catalogue.scan()
    assert "last step" in refusal(last)
    statekit.convert(lab.root / "run" / "checkpoint_4", lab.root / "made.pt")
    lab.catalogue.scan()
    assert "another was made of it" in refusal(old)
    (lab.root / "made.pt").unlink()
    lab.catalogue.scan()

    before = sum(file.stat().st_size for file in (lab.root / "run" / "checkpoint_4").rglob("*"))
    dry = lab.jobs.result(lab.do("thin", [old], dry_run=True).id)
    assert dry["dry_run"] and dry["freed"] > 0
    assert (lab.root / "run" / "checkpoint_4").is_dir()
    job = lab.do("thin", [old])
    assert job.state == "done", job.problem
    said = lab.jobs.result(job.id)
    assert not (lab.root / "run" / "checkpoint_4").exists() and before > 0
    weights = statekit.inspect(Path(said["target"]))
    assert weights.totals()["slots"] == 0 and weights.totals()["parameters"] == 6
    assert not [file for file in (lab.root / "run").iterdir() if file.name.startswith(".statekit")]
    lab.catalogue.scan()
    edges = lineage_of(lab.database, old).edges
    assert sorted(edge.kind for edge in edges) == ["convert", "thin"]


def test_thinning_is_refused_by_what_happened_since_the_last_scan(lab: Lab) -> None:
    old, last = lab.number("run/checkpoint_4"), lab.number("run/checkpoint_8")
    statekit.seal(lab.root / "run")
    lab.catalogue.scan()
    target = {"root": lab.catalogue.roots()[0].id, "path": "made"}
    reading = lab.jobs.submit("convert", [last], {"target": target, "to": "statekit", "like": old})
    with pytest.raises(RefusedError, match=f"job {reading.id} is about it"):
        lab.jobs.submit("thin", [old])
    lab.jobs.cancel(reading.id)
    lab.catalogue.tag(old, "the paper")
    with pytest.raises(RefusedError, match="with a tag are kept"):
        lab.jobs.submit_each("thin", [old])
    lab.catalogue.untag(old, "the paper")
    assert lab.jobs.cancel(lab.jobs.submit_each("thin", [old])[0].id).state == "cancelled"
    shutil.rmtree(lab.root / "run" / "checkpoint_8")  # no scan has seen it
    with pytest.raises(RefusedError, match="last step"):
        lab.jobs.submit("thin", [old])


def test_what_was_changed_after_its_seal_is_not_thinned(lab: Lab) -> None:
    old = lab.number("run/checkpoint_4")
    statekit.seal(lab.root / "run")
    lab.catalogue.scan()
    chunk = next((lab.root / "run" / "checkpoint_4").glob("state.param_states*/0*"))
    lab.jobs.submit("thin", [old])
    chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1]) + chunk.read_bytes()[1:])
    lease = lab.jobs.lease("test")
    assert lease is not None
    lab.worker._do(lease)
    assert lab.jobs.job(lease.job.id).state == "failed"
    assert chunk.exists()


def test_a_folder_with_a_file_that_its_manifest_does_not_name_is_not_thinned(lab: Lab) -> None:
    old = lab.number("run/checkpoint_4")
    assert lab.do("seal", [old]).state == "done"
    lab.catalogue.scan()
    (lab.root / "run" / "checkpoint_4" / "notes.txt").write_text("the only copy")
    lab.catalogue.scan()
    job = lab.do("thin", [lab.number("run/checkpoint_4")])
    assert job.problem is not None and "doesn't name" in job.problem["subject"]
    assert (lab.root / "run" / "checkpoint_4" / "notes.txt").exists()


SAID = {"target": "/weights", "removed": [], "freed": 0}


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (json.dumps({"tops": ["../victim"], "said": SAID}), "beside the list"),
        (json.dumps({"tops": ["victim/../../victim"], "said": SAID}), "beside the list"),
        (json.dumps({"tops": ["step"]}), "no list"),
        (json.dumps({"tops": "step", "said": SAID}), "no list"),
        (json.dumps({"tops": [1], "said": SAID}), "no list"),
        (json.dumps({"tops": ["step"], "said": {}}), "no list"),
        (json.dumps({"tops": ["step"], "said": {**SAID, "target": ["x"]}}), "no list"),
        ("[]", "no list"),
    ],
)
def test_a_list_of_what_shall_go_names_nothing_elsewhere(text: str, refused: str, tmp_path: Path) -> None:
    trash = tmp_path / "run" / ".statekit-thinned-step"
    trash.mkdir(parents=True)
    (tmp_path / "run" / "weights").mkdir()
    (tmp_path / "victim").write_text("kept")
    (trash / "removed.json").write_text(text)
    with pytest.raises(RefusedError, match=refused):
        thin(
            CheckpointRef(tmp_path / "run" / "step", container="torch"), tmp_path / "run" / "weights",
            to=None, dry_run=False, listener=Listener(io.StringIO()),
        )  # fmt: skip
    assert (tmp_path / "victim").read_text() == "kept"


def test_a_thinning_that_was_ended_goes_on_only_if_the_same_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "run" / "step.pt", tmp_path / "run" / "weights.pt"
    source.parent.mkdir()
    shutil.copy(TORCH, source)
    statekit.seal(source)

    def thinned(to: Path, *, dry_run: bool = False) -> Any:
        return thin(
            CheckpointRef(source, container="torch"), to, to=None, dry_run=dry_run,
            listener=Listener(io.StringIO()),
        )  # fmt: skip

    def end(trash: Path, *said: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("statekit.service.thinning._go_on", end)
        with pytest.raises(KeyboardInterrupt):
            thinned(target)
    for to, dry_run in ((target, True), (tmp_path / "run" / "other.pt", False)):
        to.exists() or to.write_bytes(b"something else")
        with pytest.raises(RefusedError, match="has begun to remove") as refused:
            thinned(to, dry_run=dry_run)
        assert str(target) in str(refused.value) and source.exists()
    removed, unlink = list[str](), Path.unlink

    def remove(path: Path, missing_ok: bool = False) -> None:
        removed.extend([path.name] if path.exists() else [])
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", remove)
    assert not thinned(target)["dry_run"]
    # What the attempt had moved is taken back, all is proven again, and the list goes last.
    assert removed[0] == removed[-1] == "removed.json" and "step.pt" in removed[1:-1]
    assert not source.exists() and target.exists()


def _sealed_step(folder: Path) -> Path:
    step = folder / "checkpoint_4"
    shutil.copytree(T5X, step)
    statekit.seal(step)
    return step


def _thinned(step: Path, on_progress: Callable[[], object] = lambda: None) -> Any:
    class Meanwhile(Listener):
        def progress(self, fraction: float | None, text: str = "") -> None:
            on_progress()

    ref = CheckpointRef(step, container="t5x")
    return thin(ref, step.with_name("w"), to=None, dry_run=False, listener=Meanwhile(io.StringIO()))


def test_a_list_of_what_shall_go_that_somebody_left_removes_nothing(tmp_path: Path) -> None:
    step, trash = _sealed_step(tmp_path), tmp_path / ".statekit-thinned-checkpoint_4"
    trash.mkdir()
    (tmp_path / "precious").write_text("the only copy")
    _thinned(step)
    shutil.copytree(T5X, step)
    statekit.seal(step)
    trash.mkdir()
    said = {**SAID, "target": str(tmp_path / "w")}
    (trash / "removed.json").write_text(json.dumps({"tops": ["precious"], "said": said}))
    assert "checkpoint_4/checkpoint" in _thinned(step)["removed"]
    assert (tmp_path / "precious").read_text() == "the only copy" and not trash.exists()


@pytest.mark.parametrize("moved", [False, True])
def test_what_lies_beside_a_list_that_somebody_left_stays(moved: bool, tmp_path: Path) -> None:
    """Seen red: the whole folder was removed with what no list named."""
    step, trash = _sealed_step(tmp_path), tmp_path / ".statekit-thinned-checkpoint_4"
    trash.mkdir()
    (trash / "thesis.txt").write_text("the only copy")
    said = {**SAID, "target": str(tmp_path / "w")}
    (trash / "removed.json").write_text(json.dumps({"tops": ["checkpoint_4"], "said": said, "moved": moved}))
    assert "checkpoint_4/checkpoint" in _thinned(step)["removed"]
    assert [path.name for path in trash.iterdir()] == ["thesis.txt"]
    trash.joinpath("thesis.txt").rename(tmp_path / "moved")
    trash.rmdir()
    trash.symlink_to(tmp_path)
    shutil.copytree(T5X, step)
    statekit.seal(step)
    with pytest.raises((RefusedError, CommitError)):
        _thinned(step)
    assert (step / "checkpoint").exists()


def test_what_somebody_adds_to_a_checkpoint_while_it_is_thinned_is_kept(tmp_path: Path) -> None:
    step = _sealed_step(tmp_path)
    late = step / "late.txt"
    with pytest.raises(CorruptError, match="was written to"):
        _thinned(step, lambda: late.write_text("the only copy"))
    assert late.exists() and sorted(os.listdir(tmp_path)) == ["checkpoint_4", "w"]


def test_a_checkpoint_that_came_to_a_thinned_ones_name_is_proven_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, trash = _sealed_step(tmp_path), tmp_path / ".statekit-thinned-checkpoint_4"
    whole = shutil.rmtree

    def end(folder: Path, **options: Any) -> None:
        if folder.parent == trash:
            raise KeyboardInterrupt
        whole(folder, **options)

    with monkeypatch.context() as patch:
        patch.setattr("statekit.service.thinning.shutil.rmtree", end)
        with pytest.raises(KeyboardInterrupt):
            _thinned(step)
    assert not step.exists() and (trash / "checkpoint_4" / "checkpoint").exists()
    whole(trash / "checkpoint_4")
    shutil.copytree(T5X, step)  # a trainer writes it again; nobody has sealed it
    with pytest.raises(RefusedError, match="not sealed"):
        _thinned(step)
    assert (step / "checkpoint").exists()


def test_what_nothing_shows_any_more_is_pruned_and_what_pages_and_lineages_show_is_kept(lab: Lab) -> None:
    number, other = lab.number("run/checkpoint_4"), lab.number("run/checkpoint_8")
    again, looked = lab.do("inspect", [number]), lab.do("inspect", [number])
    gone, cancelled = lab.do("check", [other]), lab.jobs.cancel(lab.jobs.submit("check", [number]).id)
    target = {"root": lab.catalogue.roots()[0].id, "path": "made"}
    made = lab.do("convert", [number], target=target, to="statekit", verify=True, hparams={"beta1": 0.9})
    assert made.state == "done", made.problem
    result = lab.jobs.result(made.id)
    assert result["passed"] and result["certificate"]
    unproven = lab.do("convert", [other], target={**target, "path": "unproven"}, to="statekit", verify=True)
    said = lab.jobs.result(unproven.id)
    assert not said["passed"] and "not proven" in said["verdict"] and "hyperparameters" in said["verdict"]
    shutil.rmtree(lab.root / "run" / "checkpoint_8")
    shutil.rmtree(lab.root / "unproven")
    lab.catalogue.scan()
    (edge,) = lineage_of(lab.database, number).edges
    assert (edge.job, edge.verdict, edge.certificate) == (made.id, result["verdict"], result["digest"])
    waiting = lab.jobs.submit("check", [number])
    assert lab.jobs.prune(1) == 0 and lab.jobs.events(looked.id)
    with lab.database.writing() as connection:
        connection.exec_driver_sql("UPDATE jobs SET ended = ended - 100000")
    assert lab.jobs.prune(1) == 3
    kept = {job.id for job in lab.jobs.jobs(limit=500).items}
    assert kept == {looked.id, made.id, unproven.id, waiting.id} and not kept & {
        again.id,
        gone.id,
        cancelled.id,
    }
    assert lab.jobs.result(looked.id)["totals"] and lab.jobs.result(made.id) == result
    assert not lab.jobs.events(looked.id) and lab.jobs.events(waiting.id)
    assert lab.jobs.prune(1) == 0


def done(lab: Lab, kind: str, number: int, result: Any) -> Job:
    """Ends a job as if it had come to this."""
    made = lab.jobs.submit(kind, [number])
    lease = lab.jobs.lease("test")
    assert lease is not None and lab.jobs.finish(lease, "done", result)
    return made


def test_what_was_found_of_a_checkpoint_is_kept_though_the_same_was_found_of_its_copy(lab: Lab) -> None:
    each = [lab.number(f"run/checkpoint_{step}") for step in (4, 8)]
    with lab.database.writing() as connection:
        connection.exec_driver_sql("UPDATE checkpoints SET digest = 'the same'")
    looks = [done(lab, "inspect", number, {"parameters": []}).id for number in (each[0], *each)]
    with lab.database.writing() as connection:
        connection.exec_driver_sql("UPDATE jobs SET ended = ended - 100000")
    assert lab.jobs.prune(1) == 1
    assert [job.id for job in lab.jobs.jobs().items] == looks[:0:-1]


def test_a_scan_follows_what_was_written_and_no_clock(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a clock was set back, the end of a job lies ahead: scans followed each other until then."""
    service = Service(lab.database, lab.catalogue, lab.jobs)
    looks, scans, written = [0], list[int](), lab.jobs.written

    def look() -> tuple[int, int]:
        looks[0] += 1
        return written()

    def until(condition: Callable[[], bool]) -> None:
        start = looks[0]
        while not condition():
            assert thread.is_alive() and looks[0] < start + 1000
            time.sleep(0.001)

    monkeypatch.setattr(lab.jobs, "written", look)
    monkeypatch.setattr(lab.catalogue, "scan", lambda: scans.append(looks[0]))
    monkeypatch.setattr("statekit.service.server._LOOK_SECONDS", 0.001)
    thread = threading.Thread(target=_scan, args=(service,))
    thread.start()
    try:
        until(lambda: len(scans) == 1)
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: 2.0**32)
            done(lab, "seal", lab.number("run/checkpoint_4"), {})
        until(lambda: len(scans) == 2)
        start = looks[0]
        until(lambda: looks[0] > start + 20)
        assert len(scans) == 2
    finally:
        service.draining.set()
        thread.join()


def test_options_are_described_as_they_are_checked() -> None:
    samples: list[Any] = [
        True, 0, 1, -1, 300, 2**20, 2**60, 0.5, "keep", "rounding", "x" * 5000, "config", [], ["a"], [1], {},
        {"a": "b"}, {"a": 1}, {"root": 1, "path": "a"}, {"root": 1}, {"root": "1", "path": "a"},
    ]  # fmt: skip
    beyond_json_schema = {
        "config",
        "hparams",
        "loss_scale",
        "map",
        "drop_slots_of",
        "slot_dtype",
        "slot_policy",
    }
    for kind, model in MODELS.items():
        schema = model.model_json_schema()
        Draft202012Validator.check_schema(schema)
        for name, described in schema["properties"].items():
            assert described["description"], (kind, name)
            for value in samples:
                try:
                    model.model_validate({name: value})
                    fits = True
                except ValidationError as error:
                    fits = all(fault["loc"][0] != name for fault in error.errors())
                if fits or name not in beyond_json_schema:
                    assert Draft202012Validator(described).is_valid(value) == fits, (kind, name, value)


class Leases(RuleBasedStateMachine):
    """Workers that lease, renew, finish, die and come late, under a clock that may jump to another start."""

    folder: Path

    @initialize()
    def begin(self) -> None:
        self.now, self.boot, self.dead = 10**12, "a", set[str]()
        self.database = Database(self.folder, migrate=True)
        with self.database.writing() as connection:
            connection.exec_driver_sql("DELETE FROM events")
            connection.exec_driver_sql("DELETE FROM results")
            connection.exec_driver_sql("DELETE FROM subjects")
            connection.exec_driver_sql("DELETE FROM jobs")
        self.jobs = Jobs(self.database, lambda: self.now, lambda: self.boot)
        self.leases: list[tuple[str, Lease]] = []
        self.ended: dict[int, str] = {}

    def teardown(self) -> None:
        self.database.close()

    @rule()
    def submit(self) -> None:
        self.jobs.submit("check", [1])

    @rule(worker=st.sampled_from(["w1", "w2"]))
    def lease(self, worker: str) -> None:
        made = self.jobs.lease(worker)
        if made is not None:
            assert made.job.id not in self.ended
            self.leases.append((worker, made))

    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        if self.leases:
            worker, lease = data.draw(st.sampled_from(self.leases))
            try:
                self.jobs.heartbeat(lease, 0.5, "half")
            except Lost:
                self.leases.remove((worker, lease))

    @rule(data=st.data(), state=st.sampled_from(["done", "failed", "crashed", "cancelled"]))
    def finish(self, data: st.DataObject, state: Any) -> None:
        if self.leases:
            worker, lease = data.draw(st.sampled_from(self.leases))
            result: Any = {"checkpoints": []} if state == "done" else None
            if self.jobs.finish(lease, state, result):
                assert lease.job.id not in self.ended
                self.ended[lease.job.id] = state
                self.leases.remove((worker, lease))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            self.jobs.release(data.draw(st.sampled_from(self.leases))[1])

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        every = self.jobs.jobs(limit=500).items
        if every:
            self.jobs.cancel(data.draw(st.sampled_from(every)).id)

    @rule(seconds=st.sampled_from([1.0, LEASE_SECONDS + 1]))
    def wait(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)

    @rule()
    def start_the_machine_anew(self) -> None:
        self.now, self.boot = 10**9, self.boot + "a"

    @rule(worker=st.sampled_from([None, "w1", "w2"]))
    def reap(self, worker: str | None) -> None:
        self.jobs.reap(lambda holder: holder == worker and holder is not None)

    @invariant()
    def each_job_ends_once_and_stays_so(self) -> None:
        for job in self.jobs.jobs(limit=500).items:
            ends = [e.data["state"] for e in self.jobs.events(job.id) if e.kind == "state"]
            assert sum(end in ENDED for end in ends) == (job.state in ENDED)
            assert job.attempts <= MOST_ATTEMPTS
            if job.id in self.ended:
                assert job.state == self.ended[job.id]
            elif job.state in ENDED:
                self.ended[job.id] = job.state


def test_leases_fence_whatever_the_order_of_events(shared: Lab) -> None:
    Leases.folder = shared.database.folder
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Leases, settings=settings(max_examples=8, stateful_step_count=25, deadline=None)
    )
