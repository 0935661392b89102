"""After a power cut at any system call of a conversion the target is absent or complete, and there once it is done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from power.cuts import cut_all
from power.disk import Call, Contents, read_journal
from reliability_table import Row, note
from samples import target_name, writable

from statekit.conversion import registry
from statekit.conversion.open_state import open_state
from statekit.files.integrity import prove_files
from statekit.tensors.digest import tensor_digest

SYSTEM_PYTHON = "/usr/bin/python3"
POWER = Path(__file__).parent / "power"
SECONDS = 120.0


def missing() -> str:
    """Says why there is no recording file system here; "" if there is one."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse"
    line = [SYSTEM_PYTHON, "-c", "import pyfuse3"]
    if not Path(SYSTEM_PYTHON).exists() or subprocess.run(line, capture_output=True, check=False).returncode:
        return f"{SYSTEM_PYTHON} has no pyfuse3 (Debian: python3-pyfuse3)"
    if shutil.which("fusermount3") is None:
        return "there is no fusermount3 (Debian: fuse3)"
    return ""


@contextmanager
def recording(folder: Path) -> Iterator[Path]:
    """Mounts a file system that records; yields its folder. What it has recorded is in `journal`."""
    mounted = folder / "mounted"
    mounted.mkdir()
    line = [SYSTEM_PYTHON, str(POWER / "recording_fs.py"), str(mounted), str(folder / "journal")]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as job:
        try:
            for _ in range(100):
                if os.path.ismount(mounted) or job.poll() is not None:
                    break
                time.sleep(0.1)
            if not os.path.ismount(mounted):
                job.kill()
                pytest.skip(f"nothing can be mounted here: {job.communicate()[1]}")
            yield mounted
        finally:
            subprocess.run(["fusermount3", "-uz", str(mounted)], check=False)
            try:
                job.wait(10)
            except subprocess.TimeoutExpired:
                job.kill()


def recorded(folder: Path, *options: str) -> list[Call]:
    """Converts in a recording file system, and returns its journal."""
    (folder / "sources").mkdir()
    with recording(folder) as mounted:
        line = [
            sys.executable,
            str(POWER / "conversions.py"),
            str(mounted),
            str(folder / "sources"),
            *options,
        ]
        environment = {**os.environ, "PYTHONPATH": str(POWER.parent)}
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
    return read_journal(folder / "journal")


def is_folder(name: str) -> bool:
    return registry.container_card(name).target_kind == "folder"


def proven(name: str, last: Contents, folder: Path) -> int:
    """Puts what a disk held into a folder, opens it, and compares every file and tensor with the manifest in it."""
    target = folder / target_name(name)
    folder.mkdir()
    for relative, data in last.items():
        path = target / relative if relative else target
        path.mkdir() if data is None else path.write_bytes(data)
    row = writable()[name]
    with open_state(target, container=name, layout=row.layout, hints=row.hints) as opened:
        checkpoint = opened.checkpoint
        assert checkpoint.manifest is not None and not prove_files(checkpoint, opened.budget)
        stated = checkpoint.manifest["tensors"]
        assert all(tensor_digest(one) == stated[key]["blake3"] for key, one in checkpoint.tensors.items())
        return len(checkpoint.tensors)


OPTIONS = {
    "into a new target": [],
    "replacing a target": ["replace"],
    "into an empty folder": ["empty"],
    "into a new target, without renameat2": ["plain"],
}
SLOW = [pytest.mark.slow]


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=SLOW * ("without" in w or "empty" in w)) for w in OPTIONS]
)
def test_a_power_cut_leaves_all_or_nothing(what: str, tmp_path: Path) -> None:
    cuts = cut_all(recorded(tmp_path, *OPTIONS[what]))
    assert cuts.keys() == {name for name in writable() if is_folder(name) or what != "into an empty folder"}
    faults = {name: one.faults for name, one in cuts.items() if one.faults}
    calls, disks = sum(one.calls for one in cuts.values()), sum(one.disks for one in cuts.values())
    silent = sum(map(len, faults.values()))
    said = f"{calls} calls of the writers of {len(cuts)} formats"
    note("power", Row(what, disks, harmless=disks - silent, silent=silent, said=said))
    assert not {name: wrong[:5] for name, wrong in faults.items()}
    for name, one in cuts.items():
        assert proven(name, one.last, tmp_path / name)


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("options", [["large"], ["replace"]], ids=["new", "replaced"])
def test_every_sync_that_is_left_out_is_seen(options: list[str], tmp_path: Path) -> None:
    journal = recorded(tmp_path, "statekit", "torch", *options)
    for name in ("statekit", "torch"):
        begin, end = (
            next(i for i, c in enumerate(journal) if c[2:3] == [f"{w} {name}"]) for w in ("begin", "end")
        )
        syncs = [
            i for i in range(begin, end) if journal[i][0] == "sync" and not remade(journal[i][1], journal)
        ]
        assert len(syncs) >= 5
        for left_out in syncs:
            calls = [call for i, call in enumerate(journal[: end + 1]) if i != left_out]
            assert cut_all(calls)[name].faults, f"{name}: {journal[left_out]} isn't needed"


def remade(number: int, journal: list[Call]) -> bool:
    """Tells whether another file takes a file's place before the end, as the manifest's when all is proven."""
    places = [tuple(call[1:3]) for call in journal if call[0] == "file"]
    mine = [tuple(call[1:3]) for call in journal if call[0] == "file" and call[3] == number]
    return any(places.count(place) > 1 for place in mine)
