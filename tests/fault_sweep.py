"""Kills a conversion, or fails its system calls, at every point in turn; run as a script, prints a summary as JSON.

    python fault_sweep.py kill|EIO|ENOSPC|... SOURCE PARENT [replace] [persistent] [plain]

`persistent` faults fail every call from the point on; `plain` does without renameat2.

Each point is a fork of one process, so that a sweep costs milliseconds a point.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats import register, save, small_state, values
from statekit import rename
from statekit.convert import convert, open_state, plan
from statekit.digest import tensor_digest
from statekit.errors import StatekitError

CALLS = ("open", "write", "fsync", "mkdir", "rmdir", "unlink", "link", "rename")
DONE, REFUSED, CRASHED, UNTOUCHED = 0, 3, 4, 5
OLD_UPDATES = 3


def injected(fault: Callable[[], None], at: int, persistent: bool) -> list[int]:
    """Makes the call number `at` of this process fail, or all from there on; returns a counter of the calls so far."""
    seen = [0]

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[0] += 1
            if seen[0] == at or (persistent and seen[0] > at):
                fault()
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counting(getattr(os, name)))
    setattr(rename, "_renameat2", counting(rename._renameat2))  # noqa: B010
    return seen


def attempt(source: Path, target: Path, options: list[str], fault: Callable[[], None], at: int) -> int:
    """Converts in a forked child with a fault at one call; returns how the child ended, negative for a signal."""
    work = plan(source, target)
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = CRASHED
    try:
        seen = injected(fault, at, "persistent" in options)
        convert(work, replace="replace" in options)
        code = UNTOUCHED if seen[0] < at else DONE
    except StatekitError:
        code = REFUSED
    finally:
        os._exit(code)


def found(target: Path) -> str:
    """Tells what is at the target: `absent`, `old`, `new`, or `torn`."""
    if not os.path.lexists(target):
        return "absent"
    try:
        with open_state(target) as opened:
            stated = (opened.checkpoint.manifest or {})["tensors"]
            whole = all(tensor_digest(t) == stated[n]["blake3"] for n, t in opened.checkpoint.tensors.items())
            updates = opened.state.counts.updates
            fits = values(opened.state.params) == values(small_state(seed=0 if updates == 7 else 1).params)
            return ("old" if updates == OLD_UPDATES else "new") if whole and fits else "torn"
    except StatekitError:
        return "torn"


def sweep(fault: Callable[[], None], source: Path, parent: Path, options: list[str]) -> dict[str, Any]:
    replace = "replace" in options
    outcomes: Counter[str] = Counter()
    bad: list[str] = []
    at, code = 0, DONE
    while code != UNTOUCHED and not bad:
        at += 1
        folder = parent / str(at)
        folder.mkdir()
        target = folder / "target.statekit"
        if replace:
            save(small_state(seed=1, updates=OLD_UPDATES), target)
        code = attempt(source, target, options, fault, at)
        outcomes[f"{code}: {found(target)}"] += 1
        left = sorted(set(os.listdir(folder)) - {target.name})
        if code == CRASHED or found(target) == "torn" or (replace and found(target) == "absent"):
            bad.append(f"point {at}: ended with {code}, target {found(target)}")
        if code in (DONE, UNTOUCHED) and found(target) != "new":
            bad.append(f"point {at}: success without a new target")
        if len(left) > 1 or any(not name.startswith(".statekit-tmp-") for name in left):
            bad.append(f"point {at}: left {left}")
        convert(plan(source, target), replace=True)
        if found(target) != "new" or [
            n for n in os.listdir(folder) if n != target.name and n not in _kept(folder)
        ]:
            bad.append(f"point {at}: the next conversion left {os.listdir(folder)}")
        shutil.rmtree(folder)
    return {"points": at - 1, "outcomes": dict(outcomes), "bad": bad}


def _kept(folder: Path) -> list[str]:
    """Names temporaries that were killed before their owner was recorded: they are kept for an hour."""
    return [
        path.name
        for path in folder.glob(".statekit-tmp-*")
        if not any(p.stat().st_size for p in path.iterdir())
    ]


def main(how: str, source: Path, parent: Path, options: list[str]) -> None:
    def fault() -> None:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        code = getattr(errno, how)
        raise OSError(code, os.strerror(code))

    register(pytest.MonkeyPatch())
    if "plain" in options:
        rename._renameat2 = lambda *_: False
    print(json.dumps(sweep(fault, source, parent, options)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
