"""Renames that never lose a file, and the syncs that make them last.

Linux can rename without replacing, and swap two names, in one step (`renameat2`); elsewhere the nearest safe sequence
stands in, as each function says.
"""

from __future__ import annotations

import ctypes
import errno
import os
import uuid
from pathlib import Path

from statekit.files.durable import sync

_AT_FDCWD = -100
_NOREPLACE = 1
_EXCHANGE = 2
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


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
