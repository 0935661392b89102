"""Replay: an original's recorded run, continued by our steps.

Two results. The *free run* goes from the start to the end on the recorded gradients, each step from our own result of
the one before. The *verdict* goes step by step: from the recorded state of step s-1 one step, compared per element
with the recorded state of step s, against the interval that the declared arithmetic can reach
(statekit.arrays.intervals).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from statekit.arrays.backend import Backend
from statekit.arrays.intervals import IntervalBackend
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.conversion.checkpoint_ref import CheckpointRef, ref_of
from statekit.conversion.open_state import open_state
from statekit.errors import FormatError, NotFoundError, StateError, UnknownFormatError, printable
from statekit.optim.run import Live, Move, initial, kernels_contract, load, mover, store
from statekit.optim.steps import Execution
from statekit.state.constants import execution
from statekit.state.evidence import Fact, headline, weakest
from statekit.state.facts import facts_of
from statekit.state.options import RATE_NAMES
from statekit.state.train_state import TrainState
from statekit.tensors.distance import gap
from statekit.tensors.tensor import DTYPES, Tensor, in_memory, widens
from statekit.tensors.tree import Tree, report_json
from statekit.verify.recorder import write_trajectory
from statekit.verify.recording import Recording, Trajectory
from statekit.verify.start_state import native_state, with_stated
from statekit.verify.stepping import named, tensors_of
from statekit.verify.verdict import Row, compare

Start = Literal["checkpoint", "init"]
Mover = Callable[[Backend, TrainState, Execution], Move]
HINTED = ("t5x",)
"""Systems whose layout takes what their recordings say of a run; a native file of others is completed by it."""
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Judged:
    """The verdict against one trajectory."""

    trajectory: Trajectory
    rows: tuple[Row, ...]

    @property
    def outside(self) -> int:
        """Elements where ours or the recording leaves the bound."""
        return sum(row.outside for row in self.rows)


@dataclass(frozen=True, repr=False)
class Replay:
    """What replaying one recording with one backend showed.

    Attributes:
        recording: Name of the recording.
        backend: Name of the backend, and its device where that isn't the CPU: `torch on cuda`.
        start: `checkpoint` or `init`.
        decoded: Tensors whose decoded values differ from the recorded state at the start, with how.
        judged: The verdict, one for each trajectory.
        free: The free run against the first trajectory, at its last step: path -> largest difference over the
            largest movement since the start.
        facts: What the updates depend on, and neither the recording nor the user says. Their rates it always has.
    """

    recording: str
    backend: str
    start: Start
    steps: tuple[int, int]
    decoded: tuple[str, ...]
    judged: tuple[Judged, ...]
    free: Mapping[str, float]
    facts: tuple[Fact, ...] = ()

    def __repr__(self) -> str:
        first, last = self.steps
        verdict = "passed" if self.passed else "NOT passed"
        return printable(
            f"<Replay {self.recording} on {self.backend}, updates {first + 1} to {last}: {verdict}>"
        )

    @property
    def passed(self) -> bool:
        """Whether the start was decoded exactly and every element of every step lies within the bound."""
        return not self.decoded and all(judged.rows and not judged.outside for judged in self.judged)

    @property
    def headline(self) -> str:
        """The verdict in a line, with the weakest facts that it rests on."""
        return headline("EQUIVALENT" if self.passed else "DIFFERENT", self.facts)

    def to_json(self) -> dict[str, Any]:
        """Returns the result as plain data."""
        return {
            "headline": self.headline,
            "facts": [fact.to_json() for fact in self.facts],
            "recording": self.recording,
            "backend": self.backend,
            "start": self.start,
            "steps": list(self.steps),
            "passed": self.passed,
            "decoded": list(self.decoded),
            "free_run": report_json(self.free),
            "judged": [
                {
                    "trajectory": j.trajectory.file,
                    "execution": j.trajectory.execution,
                    "outside": j.outside,
                    "rows": [row.to_json() for row in j.rows],
                }
                for j in self.judged
            ],
        }


@dataclass(frozen=True)
class Subject:
    """What is put to the test: a recording, where our side starts, and what our side believes.

    Attributes:
        recording: The recording.
        start: From the native checkpoint, or from fresh slots.
        checkpoint: Another checkpoint to start from, or how the recorded one is read, as a ref without a path.
            It must hold the same state.
        changes: Canonical hyperparameters that our side uses instead of the recorded ones.
    """

    recording: Recording
    start: Start = "checkpoint"
    checkpoint: CheckpointRef | str | PathLike[str] | None = None
    changes: Mapping[str, Any] | None = None

    @property
    def ref(self) -> CheckpointRef:
        """What a user says of the checkpoint; its path is None where the recorded one is meant."""
        return CheckpointRef() if self.checkpoint is None else ref_of(self.checkpoint)

    @property
    def first(self) -> int:
        """Updates done at the start."""
        if self.start == "init":
            return self.recording.first
        if self.recording.checkpoint_step is None:
            raise NotFoundError(
                "The recording has no checkpoint.", place=self.recording.folder, remedy="--start init"
            )
        return self.recording.checkpoint_step

    def obstacle(self) -> str:
        """Returns why no checkpoint can be the start: it is missing or unreadable; "" if one can."""
        try:
            with self._opened(self.first + 1):
                return ""
        except (NotFoundError, UnknownFormatError) as error:
            return f"{error.subject} ({self.recording.checkpoint or 'none'})"

    def state(self) -> TrainState:
        """Returns our state at the start, with the hyperparameters of the first update after it."""
        update, judge = self.first + 1, self.recording.trajectories[0]
        if self.start == "init":
            return self._changed(initial(self.recording.state(self.first, judge, update)))
        with self._opened(update) as stored:
            xp = NumpyBackend()  # the file is closed from here on, so the state moves into memory
            extra = {key: _in_memory(part) for key, part in stored.extra.items()}
            return self._changed(store(xp, load(xp, stored), replace(stored, extra=extra)))

    def belief(self, update: int, state: TrainState) -> TrainState:
        """Returns a state with the rules and hyperparameters that our side uses for an update."""
        if self.start == "init":
            return self._changed(with_stated(state, self._said(update)))
        with self._opened(update) as stored:
            return self._changed(with_stated(state, stored))

    @contextmanager
    def _opened(self, update: int) -> Iterator[TrainState]:
        # Another system's file speaks for itself; the native one needs what the recording says beside it.
        ref, system = self.ref, self.recording.system
        if ref.path is None:
            path = self.recording.folder / self.recording.checkpoint
            if system not in HINTED:
                with native_state(path, self._said(update), ref) as state:
                    yield state
                return
            ref = ref.at(path)
        with open_state(ref) as bare:
            if bare.layout != system:
                yield bare.state
                return
        recorded = self.recording.hints(update).hparams
        with open_state(replace(ref, hparams={**recorded, **ref.hparams})) as opened:
            yield opened.state

    def _said(self, update: int) -> TrainState:
        """Returns the recorded state before an update."""
        return self.recording.state(update - 1, self.recording.trajectories[0], update)

    def _changed(self, state: TrainState) -> TrainState:
        return CheckpointRef(hparams=self.changes).applied(state) if self.changes else state


def _in_memory(tree: Tree) -> Tree:
    """Returns a tree whose tensors are read."""
    if isinstance(tree, Mapping):
        return {key: _in_memory(part) for key, part in tree.items()}
    return in_memory(tree.read()) if isinstance(tree, Tensor) else tree


def replay(
    subject: Subject,
    xp: Backend,
    trajectory: Path | None = None,
    on_step: Progress = lambda step: None,
    make: Mover = mover,
) -> Replay:
    """Judges one recording with one backend.

    Args:
        subject: What is put to the test.
        xp: The backend.
        trajectory: A file to write the free run to, under the recording's own names.
        on_step: Called with the update's number after each judged update.
        make: What makes the step of a state: statekit's own text, or what is put to the test in its place.

    Raises:
        UnknownRuleError: A factor rule or a hyperparameter isn't known.
        StateError: The start doesn't fit the recording.
    """
    recording = subject.recording
    judge = recording.trajectories[0]
    start = subject.state()
    decoded = tuple(_differences(start, recording.state(subject.first, judge, subject.first + 1)))
    steps = {t.execution: _Stepper(subject, xp, t.execution, make) for t in recording.trajectories}
    states = _run(steps[judge.execution])
    last = write_trajectory(trajectory, states, recording) if trajectory else deque(states, maxlen=1)[0]
    judged = tuple(
        Judged(recorded, tuple(_verdict(steps[recorded.execution], start, recorded, on_step)))
        for recorded in recording.trajectories
    )
    return Replay(
        recording.name,
        xp.name if xp.device == "cpu" else f"{xp.name} on {xp.device}",
        subject.start,
        (subject.first, recording.last),
        decoded,
        judged,
        _drift(subject, last, judge),
        tuple(weakest(fact for fact in facts_of(start) if fact.name not in RATE_NAMES)),
    )


def free_run(subject: Subject, xp: Backend) -> Iterator[TrainState]:
    """Yields our state at the start and after each update, every step from our own result."""
    return _run(_Stepper(subject, xp, subject.recording.trajectories[0].execution))


def _run(step: _Stepper) -> Iterator[TrainState]:
    subject, recording, xp = step.subject, step.subject.recording, step.xp
    resumed = recording.trajectories[0].resumed
    state = subject.state()
    live = load(xp, state)
    yield state
    for update in range(subject.first + 1, recording.last + 1):
        state = subject.belief(update, state)
        live = step(state, live, update)
        state = store(xp, live, state)
        if resumed is not None and resumed.step == update:
            state = _rounded(state, resumed.dtype)
            live = load(xp, state)
        yield state


def _rounded(state: TrainState, dtype: str) -> TrainState:
    """Returns a state whose parameters were saved in another dtype and read again."""
    params = {
        path: in_memory(tensor.read().astype(DTYPES[dtype]).astype(tensor.dtype), path)
        for path, tensor in state.params.items()
    }
    return replace(state, params=params)


@dataclass(frozen=True)
class _Stepper:
    """Steps of one backend; a step is built once per phase, because a backend may compile it."""

    subject: Subject
    xp: Backend
    execution: Execution
    make: Mover = mover
    moves: dict[int, Move] = field(default_factory=dict)

    def contracts(self, state: TrainState) -> bool:
        """Tells whether products and sums may be contracted: by our backend, a compiler, or within an operation.

        What steps in another way than the text does as it likes.
        """
        is_contracted = self.xp.contracts or self.make is not mover
        return is_contracted or execution(self.execution).contracts or kernels_contract(state)

    def __call__(self, state: TrainState, live: Live, update: int) -> Live:
        recording, xp = self.subject.recording, self.xp
        phase = recording.phase(update)
        if phase.first not in self.moves:
            self.moves[phase.first] = self.make(xp, state, self.execution)
        grads = recording.gradients_in(xp, update)
        rate, groups = recording.rate(update), len(state.optimizer.groups)
        if isinstance(rate, tuple) and len(rate) != groups:
            raise FormatError(
                "A recording has another number of learning rates than of groups.",
                place=f"{recording.folder}, update {update}",
                expected=f"{groups}, or one for all",
                found=len(rate),
            )
        return self.moves[phase.first](live, grads, rate)


def _verdict(step: _Stepper, start: TrainState, trajectory: Trajectory, on_step: Progress) -> Iterator[Row]:
    subject, xp, recording = step.subject, step.xp, step.subject.recording
    roots = max(trajectory.sqrt_units, xp.sqrt_units)
    bounds = IntervalBackend(step.contracts(start), sqrt_units=roots)
    bounded = _Stepper(subject, bounds, step.execution)
    for update in range(max(subject.first, trajectory.first) + 1, recording.last + 1):
        before = recording.state(update - 1, trajectory, update)
        after = recording.outcome(update, trajectory)
        first = update == subject.first + 1 and trajectory is recording.trajectories[0]
        believed = subject.belief(update, before) if not first else start
        stepped = store(xp, step(believed, load(xp, believed), update), believed)
        bound = bounded(before, load(bounds, before), update)
        old = tensors_of(before)
        got = tensors_of(stepped)
        interval = named(bound.params, bound.slots, bound.shared)
        for (path, name), recorded in tensors_of(after).items():
            if (path, name) not in got:
                raise StateError(
                    "Our state lacks a recorded tensor.", place=f"{path} {name}", found=recording.name
                )
            yield compare(
                update,
                path,
                name,
                got[path, name].read(),
                recorded.read(),
                old[path, name].read(),
                interval[path, name],
            )
        on_step(update)


def _differences(ours: TrainState, recorded: TrainState) -> Iterator[str]:
    """Yields the values that differ; values in a narrower dtype of the file are compared as narrowed."""
    if ours.counts.updates != recorded.counts.updates:
        yield f"step: recorded {recorded.counts.updates}, decoded {ours.counts.updates}"
    decoded_tensors, recorded_tensors = tensors_of(ours), tensors_of(recorded)
    for path, name in sorted(decoded_tensors.keys() ^ recorded_tensors.keys()):
        yield f"{path} {name}: only {'decoded' if (path, name) in decoded_tensors else 'recorded'}"
    for key in sorted(decoded_tensors.keys() & recorded_tensors.keys()):
        got, want = decoded_tensors[key].read(), recorded_tensors[key].read()
        if not widens(want.dtype, got.dtype):
            want = want.astype(got.dtype)
        if got.shape != want.shape:
            yield f"{key[0]} {key[1]}: recorded shape {want.shape}, decoded {got.shape}"
        elif not np.array_equal(got.astype(np.float64), want.astype(np.float64), equal_nan=True):
            unequal = int(np.sum(got.astype(np.float64) != want.astype(np.float64)))
            yield f"{key[0]} {key[1]}: {unequal} of {got.size} values differ"


def _drift(subject: Subject, last: TrainState, judge: Trajectory) -> dict[str, float]:
    recording = subject.recording
    begun = recording.state(subject.first, judge, recording.last)
    ended = recording.state(recording.last, judge, recording.last)
    drift = {}
    for path, tensor in ended.params.items():
        recorded, old = tensor.read().astype(np.float64), begun.params[path].read().astype(np.float64)
        apart = float(np.max(gap(last.params[path].read().astype(np.float64), recorded), initial=0.0))
        with np.errstate(invalid="ignore"):
            moved = float(np.max(np.nan_to_num(np.abs(recorded - old), nan=0.0, posinf=0.0), initial=0.0))
        drift[path] = apart / moved if moved else apart and math.inf
    return drift
