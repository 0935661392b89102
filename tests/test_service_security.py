"""Nobody gets in without the token, under another name, or from another site; and what is refused changes nothing."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import FileResponse, Response
from starlette.testclient import TestClient
from starlette.types import Scope

from statekit.errors import FormatError, StateError, StatekitError, UsageError
from statekit.service.database import FILE, OWNER, Database, Ownership
from statekit.service.tasks.child import Zygote
from statekit.service.web import security
from statekit.service.web.app import create_app
from statekit.service.web.connections import UVICORN, Lobby, PunctualProtocol, uvicorn_settings
from statekit.service.web.keys import SESSION_SECONDS, SIGNED_OUT_FILE, TOKEN_FILE, Keys, read_token
from statekit.service.web.security import Hosts, refusal, remote_hosts

TOKEN = "t" * 43
BEARER = {"Authorization": f"Bearer {TOKEN}"}
HOST = "localhost:8642"
ORIGIN = f"http://{HOST}"
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")


class Site:
    """The application with one more route, which changes something."""

    def __init__(self, folder: Path) -> None:
        self.keys = Keys(TOKEN)
        self.app = create_app(self.keys, Hosts())
        self.changes = 0
        self.file = folder / "file"
        self.file.write_bytes(bytes(1000))
        self._routes(self.app)
        self.client = TestClient(self.app, base_url=ORIGIN, raise_server_exceptions=False)

    def _routes(self, app: FastAPI) -> None:
        @app.api_route("/changed", methods=[m for m in METHODS if m not in security.HARMLESS])
        async def change(request: Request) -> Response:
            await request.body()
            self.changes += 1
            return Response()

        @app.get("/file")
        def file() -> Response:
            return FileResponse(self.file)

        @app.get("/fails")
        def fails() -> Response:
            raise RuntimeError("the password of the database is swordfish")

        @app.get("/faulty")
        def faulty() -> Response:
            raise StateError("It is wrong.", place="a\x1b", expected=1, found=2, remedy="mend it")

    @property
    def cookie(self) -> dict[str, str]:
        return {"Cookie": f"{self.keys.cookie}={self.keys.new_session()}"}


@pytest.fixture(autouse=True)
def log_in_lines() -> Iterator[None]:
    """Logs as the service does; drawing a traceback for a terminal takes seconds."""
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    yield
    structlog.reset_defaults()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


HOSTS = {
    "localhost": True,
    "LocalHost:1": True,
    "127.0.0.1:8642": True,
    "[::1]:8642": True,
    "127.0.0.1.evil.example": False,
    "localhost.evil.example:8642": False,
    "evil.example": False,
    "localhost:80@evil.example": False,
    "evil.example:80#localhost": False,
    "192.168.0.7": False,
    "[::ffff:127.0.0.1]": False,
    "localhost:port": False,
    "": False,
}
SENDERS: dict[str, tuple[dict[str, str], bool]] = {
    "same": ({"Sec-Fetch-Site": "same-origin"}, True),
    "same and said": ({"Sec-Fetch-Site": "same-origin", "Origin": ORIGIN}, True),
    "a form of ours": ({"Sec-Fetch-Site": "same-origin", "Origin": "null"}, True),
    "our origin": ({"Origin": ORIGIN}, True),
    "nothing said": ({}, False),
    "null": ({"Origin": "null"}, False),
    "another port": ({"Origin": "http://localhost:8643"}, False),
    "https": ({"Origin": f"https://{HOST}"}, False),
    "ours within": ({"Origin": f"{ORIGIN}.evil.example"}, False),
    "cross": ({"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"}, False),
    "cross, ours said": ({"Sec-Fetch-Site": "cross-site", "Origin": ORIGIN}, False),
    "same site": ({"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:8643"}, False),
    "none": ({"Sec-Fetch-Site": "none"}, False),
    "same, another said": ({"Sec-Fetch-Site": "same-origin", "Origin": "https://evil.example"}, False),
}


def test_every_host_with_every_method_from_every_sender() -> None:
    keys = Keys(TOKEN)
    cookie = f"{keys.cookie}={keys.new_session()}"
    for host, named in HOSTS.items():
        for method in METHODS:
            for sender, (headers, ours) in SENDERS.items():
                said = {name: value.replace(HOST, host) for name, value in headers.items()}
                problem = refusal(scope_of(method, {"Host": host, "Cookie": cookie, **said}), keys, Hosts())
                let_in = named and (method in security.HARMLESS or ours)
                expected = None if let_in else 403 if named else 400
                assert (problem and problem.status) == expected, (host, method, sender)


@pytest.mark.parametrize("check", ["_wrong_host", "_wrong_origin"])
def test_a_check_that_is_missing_is_noticed(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, check, lambda *_: None)
    with pytest.raises(AssertionError, match="assert"):
        test_every_host_with_every_method_from_every_sender()


def test_a_missing_token_check_is_noticed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "_unknown", lambda *_: None)
    with pytest.raises(AssertionError):
        test_without_the_token_there_is_nothing({}, site)


def scope_of(method: str, headers: dict[str, str]) -> Scope:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {
        "type": "http", "method": method, "scheme": "http", "path": "/changed", "query_string": b"", "headers": raw,
    }  # fmt: skip


@pytest.mark.parametrize("sender", sorted(SENDERS))
def test_nothing_changes_but_by_our_own_pages(sender: str, site: Site) -> None:
    headers, ours = SENDERS[sender]
    for method in METHODS:
        before = site.changes
        answer = site.client.request(method, "/changed", headers={**site.cookie, **headers})
        if method in security.HARMLESS:
            assert (answer.status_code, site.changes) == (405, before)
        else:
            assert (answer.status_code, site.changes) == ((200, before + 1) if ours else (403, before))


def test_a_method_that_nobody_knows_is_checked_like_those_that_change(site: Site) -> None:
    for method in ("PROPFIND", "TRACE"):
        answer = site.client.request(method, "/changed", headers=site.cookie)
        assert answer.status_code == 403


def test_two_hosts_are_none(site: Site) -> None:
    answer = site.client.get("/healthz", headers=[("Host", HOST), ("Host", "evil.example")])
    assert answer.status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": "Bearer \xe4\xff"},
        {"Cookie": f"statekit={TOKEN}"},
    ],
    ids=str,
)
def test_without_the_token_there_is_nothing(headers: dict[str, str], site: Site) -> None:
    sent = [(b"Origin", ORIGIN.encode()), *((n.encode(), v.encode("latin-1")) for n, v in headers.items())]
    for method in METHODS:
        for path in ("/changed", "/metrics", "/api/v1/openapi.json", "/nowhere", "/"):
            answer = site.client.request(method, path, headers=sent)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")
    assert site.changes == 0


def test_a_wrong_token_is_not_made_good_by_a_cookie(site: Site) -> None:
    assert (
        site.client.get("/metrics", headers={**site.cookie, "Authorization": "Bearer x"}).status_code == 401
    )


def test_a_cookie_is_worth_nothing_when_it_is_old_altered_or_of_another_token(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = site.keys.cookie
    value = site.keys.new_session()
    ends, _, signature = value.partition(".")

    def status(text: str) -> int:
        return site.client.get("/metrics", headers={"Cookie": f"{name}={text}"}).status_code

    assert status(value) == 200
    for wrong in (
        "",
        ".",
        ends,
        f"{ends}.",
        f"{int(ends, 16) + 1:x}.{signature}",
        f"{ends}.{signature[:-1]}",
        "zz.zz",
    ):
        assert status(wrong) == 401
    assert status(Keys("u" * 43).new_session()) == 401
    now = time.time()
    monkeypatch.setattr("statekit.service.web.keys.time.time", lambda: now + SESSION_SECONDS + 1)
    assert status(value) == 401


def test_signing_out_ends_the_session_for_good_and_no_other(site: Site, tmp_path: Path) -> None:
    keys = Keys(TOKEN, tmp_path)
    app = create_app(keys, Hosts())

    def client() -> TestClient:
        return TestClient(app, base_url=ORIGIN)

    mine, other = (f"{keys.cookie}={keys.new_session()}" for _ in range(2))
    assert client().get("/metrics", headers={"Cookie": mine}).status_code == 200
    assert client().post("/sign-out", headers={"Cookie": mine, "Origin": ORIGIN}).status_code == 200
    assert client().get("/metrics", headers={"Cookie": mine}).status_code == 401
    assert client().get("/metrics", headers={"Cookie": other}).status_code == 200
    later = Keys(TOKEN, tmp_path)  # the service was started again
    assert not later.is_session(mine.partition("=")[2]) and later.is_session(other.partition("=")[2])
    listed = tmp_path / SIGNED_OUT_FILE
    assert stat.S_IMODE(listed.stat().st_mode) == 0o600
    listed.write_text(f"0 {'0' * 64}\n{listed.read_text()}")
    assert not Keys(TOKEN, tmp_path).is_session(mine.partition("=")[2])
    assert len(listed.read_text().splitlines()) == 1  # what has ended by itself isn't kept


def test_the_link_signs_in_once(site: Site) -> None:
    code = site.keys.new_code()
    wrong = site.client.get("/sign-in", params={"code": code[:-1]})
    assert wrong.status_code == 401
    assert "set-cookie" not in wrong.headers
    right = site.client.get("/sign-in", params={"code": code})
    assert right.status_code == 200
    cookie = right.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert TOKEN not in cookie
    assert site.client.get("/metrics").status_code == 200
    site.client.cookies.clear()
    again = site.client.get("/sign-in", params={"code": code})
    assert again.status_code == 401
    assert "set-cookie" not in again.headers


def test_the_token_signs_in_by_the_form_and_a_wrong_one_does_not(site: Site) -> None:
    sent = {"Origin": ORIGIN}
    assert site.client.post("/sign-in", data={"token": "x"}, headers=sent).status_code == 401
    assert site.client.post("/sign-in", headers=sent).status_code == 401
    assert site.client.post("/sign-in", data={"token": TOKEN}).status_code == 403
    assert site.client.get("/sign-in", params={"token": TOKEN}).headers.get("set-cookie") is None
    assert site.client.get("/metrics").status_code == 401
    assert site.client.post("/sign-in", data={"token": TOKEN}, headers=sent).status_code == 200
    assert site.client.get("/metrics").status_code == 200
    assert site.client.post("/sign-out", headers=sent).status_code == 200
    assert site.client.get("/metrics").status_code == 401


def test_a_person_is_shown_where_to_sign_in_and_a_program_is_told(site: Site) -> None:
    page = site.client.get("/", headers={"Accept": "text/html"})
    assert (page.status_code, page.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert 'action="/sign-in"' in page.text
    told_so = site.client.get("/").json()
    assert told_so["type"] == "urn:statekit:problem:unknown"
    assert "Bearer" in told_so["expected"]


def test_every_answer_says_what_a_browser_may_do_with_it(site: Site) -> None:
    answers = [
        site.client.get("/sign-in"),
        site.client.get("/nowhere"),
        site.client.get("/nowhere", headers=BEARER),
        site.client.get("/fails", headers=BEARER),
        site.client.get("/healthz", headers={"Host": "evil.example"}),
        site.client.get("/metrics", headers=BEARER),
        site.client.post("/changed", headers=BEARER),
    ]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_our_own_failure_is_a_number_in_the_log_and_says_no_more(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = site.client.get("/fails", headers=BEARER)
    assert answer.status_code == 500
    assert "swordfish" not in answer.text and "RuntimeError" not in answer.text
    incident = answer.json()["place"].removeprefix("incident ")
    logged = capsys.readouterr().out
    assert incident in logged and "swordfish" in logged


def test_the_log_has_no_secrets(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    code = site.keys.new_code()
    site.client.get("/sign-in", params={"code": code})
    site.client.get("/metrics", headers=BEARER)
    logged = capsys.readouterr().out
    assert "/sign-in" in logged
    assert code not in logged and TOKEN not in logged and site.client.cookies[site.keys.cookie] not in logged


def test_an_error_of_the_library_is_a_problem_with_its_four_parts(site: Site) -> None:
    answer = site.client.get("/faulty", headers=BEARER)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json() == {
        "type": "urn:statekit:problem:state", "title": "Unprocessable Entity", "status": 422, "detail": "It is wrong.",
        "place": "a\\x1b", "expected": "1", "found": "2", "remedy": "mend it",
    }  # fmt: skip


def test_what_is_too_large_is_refused_before_it_is_read(site: Site) -> None:
    client = site.client
    assert client.get("/x" * 2000, headers=BEARER).status_code == 414
    assert client.get("/healthz", params={"q": "x" * 9000}).status_code == 414
    assert client.get("/healthz", headers={"X-Long": "x" * 40_000}).status_code == 431
    assert client.get("/healthz", headers={f"X-{i}": "x" for i in range(200)}).status_code == 431
    assert client.post("/changed", headers=BEARER, content=bytes(2_000_000)).status_code == 413
    assert (
        client.post("/changed", headers=BEARER, content=(bytes(100_000) for _ in range(20))).status_code
        == 413
    )
    assert client.post("/changed", headers={**BEARER, "Content-Length": "-1"}).status_code == 400
    assert client.get("/a%00b", headers=BEARER).status_code == 400
    assert client.get("/static/a%00b").status_code == 400
    assert site.changes == 0


def test_a_thousand_ranges_are_no_range(site: Site) -> None:
    def asked(ranges: str) -> int:
        return site.client.get("/file", headers={**BEARER, "Range": ranges}).status_code

    assert asked("bytes=" + ",".join(f"{i}-{i}" for i in range(1000))) == 200
    assert asked("bytes=0-1,3-4") == 200
    assert asked("bytes=" + "0" * 5000 + "-1") == 200
    assert asked("bytes=0-9") == 206
    assert asked("bytes=-5") == 206


def test_figures_name_routes_and_not_what_was_asked_for(site: Site) -> None:
    site.client.get("/secret-name", headers=BEARER)
    site.client.get("/file", headers=BEARER)
    text = site.client.get("/metrics", headers=BEARER).text
    assert 'statekit_requests_total{method="GET",route="/file",status="200"} 1.0' in text
    assert 'route="none",status="404"' in text
    assert "secret-name" not in text


def test_the_token_is_made_once_and_is_its_users_alone(tmp_path: Path) -> None:
    token = read_token(tmp_path)
    path = tmp_path / TOKEN_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(token) >= 43
    assert read_token(tmp_path) == token
    path.chmod(0o644)
    with pytest.raises(FormatError, match="Others"):
        read_token(tmp_path)
    path.chmod(0o600)
    path.write_text("x")
    with pytest.raises(FormatError, match="no token"):
        read_token(tmp_path)
    path.unlink()
    assert read_token(tmp_path) != token


def test_a_data_folder_is_its_users_alone_or_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    sqlite3.connect(folder / FILE).close()
    (folder / FILE).touch()
    (folder / FILE).chmod(0o644)
    with Ownership(folder):
        database = Database(folder, migrate=True)
        with database.writing():
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
        copy = tmp_path / "copy.sqlite"
        database.backup(copy)
        database.close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {*modes.values(), stat.S_IMODE(copy.stat().st_mode)} == {0o600} and len(modes) > 1
    folder.chmod(0o755)
    (folder / "notes").touch()
    with pytest.raises(UsageError, match="chmod 700"):
        Ownership(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_over_a_network_it_goes_by_its_names_and_addresses_alone() -> None:
    hosts = remote_hosts(["Lab.example"])
    assert hosts.allow("lab.example:1") and hosts.allow(socket.gethostname()) and hosts.allow("10.1.2.3")
    assert hosts.allow("[2001:db8::1]:8642")
    assert not hosts.allow("evil.example") and not hosts.allow("10.1.2.3.evil.example")


class Impatient(PunctualProtocol):
    """As the service has it, with less patience."""

    head_seconds = 0.3


@pytest.fixture
def port(site: Site) -> Iterator[int]:
    """The application under uvicorn, as it is served."""
    with answering(site, {**UVICORN, "http": Impatient}) as number:
        yield number


@contextmanager
def answering(site: Site, settings: Mapping[str, Any]) -> Iterator[int]:
    """Has uvicorn answer for the application at a port meanwhile."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    server = uvicorn.Server(uvicorn.Config(site.app, log_config=None, **settings))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def _asked(connection: socket.socket, request: str) -> bytes:
    """Returns the answer of /healthz to a request, whose connection stays."""
    connection.sendall(request.encode())
    answer = b""
    while not answer.endswith(b"ok\n"):
        piece = connection.recv(65536)
        assert piece, answer
        answer += piece
    return answer


def _all_of(connection: socket.socket) -> bytes:
    """Returns what comes until the other side closes; the timeout of the connection is the test's."""
    pieces = []
    while piece := connection.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def test_who_never_finishes_asking_is_closed_and_keeps_nobody_out(port: int) -> None:
    slow = [_connected(port) for _ in range(50)]
    for i, connection in enumerate(slow):
        connection.sendall(b"" if i % 2 else b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
    with _connected(port) as quick:
        quick.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert _all_of(quick).startswith(b"HTTP/1.1 200 OK\r\n")
    for connection in slow:
        assert _all_of(connection) == b""
        connection.close()


IDLE = 1100


SIGN_IN = (
    "POST /sign-in HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\nContent-Length: 1000\r\n\r\nt"
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "said", ["", "GET /sign-in HTTP/1.1\r\nHost: localhost\r\n", SIGN_IN], ids=["", "head", "body"]
)
def test_a_thousand_idle_connections_keep_nobody_out(said: str, site: Site) -> None:
    """The issue's attack: whoever signed in before stays, and whoever comes now is answered."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < 4 * IDLE:
        pytest.skip("this system allows too few open files")
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        port = stack.enter_context(answering(site, uvicorn_settings(site.keys)))
        mine = stack.enter_context(_connected(port))
        request = f"GET /healthz HTTP/1.1\r\nHost: localhost\r\nCookie: {site.cookie['Cookie']}\r\n\r\n"
        assert _asked(mine, request).startswith(b"HTTP/1.1 200 OK")
        for _ in range(IDLE):
            stack.enter_context(_connected(port)).sendall(said.encode())
        assert _asked(mine, request).startswith(b"HTTP/1.1 200 OK")
        with _connected(port) as quick:
            quick.sendall(b"GET /sign-in HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert _all_of(quick).startswith(b"HTTP/1.1 200 OK\r\n")


def test_one_address_has_a_part_of_what_strangers_have() -> None:
    class Connection:
        is_idle = True

        def __init__(self) -> None:
            self.transport, self.is_closed = self, False

        def abort(self) -> None:
            self.is_closed = True

    lobby, connections = Lobby(most=4, most_of_address=2), [Connection() for _ in range(8)]
    connections[0].is_idle = False
    for connection, address in zip(connections, "aaabccdd", strict=True):
        lobby.enter(cast(Any, connection), address)
    closed = [i for i, connection in enumerate(connections) if connection.is_closed]
    assert closed == [1, 2, 3, 4]  # the second of its address, then the oldest of all that are idle


def test_a_newcomer_is_let_in_though_all_others_are_being_answered() -> None:
    class Busy:
        is_idle = False

        def __init__(self) -> None:
            self.transport, self.is_closed = self, False

        def abort(self) -> None:
            self.is_closed = True

    for lobby in (Lobby(most=9, most_of_address=3), Lobby(most=3, most_of_address=9)):
        connections = [Busy() for _ in range(5)]
        connections[-1].is_idle = True  # it has asked for nothing yet
        for connection in connections:
            lobby.enter(cast(Any, connection), "a")
        assert [connection.is_closed for connection in connections] == [True, True, False, False, False]


@pytest.mark.parametrize("pace", [0.05, 20.0])
def test_a_strangers_body_has_a_short_deadline_however_it_comes(
    pace: float, site: Site, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "STRANGER_BODY_SECONDS", 0.3)
    with _connected(port) as connection:
        connection.sendall(SIGN_IN.encode())
        until = time.monotonic() + 5
        connection.settimeout(min(pace, 5))
        answer = b""
        while not answer and time.monotonic() < until:
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                connection.sendall(b"t")
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_first_byte_has_its_deadline(site: Site) -> None:
    class Hasty(PunctualProtocol):
        first_byte_seconds = 0.2

    with answering(site, {**UVICORN, "http": Hasty}) as port, _connected(port) as connection:
        begun = time.monotonic()
        assert _all_of(connection) == b"" and time.monotonic() - begun < 5


def test_a_second_request_of_a_connection_has_its_deadline_too(port: int) -> None:
    with _connected(port) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /healthz HT")
        answered = _all_of(connection)
    assert answered.count(b"HTTP/1.1 200 OK") == 1


def test_a_body_that_never_comes_is_given_up(port: int, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "BODY_SECONDS", 0.2)
    head = f"POST /changed HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 9\r\n\r\nabc"
    with _connected(port) as connection:
        connection.sendall(head.encode())
        assert _all_of(connection).startswith(b"HTTP/1.1 408 ")
    assert site.changes == 0


def test_bytes_that_are_no_request_are_a_clients_fault(port: int) -> None:
    for sent in (
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ):
        with _connected(port) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert _all_of(connection).startswith((b"HTTP/1.1 4", b"")), sent[:40]


@pytest.mark.parametrize("name", [TOKEN_FILE, OWNER])
@pytest.mark.parametrize("kind", ["folder", "fifo", "deep"])
def test_what_else_lies_in_the_data_folder_is_an_error_with_its_place(
    name: str, kind: str, tmp_path: Path
) -> None:
    """Seen red: RecursionError, "Is a directory: 6", "Illegal seek", and a start that hung."""
    file = tmp_path / name
    if kind == "folder":
        file.mkdir()
    elif kind == "fifo":
        os.mkfifo(file, 0o600)
    else:
        file.write_text("[" * 4096)
        file.chmod(0o600)
    if (name, kind) == (OWNER, "deep"):  # what a file says of no owner hinders nobody
        Ownership(tmp_path).close()
        return
    with pytest.raises(StatekitError) as caught:
        read_token(tmp_path) if name == TOKEN_FILE else Ownership(tmp_path)
    assert f"{tmp_path}" in f"{caught.value.place}"


def test_tasks_end_under_a_supervisor_that_ignores_its_children(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Seen red: a traceback in the log for each task, ChildProcessError."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        zygote = Zygote()
        child = zygote.fork()
    finally:
        signal.signal(signal.SIGCHLD, before)
    child.close()
    zygote.close()
    assert "ChildProcessError" not in capfd.readouterr().err
