"""Files and names that last: complete and synced when they are closed, renamed without losing any.

Linux can rename without replacing, and swap two names, in one step (`renameat2`); elsewhere the nearest safe sequence
stands in, as each function says.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from statekit.errors import CommitError, StatekitError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AT_FDCWD = -100
_NOREPLACE = 1
_EXCHANGE = 2
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


class _Output(io.FileIO):
    """An unbuffered file that writes all it is given, or says as a CommitError why it can't."""

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        done = 0
        with writing(self.name):
            while done < len(view):
                done += os.write(self.fileno(), view[done:])
        return done


@contextmanager
def new_file(path: Path, synced: bool = True) -> Iterator[BinaryIO]:
    """Makes a file and the folders above it, opens it for writing, and syncs it when the context is left.

    Args:
        path: The file.
        synced: False where it is written to once more, and synced then.

    Raises:
        CommitError: Making, writing, syncing or closing it failed; also if it exists.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        output = _Output(path, "wb", opener=lambda name, _: os.open(name, _NEW, 0o666))
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
    through = getattr(fcntl, "F_FULLFSYNC", None)
    if through is not None:
        try:
            fcntl.fcntl(descriptor, through)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOTTY, errno.EINVAL):
                raise
    os.fsync(descriptor)


@contextmanager
def writing(place: object) -> Iterator[None]:
    """Turns an OSError into a CommitError that says where, why, and what to do about it.

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
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _SPACE),
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
    """Renames a folder to the name of an empty one, which is gone with that, in one step.

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
