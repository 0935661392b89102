"""The long run of the fuzzers: `make fuzz`.

    python sweep.py [--cases 20000] [--seconds S] [--only pickle msgpack ...] [--from 0]

Every reader reads changed samples; case n of a reader is always the same one. The outcome of a case is a value or a
StatekitError. Anything else, and what computes for longer than `SECONDS`, is printed with the case's number and what
was read, to be kept in `findings.py`. Each reader runs in a process of its own, whose memory is bounded, and which is
started again behind a case that ends it. Figures are noted for docs/reliability.md. Exit code 1 if something was found.
"""

from __future__ import annotations

import argparse
import base64
import gc
import json
import mmap
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests")]

import reliability_table

from fuzz.reader import Reader
from fuzz.readers import NOTED, READERS
from fuzz.trees import folder
from statekit.errors import StatekitError

SECONDS = 5.0
"""How long a reader may compute on one case."""
DEADLY = 2 * SECONDS
"""How long, where it is a library that computes, which no exception stops."""
MEMORY = 512 * 2**20
"""How much memory a reader may ask for beside what the process has, in bytes."""
COUNTS = ("cases", "refused", "values", "untyped", "hung", "peak")
CASES, REFUSED, VALUES, UNTYPED, HUNG, PEAK = range(len(COUNTS))


class TooLongError(BaseException):
    """A reader doesn't come to an end. Isn't an Exception, so that none takes it for the file's fault."""


def _too_long(*_: Any) -> None:
    raise TooLongError


@dataclass(frozen=True)
class Finding:
    """What a reader did that it may not.

    Attributes:
        what: The exception, or that it takes too long.
        where: The last line of ours that was run.
        case: The case's number.
        read: What was read, in base64 if that is bytes.
    """

    what: str
    where: str
    case: int
    read: str


@dataclass
class Row:
    """What the cases of one reader came to.

    Attributes:
        reader: Its name.
        counts: As `COUNTS` names them: cases; those refused by a StatekitError; values; those that ended in another
            exception; those that took too long; the most memory that the process had, in bytes.
        findings: The first of every kind and place.
        seconds: How long all took.
    """

    reader: str
    counts: list[int] = field(default_factory=lambda: [0] * len(COUNTS))
    findings: dict[str, Finding] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def broken(self) -> int:
        """How many cases broke the law."""
        return self.counts[UNTYPED] + self.counts[HUNG]


def outcome(reader: Reader, case: Any) -> BaseException | None:
    """Reads one case; returns what it raised."""
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    signal.setitimer(signal.ITIMER_PROF, DEADLY)
    try:
        reader.read(case)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def finding(error: BaseException, number: int, case: Any) -> Finding:
    """Describes what a case did."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        f
        for f in frames
        if str(ROOT) in f.filename and f"{ROOT}/tests" not in f.filename and ".venv" not in f.filename
    ]
    last = (ours or frames)[-1]
    what = (
        "takes too long" if isinstance(error, TooLongError) else f"{type(error).__name__}: {str(error)[:200]}"
    )
    return Finding(what, f"{Path(last.filename).name}:{last.lineno} {last.line}", number, shown(case))


def shown(case: Any) -> str:
    """Returns what was read as text."""
    return base64.b64encode(case).decode() if isinstance(case, bytes) else f"{case!r:.2000}"


def run(reader: Reader, numbers: range, counts: Any, seconds: float | None = None) -> list[Finding]:
    """Reads cases in this process, counting as it goes; returns every finding that is new in kind or place."""
    findings: dict[str, Finding] = {}
    began = time.monotonic()
    before = signal.signal(signal.SIGVTALRM, _too_long), signal.signal(signal.SIGPROF, signal.SIG_DFL)
    try:
        for number in numbers:
            case = reader.case(Random(number))
            counts[CASES] += 1
            error = outcome(reader, case)
            if error is None:
                counts[VALUES] += 1
            elif isinstance(error, StatekitError):
                counts[REFUSED] += 1
            else:
                counts[HUNG if isinstance(error, TooLongError) else UNTYPED] += 1
                one = finding(error, number, case)
                findings.setdefault(one.where, one)
            if seconds is not None and time.monotonic() - began > seconds:
                break
    finally:
        signal.signal(signal.SIGVTALRM, before[0])
        signal.signal(signal.SIGPROF, before[1])
    counts[PEAK] = max(counts[PEAK], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return list(findings.values())


def apart(reader: Reader, numbers: range, seconds: float | None = None) -> Row:
    """Reads cases in a process of its own, and in another one behind a case that ended that."""
    row, began = Row(reader.name), time.monotonic()
    counts = memoryview(mmap.mmap(-1, 8 * len(COUNTS))).cast("q")
    while len(numbers) > counts[CASES] and (seconds is None or time.monotonic() - began < seconds):
        ended, findings = _in_child(reader, numbers[counts[CASES] :], counts, seconds)
        if ended:
            number = numbers[counts[CASES] - 1]
            what = "takes too long" if ended == -signal.SIGPROF else f"the process ended with {ended}"
            counts[HUNG if ended == -signal.SIGPROF else UNTYPED] += 1
            read = _forked(lambda: shown(reader.case(Random(number))))[1]  # noqa: B023  # runs here and now
            findings.append(Finding(what, "", number, read or ""))
        elif counts[CASES] == 0:
            raise RuntimeError(f"{reader.name}: {findings}")
        for one in findings:
            row.findings.setdefault(f"{one.where}{one.what if not one.where else ''}", one)
        if not ended:
            break
    row.counts, row.seconds = list(counts), time.monotonic() - began
    return row


def _in_child(
    reader: Reader, numbers: range, counts: Any, seconds: float | None
) -> tuple[int, list[Finding]]:
    def work() -> list[dict[str, Any]]:
        reader.samples()
        gc.freeze()  # what is imported is no case's garbage
        _bound_memory()
        return [vars(one) for one in run(reader, numbers, counts, seconds)]

    code, findings = _forked(work)
    return code, [Finding(**one) for one in findings or []]


def _forked(work: Callable[[], Any]) -> tuple[int, Any]:
    """Returns how a process of its own ended and what it answered; none but such begin libraries' threads."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        code = 1
        try:
            with os.fdopen(write, "w") as answer:
                json.dump(work(), answer)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), json.loads(text or "null")


def _bound_memory() -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    now = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (now + MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def row_of(what: str, rows: Sequence[Row]) -> reliability_table.Row:
    """Returns what cases of some readers came to, as a row of the page."""
    cases, refused, values, untyped, hung = (sum(row.counts[i] for row in rows) for i in range(PEAK))
    return reliability_table.Row(what, cases, caught=refused, harmless=values, untyped=untyped, hung=hung)


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description="Fuzzes the readers.")
    options.add_argument("--cases", type=int, default=20_000, help="of each reader")
    options.add_argument("--seconds", type=float, help="of each reader, at most")
    options.add_argument("--only", nargs="*", default=[], help="readers, by the beginning of their names")
    options.add_argument("--from", dest="first", type=int, default=0, help="the first case's number")
    chosen = options.parse_args(arguments)
    folder()  # before a child makes it and leaves it
    rows = []
    for name, reader in READERS.items():
        if chosen.only and not name.startswith(tuple(chosen.only)):
            continue
        row = apart(reader, range(chosen.first, chosen.first + chosen.cases), chosen.seconds)
        rows.append(row)
        figures = ", ".join(f"{count} {what}" for what, count in zip(COUNTS[:PEAK], row.counts, strict=False))
        print(
            f"{name}: {figures}, {row.counts[PEAK] >> 20} MiB, {row.counts[CASES] / row.seconds:.0f}/s",
            flush=True,
        )
        for one in row.findings.values():
            print(
                f"    case {one.case}: {one.what}\n        {one.where}\n        {one.read[:500]}", flush=True
            )
        if reader in NOTED:
            reliability_table.note("fuzz", row_of(name, [row]))
    layouts = [row for row in rows if row.reader.startswith("layout ")]
    if layouts:
        reliability_table.note("fuzz", row_of(f"layouts, trees of {len(layouts)} samples", layouts))
    return 1 if any(row.broken for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
