"""Which calls of the system a task may make: a filter of Linux, for what Landlock knows nothing of.

Landlock bounds which files are opened. It knows neither sockets but TCP's, nor permissions, times and attributes of
files, nor what reaches into other processes: their limits, priorities, processors, and memory and queues that processes
share. The filter refuses these calls with EPERM. It also holds a task's processes in its group and session, which end
as one. Nothing takes it back, and programs that the task starts have it too.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_SET_SECCOMP, _FILTER = 22, 2
"""Source: Linux, include/uapi/linux/prctl.h and seccomp.h."""
_ALLOW, _REFUSE, _LACKS = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
"""What the filter answers. Source: Linux, include/uapi/linux/seccomp.h, SECCOMP_RET_*."""
_LOAD, _EQUALS, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
"""Instructions on words of 32 bits. Source: Linux, include/uapi/linux/bpf_common.h."""
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Where a call's parts lie. Source: Linux, include/uapi/linux/seccomp.h, struct seccomp_data."""
_OTHER_ABI = 0x40000000
"""From here on x86_64 has the calls of x32. Source: Linux, arch/x86/include/uapi/asm/unistd.h."""
_LOW, _HIGH = 0xFFFFFFFF, 1
"""All bits of a word; and the upper half of an argument is the word behind its lower one."""
_SPACES = 0x7E020000
"""What makes a process of its own namespaces. Source: Linux, include/uapi/linux/sched.h, CLONE_NEW*."""
_ATTRIBUTES = tuple(kind << 8 for kind in (0x58, 0x66, 0x76, 0x94, 0x97, 0xF5))
"""Kinds of `ioctl` that change a file's flags, seal it or remove trees, though it is open for reading alone.

Source: Linux, Documentation/userspace-api/ioctl/ioctl-number.rst: XFS and FSSETXATTR, SETFLAGS and ext4, SETVERSION,
Btrfs, Ceph, F2FS.
"""
_SET_LEASE = 1024
"""Source: Linux, include/uapi/linux/fcntl.h, F_SETLEASE."""


class Bound(NamedTuple):
    """What an argument of a call must be, or mustn't.

    Attributes:
        word: Number of a 32-bit half of the arguments; 0 is the lower half of the first argument, 1 its upper half.
        values: What it is compared with.
        mask: The bits that count.
        allows: Whether the call is allowed with these values, or with all others.
    """

    word: int
    values: Sequence[int]
    mask: int = _LOW
    allows: bool = True


_ITSELF = (Bound(0, (0,)),)
"""The process is the caller, by the number 0."""
BOUNDS: Mapping[str, Sequence[Bound]] = {
    "socketpair": (Bound(2, (1,), 0xF),),  # of streams, which reaches nobody else; event loops need it
    "sendto": (Bound(8, (0,)), Bound(8 + _HIGH, (0,))),  # without an address
    "clone": (Bound(0, (0,), _SPACES),),
    "ioctl": (Bound(2, _ATTRIBUTES, 0xFF00, allows=False),),
    "fcntl": (Bound(2, (_SET_LEASE,), allows=False),),
    "setpriority": (Bound(0, (0,)), Bound(2, (0,))),
    "ioprio_set": (Bound(0, (1,)), Bound(2, (0,))),
    **dict.fromkeys(("prlimit64", "sched_setparam", "sched_setscheduler", "sched_setaffinity"), _ITSELF),
    **dict.fromkeys(("sched_setattr", "migrate_pages", "move_pages"), _ITSELF),
}
"""Calls that are allowed with some arguments: each bound must hold. The filter sees no memory, only numbers."""


class Calls(NamedTuple):
    """The numbers of one architecture.

    Attributes:
        audit: What the kernel calls the architecture.
        bounded: The calls of `BOUNDS`.
        refused: What is refused whatever its arguments are.
    """

    audit: int
    bounded: Mapping[str, int]
    refused: Mapping[str, int]


_CLONE3 = 435
"""On every architecture; its flags lie in memory. Where it is unknown, libraries take `clone`."""
_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "pidfd_getfd": 438,
    "process_madvise": 440, "process_mrelease": 448,
    "fchmodat2": 452, "setxattrat": 463, "removexattrat": 466, "file_setattr": 469,
}  # fmt: skip
CALLS: Mapping[str, Calls] = {
    "x86_64": Calls(0xC000003E, {
        "socketpair": 53, "sendto": 44, "clone": 56, "ioctl": 16, "fcntl": 72, "setpriority": 141, "ioprio_set": 251,
        "prlimit64": 302, "sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203,
        "sched_setattr": 314, "migrate_pages": 256, "move_pages": 279,
    }, {
        **_EVERYWHERE,
        "socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "accept4": 288,
        "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260,
        "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "setxattr": 188, "lsetxattr": 189,
        "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "open_by_handle_at": 304, "kcmp": 312,
        "unshare": 272, "setns": 308, "mount": 165, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
        "add_key": 248, "request_key": 249, "keyctl": 250, "setsid": 112, "setpgid": 109,
        "shmget": 29, "shmat": 30, "shmctl": 31, "shmdt": 67, "semget": 64, "semop": 65, "semctl": 66,
        "semtimedop": 220, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "mq_open": 240, "mq_unlink": 241,
        "mq_timedsend": 242, "mq_timedreceive": 243, "mq_notify": 244, "mq_getsetattr": 245,
    }),
    "aarch64": Calls(0xC00000B7, {
        "socketpair": 199, "sendto": 206, "clone": 220, "ioctl": 29, "fcntl": 25, "setpriority": 140, "ioprio_set": 30,
        "prlimit64": 261, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122,
        "sched_setattr": 274, "migrate_pages": 238, "move_pages": 239,
    }, {
        **_EVERYWHERE,
        "socket": 198, "connect": 203, "accept": 202, "bind": 200, "listen": 201, "accept4": 242,
        "fchmod": 52, "fchmodat": 53, "fchown": 55, "fchownat": 54, "utimensat": 88, "setxattr": 5,
        "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "open_by_handle_at": 265, "kcmp": 272,
        "unshare": 97, "setns": 268, "mount": 40, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        "add_key": 217, "request_key": 218, "keyctl": 219, "setsid": 157, "setpgid": 154,
        "shmget": 194, "shmctl": 195, "shmat": 196, "shmdt": 197, "semget": 190, "semctl": 191, "semtimedop": 192,
        "semop": 193, "msgget": 186, "msgctl": 187, "msgrcv": 188, "msgsnd": 189, "mq_open": 180, "mq_unlink": 181,
        "mq_timedsend": 182, "mq_timedreceive": 183, "mq_notify": 184, "mq_getsetattr": 185,
    }),
}  # fmt: skip
"""Source: Linux, arch/x86/entry/syscalls/syscall_64.tbl; include/uapi/asm-generic/unistd.h."""

_Instruction = tuple[int, int, int, int]
"""Code, how many instructions to pass over where it holds, and where it doesn't, and a constant."""
_REFUSAL: _Instruction = (_RETURN, 0, 0, _REFUSE)


class _Program(ctypes.Structure):
    """Source: Linux, include/uapi/linux/filter.h, struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse_calls() -> bool:
    """Refuses this process, for good, the calls of `CALLS`; it must have given up new privileges before.

    Returns:
        False where the system, the machine or the kernel has no such filter.
    """
    calls = CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if calls is None:
        return False
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program(calls))
    kept = ctypes.create_string_buffer(code, len(code))
    filter_ = _Program(len(code) // 8, ctypes.cast(kept, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    return not libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(filter_), 0, 0)


def program(calls: Calls) -> Sequence[_Instruction]:
    """Returns the filter: what isn't refused is allowed, and another architecture's calls are unknown."""
    begin: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUALS, 1, 0, calls.audit),
        (_RETURN, 0, 0, _LACKS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _OTHER_ABI),
        (_RETURN, 0, 0, _LACKS),
    ]
    bounded = [
        instruction
        for name, number in calls.bounded.items()
        for instruction in _only(number, [*_bounded(BOUNDS[name])])
    ]
    refused = [instruction for number in calls.refused.values() for instruction in _only(number, [_REFUSAL])]
    return [*begin, *_only(_CLONE3, [(_RETURN, 0, 0, _LACKS)]), *bounded, *refused, (_RETURN, 0, 0, _ALLOW)]


def _only(number: int, answer: Sequence[_Instruction]) -> Sequence[_Instruction]:
    """Returns what answers one call, and passes over that for every other."""
    return [(_EQUALS, 0, len(answer), number), *answer]


def _bounded(bounds: Sequence[Bound]) -> Iterator[_Instruction]:
    """Yields what allows a call whose arguments are within bounds, and refuses it otherwise."""
    for bound in bounds:
        yield _LOAD, 0, 0, _ARGUMENTS + 4 * bound.word
        yield _AND, 0, 0, bound.mask
        if bound.allows:
            for left in range(len(bound.values), 0, -1):
                yield _EQUALS, left, 0, bound.values[-left]  # over what is left, the refusal among it
            yield _REFUSAL
        else:
            for value in bound.values:
                yield from _only(value, [_REFUSAL])
    yield _RETURN, 0, 0, _ALLOW
