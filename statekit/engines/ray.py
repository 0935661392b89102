"""The engine `ray`: tasks run as Ray's tasks, on a cluster that the user names, or in Ray on this machine alone.

Every machine needs the work's folder and statekit of one version. Whoever may submit to a cluster runs code there.
What comes back of a task is whether it ended well; tensors never enter Ray's object store.
Source: Ray 2.60, `ray.init`, `ray.remote`, "Fault tolerance".
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from statekit.errors import MissingExtraError, StatekitError, extra
from statekit.files.tree import Place
from statekit.scale.engine import Outcome, Pool
from statekit.scale.tasks import MEMORY
from statekit.scale.work import Work

_works: dict[str, Work] = {}
"""In a worker: the works whose source it has open. A plan is made once a process."""


def attempt(place: str, number: int) -> tuple[int, str, bool]:
    """Makes an attempt at a task; runs in a worker of Ray's. Returns the fields of an outcome."""
    try:
        if place not in _works:
            _works[place] = Work(place)
        _works[place].run(number)
    except StatekitError as error:
        return number, error.line, isinstance(error, OSError)
    return number, "", True


@dataclass(frozen=True)
class Ray:
    """Ray.

    Attributes:
        address: A cluster's: `HOST:PORT` of Ray's client server, or `auto` on a machine of it; "" for this machine.
        cpus: Cores of a task.
    """

    address: str = ""
    cpus: int = 1

    def pool(self, work: Place, missing: int) -> Pool:
        """Returns a pool for a work.

        Raises:
            MissingExtraError: Ray isn't installed.
        """
        try:
            import ray
        except ImportError:
            raise MissingExtraError("Ray isn't installed.", place="--on ray", remedy=extra("ray")) from None
        return _RayPool(ray, self, work)


class _RayPool:
    def __init__(self, ray: Any, engine: Ray, work: Place) -> None:
        self._ray, self._work = ray, f"{work}"
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
        if engine.address in ("", "auto"):
            alone = {"include_dashboard": False} if not engine.address else {}
            ray.init(address=engine.address or "local", **alone, **quiet)
        else:
            ray.init(address=f"ray://{engine.address}", **quiet)
        self.slots = max(1, int(ray.cluster_resources().get("CPU", 1)) // engine.cpus)
        # `carry_out` makes new attempts; a function by its module's name is found by every worker that has statekit.
        self._attempt = ray.remote(attempt).options(
            num_cpus=engine.cpus, memory=MEMORY, max_retries=0, scheduling_strategy="SPREAD"
        )
        self._running: dict[Any, int] = {}

    def start(self, number: int) -> None:
        self._running[self._attempt.remote(self._work, number)] = number

    def wait(self, seconds: float) -> list[Outcome]:
        ready, _ = self._ray.wait([*self._running], num_returns=1, timeout=seconds)
        return [self._outcome(task, self._running.pop(task)) for task in ready]

    def _outcome(self, result: Any, number: int) -> Outcome:
        try:
            return Outcome(*self._ray.get(result))
        except self._ray.exceptions.RayError as error:  # its worker died, or the machine
            return Outcome(number, f"its worker died: {type(error).__name__}")

    def close(self) -> None:
        for result in self._running:
            with suppress(Exception):  # a double, or what an error leaves under way
                self._ray.cancel(result, force=True)
        self._ray.shutdown()
