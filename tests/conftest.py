"""Settings that must stand before a framework is imported, and what spares the processes of a run work."""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings

from goldens import COMPACT, GOLDEN

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# The tests start hundreds of processes, each of which would compile statekit's own modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What XLA compiled is kept for as long as the run: other tests of this process, and those that it starts, ask for the
# same programs. It is one folder a worker, since JAX doesn't write such files at once.
COMPILED = tempfile.TemporaryDirectory(prefix="statekit-jax-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# The Hub's client asks whatever server it has for a list of agents, and would keep our servers' answer for the user.
os.environ["HF_HOME"] = f"{COMPILED.name}/huggingface"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

# Nobody cuts this process's power: that it syncs is tested, that a disk takes 3 ms for each of many thousand is not.
# Programs that the tests start, and that are killed or whose power is cut, do sync.
os.fsync = os.fstat  # type: ignore[assignment]

SWEEPS = Path(__file__).with_name("sweeps.txt")

LONGEST = (
    "test_torch_kernels.py",
    "test_screens.py",
    "test_torch_sharded.py",
    "test_resuming.py",
    "test_attest_jax.py",
)
"""Files of few and long tests. They come first, so that no worker begins one when the others have ended."""

settings.register_profile("statekit", deadline=None)  # a busy machine isn't a failure
settings.load_profile("statekit")


def pytest_collection(session: pytest.Session) -> None:
    """Leaves the collector of garbage out of the import of the frameworks: nothing of it is garbage."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as slow what a sample leaves out, and puts the files of few and long tests first."""
    _leave_out_listed(config, items)
    _leave_out_repeated(items)
    items.sort(key=lambda item: item.path.name not in LONGEST)


def _leave_out_listed(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as slow what `sweeps.txt` lists; of a whole file and all recordings each line must fit a case."""
    lines = [line.split(" ", 1) for line in SWEEPS.read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    fitting = set()
    for item in items:
        test, _, case = item.nodeid.removeprefix("tests/").partition("[")
        for line in lines:
            if line[0] == test and (line[1] in case or line[1] == "*"):
                item.add_marker(pytest.mark.slow)
                fitting.add(" ".join(line))
    whole = {item.nodeid.removeprefix("tests/").partition("::")[0] for item in items}
    stale = [" ".join(line) for line in lines if line[0].partition("::")[0] in whole]
    is_whole = GOLDEN != COMPACT and not any("::" in argument for argument in config.args)
    if is_whole and not fitting.issuperset(stale):
        raise pytest.UsageError(f"sweeps.txt fits no case: {sorted({*stale} - fitting)}")


def _leave_out_repeated(items: list[pytest.Item]) -> None:
    """Marks as slow what a sampled test leaves out: cases whose words others have, or all beyond its number."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("sampled")
        assert marker is not None
        for item in _drawn(cases, *marker.args) if marker.args else _repeated(cases):
            item.add_marker(pytest.mark.slow)


def _repeated(cases: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yields the cases without which each value of each axis stays."""
    left = Counter(word for case in cases for word in _words(case))
    for case in reversed(cases):  # a backend's cases stand after NumPy's, and cost more
        if all(left[word] > 1 for word in _words(case)):
            left.subtract(_words(case))
            yield case


def _drawn(cases: list[pytest.Item], number: int) -> list[pytest.Item]:
    """Returns the cases beyond a number: those that add the most new values of axes are drawn first."""
    left = Random(0).sample(cases, len(cases))
    seen: set[str] = set()
    for _ in range(min(number, len(left))):
        case = max(left, key=lambda case: len(_words(case) - seen))
        seen |= _words(case)
        left.remove(case)
    return left


def _words(item: pytest.Item) -> set[str]:
    """Returns the words of a case's name."""
    return {*re.split(r"[-,/]", item.nodeid.partition("[")[2])}


@pytest.fixture(scope="module")
def shared_zygotes() -> Iterator[None]:
    """Has services start what forks their tasks from one process, which has imported what they import."""
    import zygotes

    with zygotes.shared():
        yield


def pytest_collection_finish(session: pytest.Session) -> None:
    """Has the collector look at what the tests make, and no more at the million objects that were there before."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes what XLA compiled: an ended worker doesn't come to its own end."""
    COMPILED.cleanup()
