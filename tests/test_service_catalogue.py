"""The service's catalogue: what a scan of roots sees, and that no name leads out of them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from serving import Served
from sqlalchemy import event, text

import statekit
from goldens import GOLDEN
from statekit.errors import CommitError, CorruptError, NotFoundError, RefusedError, StatekitError, UsageError
from statekit.service import roots, scanning
from statekit.service.catalogue import Catalogue
from statekit.service.database import FILE, OWNER, DamagedCatalogueError, Database, Ownership
from statekit.service.lineage import MOST_NODES, lineage_of
from statekit.service.records import Query
from statekit.service.runs import runs_below
from statekit.service.server import _tried
from statekit.service.tables import CHECKPOINTS, JOBS, METADATA, RESULTS, SUBJECTS
from statekit.service.tasks.child import Child, Died, Zygote
from statekit.service.web.drawing import _pages
from statekit.tensors.digest import json_digest

pytestmark = pytest.mark.usefixtures("shared_zygotes")

T5X = GOLDEN / "t5x" / "momentum_f32" / "checkpoint" / "checkpoint_4"
TORCH = GOLDEN / "torch_formats" / "adamw_legacy" / "checkpoint" / "checkpoint.pt"
BUNDLE = GOLDEN / "t2t" / "late_bf16_encoded_beta1" / "checkpoint"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Ownership(tmp_path / "data") as owner:
        made = Database(owner.path.parent, migrate=True)
        yield made
        made.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    shutil.copytree(T5X, folder / "run" / "checkpoint_4")
    (folder / "torch").mkdir()
    shutil.copy(TORCH, folder / "torch" / "a.pt")
    (folder / "notes.txt").write_text("nothing")
    return folder


def test_a_scan_lists_what_lies_there_once(database: Database, root: Path) -> None:
    shutil.copytree(BUNDLE, root / "bundle")
    catalogue = Catalogue(database, [root])
    first, again = catalogue.scan(), catalogue.scan()
    assert (first.new, first.seen, again.new, again.seen, again.looked) == (3, 3, 0, 3, 0)
    listed = catalogue.checkpoints(Query(sort="path")).items
    assert [(one.path, one.container, one.optimizer, one.step) for one in listed] == [
        ("bundle/model.ckpt-7.index", "tf-bundle", "adafactor", 7),
        ("run/checkpoint_4", "t5x", "adafactor/t5x", 4),
        ("torch/a.pt", "torch", "adamw/torch", 4),
    ]
    assert all(one.resumable and one.seal == "unsealed" and one.unreadable is None for one in listed)
    assert catalogue.path_of(listed[1].id) == Path(os.path.realpath(root)) / "run" / "checkpoint_4"
    json.dumps(catalogue.checkpoints().to_json())


def test_a_file_that_changed_is_another_checkpoint_and_the_old_entry_says_so(
    database: Database, root: Path
) -> None:
    catalogue = Catalogue(database, [root])
    catalogue.scan()
    (old,) = catalogue.checkpoints(Query(text="a.pt")).items
    catalogue.tag(old.id, "baseline")
    shutil.copy(
        GOLDEN / "torch_adafactor" / "adafactor_bf16" / "checkpoint" / "checkpoint.pt", root / "torch/a.pt"
    )
    assert catalogue.scan().changed == 1
    (new,) = catalogue.checkpoints(Query(text="a.pt")).items
    before = catalogue.checkpoint(old.id)
    assert (before.status, before.replaced_by, before.tags) == ("changed", new.id, ("baseline",))
    assert new.optimizer == "adafactor/torch"
    with pytest.raises(NotFoundError, match="has changed"):
        catalogue.path_of(old.id)
    shutil.rmtree(root / "torch")
    assert catalogue.scan().gone == 1
    assert catalogue.checkpoint(new.id).status == "gone"


def test_what_cannot_be_read_is_listed_with_its_reason_and_mended_in_place(
    database: Database, root: Path
) -> None:
    whole = TORCH.read_bytes()
    (root / "torch" / "torn.pt").write_bytes(whole[: len(whole) // 2])
    (root / "torch" / "text.safetensors").write_text("no tensors at all")
    catalogue = Catalogue(database, [root])
    assert catalogue.scan().unreadable == 2
    unreadable = catalogue.checkpoints(Query(readable=False, sort="path")).items
    assert [one.name for one in unreadable] == ["text.safetensors", "torn.pt"]
    assert all(one.unreadable and one.seal == "unknown" and not one.resumable for one in unreadable)
    (root / "torch" / "torn.pt").write_bytes(whole)
    catalogue.scan()
    mended = catalogue.checkpoint(unreadable[1].id)
    assert (mended.unreadable, mended.optimizer, mended.status) == (None, "adamw/torch", "present")


def test_a_folder_with_a_part_that_is_cut_off_is_one_checkpoint_that_cannot_be_read(
    database: Database, tmp_path: Path
) -> None:
    """Its other files are parts of it; a folder that holds checkpoints of their own is none itself."""
    (source,) = (GOLDEN / "torch_formats/adamw_trainer/checkpoint").glob("checkpoint-*")
    folder = tmp_path / "runs/best"
    shutil.copytree(source, folder)
    with (folder / "optimizer.pt").open("r+b") as file:
        file.truncate(3000)
    catalogue = Catalogue(database, [folder.parent])
    catalogue.scan()
    [broken] = catalogue.checkpoints().items
    assert broken.path == "best" and broken.unreadable is not None and "zip archive" in broken.unreadable


def test_what_comes_while_a_scan_looks_costs_nothing_that_is_there(
    database: Database, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: a save during a scan had the whole root taken for what went, and all in it for gone."""
    shutil.copy(TORCH, root / "run" / "a.pt")
    catalogue = Catalogue(database, [root])
    catalogue.scan()
    listing = scanning.listed

    def listed(place: Path) -> scanning.Folder:
        top = listing(place)
        for name in ("b.pt", "torch/c.pt"):
            shutil.copy(TORCH, root / name)
        shutil.copytree(T5X, root / "run" / "checkpoint_5")
        return top

    monkeypatch.setattr(scanning, "listed", listed)
    shutil.copy(TORCH, root / "run" / "b.pt")  # so that it is looked into again
    assert catalogue.scan().gone == 0
    monkeypatch.undo()
    last = catalogue.scan()
    assert (last.new, last.gone) == (3, 0)
    everything = catalogue.checkpoints(Query(status="any", sort="path")).items
    assert [one.path for one in everything] == [
        "b.pt", "run/a.pt", "run/b.pt", "run/checkpoint_4", "run/checkpoint_5", "torch/a.pt", "torch/c.pt",
    ]  # fmt: skip


def test_the_steps_of_a_trainer_are_one_run(database: Database, tmp_path: Path) -> None:
    (source,) = (GOLDEN / "torch_formats/adamw_trainer/checkpoint").glob("checkpoint-*")
    step = int(source.name.rpartition("-")[2])
    shutil.copytree(source, tmp_path / "runs/sft" / source.name)
    later = tmp_path / "runs/sft" / f"checkpoint-{step + 1}"
    shutil.copytree(source, later)
    record = json.loads((later / "trainer_state.json").read_text())
    (later / "trainer_state.json").write_text(json.dumps({**record, "global_step": step + 1}))
    catalogue = Catalogue(database, [tmp_path / "runs"])
    catalogue.scan()
    (run,) = catalogue.runs().items
    assert (run.path, run.steps) == ("sft", 2)


def test_what_opens_and_cannot_be_decoded_is_never_called_weights(database: Database, tmp_path: Path) -> None:
    """An optimizer is there, and has the state of a parameter that it doesn't number."""
    folder = tmp_path / "runs"
    folder.mkdir()
    group = {
        "params": [0],
        "lr": 0.1,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": False,
    }
    kept = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    optimizer = {"state": {0: kept, 7: kept}, "param_groups": [group]}
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": optimizer}, folder / "odd.pt")
    catalogue = Catalogue(database, [folder])
    catalogue.scan()
    [odd] = catalogue.checkpoints().items
    assert not odd.resumable and "weights" not in f"{odd}"
    (listed,) = runs_below(folder)
    assert odd.undecoded and listed.newest.why == f"{odd.undecoded} `statekit inspect` lists its tensors"
    shown = _pages().get_template("parts.html").module.optimizer_of(odd)  # type: ignore[attr-defined]
    assert unescape(shown) == f"not known: {odd.undecoded}"


def test_steps_of_a_folder_are_one_run_and_a_seal_changes_no_checkpoint(
    database: Database, root: Path
) -> None:
    shutil.copytree(T5X, root / "run" / "checkpoint_8")
    catalogue = Catalogue(database, [root])
    catalogue.scan()
    (run,) = catalogue.runs().items
    assert (run.path, run.steps, run.first_step, run.last_step) == ("run", 2, 4, 8)
    assert (run.good_step, run.examined, run.why, run.spare) == (8, False, "", 0)
    steps = catalogue.checkpoints(Query(run=run.id, sort="step")).items
    assert [one.step for one in steps] == [4, 8]
    statekit.seal(root / "run", step=4)
    statekit.convert(root / "run" / "checkpoint_4", root / "run" / "converted.pt")
    catalogue.scan()
    sealed = catalogue.checkpoint(steps[0].id)
    assert (sealed.seal, sealed.status) == ("sealed", "present")
    assert sealed.digest is not None
    (converted,) = catalogue.checkpoints(Query(text="converted")).items
    assert (converted.seal, converted.run) == ("sealed", None)


def test_what_ends_the_process_that_looks_is_listed_and_the_scan_goes_on(
    database: Database, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Child.ask

    def ask(child: Child, request: Mapping[str, Any]) -> None:
        asked(child, request)
        if request["path"].endswith("a.pt"):
            os.kill(child.pid, signal.SIGKILL)

    monkeypatch.setattr(Child, "ask", ask)
    catalogue = Catalogue(database, [root])
    assert catalogue.scan().seen == 2
    (hostile,) = catalogue.checkpoints(Query(readable=False)).items
    assert hostile.path == "torch/a.pt"
    assert hostile.unreadable == "Looking into it has ended the process: it was ended by SIGKILL."


def test_what_could_not_be_read_is_looked_into_again_though_it_is_the_same(
    database: Database, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the machine's fault, as where its memory was full."""
    catalogue = Catalogue(database, [root])
    asked = Child.ask

    def ask(child: Child, request: Mapping[str, Any]) -> None:
        asked(child, request)
        if request["path"].endswith("a.pt"):
            os.kill(child.pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(Child, "ask", ask)
        assert catalogue.scan().unreadable == 1
    (failed,) = catalogue.checkpoints(Query(readable=False)).items
    again = catalogue.scan()
    assert (again.looked, again.unreadable) == (0, 1)
    for scanner in catalogue._scanners.values():
        for looked in scanner._known.values():
            looked.again = 0.0
    assert catalogue.scan().unreadable == 0
    assert catalogue.checkpoint(failed.id).unreadable is None


def test_what_cannot_be_listed_or_looked_into_now_is_not_taken_for_gone(
    database: Database, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    catalogue = Catalogue(database, [root, other])
    catalogue.scan()
    before = catalogue.checkpoints().items
    shutil.copy(TORCH, other / "b.pt")
    scandir, within = os.scandir, [os.path.realpath(root)]

    def fails(folder: Any) -> Any:
        if os.path.realpath(f"/proc/self/fd/{folder}").startswith(within[0] + "/"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return scandir(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fails)
        with pytest.raises(StatekitError, match="can't be listed"):
            catalogue.scan()
    assert catalogue.scanning().problem is not None
    assert catalogue.checkpoints(Query(root=before[0].root)).items == before
    assert catalogue.checkpoints().total == 3  # the other root was scanned
    assert catalogue.scan().looked == 0 and catalogue.scanning().problem is None

    def refuse(zygote: Zygote) -> Child:
        raise Died("could not be begun")

    shutil.copy(TORCH, root / "torch" / "c.pt")
    with monkeypatch.context() as patch:
        patch.setattr(Zygote, "fork", refuse)
        with pytest.raises(StatekitError, match="No process can be begun"):
            catalogue.scan()
    assert catalogue.checkpoints(Query(readable=False)).total == 0
    assert catalogue.scan().new == 1


def test_a_scan_that_fails_as_nobody_foresaw_says_so_and_can_be_asked_for_again(
    database: Database, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = Catalogue(database, [root])

    def fail() -> Any:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(threading, "excepthook", lambda said: None)
    with monkeypatch.context() as patch:
        patch.setattr(catalogue, "_scan", fail)
        first = catalogue.rescan()
        while (thread := catalogue._asked) is not None:
            thread.join(60)
        assert "a fault of ours" in str(catalogue.scanning().problem)
        assert _tried("scan", catalogue.scan) is None
    again = catalogue.rescan()
    while catalogue.scanning().done < again.number:
        time.sleep(0.01)
    assert again.number > first.number and catalogue.scanning().problem is None


def test_what_a_manifest_says_that_no_column_takes_is_left_out(database: Database, root: Path) -> None:
    """Anybody can write one, with a digest that fits."""
    statekit.convert(root / "run" / "checkpoint_4", root / "made", to="statekit")
    manifest = json.loads((root / "made" / "statekit.json").read_text())
    manifest.pop("digest")
    manifest |= {"source": {**manifest["source"], "digest": "\ud800"}, "tool": {"a": 1}, "plan": [1]}
    (root / "made" / "statekit.json").write_text(json.dumps({**manifest, "digest": json_digest(manifest)}))
    catalogue = Catalogue(database, [root])
    assert catalogue.scan().seen == 3
    (made,) = catalogue.checkpoints(Query(text="made")).items
    assert made.seal == "sealed"
    (edge,) = lineage_of(database, made.id).edges
    assert (edge.tool, edge.plan) == (None, None)


def test_a_checkpoint_that_came_back_from_another_system_makes_no_circle(
    database: Database, root: Path
) -> None:
    """What comes back has the digest of what was sent: it can't be what the way between was made of."""
    statekit.convert(root / "run" / "checkpoint_4", root / "first", to="statekit")
    statekit.convert(root / "first", root / "between", to="torch", layout="statekit-torch")
    statekit.convert(root / "between", root / "back", to="statekit")
    catalogue = Catalogue(database, [root])
    catalogue.scan()
    numbers = {one.name: f"checkpoint-{one.id}" for one in catalogue.checkpoints(Query()).items}
    lineage = lineage_of(database, int(numbers["between"].rpartition("-")[2]))
    ends = {(edge.source, edge.target) for edge in lineage.edges}
    assert (numbers["between"], numbers["back"]) in ends
    assert (numbers["back"], numbers["between"]) not in ends


def test_a_catalogue_that_another_program_keeps_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statekit.service.database.BUSY_SECONDS", 0.05)
    kept = Database(tmp_path, migrate=True)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(CommitError, match="whatever other program"), kept.writing():
            pass
    kept.close()


def test_pages_follow_each_other_in_every_order(database: Database, root: Path) -> None:
    for i in range(5):
        shutil.copy(TORCH, root / "torch" / f"{i}.pt")
    catalogue = Catalogue(database, [root])
    catalogue.scan()
    for order in ("path", "-path", "size", "-modified", "id", "step"):
        numbers: list[int] = []
        cursor: str | None = None
        while True:
            page = catalogue.checkpoints(Query(sort=order), cursor, 2)
            assert page.total == 7
            numbers += [one.id for one in page.items]
            cursor = page.next_cursor
            if cursor is None:
                break
        assert sorted(numbers) == sorted({*numbers}) and len(numbers) == 7
    with pytest.raises(UsageError, match="order"):
        catalogue.checkpoints(Query(sort="print"))
    for cursor in ("x", "WzEsMl0", "bnVsbA", "W10"):
        with pytest.raises(UsageError, match="cursor"):
            catalogue.checkpoints(Query(sort="path"), cursor)


def test_words_are_searched_literally_in_paths_notes_and_tags(database: Database, root: Path) -> None:
    catalogue = Catalogue(database, [root])
    catalogue.scan()
    (one,) = catalogue.checkpoints(Query(text="a.pt")).items
    assert catalogue.checkpoints(Query(text="%")).total == 0
    catalogue.note(one.id, "the best 100% of it\x1b[2J")
    catalogue.tag(one.id, "keep")
    assert [item.id for item in catalogue.checkpoints(Query(text="100% torch KEEP")).items] == [one.id]
    assert "\x1b" not in catalogue.checkpoint(one.id).note
    assert catalogue.facets()["tag"] == {"keep": 1}
    assert catalogue.untag(one.id, "keep").tags == ()
    with pytest.raises(UsageError):
        catalogue.tag(one.id, "two\nlines")


@pytest.mark.parametrize("way", ["openat2", "step by step"])
def test_no_link_and_no_way_up_leads_out_of_a_root(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "step by step":
        monkeypatch.setattr(roots, "_has_openat2", lambda: False)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").write_text("s")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "torch" / "up").symlink_to("..")
    base = Path(os.path.realpath(root))
    assert roots.path_beneath(base, b"torch/a.pt") == base / "torch" / "a.pt"
    for place in (
        b"link",
        b"link/file",
        b"../secret/file",
        b"torch/../../secret/file",
        b"torch/up/torch/a.pt",
    ):
        with pytest.raises((RefusedError, NotFoundError)):
            roots.path_beneath(base, place)
    with pytest.raises(NotFoundError):
        roots.path_beneath(base, b"/etc/passwd\0.pt")
    assert roots.target_beneath(base, "torch/new.pt") == base / "torch" / "new.pt"
    for target in ("../x", "/x", "link/x", "link", "a\\b", "torch//x", "torch/./x", "a\nb", ""):
        with pytest.raises((RefusedError, UsageError)):
            roots.target_beneath(base, target)


def test_a_folder_has_one_server_and_the_second_says_which(tmp_path: Path) -> None:
    with Ownership(tmp_path), pytest.raises(UsageError, match=str(os.getpid())):
        Ownership(tmp_path)
    with Ownership(tmp_path):
        pass


def test_a_dead_owner_is_followed_and_one_of_another_machine_is_not(tmp_path: Path) -> None:
    import socket

    from statekit.service.tasks.processes import boot_id

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    here = {"host": socket.gethostname(), "boot": boot_id(), "pid": dead.pid, "started": "1"}
    (tmp_path / OWNER).write_text(json.dumps(here))
    Ownership(tmp_path).close()
    (tmp_path / OWNER).write_text(json.dumps({**here, "host": "elsewhere"}))
    with pytest.raises(UsageError, match="elsewhere"):
        Ownership(tmp_path)


def test_migrations_go_up_and_down_and_make_the_tables_that_are_used(database: Database) -> None:
    with database.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    database.migrate("base")
    with database.reading() as connection:
        left = set(connection.execute(text("SELECT name FROM sqlite_master WHERE type='table'")).scalars())
        assert left <= {"alembic_version", "sqlite_sequence"}
    database.migrate("head")
    with database.reading() as connection:
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"


def test_a_newer_schema_is_refused_and_nothing_is_changed(database: Database) -> None:
    with database.writing() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    before = database.path.read_bytes()
    with pytest.raises(UsageError, match="newer statekit"):
        Database(database.folder, migrate=True)
    assert database.path.read_bytes() == before


def test_a_backup_is_restored_by_putting_it_in_place(database: Database, root: Path, tmp_path: Path) -> None:
    catalogue = Catalogue(database, [root])
    catalogue.scan()
    database.backup(tmp_path / "copy.sqlite")
    with pytest.raises(UsageError):
        database.backup(tmp_path / "copy.sqlite")
    other = tmp_path / "other"
    with Ownership(other):
        shutil.copy(tmp_path / "copy.sqlite", other / FILE)
        restored = Database(other, migrate=True)
        assert Catalogue(restored, [root]).checkpoints().total == 2
        restored.close()


def test_a_damaged_or_unwritable_catalogue_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(CorruptError, match="backup"):
        Database(tmp_path, migrate=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(StatekitError, match="--data"):
        Ownership(tmp_path / "file" / "data")


def _without_tables(path: Path) -> None:
    with closing(sqlite3.connect(path, timeout=10)) as other:
        other.executescript("DROP TABLE events; DROP TABLE jobs; DROP TABLE checkpoints;")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, 0),
    "overwritten": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "without tables": _without_tables,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_catalogue_that_is_damaged_while_it_is_served_is_a_clear_error(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = Served(tmp_path)
    assert served.client.get("/readyz").status_code == 200
    DAMAGES[damage](served.database.path)
    ready = served.client.get("/readyz")
    assert ready.status_code == 503 and "The catalogue is damaged." in ready.json()["found"]
    for address in ("/api/v1/checkpoints", "/api/v1/jobs", "/api/v1/runs", "/api/v1/checkpoints/1"):
        answer = served.client.get(address)
        assert (answer.status_code, answer.json()["detail"]) == (503, "The catalogue is damaged."), address
        assert "backup" in answer.json()["remedy"]
    page = served.client.get("/", headers={"Accept": "text/html"})
    assert page.status_code == 503 and "The catalogue is damaged." in page.text
    asked = served.client.post("/api/v1/jobs", json={"kind": "inspect", "subjects": [1]})
    assert (asked.status_code, asked.json()["detail"]) == (503, "The catalogue is damaged.")
    capsys.readouterr()
    for _ in range(5):
        assert _tried("scan", served.service.catalogue.scan) is None
        assert _tried("reap", served.service.jobs.reap) is None
    logged = capsys.readouterr()
    assert 1 <= (logged.out + logged.err).count("The catalogue is damaged.") <= 2
    with pytest.raises(UsageError if damage == "cut" else CorruptError):  # a start makes an empty file anew
        Database(served.data, migrate=False)
    served.database.close()


def test_text_of_the_catalogue_that_is_none_is_damage(tmp_path: Path) -> None:
    served = Served(tmp_path)
    with served.database.writing() as connection:
        connection.exec_driver_sql("UPDATE checkpoints SET path = CAST(x'fffe' AS TEXT)")
    answer = served.client.get("/api/v1/checkpoints")
    assert (answer.status_code, answer.json()["detail"]) == (503, "The catalogue is damaged.")
    served.database.close()


@pytest.mark.parametrize("gone", ["file", "folder"])
def test_a_service_without_its_catalogue_is_not_ready(gone: str, tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.database.path.unlink()
    if gone == "folder":
        shutil.rmtree(served.data)
    ready = served.client.get("/readyz")
    assert ready.status_code == 503 and "The catalogue" in ready.json()["found"]
    served.database.close()


@pytest.mark.parametrize("made", [4, MOST_NODES + 20])
def test_a_lineage_reads_what_jobs_wrote_once_for_each_source(
    made: int, database: Database, root: Path
) -> None:
    """However much was made of it; what is too much isn't shown."""
    Catalogue(database, [root]).scan()
    with database.writing() as connection:
        row = dict(connection.execute(CHECKPOINTS.select().where(CHECKPOINTS.c.id == 1)).one()._mapping)
        connection.execute(CHECKPOINTS.update().where(CHECKPOINTS.c.id == 1).values(digest="0" * 64))
        lines = [
            {
                **row, "id": 100 + i, "place": f"made/{i}".encode(), "path": f"made/{i}", "source_digest": "0" * 64,
                "digest": f"{i + 1:064}", "made": {"source": {"digest": "0" * 64}, "plan": str(i)},
            }
            for i in range(made)
        ]  # fmt: skip
        connection.execute(CHECKPOINTS.insert(), lines)
        for i in range(4):
            job = {
                "id": i + 1, "kind": "convert", "state": "done", "options": {}, "cache_key": str(i), "attempts": 1,
                "token": 1, "cancelling": False, "created": 0.0, "text": "", "requested_by": "test", "last_event": 0,
            }  # fmt: skip
            connection.execute(JOBS.insert(), job)
            connection.execute(SUBJECTS.insert(), {"job": i + 1, "position": 0, "checkpoint": 1})
            data = {"report": {"target": f"/data/made/{i}"}, "plan_digest": str(i)}
            connection.execute(RESULTS.insert(), {"job": i + 1, "data": data})
    statements: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *said: statements.append(said[2]))
    lineage = lineage_of(database, 1)
    assert len(lineage.nodes) == min(made + 1, MOST_NODES)
    assert lineage.more == (made >= MOST_NODES)
    jobs = {edge.target: edge.job for edge in lineage.edges}
    assert [jobs[f"checkpoint-{100 + i}"] for i in range(4)] == [1, 2, 3, 4]
    assert sum("JOIN results" in one for one in statements) == 1


ODD: dict[str, dict[str, Any]] = {
    "checkpoints": {
        "root": "'x'", "place": "5", "path": "x'00'", "name": "x'00'", "size": "'x'", "modified": "1e15",
        "print": "x'00'", "step": "'x'", "elements": "x'00'", "made": "'[['", "seal": "'x'", "checked": "'x'",
        "verdict": "x'00'", "status": "'x'", "note": "x'00'", "first_seen": "'x'", "seen": "-1",
        "optimizer": "x'00'", "replaced_by": "'x'",
    },
    "runs": {"root": "'x'", "place": "5", "path": "x'00'"},
    "tags": {"tag": "x'00'"},
}  # fmt: skip
"""What another program may put into columns, in SQL."""


def test_a_row_of_another_form_is_damage_until_a_backup_is_restored(tmp_path: Path) -> None:
    served = Served(tmp_path)
    shutil.copytree(T5X, served.root / "run" / "checkpoint_5")
    served.service.catalogue.scan()

    def listed() -> list[tuple[Any, ...]]:
        items = served.client.get("/api/v1/checkpoints?sort=path").json()["items"]
        return [(one["path"], one["size"], one["run"] is None, one["status"], one["seal"]) for one in items]

    before = listed()
    for table, column in [(table, column) for table, columns in ODD.items() for column in columns]:
        number = served.service.catalogue.checkpoints(Query(sort="path")).items[0].id
        served.service.catalogue.tag(number, "kept")
        other, backup = (
            sqlite3.connect(served.database.path, isolation_level=None),
            sqlite3.connect(":memory:"),
        )
        other.backup(backup)
        other.execute(f"UPDATE {table} SET {column} = {ODD[table][column]}")
        addresses = ("/", "/api/v1/checkpoints", f"/lineage/{number}", "/api/v1/runs", "/metrics")
        answers = [served.client.get(address) for address in addresses]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert refused or column == "root", (table, column)
        for answer in refused:
            assert answer.status_code == 503 and "The catalogue is damaged." in answer.text, (table, column)
            assert "restore it from a backup" in answer.text, (table, column)
        with suppress(DamagedCatalogueError):  # where the scan reads it
            served.service.catalogue.scan()
        backup.backup(other)
        other.close()
        backup.close()
        assert listed() == before, (table, column)
        for address in addresses:
            assert served.client.get(address).status_code == 200, (table, column, address)
    served.database.close()


def test_a_job_of_another_form_is_damage(tmp_path: Path) -> None:
    served = Served(tmp_path)
    job = served.client.post("/api/v1/jobs", json={"kind": "inspect", "subjects": [1]}).json()["id"]
    for values in (
        "options = '[['",
        "options = '[]'",
        "options = 'null'",
        "state = 'x'",
        "created = 1e15",
        "problem = '1'",
        "problem = '{\"a\": 1}'",
        "text = x'00'",
    ):
        with closing(sqlite3.connect(served.database.path, isolation_level=None)) as other:
            saved = other.execute("SELECT options, state, created, problem, text FROM jobs").fetchone()
            other.execute(f"UPDATE jobs SET {values}")
            for address in (f"/jobs/{job}", f"/api/v1/jobs/{job}", "/jobs"):
                answer = served.client.get(address)
                assert answer.status_code == 503 and "The catalogue is damaged." in answer.text, (
                    values,
                    address,
                )
            other.execute("UPDATE jobs SET (options, state, created, problem, text) = (?, ?, ?, ?, ?)", saved)
    assert served.client.get(f"/jobs/{job}").status_code == 200
    with closing(sqlite3.connect(served.database.path, isolation_level=None)) as other:
        other.execute("UPDATE changes SET number = 'x'")
    assert served.client.get("/api/v1/checkpoints").status_code == 200
    served.database.close()


def test_sizes_that_no_row_has_room_for_keep_nothing_out(tmp_path: Path) -> None:
    """Seen red: the whole root was left out of the catalogue from then on, or no page could add the sizes up."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("no file system that holds such files")
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        served = Served(Path(folder))
        for step in (5, 6):
            shutil.copytree(T5X, served.root / "run" / f"checkpoint_{step}")
            for name in ("a", "b"):
                with (served.root / "run" / f"checkpoint_{step}" / name).open("wb") as file:
                    file.truncate(7 * 2**60)
        served.service.catalogue.scan()
        assert served.client.get("/api/v1/checkpoints").json()["total"] == 6
        for address in ("/", "/api/v1/runs", "/metrics", "/runs/1"):
            assert served.client.get(address).status_code == 200, address
        served.database.close()
