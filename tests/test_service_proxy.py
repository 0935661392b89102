"""The service behind a proxy: over TLS, below a path, and what isn't believed."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from serving import BEARER, TOKEN, Served
from starlette.testclient import TestClient

from statekit.errors import UsageError
from statekit.service.web.proxies import public_address, user_header

PUBLIC = "https://lab.example/statekit"
LINK = re.compile(r'(?:href|src|action|hx-get|hx-post|data-events)="(/[^"]*)"')
NGINX = """
daemon off; pid {folder}/pid; error_log stderr;
events {{}}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder};
  fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  server {{
    listen 127.0.0.1:{port} ssl; ssl_certificate {folder}/crt; ssl_certificate_key {folder}/key;
    location /statekit/ {{ proxy_pass {to}; proxy_set_header Host $host; }}
  }}
}}
"""


USERS = user_header("X-Forwarded-User", ["10.0.0.1", "::1"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    service = Served(tmp_path_factory.mktemp("proxied"), public_address(PUBLIC), USERS)
    yield service
    service.close()


def client(served: Served) -> TestClient:
    return TestClient(served.app, base_url="https://lab.example", follow_redirects=False)


@pytest.mark.parametrize("path", ["", "/statekit"])
def test_below_a_path_every_address_of_every_answer_is_below_it(path: str, served: Served) -> None:
    asking = client(served)
    pages = ("/", "/checkpoints/1", "/jobs", "/lineage/1", "/diff", "/checkpoints/999", "/sign-in")
    links = set()
    for page in pages:
        answer = asking.get(f"{path}{page}", headers={**BEARER, "Accept": "text/html"})
        assert int(answer.headers["content-length"]) == len(answer.content)
        links |= {*LINK.findall(answer.text)}
    assert len(links) > 20 and {link for link in links if not link.startswith("/statekit/")} == set()
    for link in sorted(links):
        if "/static/" in link:
            assert asking.get(link).status_code == 200, link
    job = {"kind": "check", "subjects": [1]}
    made = asking.post(f"{path}/api/v1/jobs", json=job, headers=BEARER)
    assert made.headers["location"].startswith("/statekit/api/v1/jobs/")
    assert asking.get(made.headers["location"], headers=BEARER).status_code == 200
    described = asking.get(f"{path}/api/v1/openapi.json", headers=BEARER).json()
    assert described["servers"] == [{"url": "/statekit"}]


@pytest.mark.parametrize(
    ("address", "names", "by"),
    [
        ("10.0.0.1", ["ada"], "ada"),
        ("::1", ["ada"], "ada"),
        ("10.0.0.2", ["ada"], "api"),
        ("10.0.0.1", ["ada", "eve"], "api"),
        ("10.0.0.1", [], "api"),
        ("10.0.0.1", ["a\x7f" * 99], ("a\\x7f" * 99)[:100]),
    ],
)
def test_jobs_bear_the_name_that_a_proxy_of_ours_sends_and_no_other(
    address: str, names: list[str], by: str, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    asking = TestClient(served.app, base_url="https://lab.example", client=(address, 1))
    headers = [*BEARER.items(), *(("x-forwarded-user", name) for name in names)]
    made = asking.post("/api/v1/jobs", json={"kind": "check", "subjects": [1]}, headers=headers).json()
    assert made["requested_by"] == by
    noted = asking.put("/api/v1/checkpoints/1/note", json={"note": "keep"}, headers=headers).json()
    assert noted["note_by"] == ("" if by == "api" else by)
    assert ("ignored a header" in capsys.readouterr().out) == (bool(names) and by == "api")


@pytest.mark.parametrize(
    ("name", "proxies"),
    [("X-User", []), ("", ["10.0.0.1"]), ("a b", ["10.0.0.1"]), ("X-User", ["lab.example"])],
)
def test_a_header_without_the_address_of_a_proxy_is_refused(name: str, proxies: list[str]) -> None:
    with pytest.raises(UsageError, match=r"user-header|proxy"):
        user_header(name, proxies)


def test_forms_are_taken_from_the_public_origin_and_from_no_other(served: Served) -> None:
    form, statuses = {"token": TOKEN}, {}
    for origin in (
        "https://lab.example",
        "http://lab.example",
        "https://lab.example:444",
        "https://evil.example",
    ):
        asking = TestClient(served.app, base_url="http://lab.example")  # the proxy speaks plain HTTP to us
        headers = {"Origin": origin, "X-Forwarded-Proto": "https", "X-Forwarded-Host": "evil.example"}
        answer = asking.post("/statekit/sign-in", data=form, headers=headers)
        statuses[origin] = answer.status_code
        if origin == "https://lab.example":
            assert {"Secure", "Path=/statekit"} <= {*answer.headers["set-cookie"].split("; ")}
    assert statuses == {
        "https://lab.example": 200,
        "http://lab.example": 200,  # asked without the proxy
        "https://lab.example:444": 403,
        "https://evil.example": 403,
    }


@pytest.mark.parametrize(
    "url",
    [
        "lab.example",
        "ftp://lab.example",
        "https://",
        "https://a@b",
        "https://a/b?c",
        "https://a/<b>",
        "https://a:x",
    ],
)
def test_what_is_no_address_of_a_site_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--public-url"):
        public_address(url)


@pytest.mark.skipif(not (shutil.which("nginx") and shutil.which("openssl")), reason="needs nginx and openssl")
@pytest.mark.parametrize("strips", [False, True])
def test_people_sign_in_and_work_through_nginx_with_tls(strips: bool, served: Served, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-days",
        "1",
    ]
    line += ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "crt")]
    subprocess.run(line, check=True, capture_output=True)
    with served.listening() as to:
        (tmp_path / "conf").write_text(NGINX.format(folder=tmp_path, port=port, to=to + "/" * strips))
        with subprocess.Popen(["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "conf")]) as nginx:
            try:
                _sign_in_and_tag(port, served)
            finally:
                nginx.terminate()


def _sign_in_and_tag(port: int, served: Served) -> None:
    """Does what a person does, under the name that the proxy has for browsers."""
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.05)
    base, said = f"https://127.0.0.1:{port}", {"Host": "lab.example", "Origin": "https://lab.example"}
    with httpx.Client(base_url=base, verify=False, headers=said) as browser:
        assert browser.get("/statekit/", headers={"Accept": "text/html"}).status_code == 401
        entered = browser.post("/statekit/sign-in", data={"token": TOKEN})
        assert entered.status_code == 200 and "url=/statekit/" in entered.text
        cookie = {"Cookie": entered.headers["set-cookie"].partition(";")[0]}
        page = browser.get("/statekit/checkpoints/1", headers=cookie)
        assert page.status_code == 200 and "/statekit/static/" in page.text
        tagged = browser.post("/statekit/checkpoints/1/tags", data={"add": f"by-{port}"}, headers=cookie)
        assert tagged.status_code == 303 and tagged.headers["location"].endswith("/statekit/checkpoints/1")
        assert f"by-{port}" in served.service.catalogue.checkpoint(1).tags
        assert browser.post("/statekit/sign-out", headers=cookie).status_code == 200
        assert browser.get("/statekit/", headers=cookie).status_code == 401
