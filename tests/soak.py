"""Converts drawn samples into drawn formats while things go wrong, and looks at what is left; prints a summary as JSON.

    python tests/soak.py [--cases 1000] [--first 0] [--quiet]

A case is drawn by its number alone, so that a run can go on where another ended, and a fault is found again. Each is
a fork of one process. What goes wrong: nothing; SIGKILL or SIGTERM at some time; a limit on the size of files, as of a
full disk; one failing call, once or from there on; bytes of the source that are changed, cut off or missing. A target
is absent or complete; what is left beside it by an end amid the cleaning, the next conversion removes.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_sweep import injected
from reliability_table import Row, note
from samples import ROWS, target_name, writable
from samples import Row as SampleRow

from statekit.cli.main import Stopped, stoppable
from statekit.conversion import registry
from statekit.conversion.contracts import Exactness
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.errors import StatekitError
from statekit.files.integrity import prove_files
from statekit.tensors.digest import tensor_digest

DONE, REFUSED, UNTYPED, TORN = 0, 3, 4, 5
SECONDS = 60.0
ACCIDENTS = ("none", "SIGKILL", "SIGTERM", "full disk", "failing call", "damaged source")
CODES = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EMFILE)


def apart(work: Callable[[], int], delay: float = 0.0, number: int = 0) -> tuple[int, float, int]:
    """Runs work in a fork, and signals it after a delay; returns how it ended, its peak in MiB and whether it hung."""
    child = os.fork()
    if not child:
        code = UNTYPED
        try:
            os.close(2)
            os.open(os.devnull, os.O_WRONLY)
            code = work()
        except StatekitError:
            code = REFUSED
        except Stopped:
            code = -signal.SIGTERM
        finally:
            os._exit(code & 0xFF)
    began, sent, hung = time.monotonic(), False, 0
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), usage.ru_maxrss / 1024, hung
        seconds = time.monotonic() - began
        if number and not sent and seconds >= delay:
            os.kill(child, number)
            sent = True
        if seconds > SECONDS and not hung:
            os.kill(child, signal.SIGKILL)
            hung = 1
        time.sleep(0.002)


def attempt(source: Path, target: Path, row: SampleRow, to: str, arm: Callable[[], object]) -> int:
    """Converts, with something armed between the plan and its execution."""
    layout = row.layout if to in registry.layout_card(row.layout).containers else None
    with stoppable():
        planned = plan(source, target, to=to, layout=layout, hints=row.hints, require=Exactness.LOSSY)
        arm()
        convert(planned)
    return DONE


def proven(target: Path) -> int:
    """Opens a target and compares every file and tensor with its manifest."""
    with open_state(target) as opened:
        checkpoint = opened.checkpoint
        if checkpoint.manifest is None or prove_files(checkpoint, opened.budget):
            return TORN
        stated = checkpoint.manifest["tensors"]
        fits = all(tensor_digest(one) == stated[name]["blake3"] for name, one in checkpoint.tensors.items())
        return DONE if fits else TORN


def arming(accident: str, chance: random.Random) -> Callable[[], object]:
    """Returns what makes the accident happen in the process that calls it."""
    if accident == "full disk":
        size = chance.choice((0, 1, 500, 4096, 20_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    if accident == "failing call":
        code, at, persistent = chance.choice(CODES), chance.randint(1, 60), chance.random() < 0.5

        def fail() -> None:
            raise OSError(code, os.strerror(code))

        return lambda: injected(fail, at, persistent)
    return lambda: None


def damaged(source: Path, folder: Path, chance: random.Random) -> Path:
    """Returns a copy of a checkpoint in which one file is changed, cut off or missing."""
    copy = folder / source.name
    shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    files = sorted(one for one in copy.rglob("*") if one.is_file()) if copy.is_dir() else [copy]
    victim = chance.choice(files)
    data = bytearray(victim.read_bytes())
    how = chance.choice(("flip", "cut", "gone"))
    if how == "gone":
        victim.unlink()
    elif how == "cut":
        victim.write_bytes(data[: chance.randrange(len(data) + 1)])
    elif data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        victim.write_bytes(data)
    return copy


def case(number: int, sources: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Does one case; returns what went wrong, how the conversion ended, and what of the law was broken."""
    chance = random.Random(f"soak {number}")
    row, accident = ROWS[chance.randrange(len(ROWS))], ACCIDENTS[number % len(ACCIDENTS)]
    to = row.sample.container if chance.random() < 0.4 else chance.choice(sorted(writable()))
    if registry.container_card(to).target_kind is None:
        to = "statekit"
    source, parent = sources[key(row)], folder / "parent"
    parent.mkdir(parents=True)
    if accident == "damaged source":
        source = damaged(source, folder, chance)
    target = parent / target_name(to)
    signalled = getattr(signal, accident, 0)

    def work() -> int:
        return attempt(source, target, row, to, arming(accident, chance))

    code, peak, hung = apart(work, chance.uniform(0.0, 0.25), signalled)
    left = sorted(one.name for one in parent.iterdir() if one != target)
    bad = []
    if os.path.lexists(target) and apart(lambda: proven(target))[0] != DONE:
        bad.append("torn")
    if code == DONE and not os.path.lexists(target):
        bad.append("done without a target")
    if code not in (DONE, REFUSED, -signalled, 256 - signalled) or (
        not signalled and code not in (DONE, REFUSED)
    ):
        bad.append(f"ended with {code}")
    if left and accident not in ("SIGKILL", "SIGTERM", "failing call"):  # these may hit the cleaning, too
        bad.append(f"left {left}")
    if left:
        again = parent / f"again{target.name.removeprefix('target')}"
        apart(lambda: attempt(source, again, row, to, lambda: None))
        kept = [
            one.name for one in parent.glob(".statekit-tmp-*") if any(p.stat().st_size for p in one.iterdir())
        ]
        bad += [f"kept {kept}"] * bool(kept)
    what = f"{number}: {row.name} to {to}, {accident}"
    return {
        "accident": accident,
        "code": code,
        "peak": peak,
        "hung": hung,
        "bad": [f"{what}: {one}" for one in bad],
    }


def key(row: SampleRow) -> str:
    return f"{row.sample.container} {row.layout} {row.name}"


def made(row: SampleRow, folder: Path) -> Path:
    """Returns a sample, made in a fork: this process never starts the threads of a library, which a fork would lose."""
    folder.mkdir(parents=True)
    note = folder.with_suffix(".path")

    def work() -> int:
        note.write_text(str(row.sample_in(folder).path))
        return DONE

    assert apart(work)[0] == DONE, key(row)
    return Path(note.read_text())


def growth(sources: dict[str, Path], folder: Path, times: int) -> float:
    """Converts again and again in one process; returns how much more it holds after the second half than the first."""
    row = writable()["torch"]
    sizes = []
    for number in range(2 * times):
        parent = folder / f"growth {number}"
        parent.mkdir(parents=True)
        attempt(sources[key(row)], parent / "target", row, "statekit", lambda: None)
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20)
        shutil.rmtree(parent)
    return sizes[-1] - sizes[times - 1]


def run(first: int, cases: int, folder: Path, *, noted: bool = True) -> dict[str, Any]:
    """Does cases from one on; returns and notes the figures."""
    for name in registry.container_names():  # imported once, and not amid a signal
        registry.container(name)
    for name in registry.layout_names():
        registry.layout(name)
    sources: dict[str, Path] = {}
    for place, row in enumerate(ROWS):
        sources[key(row)] = made(row, folder / "sources" / f"{place}")
    bad, outcomes = list[str](), Counter[str]()
    counted: dict[str, Counter[str]] = {accident: Counter() for accident in ACCIDENTS}
    peaks: dict[str, float] = dict.fromkeys(ACCIDENTS, 0.0)
    for number in range(first, first + cases):
        scratch = folder / f"case {number}"
        result = case(number, sources, scratch)
        shutil.rmtree(scratch)
        bad += result["bad"]
        name, code = result["accident"], result["code"]
        outcomes[f"{name}: {code}"] += 1
        counted[name] += Counter(
            cases=1,
            caught=code == REFUSED,
            untyped=code == UNTYPED,
            hung=result["hung"],
            silent=len(result["bad"]),
        )
        peaks[name] = max(peaks[name], result["peak"])
    for name, sums in counted.items():
        if sums["cases"] and noted:
            said = f"{sums['cases'] - sums['caught']} converted or were ended, and left all or nothing"
            note("soak", Row(name, sums["cases"], sums["caught"], silent=sums["silent"], untyped=sums["untyped"],
                             hung=sums["hung"], peak=peaks[name], said=said))  # fmt: skip
    return {"cases": cases, "outcomes": dict(sorted(outcomes.items())), "peak": max(peaks.values()), "bad": bad,
            "growth": growth(sources, folder, 10)}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--quiet", action="store_true", help="note no figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="statekit-soak-") as scratch:
        summary = run(options.first, options.cases, Path(scratch), noted=not options.quiet)
    print(json.dumps(summary, indent=1))
    sys.exit(bool(summary["bad"]))
