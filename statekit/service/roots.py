"""Roots: the folders that the service may read and write, and the way from a name to what lies beneath one.

No link is followed on the way, and nothing goes up. Linux does it in one call (openat2); elsewhere each folder is
opened in the one before it, by its name alone, and a link is refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from statekit.errors import NotFoundError, RefusedError, UsageError, printable

_OPENAT2 = 437
"""Number of the system call on every architecture. Source: Linux, include/uapi/asm-generic/unistd.h."""
_NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 0x02, 0x04, 0x08
"""Source: Linux, include/uapi/linux/openat2.h."""
_NAME_BYTES = 255


def shown(place: bytes) -> str:
    """Returns a path's bytes as text that is fit to be shown."""
    return printable(place.decode("utf-8", "backslashreplace")) or "."


class _OpenHow(ctypes.Structure):
    """Source: Linux, include/uapi/linux/openat2.h."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def path_beneath(root: Path, place: bytes) -> Path:
    """Returns the path of what lies beneath a root, which is there and isn't reached through a link.

    Args:
        root: The root, without links.
        place: Where it lies, relative to the root, as bytes of the system.

    Raises:
        NotFoundError: Nothing is there.
        RefusedError: The way leads out of the root, or over a link.
    """
    if place == b"":
        return root
    os.close(opened_beneath(root, place))
    return Path(os.fsdecode(os.path.join(os.fsencode(root), place)))


def target_beneath(root: Path, relative: str) -> Path:
    """Returns the path where something shall be written beneath a root, in a folder that is there.

    Args:
        root: The root, without links.
        relative: Where, relative to it, folders joined by `/`.

    Raises:
        UsageError: That is no relative path.
        NotFoundError: The folder isn't there.
        RefusedError: The way leads out of the root, or over a link.
    """
    parts = relative.split("/")
    if (
        not relative.isprintable()  # half a character has no bytes to count
        or "\\" in relative
        or any(part in ("", ".", "..") or len(os.fsencode(part)) > _NAME_BYTES for part in parts)
    ):
        raise UsageError(
            "The place doesn't lie beneath a root.",
            place="target",
            expected="names of folders and a file, joined by /",
            found=relative[:200],
        )
    folder = path_beneath(root, os.fsencode("/".join(parts[:-1])))
    if not folder.is_dir():
        raise NotFoundError(
            "The target's parent is not a folder.",
            place=printable(str(folder)),
            expected="a folder",
            remedy="choose a name in a folder that is there",
        )
    target = folder / parts[-1]
    with suppress(FileNotFoundError):
        if stat.S_ISLNK(target.lstat().st_mode):
            raise _over_a_link(target)
    return target


def opened_beneath(root: Path, place: bytes) -> int:
    """Opens what lies beneath a root, without reading it; returns its number among the open files.

    Args:
        root: The root, without links.
        place: Where it lies, relative to the root, as bytes of the system; none is the root itself.

    Raises:
        NotFoundError: Nothing is there.
        RefusedError: The way leads out of the root, or over a link.
    """
    if b"\0" in place:
        raise NotFoundError("No file has such a name.", place=root, found=repr(place[:200]))
    path = Path(os.fsdecode(os.path.join(os.fsencode(root), place)))
    try:
        base = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise NotFoundError("The root isn't there.", place=root, found=error.strerror) from error
    if place == b"":
        return base
    try:
        if _has_openat2():
            return _openat2(base, place)
        return _step_by_step(base, place)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EXDEV):
            raise _over_a_link(path) from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise NotFoundError(
                "It isn't there any more.", place=path, remedy="scan the root again"
            ) from error
        raise NotFoundError("It can't be reached.", place=path, found=error.strerror) from error
    finally:
        os.close(base)


def _over_a_link(path: Path) -> RefusedError:
    return RefusedError(
        "The way leads out of the root, or over a link.",
        place=printable(str(path)),
        expected="a path beneath the root without links",
        remedy="make the folder that the link leads to a root",
    )


@cache
def _has_openat2() -> bool:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return False
    try:
        os.close(_openat2(-100, b"."))  # AT_FDCWD
    except OSError:
        return False
    return True


def _openat2(base: int, place: bytes) -> int:
    how = _OpenHow(os.O_PATH | os.O_CLOEXEC, 0, _BENEATH | _NO_SYMLINKS | _NO_MAGICLINKS)
    libc = ctypes.CDLL(None, use_errno=True)
    number = libc.syscall(
        ctypes.c_long(_OPENAT2),
        ctypes.c_int(base),
        ctypes.c_char_p(place),
        ctypes.byref(how),
        ctypes.c_size_t(ctypes.sizeof(how)),
    )
    if number < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(number)


def _step_by_step(base: int, place: bytes) -> int:
    """Opens each folder in the one before it, refusing links; a file at the end isn't opened, but looked at."""
    parts = place.split(b"/")
    if any(part in (b"", b".", b"..") for part in parts):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    at = os.dup(base)
    for i, part in enumerate(parts):
        try:
            facts = os.stat(part, dir_fd=at, follow_symlinks=False)
            if stat.S_ISLNK(facts.st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if i == len(parts) - 1 and not stat.S_ISDIR(facts.st_mode):
                return at
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        except BaseException:
            os.close(at)
            raise
        os.close(at)
        at = inner
    return at
