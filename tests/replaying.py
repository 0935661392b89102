"""What the tests of recordings share: which there are, in which backends, and rules that are wrong on one side only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from goldens import GOLDEN
from statekit.arrays.backend import Backend
from statekit.errors import StatekitError
from statekit.optim import adafactor
from statekit.optim.adafactor import ParamConfig
from statekit.optim.steps import Scene
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis, TrainState
from statekit.verify.recording import Recording, from_json, open_recording, to_json
from statekit.verify.replay import Replay, Subject, replay

BACKENDS = ("numpy", "torch", "jax", "tensorflow")
COMPILING = ("jax", "tensorflow")
"""Backends that take a second or two to compile a step."""


def everywhere(
    cases: Sequence[Any], quick: Sequence[Any], compiled: Sequence[Any] | None = None
) -> list[Any]:
    """Each case in each backend, as parameters (name, case).

    Args:
        cases: All cases.
        quick: Those that backends that compile see in `make test`; the others they see in `make test-all`.
        compiled: All that these see; None: as the others.
    """
    return [
        pytest.param(
            name, case, id=f"{name}-{case}", marks=marks(name, name in COMPILING and case not in quick)
        )
        for name in BACKENDS
        for case in (cases if name not in COMPILING or compiled is None else compiled)
    ]


def marks(name: str, slow: bool = False) -> list[pytest.MarkDecorator]:
    """What a test in one backend is marked with."""
    framework = [] if name == "numpy" else [getattr(pytest.mark, name)]
    return [*framework, pytest.mark.slow] if slow else framework


def present(*cases: str) -> list[str]:
    """Those of some `<system>/<case>` that are here: of the compact choice only some."""
    return [case for case in cases if (GOLDEN / case / "trajectory.safetensors").is_file()]


def first_state(recording: Recording) -> TrainState:
    return recording.state(recording.first, recording.trajectories[0], recording.first + 1)


@cache
def stepped(folder: Path) -> bool:
    """Tells whether a recording has a rule that statekit steps."""
    try:
        with open_recording(folder) as recording:
            state = first_state(recording)
    except (StatekitError, OSError, KeyError):
        return False
    return state.optimizer.variant in load_schema(state.optimizer.schema).stepped


@contextmanager
def mistaken(
    module: ModuleType,
    xp: Backend,
    constants: Mapping[str, Any] | None = None,
    variant: str | None = None,
    late: int = 0,
) -> Iterator[None]:
    """Lets one backend, and not the bound, run another rule: other constants or variant, or a step that is late."""
    constants_of = module.variant_constants

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def run(scene: Scene, *arguments: Any) -> Any:
            if scene.xp is not xp:
                return right(scene, *arguments)
            other = replace(scene, variant=variant or scene.variant, step=scene.step + late)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    module,
                    "variant_constants",
                    lambda *names: {**constants_of(*names), **(constants or {})},
                )
                return right(other, *arguments)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "prepare", wrong(module.prepare))
        patch.setattr(module, "update", wrong(module.update))
        yield


@contextmanager
def swapped(xp: Backend) -> Iterator[None]:
    """Lets one backend exchange rows and columns of square matrices in Adafactor, where no shape tells."""
    right, other = adafactor.update, {Axis.ROW: Axis.COLUMN, Axis.COLUMN: Axis.ROW}

    def wrong(scene: Scene, param: Any, grad: Any, slots: Any, config: ParamConfig, common: Any) -> Any:
        shape = scene.xp.shape(param)
        if scene.xp is xp and len(shape) == 2 and shape[0] == shape[1]:
            axes = tuple(other.get(axis, axis) for axis in config.rule.axes)
            config = replace(config, rule=replace(config.rule, axes=axes))
        return right(scene, param, grad, slots, config, common)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adafactor, "update", wrong)
        yield


def shortened(folder: Path, updates: int = 3) -> Recording:
    """Opens the first updates of a recording."""
    data = to_json(open_recording(folder))
    first = data["steps"][0]
    last = first + updates
    phases = [
        {**phase, "updates": [phase["updates"][0], min(phase["updates"][1], last)]}
        for phase in data["phases"]
        if phase["updates"][0] <= last
    ]
    few = {"steps": [first, last], "phases": phases, "learning_rate": data["learning_rate"][:updates]}
    return from_json(folder, {**data, **few, "checkpoint": None})


def judged(recording: Recording, xp: Backend, **changes: Any) -> Replay:
    """Replays a recording from its first state."""
    return replay(Subject(recording, "init", changes=changes or None), xp)


def outside(result: Replay, tensor: str) -> int:
    """Elements of one kind of tensor that leave the bound."""
    return sum(row.outside for each in result.judged for row in each.rows if row.tensor == tensor)
