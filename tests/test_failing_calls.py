"""Every system call of `statekit convert` on a source or a target may fail: an error says so, and nothing is left.

strace makes the calls of a whole process fail, those of the libraries among them. Skipped where it is missing.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from reliability_table import Row, note
from samples import target_name, writable
from soak import DONE, proven

from statekit.conversion.contracts import NO_HINTS, Hints
from statekit.errors import StatekitError

READING = ("openat", "getdents64", "read", "pread64", "preadv", "preadv2")
WRITING = (
    "write",
    "writev",
    "pwrite64",
    "ftruncate",
    "fallocate",
    "mkdir",
    "rename",
    "renameat",
    "renameat2",
)
SYNCING = ("fsync", "fdatasync")
CODES = {
    **dict.fromkeys((*READING, *SYNCING), ("EIO",)),
    **dict.fromkeys(WRITING, ("EIO", "ENOSPC")),
}
"""Call -> how it fails."""
OF_ONE_FILE = 6
"""How many calls of one name on one file are made to fail, each by itself: as far from one another as can be."""
OF_ONE_CONVERSION = 48
SECONDS = 60.0
_LINE = re.compile(r"(\d+) +(\w+)\((.*)")


def missing() -> str:
    """Says why nothing can be traced here; "" if it can."""
    strace = shutil.which("strace")
    if strace is None:
        return "there is no strace"
    line = [strace, "-f", "--seccomp-bpf", "-o", "/dev/null", "-e", "inject=chdir:error=EIO", "true"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


@dataclass(frozen=True)
class Traced:
    """A conversion in a process of its own, whose system calls are written down.

    Attributes:
        source: The checkpoint.
        folder: Where the target is made; nothing else is in it.
        target: The target.
        options: Of the conversion.
        log: What strace writes.
    """

    source: Path
    folder: Path
    target: Path
    options: tuple[str, ...]
    log: Path

    def run(self, *injections: str) -> subprocess.CompletedProcess[str]:
        """Converts."""
        line = ["strace", "-f", "--seccomp-bpf", "-y", "-o", str(self.log), "-e", f"trace={','.join(CODES)}"]
        line += [word for one in injections for word in ("-e", f"inject={one}")]
        line += [
            sys.executable,
            "-m",
            "statekit",
            "convert",
            str(self.source),
            str(self.target),
            *self.options,
        ]
        return subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False)

    def calls(self) -> Iterator[tuple[str, int, str, str]]:
        """Yields the calls on the source and in the target's folder: name, number in its thread, file, all of it."""
        seen = Counter[tuple[str, str]]()
        below = rf'[<"]((?:{re.escape(str(self.source))}|{re.escape(str(self.folder))}/)[^>"]*)[>"]'
        for line in self.log.read_text(errors="replace").splitlines():
            if match := _LINE.match(line):
                thread, name, rest = match.groups()
                seen[thread, name] += 1
                if files := re.findall(below, rest):  # and not in what is written, as in a message
                    yield name, seen[thread, name], files[0], rest


def points(traced: Traced) -> list[tuple[str, int, str]]:
    """Returns which calls to make fail and how, of each name on each file some."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name, number, file, _ in traced.calls():
        groups.setdefault((name, file), []).append(number)
    drawn = [
        (name, numbers[place], code)
        for (name, _), numbers in groups.items()
        for place in sorted({round(at) for at in np.linspace(0, len(numbers) - 1, OF_ONE_FILE)})
        for code in CODES[name]
    ]
    return list(dict.fromkeys(drawn))


@dataclass
class Seen:
    """What came of the calls that failed.

    Attributes:
        counts: How many were `cases`, `caught` or `harmless`; `swept`: left what the next conversion removes.
        bad: What mustn't be.
        seconds: The longest.
    """

    counts: Counter[str]
    bad: list[str]
    seconds: float = 0.0


def swept(traced: Traced, drawn: list[tuple[str, int, str]]) -> Seen:
    """Makes calls fail, one in each conversion."""
    seen = Seen(Counter(), [])
    for name, number, code in drawn:
        began = time.monotonic()
        done = traced.run(f"{name}:error={code}:when={number}")
        seen.seconds = max(seen.seconds, time.monotonic() - began)
        failed = [rest for *_, rest in traced.calls() if "(INJECTED)" in rest]
        if failed:  # of several threads, another one may have come first
            bad = verdict(traced, done, seen.counts)
            seen.bad += [f"{name} {number} {code}: {bad}: {failed[0][:200]}"] * bool(bad)
        for left in traced.folder.iterdir():
            remove(left)
    return seen


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def verdict(traced: Traced, done: subprocess.CompletedProcess[str], counts: Counter[str]) -> str:
    """Counts how a conversion ended; says what is wrong with that, "" if nothing is."""
    counts["cases"] += 1
    counts["caught"] += done.returncode == 3
    counts["harmless"] += done.returncode == 0
    if done.returncode not in (0, 3) or (done.returncode == 0 and not traced.target.exists()):
        return f"ended with {done.returncode}"
    if done.returncode and (
        "Error: " not in done.stderr or "statekit itself" in done.stderr or ".statekit-" in done.stderr
    ):
        return f"says {done.stderr}"
    if traced.target.exists():
        try:
            if proven(traced.target) != DONE:
                return "torn"
        except StatekitError as error:
            return f"torn: {error}"
    left = [one for one in traced.folder.iterdir() if one != traced.target]
    if not left:
        return ""
    counts["swept"] += 1
    if traced.target.exists():
        remove(traced.target)
    again = traced.run()
    kept = [one for one in traced.folder.iterdir() if one != traced.target]
    return f"kept {kept}" if kept or again.returncode else ""


SAMPLES = writable()
CASES = {name: (row, row.layout) for name, row in SAMPLES.items()} | {
    "statekit": (SAMPLES["t5x"], "statekit")
}
"""Container -> a sample of which the command line needs to be told no more than a variant, and the written layout."""


def traced(name: str, work: Path) -> Traced:
    """Returns a conversion to a container."""
    row, layout = CASES[name]
    (work / "source").mkdir()
    (work / "targets").mkdir()
    target = work / "targets" / target_name(name)
    options: tuple[str, ...] = ("--to", name, "--layout", layout, "--require", "lossy")
    if row.hints != NO_HINTS:
        assert row.hints == Hints(variant=row.hints.variant)
        options += ("--variant", str(row.hints.variant))
    conversion = Traced(row.sample_in(work / "source").path, target.parent, target, options, work / "log")
    for _ in range(2):  # the first may compile modules
        done = conversion.run()
        assert done.returncode == 0, done.stderr
        remove(target)
    return conversion


@pytest.fixture(scope="module", autouse=True)
def strace() -> None:
    if why := missing():
        pytest.skip(why)


def test_a_few_calls_fail(tmp_path: Path) -> None:
    conversion = traced("torch", tmp_path)
    first = {name: (name, number, code) for name, number, code in reversed(points(conversion))}
    # others of these calls, and other names' calls, may fail without harm: where a format is told, or at the end
    seen = swept(conversion, [first[name] for name in ("mkdir", "write", "fsync", "renameat2")])
    assert not seen.bad and seen.counts["caught"] == 4, seen


def test_what_is_printed_is_no_call_on_a_file(tmp_path: Path) -> None:
    """With a short path the text that goes to stdout shows all of it."""
    conversion = Traced(tmp_path / "s", tmp_path / "t", tmp_path / "t" / "target", (), tmp_path / "log")
    on_target = f'7 write(5<{conversion.target}>, "PK"..., 64) = 64'
    printed = (
        f'7 write(1<pipe:[31]>, "  source  {conversion.source}\\n  target  {conversion.target}\\n", 32) = 32'
    )
    conversion.log.write_text(f"{printed}\n{on_target}\n")
    assert points(conversion) == [("write", 2, code) for code in CODES["write"]]


def test_a_target_that_is_torn_would_be_seen(tmp_path: Path) -> None:
    conversion = traced("torch", tmp_path)
    done = conversion.run()
    conversion.target.write_bytes(conversion.target.read_bytes()[:-100])
    assert "torn" in verdict(conversion, done, Counter())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_call_fails(name: str, tmp_path: Path) -> None:
    every = points(conversion := traced(name, tmp_path))
    seen = swept(conversion, every[:: math.ceil(len(every) / OF_ONE_CONVERSION)])
    assert not seen.bad
    counts = seen.counts
    said = f"{counts['swept']} left what the next conversion removed" if counts["swept"] else ""
    note("calls", Row(f"to {name}", counts["cases"], counts["caught"], counts["harmless"], 0, 0, 0,
                      seen.seconds, said=said))  # fmt: skip
