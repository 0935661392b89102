"""New files that are complete and synced when they are closed, or fail saying which and why."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from statekit.errors import CommitError, StatekitError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


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
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Makes a file and the folders above it, opens it for writing, and syncs it when the context is left.

    Raises:
        CommitError: Making, writing, syncing or closing it failed; also if it exists.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        output = _Output(path, "wb", opener=lambda name, _: os.open(name, _NEW, 0o666))
    try:
        yield cast(BinaryIO, output)
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
