"""The service's API: typed, paged, and a client's fault is never the server's."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import negative_data_rejection, positive_data_acceptance
from schemathesis.python.asgi import get_client
from serving import BEARER, Served

from statekit.errors import CommitError, NotFoundError
from statekit.files.durable import writing
from statekit.service.records import KINDS
from statekit.service.tasks.failures import problem_of
from statekit.service.tasks.listener import Listener
from statekit.service.web.remembered import Remembered
from statekit.service.work import KINDS as KINDS_OF_TASKS

pytestmark = pytest.mark.usefixtures("shared_zygotes")

API = "/api/v1"
SEMANTIC = [positive_data_acceptance, negative_data_rejection]
"""Checks that hold a description to say all that makes sense (which text is a cursor it can't), or take a request for
wrong that our token or an empty list has made right."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    service = Served(tmp_path_factory.mktemp("service"))
    yield service
    service.close()


def got(served: Served, path: str, **params: Any) -> Any:
    answer = served.client.get(f"{API}{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_checkpoints_are_listed_page_by_page_and_each_once(served: Served) -> None:
    whole = got(served, "/checkpoints", sort="path")
    assert [one["path"] for one in whole["items"]] == ["a.pt", "b.pt", "broken.pt", "run/checkpoint_4"]
    seen, cursor = [], None
    for _ in range(10):
        page = got(served, "/checkpoints", sort="path", limit=1, **({"cursor": cursor} if cursor else {}))
        seen += [one["id"] for one in page["items"]]
        assert page["total"] == 4
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == [one["id"] for one in whole["items"]]


def test_filters_choose_and_what_cannot_be_read_says_why(served: Served) -> None:
    (t5x,) = got(served, "/checkpoints", optimizer="adafactor/t5x")["items"]
    assert t5x["container"] == "t5x" and t5x["step"] == 4 and t5x["resumable"]
    (broken,) = got(served, "/checkpoints", readable=False)["items"]
    assert broken["path"] == "broken.pt" and broken["unreadable"]
    assert got(served, "/checkpoints", text="a.pt")["total"] == 1
    assert got(served, "/facets")["container"] == {"t5x": 1, "torch": 3}


def test_a_scan_is_begun_at_once_and_says_how_far_it_is(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, catalogue = threading.Event(), served.service.catalogue
    scan = catalogue._scan
    monkeypatch.setattr(catalogue, "_scan", lambda: (may_end.wait(30), scan())[1])
    asked = served.client.post(f"{API}/scan")
    assert asked.status_code == 202 and asked.json()["running"]
    now = got(served, "/scan")
    assert now["running"] and now["done"] < asked.json()["number"]
    assert "Scanning:" in served.client.get("/").text
    may_end.set()
    while (now := got(served, "/scan"))["done"] < asked.json()["number"]:
        time.sleep(0.01)
    assert now["last"]["seen"] == 4 and now["entries"] > 4 and now["problem"] is None


def test_an_answer_is_remembered_until_anybody_changes_the_catalogue(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    catalogue = served.service.catalogue
    listed = catalogue.checkpoints

    def checkpoints(*said: Any) -> Any:
        asked.append(said)
        return listed(*said)

    monkeypatch.setattr(catalogue, "checkpoints", checkpoints)
    first = got(served, "/checkpoints", sort="-name")
    assert got(served, "/checkpoints", sort="-name") == first and len(asked) == 1
    number = first["items"][0]["id"]
    with sqlite3.connect(served.database.path) as another:
        another.execute("UPDATE checkpoints SET verdict = 'clean' WHERE id = ?", (number,))
    another.close()
    assert got(served, "/checkpoints", sort="-name")["items"][0]["verdict"] == "clean" and len(asked) == 2
    assert got(served, f"/checkpoints/{number}")["tags"] == []
    catalogue.tag(number, "seen")
    assert got(served, f"/checkpoints/{number}")["tags"] == ["seen"]
    catalogue.untag(number, "seen")
    assert got(served, f"/checkpoints/{number}")["tags"] == []
    assert served.client.get(f"{API}/checkpoints/{number}", headers={"Authorization": "x"}).status_code == 401
    with served.database.writing():  # somebody writes: nothing waits for that
        assert served.database.change() is not None
    figures = served.client.get("/metrics").text
    assert 'route="/api/v1/checkpoints"' in figures
    assert 'statekit_checkpoints{doctor="clean"} 1.0' in figures
    assert 'statekit_checkpoint_bytes{seal="unsealed"}' in figures


def test_what_many_ask_at_a_time_is_looked_up_once_and_a_failure_is_not_remembered() -> None:
    calls, change = Counter[str](), [1]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls[scope["path"]] += 1
        await asyncio.sleep(0.01)
        status = 404 if scope["path"].endswith("9") else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": str(change[0]).encode()})

    busy = iter([None, None])
    layer = Remembered(app, lambda: next(busy, change[0]))

    async def ask(path: str) -> bytes:
        sent: list[Any] = []

        async def receive() -> Any:
            raise AssertionError("nobody reads what isn't sent")

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": f"{API}{path}", "query_string": b""}
        await layer(scope, receive, send)
        return bytes(sent[-1]["body"])

    async def many(path: str) -> set[bytes]:
        return {*await asyncio.gather(*(ask(path) for _ in range(20)))}

    async def all_of_it() -> None:
        assert await many("/checkpoints") == {b"1"} and calls[f"{API}/checkpoints"] == 1
        change[0] = 2
        assert await many("/checkpoints") == {b"2"} and calls[f"{API}/checkpoints"] == 2
        assert await many("/checkpoints/9") == {b"2"} and calls[f"{API}/checkpoints/9"] == 20
        assert await many("/jobs") == {b"2"} and calls[f"{API}/jobs"] == 20
        assert not layer._asked

    asyncio.run(all_of_it())


def test_the_description_says_which_options_each_kind_of_job_takes(served: Served) -> None:
    forms = {
        one["properties"]["kind"]["const"]: one
        for one in got(served, "/openapi.json")["components"]["schemas"]["JobBody"]["oneOf"]
    }
    assert [*forms] == [*KINDS]
    convert = forms["convert"]["properties"]
    assert convert["options"]["required"] == ["target"] and "options" in forms["convert"]["required"]
    assert convert["options"]["properties"]["require"]["anyOf"][0]["enum"][0] == "bitwise"
    assert forms["diff"]["properties"]["subjects"]["minItems"] == 2


def test_tags_and_notes_are_written_down(served: Served) -> None:
    number = got(served, "/checkpoints", text="a.pt")["items"][0]["id"]
    tagged = served.client.post(f"{API}/checkpoints/{number}/tags", json={"tag": "<b>good</b>"})
    assert tagged.json()["tags"] == ["<b>good</b>"]
    noted = served.client.put(f"{API}/checkpoints/{number}/note", json={"note": "two\nlines \u202e"})
    assert noted.json()["note"] == "two\nlines \\u202e"
    assert got(served, "/checkpoints", tag="<b>good</b>")["total"] == 1
    cleared = served.client.delete(f"{API}/checkpoints/{number}/tags", params={"tag": "<b>good</b>"})
    assert cleared.json()["tags"] == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "named"),
    [
        ("GET", "/checkpoints/999", None, 404, "checkpoint 999"),
        ("GET", "/checkpoints/0", None, 422, "path"),
        ("GET", "/checkpoints/99999999999999999999", None, 422, "path"),
        ("GET", "/checkpoints/..%2f..%2fsecret", None, 404, None),
        ("GET", "/checkpoints?sort=place", None, 422, "query"),
        ("GET", "/checkpoints?cursor=x", None, 422, "cursor"),
        ("GET", "/checkpoints?text=a%00", None, 422, "query"),
        ("GET", "/checkpoints?optimiser=adamw", None, 422, "query"),
        ("GET", "/checkpoints?tag=a&tag=b", None, 422, "query"),
        ("GET", "/runs/1", None, 404, "run 1"),
        ("POST", "/checkpoints/1/tags", {"tag": "\ud800"}, 422, "body"),
        ("POST", "/checkpoints/1/tags", {"tag": "\n"}, 422, "tag"),
        ("POST", "/checkpoints/1/tags", {"tag": "a", "path": "/etc/passwd"}, 422, "body"),
        ("PUT", "/checkpoints/1/note", {"note": "x" * 5000}, 422, "body"),
        ("PUT", "/checkpoints/1", None, 405, None),
    ],
)
def test_a_problem_says_what_is_wrong_and_where(
    method: str, path: str, body: Any, status: int, named: str | None, served: Served
) -> None:
    sent = None if body is None else json.dumps(body).encode()
    headers = {} if sent is None else {"Content-Type": "application/json"}
    answer = served.client.request(method, f"{API}{path}", content=sent, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status and problem["detail"]
    assert named is None or problem["place"] == named


def test_a_body_that_is_no_json_is_a_clients_fault(served: Served) -> None:
    for content in (b"{", b"\xff", b"[" * 100_000, b'{"tag": 1e999}', b"null"):
        answer = served.client.post(
            f"{API}/checkpoints/1/tags", content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code in (400, 422), content[:20]


def number_of(served: Served, path: str) -> int:
    return int(got(served, "/checkpoints", text=path, sort="path")["items"][0]["id"])


def asked(served: Served, kind: str, *paths: str, key: str | None = None, **options: Any) -> Any:
    body = {"kind": kind, "subjects": [number_of(served, path) for path in paths], "options": options}
    headers = {} if key is None else {"Idempotency-Key": key}
    answer = served.client.post(f"{API}/jobs", json=body, headers=headers)
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"{API}/jobs/{answer.json()['id']}"
    return answer.json()


def events_of(served: Served, job: int, after: int | None = None) -> list[tuple[int, str, Any]]:
    """Returns the events of a job until it has ended: number, kind and data of each."""
    headers = {} if after is None else {"Last-Event-ID": f"{after}"}
    answer = served.client.get(f"{API}/jobs/{job}/events", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.replace("\r\n", "\n").split("\n\n"):
        said = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if said:
            events.append((int(said["id"]), said["event"], json.loads(said["data"])["data"]))
    return events


def test_a_job_is_followed_to_its_end_and_its_result_read(served: Served) -> None:
    job = asked(served, "inspect", "a.pt", stats=True)
    assert job["state"] == "queued"
    missing = served.client.get(f"{API}/jobs/{job['id']}/result")
    assert (missing.status_code, missing.json()["found"]) == (404, "it is queued")
    with served.working():
        events = events_of(served, job["id"])
    assert [number for number, _, _ in events] == list(range(1, len(events) + 1))
    states = [data["state"] for _, kind, data in events if kind == "state"]
    assert states == ["queued", "running", "done"]
    again = events_of(served, job["id"], after=events[0][0])
    assert again == events[1:]
    over = served.client.get(f"{API}/jobs/{job['id']}/events", headers={"Last-Event-ID": f"{events[-1][0]}"})
    assert over.status_code == 204
    result = got(served, f"/jobs/{job['id']}/result")
    assert result["totals"]["parameters"] == len(result["parameters"]) > 0
    number = job["subjects"][0]
    page = got(served, f"/checkpoints/{number}/parameters", limit=1)
    assert (page["total"], page["next_after"], len(page["items"])) == (len(result["parameters"]), 1, 1)
    module = result["parameters"][0]["path"].replace(".", "/").split("/")[0]
    inside = got(served, f"/checkpoints/{number}/parameters", under=module)["items"]
    assert inside and all(one["path"].startswith(module) for one in inside)
    assert got(served, f"/checkpoints/{number}/resumes-in")["job"] == job["id"]


def test_nothing_is_said_of_what_nobody_has_looked_into(served: Served) -> None:
    number = number_of(served, "b.pt")
    for what in ("parameters", "resumes-in"):
        answer = served.client.get(f"{API}/checkpoints/{number}/{what}")
        assert answer.status_code == 404
        assert "inspect" in answer.json()["remedy"]


def test_the_same_request_again_is_the_same_job(served: Served) -> None:
    job = asked(served, "check", "a.pt", key="once")
    assert asked(served, "check", "a.pt", key="once")["id"] == job["id"]
    other = {"kind": "check", "subjects": [number_of(served, "b.pt")]}
    answer = served.client.post(f"{API}/jobs", json=other, headers={"Idempotency-Key": "once"})
    assert (answer.status_code, answer.json()["place"]) == (422, "Idempotency-Key")
    assert served.client.post(f"{API}/jobs/{job['id']}/cancel").json()["state"] == "cancelled"
    assert got(served, "/jobs", state="cancelled")["items"][0]["id"] == job["id"]


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("convert", {}, "target"),
        ("convert", {"target": {"root": 1, "path": "x"}, "nothing": 1}, "nothing"),
        ("convert", {"target": "/etc/passwd"}, "target"),
        ("inspect", {"path": "/etc/passwd"}, "path"),
        ("diff", {"map": "/etc/passwd.json"}, "map"),
    ],
)
def test_options_that_a_job_does_not_take_are_refused_by_name(
    kind: str, options: Any, named: str, served: Served
) -> None:
    subjects = [number_of(served, name) for name in ("a.pt", "b.pt")][: 2 if kind == "diff" else 1]
    answer = served.client.post(f"{API}/jobs", json={"kind": kind, "subjects": subjects, "options": options})
    assert answer.status_code == 422
    assert named in answer.json()["found"]


HALF = "\ud800"
"""Half a character, which Python's text may have and UTF-8 not."""


def test_halves_of_characters_hold_no_answer_up(served: Served) -> None:
    jobs, checkpoint = served.service.jobs, number_of(served, "b.pt")
    body = json.dumps({"kind": "inspect", "subjects": [checkpoint], "options": {"filter": HALF}})
    sent = {"Content-Type": "application/json"}
    assert served.client.post(f"{API}/jobs", content=body, headers=sent).status_code == 422
    result = {"parameters": [{"path": HALF, "shape": [1], "slots": {}}], "resumes": [{"layout": HALF}]}
    problem = problem_of(NotFoundError(HALF, place=HALF))
    for state, said in (("failed", {"problem": problem}), ("done", {"result": result})):
        jobs.submit("inspect", [checkpoint], {})
        lease = jobs.lease("test")
        assert lease is not None and jobs.finish(lease, state, **said)  # type: ignore[arg-type]
        assert got(served, "/jobs", subject=checkpoint)["total"]
    (latest, *_) = got(served, "/jobs", subject=checkpoint)["items"]
    assert got(served, f"/jobs/{latest['id']}/result") == result
    assert got(served, f"/checkpoints/{checkpoint}/parameters")["items"] == result["parameters"]
    assert got(served, f"/checkpoints/{checkpoint}/resumes-in")["resumes"] == result["resumes"]


def test_what_the_services_own_bounds_end_is_done_elsewhere(tmp_path: Path) -> None:
    """Neither a disk nor the machine's memory lacks room."""
    with pytest.raises(CommitError) as caught, writing(tmp_path):
        raise OSError(errno.EFBIG, "File too large")
    for error in (caught.value, OSError(errno.EFBIG, "File too large"), MemoryError()):
        assert "command line" in problem_of(error)["remedy"]
    assert problem_of(OSError(errno.ENOSPC, "No space left on device"))["remedy"] is None


def test_a_lineage_begins_with_the_checkpoint_itself(served: Served) -> None:
    number = number_of(served, "a.pt")
    lineage = got(served, f"/lineage/{number}")
    assert [node["checkpoint"]["id"] for node in lineage["nodes"]] == [number]


def cases_of(served: Served) -> st.SearchStrategy[schemathesis.Case[Any]]:
    """Returns requests that the description of the interface allows, and others that it doesn't."""
    schema = schemathesis.openapi.from_asgi(f"{API}/openapi.json", served.app, headers=BEARER)
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    return st.one_of(*(schema.as_strategy(generation_mode=mode) for mode in modes))


def hold_to_the_description(served: Served, count: int) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[*HealthCheck],
    )
    @given(case=cases_of(served))
    def holds(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(session=client, headers=BEARER, excluded_checks=SEMANTIC)

    with get_client(cast(Any, served.app), max_stream_events=10) as client:
        holds()


def test_answers_are_as_described_whatever_is_asked(served: Served) -> None:
    hold_to_the_description(served, 150)


@pytest.mark.slow
def test_answers_are_as_described_in_ten_thousand_cases(served: Served) -> None:
    hold_to_the_description(served, 10_000)


def integers(node: Any, at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every whole number that a description names, with where it does."""
    if isinstance(node, dict):
        if node.get("type") == "integer":
            yield at, node
        for key, below in node.items():
            yield from integers(below, f"{at}/{key}")
    elif isinstance(node, list):
        for i, below in enumerate(node):
            yield from integers(below, f"{at}/{i}")


def test_every_whole_number_that_may_be_sent_has_its_range(served: Served) -> None:
    described = got(served, "/openapi.json")
    sent = [
        {"parameters": one.get("parameters", []), "body": one.get("requestBody", {})}
        for path in described["paths"].values()
        for one in path.values()
    ]
    bodies = {
        name: schema for name, schema in described["components"]["schemas"].items() if name.endswith("Body")
    }
    seen = dict(integers([sent, bodies]))
    assert len(seen) > 20
    assert [at for at, one in seen.items() if not {"minimum", "maximum"} <= {*one}] == []


def test_both_ends_of_every_whole_number_are_taken_or_refused_and_never_fail(served: Served) -> None:
    looked = served.service.jobs
    looked.submit("inspect", [1])
    lease = looked.lease("test")
    assert lease is not None
    said = {"paths": [str(served.service.catalogue.path_of(1))], "options": {}}
    looked.finish(lease, "done", result=KINDS_OF_TASKS["inspect"](said, Listener(io.StringIO())))
    assert served.client.get("/checkpoints/1/tree").status_code == 200
    tried = 0
    for route in [one for router in (served.app.router, *served.routers) for one in router.routes]:
        if (
            not isinstance(route, APIRoute)
            or "GET" not in (route.methods or ())
            or route.path.endswith("/events")
        ):
            continue
        whole = {
            field.alias: field
            for field in (*route.dependant.path_params, *route.dependant.query_params)
            if "'type': 'int'" in str(field._type_adapter.core_schema)
        }
        usual = dict.fromkeys(route.param_convertors, "1")
        for name in whole:
            for value in (-(2**63), -1, 0, 1, 2**31, 2**31 + 1, 2**63 - 1, 2**63, 10**30):
                path = route.path.format(**{**usual, name: value})
                query = {} if name in usual else {name: value}
                answer = served.client.get(path, params=query, follow_redirects=False)
                assert answer.status_code < 500, (path, query, answer.text)
                tried += 1
    assert tried > 200
