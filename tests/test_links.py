"""Links in a checkpoint: those inside it and in Hugging Face's cache are followed, others when that is said."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import statekit
from goldens import GOLDEN
from statekit.cli.main import FAILED, main
from statekit.errors import NotFoundError, RefusedError
from statekit.files.source import Files, Links

TRAINER = GOLDEN / "torch_formats/adamw_trainer/checkpoint/checkpoint-4"
STATES = "optimizer.pt"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoint of a step."""
    run = tmp_path / "run"
    shutil.copytree(TRAINER, run / "checkpoint-4")
    return run


@pytest.fixture
def linked(run: Path, tmp_path: Path) -> Path:
    """A checkpoint whose optimizer lies elsewhere."""
    shutil.move(run / "checkpoint-4" / STATES, tmp_path / "elsewhere")
    (run / "checkpoint-4" / STATES).symlink_to(tmp_path / "elsewhere")
    return run / "checkpoint-4"


def test_a_link_out_is_named_with_where_it_leads(linked: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="leads out") as caught:
        statekit.open(linked)
    error = caught.value
    assert error.place == linked / STATES and error.found == str(tmp_path / "elsewhere")
    assert "--follow-links" in error.remedy and "follow_links=True" in error.remedy


@pytest.mark.parametrize("verb", ["inspect", "resume", "plan", "convert"])
def test_every_verb_follows_links_when_that_is_said(verb: str, linked: Path, tmp_path: Path) -> None:
    line = [verb, str(linked)]
    if verb in ("plan", "convert"):
        line = ["convert", str(linked), str(tmp_path / "target"), "--to", "statekit"]
        line += ["--dry-run"] * (verb == "plan")
    assert main(line) == FAILED
    assert main([*line, "--follow-links"]) == 0


def test_a_link_out_is_not_sealed_nor_looked_into(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.txt").write_text("secret")
    (run / "checkpoint-4" / "notes.txt").symlink_to(tmp_path / "elsewhere.txt")
    with pytest.raises(RefusedError, match="leads out"):
        statekit.seal(run / "checkpoint-4")
    [one] = statekit.check(run / "checkpoint-4").checkpoints
    assert [place for what, place in one.faults if "leads out" in what] == [
        str(run / "checkpoint-4" / "notes.txt")
    ]
    statekit.seal(run / "checkpoint-4", follow_links=True)
    assert statekit.check(run / "checkpoint-4", follow_links=True).passed


def test_a_link_that_leads_nowhere_is_named_by_who_seals(run: Path) -> None:
    (run / "checkpoint-4" / "notes.txt").symlink_to("nowhere")
    with pytest.raises(NotFoundError, match="missing") as caught:
        statekit.seal(run / "checkpoint-4")
    assert caught.value.place == run / "checkpoint-4" / "notes.txt"


@pytest.mark.parametrize("verb", ["open", "inspect", "plan", "convert"])
def test_every_function_follows_links_when_that_is_said(verb: str, linked: Path, tmp_path: Path) -> None:
    target = [tmp_path / "target.pt"] * (verb in ("plan", "convert"))
    with pytest.raises(RefusedError):
        getattr(statekit, verb)(linked, *target)
    getattr(statekit, verb)(linked, *target, follow_links=True)


def test_a_link_of_a_step_out_of_its_run_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.move(run / "checkpoint-4", tmp_path / "elsewhere")
    (run / "checkpoint-4").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError) as caught:
        statekit.open(run)
    assert caught.value.place == run / "checkpoint-4"
    statekit.open(run, follow_links=True).close()


def test_what_the_user_names_may_be_a_link(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "latest").symlink_to("checkpoint-4")
    (tmp_path / "here").symlink_to(run / "checkpoint-4")
    (tmp_path / "runs").symlink_to(run)
    for path in (run / "latest", tmp_path / "here", tmp_path / "runs" / "checkpoint-4", tmp_path / "runs"):
        statekit.open(path).close()
        monkeypatch.chdir(tmp_path)
        statekit.open(path.relative_to(tmp_path)).close()
    monkeypatch.chdir(tmp_path / "here")
    statekit.open(".").close()
    file = tmp_path / "alone.safetensors"
    file.symlink_to(run / "checkpoint-4" / "model.safetensors")
    statekit.open(file).close()


def test_links_inside_are_followed(run: Path) -> None:
    shutil.move(run / "checkpoint-4" / STATES, run / "checkpoint-4" / "kept.pt")
    (run / "checkpoint-4" / STATES).symlink_to("kept.pt")
    statekit.open(run / "checkpoint-4").close()
    shutil.move(run / "checkpoint-4" / "kept.pt", run / "kept.pt")
    (run / "checkpoint-4" / STATES).unlink()
    (run / "checkpoint-4" / STATES).symlink_to("../kept.pt")
    statekit.open(run).close()  # inside of the run, which is what was named
    with pytest.raises(RefusedError):
        statekit.open(run / "checkpoint-4")


def cached(folder: Path, name: str = "models--owner--name") -> Path:
    """A snapshot as Hugging Face's cache keeps it."""
    snapshot = folder / name / "snapshots" / "0123"
    (folder / name / "blobs").mkdir(parents=True)
    shutil.copytree(TRAINER, snapshot)
    shutil.move(snapshot / STATES, folder / name / "blobs" / "4567")
    (snapshot / STATES).symlink_to("../../blobs/4567")
    return snapshot


def test_a_snapshot_is_read_and_leads_nowhere_else(tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    statekit.open(snapshot).close()
    (tmp_path / "by a link").symlink_to(snapshot)
    statekit.open(tmp_path / "by a link").close()
    other = cached(tmp_path, "models--owner--other")
    for leads in ("../../../models--owner--name/blobs/4567", "../../refs"):
        (other / STATES).unlink()
        (other / STATES).symlink_to(leads)
        shutil.copy(TRAINER / STATES, tmp_path / "models--owner--other" / "refs")
        with pytest.raises(RefusedError, match="leads out"):
            statekit.open(other)


def test_a_folder_that_only_looks_like_a_snapshot_is_none(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "owner--name")
    with pytest.raises(RefusedError):
        statekit.open(snapshot)


def test_the_first_link_that_leads_out_is_named(tmp_path: Path) -> None:
    for name in ("outside/deeper", "checkpoint/inner"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "outside/deeper/file").write_text("")
    (tmp_path / "checkpoint/inner/way").symlink_to("../other")
    (tmp_path / "checkpoint/other").symlink_to(tmp_path / "outside")
    links = Links(tmp_path / "checkpoint")
    with pytest.raises(RefusedError) as caught:
        links.check(tmp_path / "checkpoint/inner/way/deeper/file")
    assert caught.value.place == tmp_path / "checkpoint/inner/way"
    assert caught.value.found == str(tmp_path / "outside/deeper/file")


def test_a_link_that_comes_later_is_seen(tmp_path: Path) -> None:
    """A folder that was looked at is known, each file in it is looked at."""
    (tmp_path / "checkpoint").mkdir()
    for name in ("checkpoint/a", "checkpoint/b", "secret"):
        (tmp_path / name).write_text("")
    with Files(checkpoint=tmp_path / "checkpoint") as files:
        files.source(tmp_path / "checkpoint/a")
        (tmp_path / "checkpoint/b").unlink()
        os.symlink(tmp_path / "secret", tmp_path / "checkpoint/b")
        with pytest.raises(RefusedError):
            files.source(tmp_path / "checkpoint/b")
