"""The process in which checkpoints are opened: `python -m statekit.service.task`, which has limits.

Requests come in as lines of JSON, one after the other; out go lines with `type`: `progress`, `log`, and last either
`result` or `problem`, which has the parts of an error. Whatever a checkpoint does to this process, the service only
sees it end; and it ends with the service. What has to be imported is imported before the limits count.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from statekit.errors import StatekitError
from statekit.service import looking, work
from statekit.service.processes import end_with

ANSWER_BYTES = 256 * 2**20
"""How long an answer may be."""
_PROGRESS_SECONDS = 0.25


class Listener:
    """Where a task says how far it is.

    Args:
        output: Takes the lines.
    """

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._due = 0.0

    def progress(self, fraction: float | None, text: str) -> None:
        """Says how much is done; seldom enough that nobody is kept from work."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _PROGRESS_SECONDS
            self.say("progress", {"fraction": fraction, "text": text[:500]})

    def log(self, line: str) -> None:
        """Says something that is worth keeping."""
        self.say("log", {"line": line[:4000]})

    def say(self, kind: str, data: Any) -> None:
        """Writes a line."""
        text = json.dumps({"type": kind, "data": data}, allow_nan=False)
        if len(text) > ANSWER_BYTES:
            raise StatekitError(
                "The answer is longer than the service takes.", expected=f"{ANSWER_BYTES} bytes"
            )
        self._output.write(text + "\n")
        self._output.flush()


KINDS: Mapping[str, Callable[[Mapping[str, Any], Listener], Any]] = {**looking.KINDS, **work.KINDS}


def problem_of(error: BaseException) -> dict[str, Any]:
    """Returns an error as plain data: its kind, its parts, and its faults one by one."""
    if not isinstance(error, StatekitError):
        said = "There is not enough memory for this job." if isinstance(error, MemoryError) else str(error)
        expected = isinstance(error, OSError | MemoryError)
        subject = (
            said if expected and said else f"statekit itself has failed: {type(error).__name__}: {error}"
        )
        error_kind = "MemoryError" if isinstance(error, MemoryError) else "StatekitError"
        return {"kind": error_kind, "subject": subject[:2000], "place": None, "expected": None, "found": None,
                "remedy": None, "faults": []}  # fmt: skip
    parts = {name: getattr(error, name) for name in ("subject", "place", "expected", "found", "remedy")}
    return {
        "kind": error.kind,
        **{name: None if value in (None, "") else str(value)[:8000] for name, value in parts.items()},
        "faults": [{"what": what, "place": place} for what, place in error.faults[:1000]],
    }


def limit(limits: Mapping[str, int]) -> None:
    """Sets what this process may take: `memory`, `files` and `written` in bytes and numbers, `cpu` from now on."""
    kinds = {"memory": resource.RLIMIT_AS, "files": resource.RLIMIT_NOFILE, "written": resource.RLIMIT_FSIZE}
    wanted = [(kinds[name], value) for name, value in limits.items() if name in kinds]
    if "cpu" in limits:
        used = resource.getrusage(resource.RUSAGE_SELF)
        wanted.append((resource.RLIMIT_CPU, round(used.ru_utime + used.ru_stime) + limits["cpu"]))
    wanted.append((resource.RLIMIT_CORE, 0))
    for kind, value in wanted:
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def answer(request: Mapping[str, Any], listener: Listener) -> None:
    """Does what a request says, and says what came of it."""
    try:
        limit(request.get("limits", {}))
        result = KINDS[request["kind"]](request, listener)
        listener.say("result", result)
    except (Exception, KeyboardInterrupt) as error:
        listener.say("problem", problem_of(error))


def main() -> int:
    """Answers requests until there are no more."""
    end_with(int(sys.argv[1]))
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w", encoding="ascii", errors="strict")
    os.dup2(2, 1)  # what a library prints is no answer
    listener = Listener(answers)
    for line in sys.stdin:
        answer(json.loads(line), listener)
    return 0


if __name__ == "__main__":
    sys.exit(main())
