"""The client says what the service says, in its records and its errors; and docs/service.md runs as it stands."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import TOKEN, Served

from statekit import errors
from statekit.client import PAUSE_SECONDS, Client
from statekit.errors import NotFoundError, StatekitError, UsageError
from statekit.service.records import Checkpoint, Event

ROOT = Path(__file__).parents[1]
PAGES = {
    page: re.findall(r"<!-- served -->\n```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    for page in ("README.md", "docs/service.md")
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    service = Served(tmp_path_factory.mktemp("service"))
    with service.listening() as url, service.working():
        yield url
    service.close()


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, TOKEN) as made:
        yield made


SHELL = {
    page: [
        line
        for block in re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
        for line in block.splitlines()
        if "statekit serve" in line or "[service]" in line or "TOKEN" in line
    ]
    for page in PAGES
}
"""The lines of the shell that are about the service."""


def test_the_lines_of_the_shell_work_as_they_stand(address: str, tmp_path: Path) -> None:
    from statekit.cli.serve_command import command

    token = tmp_path / ".local" / "share" / "statekit" / "token"
    token.parent.mkdir(parents=True)
    token.write_text(TOKEN + "\n")
    asked = []
    for line in [line for lines in SHELL.values() for line in lines] + [_made_by("serve")]:
        if line.startswith("pip install"):
            assert line in ("pip install 'statekit[service]'", "pip install '.[service]'")
            assert "service" in extras()
        elif "statekit serve" in line:  # that it starts is seen in a browser
            words = line.replace("/data/runs", str(tmp_path)).replace("$(ROOT)", str(tmp_path)).split()
            said = command.make_context("serve", words[words.index("serve") + 1 :]).params
            assert said["port"] == 8642 and said["roots"] == (tmp_path,)
        else:
            asked.append(line.replace("http://127.0.0.1:8642", address))
    if shutil.which("curl"):
        environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        answer = subprocess.run(
            ["sh", "-c", "\n".join(asked)], env=environment, capture_output=True, text=True, check=True
        )
        assert json.loads(answer.stdout)["total"] == 0
    assert len(asked) == 2 and sum(map(len, SHELL.values())) == 6


def _made_by(goal: str) -> str:
    """Returns the line of the Makefile that makes a goal."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (line,) = re.findall(rf"^{goal}: .*\n\t@(.*)$", makefile, re.MULTILINE)
    return str(line)


def extras() -> set[str]:
    """Returns the extras that can be installed."""
    return {*metadata("statekit").get_all("Provides-Extra", [])}


def test_records_come_page_by_page(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    ask = client._get

    def ask_for_one(path: str, params: Any = None) -> Any:
        sent.append(params)
        return ask(path, {**(params or {}), "limit": 1})

    monkeypatch.setattr(client, "_get", ask_for_one)
    listed = list(client.checkpoints(sort="path", status="any"))
    assert [type(one) for one in listed] == [Checkpoint] * len(sent)
    assert [one.path for one in listed][:3] == ["a.pt", "b.pt", "broken.pt"]
    assert listed[0].modified.tzinfo is not None and isinstance(listed[0].tags, tuple)


def test_tags_notes_and_roots(client: Client) -> None:
    (one,) = client.checkpoints(text="b.pt")
    assert client.tag(one.id, "best").tags == ("best",)
    assert [each.id for each in client.checkpoints(tag="best")] == [one.id]
    assert client.note(one.id, "keep").note == "keep"
    assert client.untag(one.id, "best").tags == ()
    assert len(client.roots()) == 1
    assert list(client.runs()) == []


def test_an_error_is_the_librarys(client: Client, address: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        client.checkpoint(10**6)
    assert caught.value.place == "checkpoint 1000000"
    with pytest.raises(UsageError, match="no option"):
        client.submit("check", 1, nothing=True)  # type: ignore[call-overload]  # a type checker says so too
    with pytest.raises(UsageError, match="who asks"), Client(address, "x") as stranger:
        stranger.roots()
    with pytest.raises(errors.StatekitError):
        client.run(10**6)


def test_a_job_that_fails_raises_what_it_failed_with(client: Client) -> None:
    (one,) = client.checkpoints(text="broken.pt")
    job = client.submit("inspect", one.id)
    with pytest.raises(StatekitError) as caught:
        client.wait(job)
    assert client.job(job).state == "failed"
    assert type(caught.value).__name__ == (client.job(job).problem or {})["kind"]


def test_events_go_on_where_the_connection_was_lost(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = client.checkpoints(text="a.pt")
    job = client.wait(client.submit("check", one.id))
    whole = list(client.events(job))
    opened: list[str] = []
    stream = client._http.stream

    def stream_once(method: str, path: str, **options: Any) -> Any:
        opened.append(options["headers"]["Last-Event-ID"])
        if len(opened) == 1:
            raise client._lost("lost")
        return stream(method, path, **options)

    monkeypatch.setattr(client._http, "stream", stream_once)
    monkeypatch.setattr("statekit.client.PAUSE_SECONDS", 0.0)
    events = list(client.events(job, after=1))
    assert events == whole[1:]
    assert all(isinstance(event, Event) for event in events)
    assert opened == ["1", "1", str(whole[-1].number)]


def test_events_are_not_asked_for_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands between may end each stream at once, in order."""
    paused: list[float] = []
    answers = [200, 200, 200, 204]

    class Answer:
        is_success = True

        def __init__(self, status: int) -> None:
            self.status_code = status

        def iter_lines(self) -> Iterator[str]:
            yield from (": ping", "")

    @contextmanager
    def stream(method: str, path: str, **options: Any) -> Iterator[Answer]:
        yield Answer(answers.pop(0))

    # not time.sleep itself, which threads of other tests call too
    monkeypatch.setattr("statekit.client.time", SimpleNamespace(sleep=paused.append))
    with Client("http://127.0.0.1:1", TOKEN) as client:
        monkeypatch.setattr(client._http, "stream", stream)
        assert list(client.events(1)) == []
    assert paused == [PAUSE_SECONDS] * 3


def test_a_request_whose_answer_is_lost_is_sent_again_and_done_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = client.checkpoints(text="a.pt")
    request = client._http.request
    sent: list[str] = []

    def lose_the_first(*arguments: Any, **options: Any) -> Any:
        answer = request(*arguments, **options)
        sent.append(options["headers"]["Idempotency-Key"])
        if len(sent) == 1:
            raise client._lost("lost")
        return answer

    monkeypatch.setattr("statekit.client.PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(client._http, "request", lose_the_first)
    client.submit("check", one.id, budget=2**30)
    monkeypatch.undo()
    assert len(sent) == 2 and len(set(sent)) == 1
    again = [job for job in client.jobs(kind="check", subject=one.id) if job.options.get("budget") == 2**30]
    assert len(again) == 1


def test_a_service_or_a_token_that_is_not_there_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statekit.client.PAUSE_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with Client(nobody, TOKEN) as client:
        for ask in (client.roots, lambda: next(client.events(1)), lambda: next(client.checkpoints())):
            with pytest.raises(StatekitError, match=rf"doesn't answer(.|\n)*{nobody}"):
                ask()
    with pytest.raises(NotFoundError, match="token can't be read"):
        Client(nobody, tmp_path / "token")


def test_the_examples_run_as_they_stand(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / ".local" / "share" / "statekit" / "token"
    token.parent.mkdir(parents=True)
    token.write_text(TOKEN + "\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    examples = PAGES["docs/service.md"]
    assert len(examples) == 4 and not PAGES["README.md"]
    names: dict[str, Any] = {}
    for text in examples:
        exec(compile(text.replace("http://127.0.0.1:8642", address), "service.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "run/checkpoint_4 clean" in printed or "run/checkpoint_4 findings" in printed
    assert "run/checkpoint_4 4 unsealed" in printed
    assert "encoder/layers_0/attention/query/kernel" in printed
    assert re.search(r"\d+ state \{'state': 'done'", printed)
    assert re.search(r"checkpoint-\d+ -> checkpoint-\d+ convert", printed)
