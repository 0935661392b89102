"""Processes and time as the machine has them: who is alive, since when, and what a child's end follows.

A number of a process is used again; with the moment of its start it is one process. Leases count on a clock that
nobody sets, and which means nothing after the machine was started anew: hence the name of this start beside it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from functools import cache
from pathlib import Path

_PR_SET_PDEATHSIG = 1
"""Source: Linux, include/uapi/linux/prctl.h."""


@cache
def boot_id() -> str:
    """Returns what names this start of the machine; "" where the system doesn't say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def now() -> int:
    """Returns nanoseconds since the machine was started, sleep included; no clock that is set changes it."""
    clock = time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC
    return time.clock_gettime_ns(clock)


def started_at(pid: int | None = None) -> str | None:
    """Returns when a process was started, as its system counts; None if there is no such process, or nobody says."""
    try:
        text = Path(f"/proc/{pid or os.getpid()}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in brackets may hold anything; field 22 is the 20th behind it. Source: proc(5).
    return text.rpartition(")")[2].split()[19]


def is_alive(pid: object, started: object = None) -> bool:
    """Tells whether a process is alive, and the one that was started then, where the system says when."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    begun = started_at(pid)
    return begun is None or started is None or begun == started


def holder_name() -> str:
    """Returns the name of this process, which no other has had: start of the machine, number, start of the process."""
    return f"{boot_id()}/{os.getpid()}/{started_at() or ''}"


def holder_is_dead(name: str | None) -> bool:
    """Tells whether the process of that name is proven to be dead."""
    if not name:
        return True
    boot, pid, started = name.split("/")
    return boot != boot_id() or not is_alive(int(pid), started or None)


def end_with(parent: int) -> None:
    """Lets this process be killed when its parent ends; at once, if it has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
