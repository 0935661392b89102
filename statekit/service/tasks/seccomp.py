"""Which calls of the system a task may make: a filter of Linux, for what Landlock knows nothing of.

Landlock bounds which files are opened. It knows neither sockets but TCP's, nor permissions, times and attributes of
files, nor what reaches into other processes. The filter refuses these calls with EPERM. Nothing takes it back, and
programs that the task starts have it too.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys
from collections.abc import Mapping, Sequence
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
_STREAM, _KIND = 1, 0xF
"""A connected pair that reaches nobody else, and the bits that say so. Source: Linux, include/linux/net.h."""


class Calls(NamedTuple):
    """The numbers of one architecture.

    Attributes:
        audit: What the kernel calls the architecture.
        pair: `socketpair`, which event loops need; allowed for streams.
        send: `sendto`, allowed without an address.
        refused: What is refused whatever its arguments are.
    """

    audit: int
    pair: int
    send: int
    refused: Mapping[str, int]


_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "pidfd_getfd": 438,
    "fchmodat2": 452, "setxattrat": 463, "removexattrat": 466, "file_setattr": 469,
}  # fmt: skip
CALLS: Mapping[str, Calls] = {
    "x86_64": Calls(0xC000003E, 53, 44, {
        **_EVERYWHERE,
        "socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "accept4": 288,
        "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260,
        "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "setxattr": 188, "lsetxattr": 189,
        "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "open_by_handle_at": 304,
        "unshare": 272, "setns": 308, "mount": 165, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
        "add_key": 248, "request_key": 249, "keyctl": 250,
    }),
    "aarch64": Calls(0xC00000B7, 199, 206, {
        **_EVERYWHERE,
        "socket": 198, "connect": 203, "accept": 202, "bind": 200, "listen": 201, "accept4": 242,
        "fchmod": 52, "fchmodat": 53, "fchown": 55, "fchownat": 54, "utimensat": 88, "setxattr": 5,
        "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "open_by_handle_at": 265,
        "unshare": 97, "setns": 268, "mount": 40, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        "add_key": 217, "request_key": 218, "keyctl": 219,
    }),
}  # fmt: skip
"""Source: Linux, arch/x86/entry/syscalls/syscall_64.tbl; include/uapi/asm-generic/unistd.h."""

_Instruction = tuple[int, int, int, int]
"""Code, how many instructions to pass over where it holds, and where it doesn't, and a constant."""


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
    kind = _ARGUMENTS + 8
    address = _ARGUMENTS + 4 * 8
    pair: list[_Instruction] = [
        (_EQUALS, 0, 5, calls.pair),
        (_LOAD, 0, 0, kind),
        (_AND, 0, 0, _KIND),
        (_EQUALS, 1, 0, _STREAM),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    send: list[_Instruction] = [
        (_EQUALS, 0, 6, calls.send),
        (_LOAD, 0, 0, address),
        (_EQUALS, 0, 3, 0),
        (_LOAD, 0, 0, address + 4),
        (_EQUALS, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    refused = [
        instruction
        for number in calls.refused.values()
        for instruction in ((_EQUALS, 0, 1, number), (_RETURN, 0, 0, _REFUSE))
    ]
    return [*begin, *pair, *send, *refused, (_RETURN, 0, 0, _ALLOW)]
