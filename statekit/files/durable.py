"""Files and names that last: complete and synced when they are closed, renamed without losing any.

Until then they lie in a temporary folder beside the target, which is made with a record of its owner, and swept only
when that is provably dead. Nobody else hears of it: what goes wrong in it is said of the place that its files
would have had. Linux can rename without replacing, and swap two names, in one step (`renameat2`); elsewhere the nearest
safe sequence stands in, as each function says.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import json
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from statekit.errors import CommitError, StatekitError, TargetExistsError
from statekit.pipeline import working

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

OWNER_FILE = ".statekit-owner.json"
_NAME = re.compile(r"\.statekit-tmp-[0-9a-f]{32}")
_STEP = re.compile(r"/(\.statekit-tmp-[0-9a-f]*)")
"""A temporary folder's part of a path, which may be cut off in a library's message."""
_ABANDONED_SECONDS = 3600.0
_OWNER_BYTES = 4096
_WRITTEN_BACK = 32 * 2**20
"""Bytes after which the system is asked to begin writing them to the disk."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AT_FDCWD = -100
_NOREPLACE = 1
_EXCHANGE = 2
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


class _Output(io.FileIO):
    """An unbuffered file that writes all it is given, or says as a CommitError why it can't.

    The disk gets it from early on, so that a sync has little left to wait for.
    """

    _pending = 0
    taken: Callable[[int, memoryview], object] | None = None
    """Is given all bytes before they are written, and where."""

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        done = 0
        with writing(self.name):
            if self.taken is not None:
                self.taken(self.tell(), view)
            with working("write"):
                while done < len(view):
                    done += os.write(self.fileno(), view[done:])
            self._pending += done
            if self._pending >= _WRITTEN_BACK:
                _write_back(self.fileno())
                self._pending = 0
        return done


@contextmanager
def new_file(
    path: Path, synced: bool = True, taken: Callable[[int, memoryview], object] | None = None
) -> Iterator[BinaryIO]:
    """Makes a file and the folders above it, opens it for writing, and syncs it when the context is left.

    Args:
        path: The file.
        synced: False where it is written to once more, and synced then.
        taken: Is given all bytes before they are written, and where.

    Raises:
        CommitError: Making, writing, syncing or closing it failed; also if it exists.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        output = _Output(path, "wb", opener=lambda name, _: os.open(name, _NEW, 0o666))
        output.taken = taken
    try:
        yield cast(BinaryIO, output)
        if synced:
            with writing(path):
                sync(output.fileno())
    finally:
        with writing(path):
            output.close()


def sync(descriptor: int) -> None:
    """Makes what was written last, through the disk's own cache.

    Source: fsync(2) of macOS, which leaves data in the disk's cache and names `F_FULLFSYNC` for the rest; not every
    file system there has it.

    Raises:
        OSError: The sync failed.
    """
    with working("sync"):
        _sync(descriptor)


def _sync(descriptor: int) -> None:
    through = getattr(fcntl, "F_FULLFSYNC", None)
    if through is not None:
        try:
            fcntl.fcntl(descriptor, through)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOTTY, errno.EINVAL):
                raise
    os.fsync(descriptor)


def _write_back(descriptor: int) -> None:
    """Has the system begin to write what a file has, without waiting; what fails is said by the sync at the end.

    Source: sync_file_range(2): from byte 0, to the end, SYNC_FILE_RANGE_WRITE.
    """
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(2))


@contextmanager
def writing(place: object) -> Iterator[None]:
    """Turns an OSError into a CommitError with place, reason and remedy.

    Raises:
        CommitError: Whatever the system reported.
    """
    try:
        yield
    except StatekitError:
        raise
    except OSError as error:
        raise CommitError(
            f"Writing failed: {error.strerror or error}.",
            place=place,
            found=errno.errorcode.get(error.errno or 0, type(error).__name__),
            remedy=_REMEDIES.get(error.errno or 0, "check the target's disk; nothing was left at the target"),
        ) from error


_SPACE = "free some space, or choose a target on another disk"
_ACCESS = "choose a target that you may write to"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _SPACE),
    errno.EFBIG: "raise the limit on a file's size (ulimit -f), or choose a target whose file system has such files",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _ACCESS),
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def rename_new(source: Path, target: Path) -> None:
    """Renames a file or folder to a name that must be free.

    Without `renameat2`: a file is linked, which fails if the name is taken; a folder is renamed after a look, which
    at worst takes the place of an empty folder made in between.

    Raises:
        FileExistsError: The name is taken.
        OSError: The rename failed.
    """
    if _renameat2(source, target, _NOREPLACE):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    if source.is_dir():
        source.rename(target)
        return
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        source.rename(target)
    else:
        source.unlink()


def rename_over_empty(source: Path, target: Path) -> None:
    """Renames a folder over an empty one, in one step.

    Raises:
        FileExistsError: Something is in it by now, or stands in its place.
        OSError: The rename failed.
    """
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        raise


def exchange(new: Path, target: Path) -> Path:
    """Puts `new` in the place of `target` and returns where the old copy is now.

    Without `renameat2`: the old copy is first moved to `<target>.statekit-old-<uuid>`, a name that is never swept, so
    that a crash between the two renames loses nothing.

    Raises:
        OSError: A rename failed; `target` is as it was.
    """
    if _renameat2(new, target, _EXCHANGE):
        return new
    old = target.with_name(f"{target.name}.statekit-old-{uuid.uuid4().hex}")
    target.rename(old)
    try:
        rename_new(new, target)
    except OSError:
        old.rename(target)
        raise
    return old


def sync_folder(path: Path) -> None:
    """Makes the names in a folder last; file systems that can't sync folders are tolerated.

    Raises:
        OSError: The sync failed.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(folder)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """Calls renameat2(2); False if this system or file system doesn't have it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(flags)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(target))


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


def replace_file(
    target: Path,
    content: bytes,
    mode: int = 0o666,
    check: Callable[[Path], object] | None = None,
    place: Path | None = None,
) -> None:
    """Writes a small file beside its place, syncs it, and gives it its name in one step, in place of a file there.

    Whether the file that is there may go is the caller's to know; a link, folder, FIFO, socket or device never may.

    Args:
        target: Its place.
        content: Its bytes.
        mode: Permissions that it may have at most.
        check: Given the new file just before it gets its name; raises where it mustn't.
        place: A folder. The file is first written beside it, if that can be done: another program that removes the
            folder meanwhile finds nothing of ours in it.

    Raises:
        TargetExistsError: Something else than a file is there.
        CommitError: It can't be written; what was there still is.
    """
    check_regular(target)
    if place is not None:
        with suppress(CommitError):  # another disk, or a folder where others write
            return _replace(target, place, content, mode, check)
    _replace(target, target, content, mode, check)


def _replace(
    target: Path, place: Path, content: bytes, mode: int, check: Callable[[Path], object] | None
) -> None:
    """Writes a file beside some place, and gives it its name."""
    for folder in {target.parent, place.parent}:
        sweep(folder)
    with beside(place) as temporary, writing(target):
        new = temporary / target.name
        with new_file(new) as output:
            output.write(content)
        set_mode(new, stat.S_IMODE(new.stat().st_mode) & mode)
        if check is not None:
            check(new)
        os.replace(new, target)
        sync_folder(target.parent)


def set_mode(path: Path, mode: int) -> None:
    """Gives a file or folder of ours its permissions; where the process mayn't, others may have fewer, and not more.

    The service's tasks may change no permissions, and make files with few enough of them.

    Raises:
        PermissionError: It lets others do more than it shall, and that can't be changed.
    """
    now = stat.S_IMODE(path.stat().st_mode)
    if now == mode:
        return
    try:
        path.chmod(mode)
    except PermissionError:
        if now & ~mode & 0o077:
            raise


def check_regular(target: Path) -> None:
    """Refuses to put a file in the place of anything but a file.

    Raises:
        TargetExistsError: A link, folder, FIFO, socket or device is there.
    """
    if not os.path.lexists(target):
        return
    mode = target.lstat().st_mode
    if not stat.S_ISREG(mode):
        raise TargetExistsError(
            "Something other than a file has this name.",
            place=target,
            expected="a file, or nothing",
            found=stat.filemode(mode),
            remedy="move it away",
        )


def make_temporary(parent: Path) -> Path:
    """Makes `<parent>/.statekit-tmp-<uuid>/`, open to its owner alone, with a record of who that is.

    The record is synced before anything else is in the folder: what the power takes down is swept, too.

    Raises:
        OSError: The folder can't be made.
    """
    folder = parent / f".statekit-tmp-{uuid.uuid4().hex}"
    record = json.dumps(owner_of(os.getpid())).encode()
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
    """Removes a temporary folder as far as it may, its owner's record last: what a power cut brings back is swept.

    A link in its place leads to what is somebody else's, and stays.
    """
    with suppress(OSError), _opened_folder(folder) as opened:
        for name in os.listdir(opened):
            if stat.S_ISDIR(os.lstat(name, dir_fd=opened).st_mode):
                shutil.rmtree(name, ignore_errors=True, dir_fd=opened)
            elif name != OWNER_FILE:
                os.unlink(name, dir_fd=opened)
        sync(opened)
    shutil.rmtree(folder, ignore_errors=True)  # which follows no link either


@contextmanager
def _opened_folder(folder: Path) -> Iterator[int]:
    """Opens a folder itself, and no link in its place."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield opened
    finally:
        os.close(opened)


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
    if not is_dead(owner):
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
    except (ValueError, RecursionError):
        return {}
    finally:
        os.close(file)
    return record if isinstance(record, dict) else {}


def is_dead(owner: dict[str, Any]) -> bool:
    """Tells whether the owner provably runs no more: same machine, and since rebooted or without that process."""
    pid = owner.get("pid")
    if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        return False
    here = owner_of(pid)
    if owner.keys() != here.keys() or any(owner[key] != here[key] for key in ("host", "machine")):
        return False
    if owner["boot"] != here["boot"]:
        return bool(owner["boot"] and here["boot"])
    if owner["namespace"] != here["namespace"]:
        return False  # another container on this machine: its processes can't be seen from here
    return bool(owner["started"] != here["started"])


def owner_of(pid: int) -> dict[str, Any]:
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
