"""The table of docs/remote.md: every container, into and out of every store, is that of a disk, or is refused.

S3 is moto and Azure is azurite, which others wrote; Google's store and the Hub are servers of our own.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from pathlib import Path

import pytest
from store_serving import KINDS, SECRET, Served, serving

import statekit
from statekit.errors import StatekitError, TargetExistsError, UsageError
from statekit.files.manifest import FILE
from statekit.files.source import checkpoint_place
from statekit.files.store_home import bucket_of
from statekit.files.tree import WORK, StoredPlace
from statekit.tensors.digest import tensor_digests

ROOT = Path(__file__).parents[1]
MOTO = ROOT / ".moto"
AZURITE = ROOT / ".azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
"""Where `make test` installs them."""
ACCOUNT = "devstoreaccount1"
PUBLIC_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""azurite's account and its key, which its documentation prints."""


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


@pytest.fixture
def bucket(store: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Has a store answer, and gives the address of what is in its bucket."""
    settings: dict[str, str] = {}
    if store == "s3":
        settings = {
            "AWS_ACCESS_KEY_ID": SECRET,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": request.getfixturevalue("moto"),
        }
    elif store == "az":
        settings = {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": PUBLIC_KEY,
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": request.getfixturevalue("azurite"),
        }
    else:
        pytest.importorskip("obstore")
        address, _ = request.getfixturevalue("google")
        settings = {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": SECRET,
        }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield f"{store}://bucket"


@pytest.fixture(scope="module")
def google() -> Iterator[tuple[str, Served]]:
    with serving("s3", {}) as served:
        yield served


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Converts into a container on a disk, once."""
    folder = tmp_path_factory.mktemp("near")

    @functools.cache
    def converted(to: str) -> Path:
        source, name = KINDS[to]
        target = folder / to / name
        target.parent.mkdir()
        statekit.convert(source, target, to=to, require="lossy")
        return target

    return converted


def values(place: str | Path) -> dict[str, str]:
    """Returns the digest of each tensor of a checkpoint."""
    with statekit.open(place) as opened:
        return dict(tensor_digests(opened.checkpoint.tensors, lambda name, size: None))


def check_as_source(far: str, near: Path, folder: Path) -> None:
    """Reads a checkpoint out of a store and off a disk: the values, and what they are converted to, are the same."""
    assert values(far) == values(near) != {}
    for number, source in enumerate((f"{near}", far)):
        statekit.convert(source, folder / f"{number}", to="statekit", require="lossy")
    manifests = [json.loads((folder / f"{number}" / FILE).read_text()) for number in range(2)]
    assert manifests[0]["tensors"] == manifests[1]["tensors"] and manifests[0]["plan"] == manifests[1]["plan"]


def stored(bucket: str, near: Path, name: str) -> None:
    """Puts files of a disk into a store, as other programs do."""
    import obstore

    place = checkpoint_place(f"{bucket}/{name}")
    assert isinstance(place, StoredPlace)
    objects, _ = bucket_of(place)
    for file in (near, *near.rglob("*")):
        if file.is_file():
            obstore.put(
                objects.store, f"{name}/{file.relative_to(near.parent).as_posix()}", file.read_bytes()
            )


@pytest.mark.sampled
@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("store", ["s3", "gs", "az"])
def test_a_container_in_a_store_is_that_of_a_disk(
    bucket: str, store: str, to: str, near: Callable[[str], Path], tmp_path: Path
) -> None:
    source, name = KINDS[to]
    far = f"{bucket}/{to}/{name}"
    if (store, to) == ("az", "orbax"):
        with pytest.raises(UsageError, match="choose another container"):
            statekit.convert(source, far, to=to, require="lossy")
        stored(bucket, near(to), to)
        with pytest.raises(StatekitError, match="copy it first") as caught:
            statekit.open(far)
        return
    statekit.convert(source, far, to=to, require="lossy")
    check_as_source(far, near(to), tmp_path)
    with pytest.raises(TargetExistsError):
        statekit.convert(source, far, to=to, require="lossy")
    with pytest.raises(StatekitError) as caught:
        statekit.open(f"{bucket}/{WORK}{to}")
    assert SECRET not in f"{caught.value!r} {caught.value}" and PUBLIC_KEY not in f"{caught.value}"


@pytest.mark.parametrize("to", KINDS)
def test_a_container_on_the_hub_is_that_of_a_disk(
    to: str, near: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    top = near(to).parent
    files = {f"{path.relative_to(top)}": path.read_bytes() for path in top.rglob("*") if path.is_file()}
    far = f"hf://owner/name@main/{near(to).name}"
    with serving("hub", files) as (address, _):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # whatever the machine says
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        if to == "orbax":
            with pytest.raises(StatekitError, match="copy it first"):
                statekit.open(far)
        else:
            check_as_source(far, near(to), tmp_path)
        with pytest.raises(UsageError, match="hf upload"):
            statekit.convert(near(to), "hf://owner/name/other", to="statekit")
