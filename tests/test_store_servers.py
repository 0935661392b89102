"""Servers that others wrote: a conversion into moto (S3) and azurite (Azure), and back, is that of a disk."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from pathlib import Path

import pytest
from store_serving import SECRET

import statekit
from statekit.errors import StatekitError, TargetExistsError
from statekit.files.tree import WORK

ROOT = Path(__file__).parents[1]
T5X = ROOT / "tests" / "golden" / "t5x" / "bf16_params" / "checkpoint" / "checkpoint_4"
MOTO = ROOT / ".moto"
AZURITE = ROOT / ".azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
"""Where `make test` installs them."""
ACCOUNT = "devstoreaccount1"
PUBLIC_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""azurite's account and its key, which its documentation prints."""
CONTAINERS = {"statekit": "run", "torch": "run.pt", "dcp": "run", "t5x": "run", "tf-bundle": "run"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    """Runs a server until the block ends; enters it when the server answers."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(600):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            yield
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    pytest.importorskip("obstore")
    if not MOTO.is_dir():
        pytest.skip("moto isn't installed: make test")
    port = free_port()
    start = (
        f"import sys; sys.path.insert(0, {f'{MOTO}'!r}); from moto.server import main; main(['-p', '{port}'])"
    )
    with running([sys.executable, "-c", start], port):
        address = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
        yield address


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("obstore")
    node = shutil.which("node")
    if node is None or not AZURITE.is_file():
        pytest.skip("azurite isn't installed: make test, where npm is")
    port, folder = free_port(), tmp_path_factory.mktemp("azurite")
    options = ["--blobPort", f"{port}", "--location", f"{folder}", "--silent", "--skipApiVersionCheck"]
    with running([node, f"{AZURITE}", *options, "--disableTelemetry"], port):
        make_container(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"


def make_container(address: str) -> None:
    """Makes the container `bucket`. Source: learn.microsoft.com, "Authorize with Shared Key"."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    canonical = "".join(f"{name}:{value}\n" for name, value in headers.items())
    resource = f"/{ACCOUNT}/{ACCOUNT}/bucket\nrestype:container"  # an emulator's paths begin with the account
    signed = "PUT" + "\n" * 12 + canonical + resource
    digest = hmac.new(base64.b64decode(PUBLIC_KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"{address}/{ACCOUNT}/bucket?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()


def check_there_and_back(bucket: str, to: str, tmp_path: Path) -> None:
    """Converts to a disk and into a store, and both of these to a disk: the values are the same."""
    near, far = tmp_path / CONTAINERS[to], f"{bucket}/{to}/{CONTAINERS[to]}"
    values = []
    for number, target in enumerate((f"{near}", far)):
        statekit.convert(T5X, target, to=to)
        statekit.convert(target, tmp_path / f"back{number}", to="statekit")
        with statekit.open(tmp_path / f"back{number}") as opened:
            values.append({name: tensor.read().tobytes() for name, tensor in opened.tensors.items()})
    assert values[0] == values[1] and values[0]
    with pytest.raises(TargetExistsError):
        statekit.convert(T5X, far, to=to)
    with pytest.raises(StatekitError) as caught:
        statekit.open(f"{bucket}/{WORK}{to}")
    assert SECRET not in f"{caught.value!r} {caught.value}" and PUBLIC_KEY not in f"{caught.value}"


@pytest.mark.parametrize("to", CONTAINERS)
def test_moto_gives_what_a_disk_gives(
    moto: str, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"ACCESS_KEY_ID": SECRET, "SECRET_ACCESS_KEY": SECRET, "REGION": "us-east-1", "ENDPOINT_URL": moto}
    for name, value in keys.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    check_there_and_back("s3://bucket", to, tmp_path)


@pytest.mark.parametrize("to", CONTAINERS)
def test_azurite_gives_what_a_disk_gives(
    azurite: str, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = {"NAME": ACCOUNT, "KEY": PUBLIC_KEY}
    for name, value in account.items():
        monkeypatch.setenv(f"AZURE_STORAGE_ACCOUNT_{name}", value)
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", azurite)
    check_there_and_back("az://bucket", to, tmp_path)
