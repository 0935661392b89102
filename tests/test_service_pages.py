"""Pages without a browser: every kind of job has one, and so has what isn't there; programs get data in their place."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlencode

import numpy as np
import pytest
from safetensors.numpy import save
from serving import Served, write_step

from statekit.pages import charts
from statekit.service.lineage import _in_order
from statekit.service.records import ENDED, KINDS, Edge, Job, Node
from statekit.service.web.screens import Screens

pytestmark = pytest.mark.usefixtures("shared_zygotes")

PAGE = {"Accept": "text/html"}
EMBEDDING = "token_embedder/embedding"
ASKED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "inspect": (("checkpoint_4",), {"stats": True}),
    "parameter": (("checkpoint_4",), {"path": EMBEDDING}),
    "check": (("a.pt",), {}),
    "doctor": (("a.pt", "b.pt"), {}),
    "diff": (("a.pt", "b.pt"), {}),
    "verify": (("a.pt", "b.pt"), {"steps": 0}),
    "convert": (("a.pt",), {"dry_run": True, "to": "torch"}),
    "seal": (("b.pt",), {}),
    "thin": (("a.pt",), {}),
}
"""What each kind of job is asked for here; a thinning of a checkpoint that isn't sealed is refused."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    service = Served(tmp_path_factory.mktemp("service"))
    with service.working():
        yield service
    service.close()


def number(served: Served, name: str) -> int:
    (one,) = [
        each for each in served.client.get("/api/v1/checkpoints").json()["items"] if each["name"] == name
    ]
    return int(one["id"])


def ended(served: Served, kind: str, subjects: tuple[str, ...], options: dict[str, Any]) -> Job:
    """Asks for a job, and returns it once it has ended."""
    if kind == "convert":
        options = {**options, "target": {"root": served.service.catalogue.roots()[0].id, "path": "made.pt"}}
    numbers = tuple(number(served, name) for name in subjects)
    job = served.service.jobs.submit(kind, numbers, options)
    with served.client.stream("GET", f"/api/v1/jobs/{job.id}/events") as events:
        for _ in events.iter_lines():
            pass
    return served.service.jobs.job(job.id)


@pytest.mark.parametrize("kind", sorted(set(ASKED) - {"thin"}))
def test_what_a_job_came_to_has_a_page(kind: str, served: Served) -> None:
    job = ended(served, kind, *ASKED[kind])
    assert job.state == "done", job.problem
    page = served.client.get(f"/jobs/{job.id}", headers=PAGE)
    assert page.status_code == 200 and '<h2 id="result-title">Result</h2>' in page.text


def test_a_run_says_which_slots_stand_still_while_weights_move(served: Served) -> None:
    before = served.root / "run" / "checkpoint_4"
    write_step(before, 5, served.root / "run" / "checkpoint_5", "t5x", "t5x", still=True)
    served.service.catalogue.scan()
    (run,) = served.client.get("/api/v1/runs").json()["items"]
    address = f"/runs/{run['id']}"
    page = served.client.get(address, headers=PAGE).text
    assert "Nobody has held the steps against each other yet" in page and "<th" in page
    job = ended(served, "doctor", ("checkpoint_4", "checkpoint_5"), {})
    page = served.client.get(address, headers=PAGE).text.partition("The same bits as at the step before")[2]
    assert "moments-stale" in page and f"slots/{EMBEDDING}" in page and f"/jobs/{job.id}" not in page
    write_step(before, 9, served.root / "run" / "checkpoint_9", "t5x", "t5x")
    served.service.catalogue.scan()
    ended(served, "doctor", ("checkpoint_5", "checkpoint_9"), {})  # in which it has no step before it
    for name, is_stale in (("checkpoint_4", False), ("checkpoint_5", True), ("checkpoint_9", False)):
        page = served.client.get(f"/checkpoints/{number(served, name)}", headers=PAGE).text
        of_doctor = page.partition("<h3>Doctor")[2].partition("<h3>What it is")[0]
        assert ("moments-stale" in of_doctor, "findings</span>" in of_doctor) == (is_stale, is_stale), name


def test_a_run_that_is_not_sealed_is_sealed_as_a_whole_before_it_is_thinned(served: Served) -> None:
    (run,) = served.client.get("/api/v1/runs").json()["items"]
    address = f"/runs/{run['id']}/thin"
    page = served.client.get(f"{address}?last=1", headers=PAGE).text
    form = page.partition('name="kind" value="seal"')[2].partition("</form>")[0]
    subjects = re.findall(r'name="subject" value="(\d+)"', form)
    assert subjects and f"Seal {len(subjects)} step" in form
    answer = served.client.post(address, data={"kind": "seal", "subject": subjects}, headers=PAGE)
    sealing = served.client.get("/api/v1/jobs?kind=seal").json()["items"]
    assert answer.status_code == 200 and {int(one) for one in subjects} <= {
        job["subjects"][0] for job in sealing
    }


def test_what_a_job_of_before_lacks_is_asked_for_anew(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ("checkpoint_4", "checkpoint_6")
    write_step(served.root / "run" / "checkpoint_4", 6, served.root / "run" / "checkpoint_6", "t5x", "t5x")
    served.service.catalogue.scan()
    (run,) = served.client.get("/api/v1/runs").json()["items"]
    result = served.service.jobs.result

    def without_changes(job: int) -> Any:
        return {name: one for name, one in result(job).items() if name != "changes"}

    numbers = Screens(served.service).steps(run["id"])
    assert {number(served, name) for name in steps} <= {*numbers}
    job = served.service.jobs.submit("parameter", numbers, {"path": EMBEDDING})
    while served.service.jobs.job(job.id).state not in ENDED:
        time.sleep(0.01)
    address = f"/diff?{urlencode({'run': run['id'], 'path': EMBEDDING})}"
    assert "Each step against the one before" in served.client.get(address, headers=PAGE).text
    monkeypatch.setattr(served.service.jobs, "result", without_changes)
    page = served.client.get(address, headers=PAGE)
    assert page.status_code == 200 and "Read it in every step" in page.text
    assert served.client.get(f"/jobs/{job.id}", headers=PAGE).status_code == 200


def test_a_checkpoints_page_names_the_optimizer_beside_it_that_is_not_read(served: Served) -> None:
    folder = served.root / "halves"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(save({"a": np.zeros(3, np.float32)}))
    shutil.copy(served.root / "a.pt", folder / "my_opt.pt")
    served.service.catalogue.scan()
    ended(served, "inspect", ("halves",), {})
    page = served.client.get(f"/checkpoints/{number(served, 'halves')}", headers=PAGE).text
    section = page.partition('id="unread"')[2].partition("</section>")[0]
    assert "What is not read" in section and "my_opt.pt" in section
    verdict = page.partition('id="standing"')[2].partition("</div>")[0]
    assert "No run goes on from it" in verdict and "no optimizer" in verdict


def test_every_kind_of_job_was_asked_for() -> None:
    assert ASKED.keys() == KINDS.keys() and "done" in ENDED


@pytest.mark.parametrize("text", ["{}", "{}: whatever/is-there.pt", "checkpoint_4"])
def test_a_checkpoint_to_compare_is_chosen_by_number_or_by_what_fits_it_alone(
    text: str, served: Served
) -> None:
    one = number(served, "checkpoint_4")
    page = served.client.get("/diff", params={"a": text.format(one)}, headers=PAGE).text
    assert f'value="{one}: ' in page.partition("<datalist")[0]
    assert (
        'value="'
        not in served.client.get("/diff?a=c", headers=PAGE)
        .text.partition("<datalist")[0]
        .partition("<form")[2]
    )


def test_a_region_has_a_page_and_what_lies_outside_is_refused(served: Served) -> None:
    one = number(served, "checkpoint_4")
    ended(served, "inspect", ("checkpoint_4",), {})
    listed = served.client.get(f"/api/v1/checkpoints/{one}/parameters?limit=500").json()["items"]
    index = next(i for i, each in enumerate(listed) if each["path"] == EMBEDDING)
    lines = served.client.get(f"/checkpoints/{one}/parameters.csv").text.splitlines()
    assert lines[0].startswith("parameter,slot,shape") and len(lines) == 1 + sum(
        1 + len(each["slots"]) for each in listed
    )
    rows, columns = listed[index]["shape"]
    address = f"/checkpoints/{one}/parameters/{index}/region"
    assert "Look at it" in served.client.get(address, headers=PAGE).text
    job = ended(served, "parameter", ("checkpoint_4",), {"path": EMBEDDING, "region": [0, 2, 0, columns]})
    assert f"/jobs/{job.id}/result" in served.client.get(f"{address}?rows=0:2", headers=PAGE).text
    for said in (
        f"rows=0:{rows + 1}",
        "rows=2:2",
        "rows=-1:1",
        f"columns={columns}:0",
        "slot=none",
        "rows=x",
    ):
        page = served.client.get(f"{address}?{said}", headers=PAGE)
        assert page.status_code in {404, 422} and "That didn't work" in page.text, said


def test_a_region_that_says_nothing_is_refused(served: Served) -> None:
    for subjects, options, why in (
        (("checkpoint_4",), {"slot": "v_row"}, "without a region"),
        (("a.pt", "b.pt"), {"region": [0, 1, 0, 1]}, "one checkpoint alone"),
        (("checkpoint_4",), {"region": [1, 1, 0, 1]}, "row behind the last"),
    ):
        body = {
            "kind": "parameter",
            "subjects": [number(served, name) for name in subjects],
            "options": {"path": EMBEDDING, **options},
        }
        answer = served.client.post("/api/v1/jobs", json=body)
        assert answer.status_code == 422 and why in answer.text


def test_what_is_no_checkpoints_number_is_said_and_not_left_out(served: Served) -> None:
    form = {"kind": "check", "subject": [f"{number(served, 'a.pt')}", "x"]}
    answer = served.client.post("/jobs", data=form, headers={**PAGE, "Origin": "http://localhost:8642"})
    assert answer.status_code == 422 and "not of a checkpoint" in answer.text


@pytest.mark.parametrize("address", ["/nowhere", "/runs/7", "/jobs/999", "/static/none.js", "/checkpoints/x"])
def test_what_is_not_there_is_a_page_for_people_and_data_for_programs(address: str, served: Served) -> None:
    page = served.client.get(address, headers=PAGE)
    assert page.status_code in {404, 422} and "<h1>That didn't work</h1>" in page.text
    assert page.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize(
    ("address", "headers"), [("/nowhere", {"Accept": "*/*"}), ("/api/v1/nowhere", PAGE)], ids=["other", "api"]
)
def test_programs_get_data_for_what_is_not_there(
    address: str, headers: dict[str, str], served: Served
) -> None:
    answer = served.client.get(address, headers=headers)
    assert answer.status_code == 404 and answer.headers["content-type"] == "application/problem+json"


def test_what_is_refused_at_the_door_is_a_page_too(served: Served) -> None:
    page = served.client.post("/scan", headers={**PAGE, "Origin": "http://evil.example"})
    assert page.status_code == 403 and "comes from another site" in page.text
    assert page.headers["content-type"].startswith("text/html")


def test_a_lineage_is_in_the_order_of_time_and_sources_come_first() -> None:
    def node(name: str, day: int) -> Any:
        return Node(name, cast(Any, SimpleNamespace(modified=datetime(2026, 1, day, tzinfo=UTC))))

    late, early, sealed_later = node("late", 3), node("early", 1), node("source", 4)
    edge = Edge("source", "early", "convert", None, None, {}, None)
    assert [one.id for one in _in_order([late, early], [])] == ["early", "late"]
    assert [one.id for one in _in_order([early, late, sealed_later], [edge])] == ["late", "source", "early"]


def test_arcs_of_a_lineage_that_share_rows_have_lanes_of_their_own() -> None:
    assert charts._lanes([(0, 1), (1, 2), (0, 2), (1, 3)]) == [0, 0, 1, 2]


def test_a_run_of_the_root_itself_has_its_path_and_names_may_fold_behind_slashes(served: Served) -> None:
    for step in (4, 5):
        write_step(
            served.root / "run" / "checkpoint_4", step, served.root / f"checkpoint_{step}", "t5x", "t5x"
        )
    served.service.catalogue.scan()
    page = served.client.get("/", headers=PAGE).text
    (run,) = [run for run in served.client.get("/api/v1/runs").json()["items"] if run["path"] == "."]
    assert page.count(f'href="/runs/{run["id"]}">{served.root}</a>') == 2
    assert "adafactor/<wbr>t5x" in page
