"""The engine `slurm`: an array of the tasks that are missing, and a job that finishes the work when all have ended.

A task that failed isn't requeued by SLURM: the same command again submits those that are missing then.
Source: sbatch(1), "Job arrays", `--dependency=afterany`, `--parsable`.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from statekit.errors import StatekitError, UsageError
from statekit.files.tree import Place

MOST_IN_ARRAY = 1000
"""Tasks in an array at most. Source: slurm.conf(5), `MaxArraySize` is 1001 unless a site says otherwise."""


@dataclass(frozen=True)
class Slurm:
    """The jobs of a work.

    Attributes:
        work: Its folder, which all nodes see; the jobs of one in a store write their logs where they were submitted.
        missing: The tasks to be done.
        cpus: Cores of a task.
        memory: Its memory, as sbatch has it.
    """

    work: Place
    missing: Sequence[int]
    cpus: int = 4
    memory: str = "2G"

    def array(self) -> list[str]:
        """Returns the command that submits the tasks.

        Raises:
            UsageError: They are more than an array holds.
        """
        if len(self.missing) > MOST_IN_ARRAY:
            raise UsageError(
                "There are more tasks than an array of SLURM holds.",
                place=self.work,
                expected=f"at most {MOST_IN_ARRAY}",
                found=len(self.missing),
                remedy="split it into larger tasks (--task-bytes), or submit an array that runs --shard auto",
            )
        run = shlex.join([*_statekit(), "work", "run", f"{self.work}", "--tasks"])
        return [
            "sbatch", "--parsable", f"--job-name={self.work.name}", f"--array={ranges(self.missing)}",
            f"--cpus-per-task={self.cpus}", f"--mem={self.memory}", f"--output={self._logs}slurm-%A_%a.log",
            f"--wrap={run} $SLURM_ARRAY_TASK_ID",
        ]  # fmt: skip

    def finish(self, array: str) -> list[str]:
        """Returns the command that submits the job which finishes the work after an array."""
        finish = shlex.join([*_statekit(), "work", "finish", f"{self.work}"])
        return [
            "sbatch", "--parsable", f"--job-name={self.work.name}-finish", f"--dependency=afterany:{array}",
            f"--cpus-per-task={self.cpus}", f"--mem={self.memory}", f"--output={self._logs}slurm-finish-%j.log",
            f"--wrap={finish}",
        ]  # fmt: skip

    @property
    def _logs(self) -> str:
        return f"{self.work}/" if isinstance(self.work, Path) else ""

    def submit(self) -> tuple[str, str]:
        """Submits both; returns the numbers of the jobs.

        Raises:
            UsageError: There is no SLURM here.
            StatekitError: It refuses a job.
        """
        array = _submitted(self.array()) if self.missing else ""
        finish = self.finish(array)
        if not array:
            finish = [word for word in finish if not word.startswith("--dependency")]
        return array, _submitted(finish)


def ranges(numbers: Sequence[int]) -> str:
    """Returns numbers as SLURM's arrays name them.

    Example:
        >>> ranges([3, 17, 18, 19])
        '3,17-19'
    """

    def runs() -> Iterator[str]:
        for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
            ends = [number for _, number in run]
            yield f"{ends[0]}" if len(ends) == 1 else f"{ends[0]}-{ends[-1]}"

    return ",".join(runs())


def _statekit() -> list[str]:
    return [sys.executable, "-P", "-m", "statekit"]


def _submitted(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UsageError(
            "There is no sbatch on this machine.",
            place="--on slurm",
            remedy="give the command on a login node; `statekit work split` prints what to submit",
        ) from None
    if done.returncode:
        raise StatekitError(
            "SLURM refuses a job.", place=shlex.join(command), found=done.stderr.strip() or done.returncode
        )
    return done.stdout.strip().partition(";")[0]
