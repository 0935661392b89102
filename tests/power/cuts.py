"""Cuts the power at every call of recorded conversions, and looks at what is left."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from samples import target_name

from power.disk import Call, Contents, Disk, contents
from statekit.files.durable import OWNER_FILE

TEMPORARY = ".statekit-tmp-"


@dataclass(frozen=True)
class Cuts:
    """What cuts at every call of one conversion leave.

    Attributes:
        calls: How many calls it makes.
        disks: How many disks were looked at: each cut leaves many, as what wasn't synced is there or not.
        faults: What was wrong with them.
        last: What the target holds when the power goes right after the conversion, of which only what was synced lasts.
    """

    calls: int
    disks: int
    faults: tuple[str, ...]
    last: Contents


def cut_all(journal: list[Call]) -> dict[str, Cuts]:
    """Cuts the power at every call of each conversion in a journal; what it leaves, by container."""
    disk, cuts, at = Disk(), {}, 0
    while at < len(journal):
        call = journal[at]
        disk.take(call)
        at += 1
        if call[0] == "folder" and call[2].startswith("begin "):
            name = call[2].removeprefix("begin ")
            end = next(i for i in range(at, len(journal)) if journal[i][2:3] == [f"end {name}"])
            disk.sync_all()
            cuts[name] = _cut(disk, journal[at:end], name)
            at = end
    return cuts


def _cut(disk: Disk, calls: list[Call], name: str) -> Cuts:
    target = f"{name}/{target_name(name)}"
    old, new = _seen(disk, target), _seen(_after(disk, calls), target)
    assert new is not None and calls, f"{name} isn't written in the recording file system"
    chance, faults, disks = random.Random(name), list[str](), 0
    for number in range(len(calls) + 1):
        if number:
            disk.take(calls[number - 1])
        done = number == len(calls)
        for what, names, ways in disk.survivors(chance):
            for how, data in ways.items():
                disks += 1
                left = contents(names, data, target)
                wrong = (
                    [f"the target is {_told(left, old, new)}"]
                    if left != new and (done or left != old)
                    else []
                )
                wrong += _unswept(contents(names, data, name) or {})
                call = calls[number - 1][:3] if number else "none"
                faults += [
                    f"after call {number} of {len(calls)}, {call}; {what}, {how}: {one}" for one in wrong
                ]
    last = contents(disk.lasting_names, lambda number: disk.lasting_data.get(number, b""), target)
    return Cuts(len(calls), disks, tuple(faults), last or {})


def _after(disk: Disk, calls: list[Call]) -> Disk:
    later = copy.deepcopy(disk)
    for call in calls:
        later.take(call)
    return later


def _seen(disk: Disk, path: str) -> Contents | None:
    return contents(disk.names, lambda number: bytes(disk.data[number]), path)


def _told(left: Contents | None, old: Contents | None, new: Contents) -> str:
    if left is None or left == old:
        return "gone" if left is None else "as before, though the conversion is done"
    wrong = sorted(name for name in {*left, *new} if left.get(name, ...) != new.get(name, ...))
    return f"torn: {wrong[:5]}"


def _unswept(folder: Contents) -> Iterator[str]:
    """Says which temporary folders the next conversion wouldn't remove: those that don't say whose they were."""
    for name in {name.partition("/")[0] for name in folder if name.startswith(TEMPORARY)}:
        if any(one.startswith(f"{name}/") and one != f"{name}/{OWNER_FILE}" for one in folder):
            try:
                json.loads(folder.get(f"{name}/{OWNER_FILE}") or b"")
            except ValueError:
                yield f"{name} has no owner"
