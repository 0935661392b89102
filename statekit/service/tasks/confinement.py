"""What the kernel lets a task reach, whatever a checkpoint has made of it: Landlock and a filter, where Linux has them.

A task that is confined reads the roots that it works on and what programs need of the system, writes where it was
asked to write and into its own temporary folder, and reaches no network and no process outside; docs/tasks.md has what
the kernel leaves. It changes no permissions, owners, times or attributes of files, and isn't root. Folders to write to
are opened before, without following links: who exchanges one for a link later gains nothing. Nothing takes it back.
"""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import statekit
from statekit.service.roots import opened_beneath
from statekit.service.tasks.seccomp import refuse_calls

_CREATE, _ADD, _RESTRICT = 444, 445, 446
"""Numbers of the system calls on every architecture. Source: Linux, include/uapi/asm-generic/unistd.h."""
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_CHAR, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 6, 1 << 7, 1 << 8
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
"""Source: Linux, include/uapi/linux/landlock.h, as the numbers below are."""
_ALL_FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""What a version knows of files: what it doesn't know, it can't forbid."""
_ALL_NETWORK, _NETWORK_SINCE = 0b11, 4
_ALL_SCOPES, _SCOPES_SINCE = 0b11, 6
_BENEATH = 1
_READ = _READ_FILE | _READ_DIR
_WRITE = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _REFER | _TRUNCATE
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/opt", "/proc", "/sys")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


class Reach(NamedTuple):
    """What a task may reach beside the system.

    Attributes:
        reads: Roots that it may read.
        writes: Folders that it may write to: each a root, and the place below it.
        hidden: A folder that it mustn't read, wherever it lies: the service's data.
    """

    reads: tuple[str, ...]
    writes: tuple[tuple[str, str], ...] = ()
    hidden: str = ""


class _Rules(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


@cache
def version() -> int:
    """Returns the version of Landlock that the kernel has; 0 of none."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return 0
    number = int(_libc().syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))
    return max(number, 0)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def confine(reach: Reach, scratch: Path) -> bool:
    """Takes from this process, for good, whatever isn't within reach; what the kernel can't take is left.

    Returns:
        Whether the kernel bounds its files: it has Landlock.

    Raises:
        StatekitError: A folder that it shall write to isn't there, or is behind a link.
        OSError: The kernel refuses.
    """
    writes = [opened_beneath(Path(root), os.fsencode(place)) for root, place in reach.writes]
    ruleset = _ruleset(reach, writes, scratch) if version() else None
    try:
        folder = writes[0] if writes else None
        give_up(identity(folder), scratch, writes=bool(writes) and ruleset is not None)
        if ruleset is not None:
            _called(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        for opened in (*writes, *([] if ruleset is None else [ruleset])):
            os.close(opened)
    refuse_calls()
    return ruleset is not None


def _ruleset(reach: Reach, writes: Sequence[int], scratch: Path) -> int:
    """Returns the open rules of what may be read and written: `writes` are the folders to write to, open."""
    abi = version()
    files = max(bits for since, bits in _ALL_FILES.items() if since <= abi)
    rules = _Rules(
        files, _ALL_NETWORK if abi >= _NETWORK_SINCE else 0, _ALL_SCOPES if abi >= _SCOPES_SINCE else 0
    )
    size = 8 if abi < _NETWORK_SINCE else 16 if abi < _SCOPES_SINCE else 24
    ruleset = _called(_CREATE, ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        for path, allowed in _readable(reach):
            with_links = os.path.realpath(path)
            if os.path.exists(with_links):
                _allow(ruleset, os.open(with_links, os.O_PATH | os.O_CLOEXEC), allowed & files)
        for folder in writes:
            _allow(ruleset, os.dup(folder), (_READ | _WRITE) & files)
        _allow(ruleset, os.open(scratch, os.O_PATH | os.O_CLOEXEC), (_READ | _WRITE) & files)
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def _readable(reach: Reach) -> Iterator[tuple[str, int]]:
    """Yields what may be read, with how: of folders above the hidden one their names, and all but it."""
    for path in (*_SYSTEM, *_libraries()):
        yield from _but_hidden(path, reach.hidden, _READ | _EXECUTE)
    for path in _DEVICES:
        yield path, _READ_FILE | _WRITE_FILE
    for path in reach.reads:
        yield from _but_hidden(path, reach.hidden, _READ)


@cache
def _libraries() -> tuple[str, ...]:
    """Returns the folders that modules come from, those of editable installations too; none lies in another."""
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    package = Path(statekit.__file__).parent
    folders = {
        *(str(path) for path in package.iterdir() if path.is_symlink()),  # in a checkout
        *sysconfig.get_paths().values(),
        sys.prefix,
        sys.base_prefix,
        *filter(None, sys.path),
        *(os.path.dirname(file) for file in loaded if file),
    }
    outer: list[str] = []
    for path in sorted(map(os.path.realpath, folders)):
        if not any(Path(path).is_relative_to(folder) for folder in outer):
            outer.append(path)
    return tuple(outer)


def _but_hidden(path: str, hidden: str, allowed: int) -> Iterable[tuple[str, int]]:
    path = os.path.realpath(path)
    if not hidden or os.path.commonpath([path, hidden]) != path:
        yield path, allowed
    elif path != hidden:
        yield path, _READ_DIR
        with os.scandir(path) as entries:
            for entry in entries:
                if not entry.is_symlink():
                    yield from _but_hidden(entry.path, hidden, allowed)


def _allow(ruleset: int, node: int, allowed: int) -> None:
    """Adds to what may be done beneath a folder, or with a file, that is open; closes it."""
    try:
        if not stat.S_ISDIR(os.fstat(node).st_mode):
            allowed &= _OF_A_FILE
        rule = _Beneath(allowed, node)
        _called(_ADD, ctypes.c_int(ruleset), ctypes.c_int(_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(node)


def _called(number: int, *arguments: object) -> int:
    result = _libc().syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return int(result)


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
