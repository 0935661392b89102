"""Kills a conversion, or fails its system calls, at every point in turn; run as a script, prints a summary as JSON.

    python fault_sweep.py kill|EIO|ENOSPC|... SOURCE PARENT NAME [OPTION]...

The target is called NAME, which says its container. Options: `replace` needs the `statekit` one; with `empty` an empty
folder has the name already.
`persistent` faults fail every call from the point on; `plain` does without renameat2; `sample=N` takes every fifth
point, from N on; `large` takes every file for a large one, whose digest is filled in once it has been read again;
`careless` writes the final folder file by file, to show that the sweep notices.

Each point is a fork of one process, so that a sweep costs milliseconds a point.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats import plain_state, register, save, values
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.converters.containers.orbax.container import CONTAINER as ORBAX
from statekit.converters.containers.t5x import CONTAINER as T5X
from statekit.converters.containers.torch_file import CONTAINER as TORCH
from statekit.converters.layouts.own.statekit_torch import LAYOUT as TORCH_LAYOUT
from statekit.converters.layouts.t5x.layout import LAYOUT as T5X_LAYOUT
from statekit.errors import StatekitError
from statekit.files import durable, homes, integrity, stage
from statekit.tensors.digest import tensor_digest

CALLS = ("open", "write", "fsync", "mkdir", "rmdir", "unlink", "link", "rename")
DONE, REFUSED, CRASHED, UNTOUCHED = 0, 3, 4, 5
OLD_UPDATES = 3
MOST_POINTS = 1000


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
    setattr(durable, "_renameat2", counting(durable._renameat2))  # noqa: B010  # mypy refuses =, it is no variable
    return seen


def attempt(source: Path, target: Path, options: list[str], fault: Callable[[], None], at: int) -> int:
    """Converts in a forked child with a fault at one call; returns how the child ended, negative for a signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = CRASHED
    try:
        work = plan(source, target)
        seen = injected(fault, at, "persistent" in options)
        convert(work, replace="replace" in options)
        code = UNTOUCHED if seen[0] < at else DONE
    except StatekitError:
        code = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def outcome(target: Path) -> str:
    """Tells what is at the target: `absent`, `old`, `new`, or `torn`."""
    if not os.path.lexists(target):
        return "absent"
    try:
        with open_state(target) as opened:
            stated = (opened.checkpoint.manifest or {})["tensors"]
            whole = all(tensor_digest(t) == stated[n]["blake3"] for n, t in opened.checkpoint.tensors.items())
            updates = opened.state.counts.updates
            fits = values(opened.state.params) == values(plain_state(seed=0 if updates == 7 else 1).params)
            return ("old" if updates == OLD_UPDATES else "new") if whole and fits else "torn"
    except StatekitError:
        return "torn"


def point(
    source: Path, target: Path, options: list[str], fault: Callable[[], None], at: int
) -> dict[str, Any]:
    """Converts with a fault at one call, then again without; returns how it ended and what was wrong."""
    folder, replace, bad = target.parent, "replace" in options, []
    if replace:
        save(plain_state(seed=1, updates=OLD_UPDATES), target)
    if "empty" in options:
        target.mkdir()
    code = attempt(source, target, options, fault, at)
    untouched = "empty" in options and target.is_dir() and not os.listdir(target)
    state, left = "empty" if untouched else outcome(target), sorted(set(os.listdir(folder)) - {target.name})
    if code not in (DONE, REFUSED, UNTOUCHED, -signal.SIGKILL):
        bad.append(f"ended with {code}")
    if state == "torn":
        shutil.rmtree(target)
    if state == "torn" or (state == "absent" and (replace or "empty" in options)):
        bad.append(f"target {state}")
    if code in (DONE, UNTOUCHED) and state != "new":
        bad.append("success without a new target")
    if len(left) > 1 or any(not name.startswith(".statekit-tmp-") for name in left):
        bad.append(f"left {left}")
    convert(plan(source, target), replace=True)
    kept = [name for name in os.listdir(folder) if name != target.name and name not in _kept(folder)]
    if outcome(target) != "new" or kept:
        bad.append(f"the next conversion left {kept}, target {outcome(target)}")
    return {"code": code, "state": state, "bad": [f"point {at}: {what}" for what in bad]}


def apart(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Runs work in a forked child, so that this process never starts a thread, which a fork would lose."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(write, json.dumps(work()).encode())
        except BaseException as error:
            os.write(write, json.dumps({"code": CRASHED, "state": "", "bad": [repr(error)]}).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        result: dict[str, Any] = json.loads(answer.read())
    os.waitpid(child, 0)
    return result


def sweep(
    fault: Callable[[], None], source: Path, parent: Path, name: str, options: list[str]
) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    first = next((int(option.removeprefix("sample=")) for option in options if "=" in option), None)
    points = range(first or 1, MOST_POINTS, 5 if first else 1)
    for at in points:
        folder = parent / str(at)
        folder.mkdir()
        # mypy can't infer a lambda whose defaults bind what the loop changes.
        result = apart(lambda at=at, folder=folder: point(source, folder / name, options, fault, at))  # type: ignore[misc]  # bound by defaults
        outcomes[f"{result['code']}: {result['state']}"] += 1
        if result["bad"] or result["code"] == UNTOUCHED:
            return {"points": points.index(at), "outcomes": dict(outcomes), "bad": result["bad"]}
        shutil.rmtree(folder)
    return {"points": MOST_POINTS, "outcomes": dict(outcomes), "bad": ["the sweep doesn't end"]}


def carelessly(source: Path, target: Path) -> None:
    """Gives a folder its name the way a plain copy does."""
    if not target.exists():
        os.mkdir(target)
    for path in source.iterdir():
        file = os.open(target / path.name, os.O_WRONLY | os.O_CREAT)
        os.write(file, path.read_bytes())
        os.close(file)


def _kept(folder: Path) -> list[str]:
    """Names temporaries that were killed before their owner was recorded: they are kept for an hour."""
    return [
        path.name
        for path in folder.glob(".statekit-tmp-*")
        if not any(p.stat().st_size for p in path.iterdir())
    ]


def main(how: str, source: Path, parent: Path, name: str, options: list[str]) -> None:
    def fault() -> None:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        code = getattr(errno, how)
        raise OSError(code, os.strerror(code))

    register(pytest.MonkeyPatch(), T5X, ORBAX, TORCH, T5X_LAYOUT, TORCH_LAYOUT)
    convert(plan(source, parent / "warm.statekit"))  # imports what every child would; starts no thread
    if "plain" in options:
        durable._renameat2 = lambda *_: False
    if "large" in options:
        for module in (homes, stage, integrity):
            setattr(module, "SMALL_BYTES", 0)  # noqa: B010  # mypy refuses =, it is a constant
    if "careless" in options:
        for name_giver in ("rename_new", "rename_over_empty"):
            setattr(homes, name_giver, carelessly)
    print(json.dumps(sweep(fault, source, parent, name, options)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5:])
