"""Who a task is, where the service was started as root: nobody, or the owner of the folder that it writes to.

It keeps one right of root's: to read what others mayn't, and if it writes, to write so, too. Landlock bounds both to
the roots and to the folders that it was asked to write to. Without the other rights it can change no permissions of
another user's files, and see into no other process.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import NamedTuple

_KEEP_CAPABILITIES, _NO_NEW_PRIVILEGES = 8, 38
"""Source: Linux, include/uapi/linux/prctl.h."""
_VERSION = 0x20080522
_OVERRIDE, _READ_SEARCH = 1 << 1, 1 << 2
"""Writing and reading what others mayn't; reading it alone. Source: Linux, include/uapi/linux/capability.h."""
_NOBODY = 65534


class Identity(NamedTuple):
    """A user and a group, by their numbers."""

    user: int
    group: int


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("process", ctypes.c_int))


class _Data(ctypes.Structure):
    """The first 32 capabilities and those behind them. Source: capset(2)."""

    _fields_ = tuple(
        (f"{kind}_{part}", ctypes.c_uint32)
        for part in ("low", "high")
        for kind in ("effective", "permitted", "inheritable")
    )


def identity(folder: int | None) -> Identity:
    """Returns who a task shall be that root has started.

    Args:
        folder: The folder that it writes to, open; None of a task that only reads.
    """
    if folder is None:
        return Identity(_NOBODY, _NOBODY)
    facts = os.fstat(folder)
    return Identity(facts.st_uid, facts.st_gid)


def give_up(wanted: Identity, scratch: Path, *, writes: bool = False) -> None:
    """Gives up for good what root may, where this process is root's; then no program that it starts gets it back.

    Where the system lets it be no other user, as in some containers, it stays root without root's rights.

    Args:
        wanted: Whom to be.
        scratch: The task's temporary folder, which it keeps.
        writes: Whether it keeps the right to write where root alone may; for what Landlock is about to bound.

    Raises:
        OSError: The kernel refuses.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0:
        header, data = _Header(_VERSION, 0), _Data()
        _checked(libc.capget(ctypes.byref(header), ctypes.byref(data)))
        rights = _READ_SEARCH | _OVERRIDE if writes else _READ_SEARCH
        kept = data.permitted_low & rights or data.permitted_low & _OVERRIDE
        _checked(libc.prctl(_KEEP_CAPABILITIES, 1, 0, 0, 0))
        if kept and wanted.user:  # without that right it couldn't read what root has started it for
            try:
                os.chown(scratch, *wanted)
                os.setgroups([])
                os.setresgid(wanted.group, wanted.group, wanted.group)
                os.setresuid(wanted.user, wanted.user, wanted.user)
            except OSError:
                os.chown(scratch, 0, 0)
        _checked(libc.capset(ctypes.byref(header), ctypes.byref(_Data(kept, kept))))
    _checked(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))


def _checked(failed: int) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
