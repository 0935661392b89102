"""Object stores and the Hub, as their libraries read them: what is pinned, what is refused, what is never shown."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_serving import SECRET, Served, serving

import statekit
from statekit.cli.main import main
from statekit.errors import CorruptError, FormatError, NotFoundError, RefusedError, StatekitError, UsageError
from statekit.files.objects import Objects
from statekit.files.source import Files, checkpoint_place, listing, target_place
from statekit.files.store import ListedTree, asking, opened_store
from statekit.files.tree import Place

T5X = Path(__file__).parent / "golden" / "t5x" / "bf16_params" / "checkpoint" / "checkpoint_4"


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {f"run/{file.relative_to(folder).as_posix()}": file.read_bytes() for file in files}


def first_bytes(place: Place) -> bytes:
    with Files() as files:
        return files.source(place).read(0, 8).tobytes()


def bucket(scheme: str) -> Objects:
    return Objects(opened_store(scheme, "bucket", ""), f"{scheme}://bucket")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    pytest.importorskip("obstore")
    with serving("s3", {"run/a": b"12345678" * 2**17, "run/deep/b": b"1", "run/empty": b""}) as (
        address,
        served,
    ):
        for name, value in {
            "ACCESS_KEY_ID": SECRET,
            "SECRET_ACCESS_KEY": SECRET,
            "REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "aGVsbG8=")
        for name in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_ENDPOINT"):
            monkeypatch.setenv(name, address)
        yield served


def test_a_bucket_is_listed_once_and_has_files_and_folders(store: Served) -> None:
    run = checkpoint_place("s3://bucket/run")
    assert run.is_dir() and [entry.name for entry in listing(run)] == ["a", "deep", "empty"]
    assert (run / "a").is_file() and (run / "deep").is_dir() and not (run / "gone").exists()
    assert [entry.name for entry in listing(run / "deep")] == ["b"]
    store.files["run/later"] = b""
    assert not (run / "later").exists() and len(listing(run)) == 3
    assert len(store.requests) == 2  # above the run, and all below it
    assert first_bytes(run / "a") == b"12345678"


def test_what_a_listing_has_outside_of_its_folder_is_passed_over(store: Served) -> None:
    store.files |= {"run/": b"", "run/deep/": b""}  # as consoles of stores make folders
    run = checkpoint_place("s3://bucket/run")
    assert [entry.name for entry in listing(run)] == ["a", "deep", "empty"]
    assert [entry.name for entry in listing(run / "deep")] == ["b"]


def test_an_object_that_changes_is_named_and_never_mixed(store: Served) -> None:
    file = checkpoint_place("s3://bucket/run") / "a"
    with Files() as files:
        source = files.source(file)
        source.read(0, 8)
        store.files["run/a"] = b"87654321" * 2**17
        with pytest.raises(CorruptError, match="changed while it was read") as caught:
            source.read(2**19, 8)
    assert f"{caught.value.place}" == "s3://bucket/run/a"


def test_a_short_answer_is_an_error(store: Served) -> None:
    file = checkpoint_place("s3://bucket/run/a")
    assert file.is_file()
    store.fault = "short"
    with pytest.raises(StatekitError):
        first_bytes(file)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_of_a_longer_answer_no_more_is_read_than_tells_it(scheme: str, store: Served) -> None:
    """Seen red: all of it was read into memory, as much as comes within a minute."""
    file = checkpoint_place(f"{scheme}://bucket/run/a")
    assert file.is_file()
    store.fault = "flood"
    with pytest.raises(CorruptError, match="another number of bytes"):
        first_bytes(file)
    assert store.flooded < 64


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_store_that_knows_no_condition_mixes_no_two_states(scheme: str, store: Served) -> None:
    store.fault = "unpinned"
    file = checkpoint_place(f"{scheme}://bucket/run/a")
    with Files() as files:
        source = files.source(file)
        assert source.read(0, 8).tobytes() == b"12345678"
        store.files["run/a"] = b"87654321" * 2**17
        with pytest.raises(CorruptError, match="changed while it was read"):
            source.read(2**19, 8)


def test_a_listing_that_never_ends_is_given_up(store: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statekit.files.store._LISTING_SECONDS", 0.3)
    store.fault = "endless"
    with pytest.raises(FormatError, match="doesn't end") as caught:
        checkpoint_place("s3://bucket/run").is_dir()
    assert "s3://bucket" in f"{caught.value.place}"
    asked = len(store.requests)
    time.sleep(0.2)
    assert len(store.requests) <= asked + 1


def test_pages_without_names_are_given_up(store: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statekit.files.store._LISTING_SECONDS", 0.3)
    store.fault = "endless"
    objects = bucket("s3")
    for ask in (
        lambda: ListedTree(objects.store, "s3://bucket", "gone").names("gone"),
        lambda: objects.below("gone"),
    ):
        with pytest.raises(FormatError, match="doesn't end"):
            ask()


@pytest.mark.parametrize(("fault", "shown"), [("denied", "AWS_ACCESS_KEY_ID"), ("broken", "400 Bad Request")])
def test_no_error_shows_a_key(store: Served, fault: str, shown: str) -> None:
    store.fault = fault
    with pytest.raises(FormatError) as caught:
        first_bytes(checkpoint_place("s3://bucket/run/a"))
    assert (
        shown in f"{caught.value}"
        and SECRET not in f"{caught.value!r} {caught.value} {caught.value.__cause__}"
    )


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("tag", ['"a\nb: c"', '"\u202e"', "*", '""', '"', "a b"])
def test_an_etag_that_no_request_can_repeat_is_refused(tag: str, scheme: str, store: Served) -> None:
    assert first_bytes(checkpoint_place(f"{scheme}://bucket/run/a")) == b"12345678"
    store.tag = tag
    with pytest.raises(FormatError, match="which state of a file"):
        first_bytes(checkpoint_place(f"{scheme}://bucket/run/a"))
    if tag.isascii() and "\n" not in tag:
        with pytest.raises(FormatError, match="which state of a file"):
            bucket(scheme).facts("run/a")


def test_a_panic_of_obstore_is_an_error_of_ours(store: Served) -> None:
    import obstore

    objects = bucket("s3")

    async def wait() -> None:
        await obstore.get_async(objects.store, "run/a", options={"if_match": "\n"})

    for ask in (
        lambda: obstore.get(objects.store, "run/a", options={"if_match": "\n"}),
        lambda: asyncio.run(wait()),
    ):
        with pytest.raises(FormatError, match="can't be read"), asking("s3://bucket", "run/a"):
            ask()
    with pytest.raises(KeyboardInterrupt), asking("s3://bucket", "run/a"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize(
    "moments",
    [
        ("+10000-01-01T00:00:00Z", *2 * ("Sat, 01 Jan 10000 00:00:00 GMT",)),
        ("-0001-01-01T00:00:00Z", *2 * ("Mon, 01 Jan 0001 00:00:00 +2359",)),
    ],
)
def test_a_year_that_dates_do_not_have_is_an_error_of_ours(
    moments: tuple[str, str, str], scheme: str, store: Served
) -> None:
    objects = bucket(scheme)
    store.moments = moments
    for ask in (
        lambda: first_bytes(checkpoint_place(f"{scheme}://bucket/run/a")),
        lambda: listing(checkpoint_place(f"{scheme}://bucket/run")),
        lambda: objects.facts("run/a"),
        lambda: objects.read("run/a", 2**30),
        lambda: objects.below("run"),
    ):
        with pytest.raises(FormatError, match="can't be read"):
            ask()


def test_what_is_not_in_a_bucket_is_said_to_be_missing(store: Served) -> None:
    with pytest.raises(NotFoundError, match="no such file or folder"):
        statekit.inspect("s3://bucket/gone")


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX warns of a fork, where another test has used it
@pytest.mark.parametrize("is_anew", [False, True])
def test_a_fork_of_a_process_that_asked_a_store_is_refused_and_does_not_hang(
    is_anew: bool, store: Served
) -> None:
    """Seen red: the child waited for ever for threads of obstore, or of ours, that only its parent has."""
    place = checkpoint_place("s3://bucket/run/a")
    assert first_bytes(place) == b"12345678"
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            first_bytes(checkpoint_place("s3://bucket/run/deep/b") if is_anew else place)
        except BaseException as error:
            os.write(into, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(into)
    ended, _, _ = select.select([out], [], [], 10)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(out) as answer:
        assert ended and re.match("UsageError: .* forked .*spawn", answer.read(), re.DOTALL)
    assert first_bytes(place) == b"12345678"


def test_a_conversion_from_a_bucket_is_that_of_the_local_files(store: Served, tmp_path: Path) -> None:
    store.files |= contents(T5X)
    manifests = []
    for number, source in enumerate((f"{T5X}", "s3://bucket/run")):
        target = tmp_path / f"{number}"
        statekit.convert(statekit.plan(source, target, to="statekit"))
        manifests.append(json.loads((target / "statekit.json").read_text()))
    assert manifests[0]["tensors"] == manifests[1]["tensors"] and manifests[0]["plan"] == manifests[1]["plan"]
    assert SECRET not in json.dumps(manifests[1])


def test_the_hub_is_read_at_the_commit_that_a_revision_names(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    with serving("hub", contents(T5X)) as (address, served):

        def run(*words: str) -> subprocess.CompletedProcess[str]:
            command = [
                sys.executable,
                "-m",
                "statekit",
                *words,
            ]  # the library reads the endpoint when it is imported
            home = {
                "HF_HOME": f"{tmp_path}",
                "HF_ENDPOINT": address,
                "HF_TOKEN": SECRET,
                "HF_HUB_OFFLINE": "0",
            }
            return subprocess.run(
                command, capture_output=True, text=True, env={**os.environ, **home}, check=False
            )

        target = tmp_path / "out"
        done = run("convert", "hf://owner/name@main/run", f"{target}", "--to", "statekit", "--from", "t5x")
        assert done.returncode == 0, done.stderr
        assert served.requests and all("/resolve/main/" not in request for request in served.requests)
        gone = run("inspect", "hf://owner/gone/run")
        assert gone.returncode == 3 and "no such repository" in gone.stderr and SECRET not in gone.stderr
    with statekit.open(T5X) as ours, statekit.open(target) as theirs:
        assert dict(ours.state.params).keys() == dict(theirs.state.params).keys()
        for name, tensor in ours.state.params.items():
            assert np.array_equal(np.asarray(tensor.read()), np.asarray(theirs.state.params[name].read()))


def test_a_process_that_is_offline_says_so(hub: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FormatError, match="offline") as caught:
        statekit.inspect("hf://owner/name@main/run")
    assert "unset both" in f"{caught.value}" and not hub.requests


@pytest.mark.parametrize(
    "address",
    ["hf://owner", "hf://owner/na me", "hf://ow..ner/name", "hf://owner/name@", "hf://owner/name@.."],
)
def test_an_address_on_the_hub_names_a_repository(address: str) -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(UsageError, match="names no repository"):
        checkpoint_place(address)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    pytest.importorskip("huggingface_hub")
    with serving("hub", {"run/a": b"12345678" * 2**17}) as (address, served):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # whatever the machine says
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield served


def test_an_answer_of_the_hub_is_what_was_asked_for_or_an_error(hub: Served) -> None:
    file = checkpoint_place("hf://owner/name/run/a")
    for fault in ("", "whole"):  # a server that knows no parts
        hub.fault = fault
        with Files() as files:
            assert files.source(file).read(2**19 + 4, 8).tobytes() == b"56781234"
    hub.fault = "long"
    with pytest.raises(CorruptError, match="another number of bytes"):
        first_bytes(checkpoint_place("hf://owner/name/run/a"))


@pytest.mark.parametrize(
    ("said", "is_taken"),
    [
        ({"Content_Range": "bytes 0-{last}/1048576"}, True),
        ({"Content_Range": "bytes 0-{last}/*"}, True),
        ({}, True),
        ({"Content_Range": "bytes 8-{last}/1048576"}, False),
        ({"Content_Range": "bytes 0-{last}/1048577"}, False),
        ({"Content_Range": f"bytes {'9' * 5000}-{{last}}/1048576"}, False),
        ({"X_Repo_Commit": "0" * 40}, False),
    ],
)
def test_an_answer_that_says_that_it_is_another_part_is_refused(
    said: dict[str, str], is_taken: bool, hub: Served
) -> None:
    """Seen red: a proxy's neighbouring part, which said so, was read as other values."""

    def answer(handler: Any) -> None:
        first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        data = hub.files["run/a"][first : last + 1]
        handler.answer(206, data, **{name: value.format(last=last) for name, value in said.items()})

    hub.instead["resolve"] = answer
    if is_taken:
        assert first_bytes(checkpoint_place("hf://owner/name/run/a"))[:4] == b"1234"
        return
    with pytest.raises(FormatError):
        first_bytes(checkpoint_place("hf://owner/name/run/a"))


def test_a_connection_that_drops_is_made_again(hub: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: one drop ended a conversion of hours, while a busy Hub was asked again."""
    monkeypatch.setattr("statekit.files.hub._PAUSES", (0.01, 0.01))

    def dropped(handler: Any) -> None:
        del hub.instead["resolve"]
        handler.answer(206, b"12", Content_Length="1048576")
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)

    hub.instead["resolve"] = dropped
    assert first_bytes(checkpoint_place("hf://owner/name/run/a")) == b"12345678"


def hanging(handler: Any) -> None:
    """Answers nothing while anybody waits."""
    handler.close_connection = True
    while not handler.served.is_over:
        time.sleep(0.02)


def redirected(handler: Any) -> None:
    handler.drip(302, b" " * 2**16, Location=handler.path)


ENDLESS: dict[str, Callable[[Any], object]] = {
    "hangs": hanging,
    "drips": lambda handler: handler.drip(pause=0.05),
    "redirects": redirected,
    "has an error without an end": lambda handler: handler.drip(400, b" " * 2**16),
}


@pytest.mark.parametrize("asked", ["info", "tree", "resolve"])
@pytest.mark.parametrize("fault", ENDLESS)
def test_an_answer_of_the_hub_has_an_end(
    fault: str, asked: str, hub: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_SECONDS", "_PART_SECONDS"):
        monkeypatch.setattr(f"statekit.files.hub.{name}", 0.3)
    hub.instead[asked] = ENDLESS[fault]
    start = time.monotonic()
    with pytest.raises(FormatError, match=r"can't be read|doesn't end") as caught:
        first_bytes(checkpoint_place("hf://owner/name/run/a"))
    assert f"{caught.value.place}".startswith("hf://owner/name") and time.monotonic() - start < 5


def test_a_file_that_hangs_is_waited_for_once(hub: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statekit.files.hub._SECONDS", 0.4)
    hub.instead["resolve"] = hanging
    with pytest.raises(FormatError, match="can't be read"):
        statekit.inspect("hf://owner/name/run/a")
    assert len([request for request in hub.requests if "/resolve/" in request]) == 1


@pytest.mark.parametrize("asked", ["info", "tree"])
def test_an_answer_of_the_hub_has_a_size(asked: str, hub: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.instead[asked] = lambda handler: handler.drip(block=b" " * 2**20)
    with pytest.raises(FormatError, match="too large"):
        checkpoint_place("hf://owner/name")
    packed = gzip.compress(b"[" + b" " * 2**26)
    hub.instead[asked] = lambda handler: handler.answer(200, packed, Content_Encoding="gzip")
    with pytest.raises(FormatError, match="can't be read"):
        checkpoint_place("hf://owner/name")
    monkeypatch.setattr("statekit.files.hub._MOST_PAGES", 3)
    again = {"Link": f'<http://127.0.0.1:{hub.port}/api/models/owner/name/tree/x>; rel="next"'}
    hub.instead = {"tree": lambda handler: handler.answer(200, b"[]", **again)}
    with pytest.raises(RefusedError, match="too many files"):
        checkpoint_place("hf://owner/name")


def test_a_page_of_the_hub_has_no_more_values_than_it_needs(hub: Served) -> None:
    body = b"[" + b"[]," * (2**24 // 3 - 10) + b"[]]"
    hub.instead["info"] = lambda handler: handler.answer(200, body)
    with pytest.raises(FormatError, match="too large"):
        checkpoint_place("hf://owner/name")


def test_a_listing_of_the_hub_that_goes_on_elsewhere_takes_no_token_along(
    hub: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    row = b'[{"type": "file", "path": "%s", "size": 8, "oid": "1"}]'
    sent: list[str | None] = []

    def page(handler: Any) -> None:
        sent.append(handler.headers["Authorization"])
        further = f'<http://localhost:{hub.port}/tree/x>; rel="next"'
        handler.answer(200, row % f"{len(sent)}".encode(), **({} if len(sent) > 1 else {"Link": further}))

    hub.instead["tree"] = page
    assert [entry.name for entry in listing(checkpoint_place("hf://owner/name"))] == ["1", "2"]
    assert sent == [f"Bearer {SECRET}", None]


def test_half_a_character_in_a_name_of_the_hub_is_an_error_of_ours(hub: Served) -> None:
    row = b'[{"type": "file", "path": "\\ud800", "size": 8, "oid": "1"}]'
    hub.instead["tree"] = lambda handler: handler.answer(200, row)
    (entry,) = listing(checkpoint_place("hf://owner/name"))
    with pytest.raises(FormatError, match="can't be read"):
        first_bytes(entry)


def test_a_listing_of_the_hub_goes_on_and_waits_for_a_busy_one(
    hub: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statekit.files.hub._PAUSES", (0.01,))
    page = f"http://127.0.0.1:{hub.port}/api/models/owner/name/tree/x"
    row = {"type": "file", "path": "a", "size": 8, "oid": "1"}

    def tree(handler: Any) -> None:
        asked = [request for request in hub.requests if "/tree/" in request]
        if len(asked) == 1:
            handler.answer(503)
        elif len(asked) == 2:
            handler.answer(307, Location=page)
        elif len(asked) == 3:
            rows = json.dumps([row]).encode()
            handler.answer(200, rows, Link=f'<{page}>; rel="next"')
        else:
            handler.answer(200, json.dumps([{**row, "path": "b"}]).encode())

    hub.instead["tree"] = tree
    assert [entry.name for entry in listing(checkpoint_place("hf://owner/name"))] == ["a", "b"]


@pytest.mark.parametrize("asked", ["info", "tree"])
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 300_000,
        b"null",
        b"1",
        b"[1]",
        b"[[]]",
        b"",
        b"\xff\xfe",
        b"[" + b"9" * 5000 + b"]",
        b'[{"type": "file"}]',
        b'[{"type": "file", "path": 1, "size": 1, "oid": "a"}]',
        b'[{"type": "directory", "path": null, "oid": "a"}]',
        b'[{"type": "file", "path": "a", "size": 1e400, "oid": "a"}]',
        b'[{"type": "file", "path": "a", "size": 1, "oid": 2}]',
    ],
)
def test_an_odd_answer_of_the_hub_is_an_error_of_ours(body: bytes, asked: str, hub: Served) -> None:
    hub.instead[asked] = lambda handler: handler.answer(200, body, Content_Type="application/json")
    with pytest.raises(FormatError):
        checkpoint_place("hf://owner/name/run")


@pytest.mark.parametrize("link", ["http://[", "file:///etc/passwd", "x\u00e9://"])
def test_a_next_page_that_is_no_address_is_an_error_of_ours(link: str, hub: Served) -> None:
    hub.instead["tree"] = lambda handler: handler.answer(200, b"[]", Link=f'<{link}>; rel="next"')
    with pytest.raises(FormatError, match="can't be read"):
        checkpoint_place("hf://owner/name/run")


@pytest.mark.parametrize("commit", [None, "main", "../main"])
def test_a_revision_that_is_no_commit_is_not_read(commit: str | None, hub: Served) -> None:
    hub.commit = commit
    with pytest.raises(FormatError, match="no commit"):
        checkpoint_place("hf://owner/name/run")


@pytest.mark.parametrize(
    "address",
    ["https://user:swordfish@host/run?token=swordfish", "S3://key:swordfish@b/run", "ftp://a/b#swordfish"],
)
def test_no_error_shows_a_password_of_an_address(address: str) -> None:
    for place in (checkpoint_place, target_place):
        with pytest.raises(UsageError) as caught:
            place(address)
        assert "swordfish" not in f"{caught.value!r} {caught.value}"


VERBS = (
    "inspect {}",
    "inspect {} --stats --json",
    "check {}",
    "doctor {}",
    "diff {} {}",
    "cold-start {} --updates 2",
    "resume {} --framework jax",
    "convert {} out --to dcp --assume-defaults --dry-run",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of AdamW as torch writes it, and what it becomes as a file of Keras and in Orbax' database."""
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("verbs") / "run"
    folder.mkdir()
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    torch.save(states, folder / "run.pt")
    for name, to in (("run.weights.h5", "keras-h5"), ("orbax", "orbax")):
        statekit.convert(folder / "run.pt", folder / name, to=to, assume_defaults=True)
    return folder


@pytest.mark.parametrize("name", ["run.pt", "run.weights.h5", "orbax"])
def test_each_verb_says_of_a_store_what_it_says_of_a_disk(
    name: str, run: Path, store: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    store.files.update(contents(run))
    for verb in VERBS:
        texts = []
        for place in (f"{run}", "s3://bucket/run"):
            code = main(verb.replace("{}", f"{place}/{name}").split())
            captured = capsys.readouterr()
            texts.append((code, re.sub(r"\s+", " ", captured.out.replace(place, "RUN"))))
        assert texts[0] == texts[1] and texts[0][0] == 0 and len(texts[0][1]) > 20, verb


@pytest.mark.parametrize("name", ["run.pt", "run.weights.h5", "orbax"])
def test_loaders_and_attest_read_a_store(name: str, run: Path, store: Served) -> None:
    torch = pytest.importorskip("torch")
    jax = pytest.importorskip("jax")
    import statekit.jax
    import statekit.torch

    store.files.update(contents(run))
    place, model = f"s3://bucket/run/{name}", torch.nn.Linear(4, 3)
    statekit.torch.load_params(place, model)
    optimizer = statekit.torch.load_optimizer(place, model.named_parameters())
    assert statekit.torch.attest(optimizer, model, place).passed
    like = {key: jax.numpy.zeros(value.shape) for key, value in model.state_dict().items()}
    params = statekit.jax.load_params(place, like)
    assert all(np.array_equal(params[key], value.numpy()) for key, value in model.state_dict().items())
    _, state = statekit.jax.load_optimizer(place, params)
    assert statekit.jax.attest(params, state, place).passed


def test_a_recording_is_read_from_this_machine_which_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "s3://bucket/run"]) == 2
    assert "path of this machine" in capsys.readouterr().err
