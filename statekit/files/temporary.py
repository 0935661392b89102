"""Temporary folders beside a target: made with an owner record, swept only when the owner is provably dead.

Nobody else hears of them: what goes wrong in one is said of the place that its files would have had.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from statekit.errors import StatekitError
from statekit.files.durable import sync, sync_folder, writing

OWNER_FILE = ".statekit-owner.json"
_NAME = re.compile(r"\.statekit-tmp-[0-9a-f]{32}")
_STEP = re.compile(r"/(\.statekit-tmp-[0-9a-f]*)")
"""A temporary folder's part of a path, which may be cut off in a library's message."""
_ABANDONED_SECONDS = 3600.0
_OWNER_BYTES = 4096


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Gives a temporary folder beside a target, which is gone at the end.

    An error that names a file in it is said of the target's own folder, as the user knows no other.

    Raises:
        CommitError: The folder can't be made.
    """
    with writing(target):
        folder = make_temporary(target.parent)
    try:
        with _named_as_beside(folder):
            yield folder
    finally:
        try:
            remove_temporary(folder)
        except BaseException:  # a signal meanwhile
            remove_temporary(folder)
            raise


@contextmanager
def _named_as_beside(folder: Path) -> Iterator[None]:
    def shown(text: str) -> str:
        return _STEP.sub(lambda match: "" if folder.name.startswith(match[1]) else match[0], text)

    try:
        yield
    except StatekitError as error:
        error.rename(shown)
        raise


def make_temporary(parent: Path) -> Path:
    """Makes `<parent>/.statekit-tmp-<uuid>/`, open to its owner alone, with a record of who that is.

    The record is synced before anything else is in the folder: what the power takes down is swept, too.

    Raises:
        OSError: The folder can't be made.
    """
    folder = parent / f".statekit-tmp-{uuid.uuid4().hex}"
    record = json.dumps(_owner(os.getpid())).encode()
    try:
        folder.mkdir(mode=0o700)
        file = os.open(folder / OWNER_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, record)
            sync(file)
        finally:
            os.close(file)
        sync_folder(folder)
    except BaseException:  # a signal too
        remove_temporary(folder)
        raise
    return folder


def remove_temporary(folder: Path) -> None:
    """Removes a temporary folder as far as it may, its owner's record last: what a power cut brings back is swept."""
    with suppress(OSError):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != OWNER_FILE:
                entry.unlink()
        sync_folder(folder)
    shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path) -> list[Path]:
    """Removes what killed conversions left in a folder, and returns what it removed.

    A folder goes only if it has a temporary's name, belongs to this user, and its owner was a process of this machine
    that no longer runs; or if it has no owner record that can be read, holds nothing else and is an hour old.
    Everything else stays.
    """
    removed = []
    for folder in sorted(parent.iterdir()) if parent.is_dir() else []:
        if not _NAME.fullmatch(folder.name):
            continue
        try:
            if _swept(folder):
                removed.append(folder)
        except OSError:
            continue  # somebody else sweeps it, or it isn't ours to touch
    return removed


def _swept(folder: Path) -> bool:
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        return False
    owner = _read_owner(folder / OWNER_FILE)
    if not owner:
        if time.time() - facts.st_mtime < _ABANDONED_SECONDS or {*os.listdir(folder)} - {OWNER_FILE}:
            return False
        (folder / OWNER_FILE).unlink(missing_ok=True)
        folder.rmdir()
        return True
    if not _dead(owner):
        return False
    remove_temporary(folder)
    return not folder.exists()


def _read_owner(path: Path) -> dict[str, Any]:
    """Returns an owner record; {} if there is none, or it isn't JSON, as after a power cut."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return {}
    try:
        record = json.loads(os.read(file, _OWNER_BYTES))
    except ValueError:
        return {}
    finally:
        os.close(file)
    return record if isinstance(record, dict) else {}


def _dead(owner: dict[str, Any]) -> bool:
    """Tells whether the owner provably runs no more: same machine, and since rebooted or without that process."""
    pid = owner.get("pid")
    if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        return False
    here = _owner(pid)
    if owner.keys() != here.keys() or any(owner[key] != here[key] for key in ("host", "machine")):
        return False
    if owner["boot"] != here["boot"]:
        return bool(owner["boot"] and here["boot"])
    if owner["namespace"] != here["namespace"]:
        return False  # another container on this machine: its processes can't be seen from here
    return bool(owner["started"] != here["started"])


def _owner(pid: int) -> dict[str, Any]:
    """Describes a process of this machine so that no other process, now or later, has the same description."""
    return {
        "pid": pid,
        "started": _started(pid),
        "boot": _line("/proc/sys/kernel/random/boot_id"),
        "namespace": _link("/proc/self/ns/pid"),
        "host": socket.gethostname(),
        "machine": _line("/etc/machine-id"),
    }


def _started(pid: int) -> str:
    """Returns when a process started (clock ticks since boot), or "" if there is none.

    Source: proc(5), `/proc/[pid]/stat` field 22; the command in field 2 may hold anything up to its last `)`.
    """
    fields = _line(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 20:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
