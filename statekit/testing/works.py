"""The laws of many workers: whatever the cut, the order, the workers and the accidents, the target is the same.

    from statekit.testing.works import split_alike

    def test_my_container_is_cut(tmp_path: Path) -> None:
        split_alike(lambda target: statekit.plan("run", target, to="mine"), tmp_path, task_bytes=4000, seed=0)

Input: what makes a plan for a target. Its tasks are done in a random order, each attempt twice, three in ten of them
killed, by processes that are one in truth. Output: an assertion that the files are those of one process, cut alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from statekit.conversion.check import check
from statekit.conversion.convert import convert
from statekit.conversion.plan import Plan
from statekit.files.manifest import require_manifest
from statekit.files.tree import Place
from statekit.scale.engine import Outcome, Pool, carry_out
from statekit.scale.running import run
from statekit.scale.work import Work, split

KILLED = 0.3
"""The share of attempts that end with nothing done."""


class Flaky:
    """An engine in this process, of which some attempts are killed and each is made twice.

    Args:
        work: The work.
        seed: Of the order, and of which attempts are killed.
        killed: Their share.

    Attributes:
        slots: How many attempts run at once.
        attempts: How many were made.
        begun: The tasks whose attempts haven't ended.
    """

    slots = 3

    def __init__(self, work: Work, seed: int, killed: float = KILLED) -> None:
        self.work, self.killed, self.attempts = work, killed, 0
        self.begun: list[int] = []
        self._random = random.Random(seed)

    def pool(self, work: Place, missing: int) -> Pool:
        return self

    def start(self, number: int) -> None:
        self.begun.append(number)

    def wait(self, seconds: float) -> list[Outcome]:
        number = self.begun.pop(self._random.randrange(len(self.begun)))
        self.attempts += 1
        if self._random.random() < self.killed:
            return [Outcome(number, "its worker was killed")]
        assert run(self.work, number).attempt == run(self.work, number).attempt, "two attempts count"
        return [Outcome(number)]

    def close(self) -> None:
        """Stops nothing: attempts end at once."""


def split_alike(
    plan: Callable[[Path], Plan], folder: Path, task_bytes: int, seed: int, same_bytes: bool = True
) -> None:
    """Many workers write the same target as one process with the same cut.

    Args:
        plan: Makes the plan for a target.
        folder: An empty folder, in which both targets are written.
        task_bytes: Where they are cut.
        seed: Of the order, and of which attempts are killed.
        same_bytes: Whether the container repeats its bytes; else the digests of tensors are compared.
    """
    for name in ("one", "many"):
        (folder / name).mkdir()
    alone, many = (folder / name / "target" for name in ("one", "many"))
    convert(plan(alone), task_bytes=task_bytes)
    with split(plan(many), folder / "work", task_bytes) as work:
        carry_out(work, Flaky(work, seed))
        assert not work.missing(), "a task that is done is missing"
        work.finish()
    assert check(many).passed, "the target isn't what its manifest says"
    manifests = [require_manifest(target) for target in (alone, many)]
    assert manifests[0]["tensors"] == manifests[1]["tensors"], "tensors differ"
    assert manifests[0]["source"] == manifests[1]["source"], "the source has another digest"
    if same_bytes:
        assert _files(alone) == _files(many), "files differ"


def _files(place: Path) -> dict[str, bytes]:
    paths = (path for path in place.rglob("*") if path.is_file())
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in paths}
