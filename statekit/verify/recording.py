"""Recordings: an original optimizer taking real steps, in one documented form.

A recording is a folder:

    recording.json              what ran (schemas/statekit-recording.schema.json; docs/recordings.md)
    grads.safetensors           "{step}/{param}": the gradient of the update that takes state step-1 to state step
    trajectory.safetensors      "{step}/param/{param}", "{step}/slot/{param}/{slot}", "{step}/global/{path}"
    checkpoint/...              optional: what the original's own save code wrote

Folders that hold a `meta.json` instead were recorded by one of the modules in `statekit.verify.systems`, which bring
it into this form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from statekit.arrays.backend import Backend, Value
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.errors import FormatError, NotFoundError, StatekitError, UsageError
from statekit.files.safetensors import OpenFile, open_safetensors
from statekit.files.source import read_small
from statekit.optim.steps import Execution
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor, in_memory
from statekit.verify.contract import DESCRIPTION, FORMAT, GRADS, TRAJECTORY, Phase, System
from statekit.verify.systems import SYSTEMS

FOREIGN = "meta.json"
"""The description that recorders of a system write."""
T = TypeVar("T")
Rate: TypeAlias = float | tuple[float, ...] | None
"""The learning rate of one update: a number, or one for each parameter group; None where the optimizer has its own."""


@dataclass(frozen=True)
class Resumption:
    """A save and a restore of the original in the middle of a run, which rounded its parameters.

    Attributes:
        step: Updates done; the trajectory holds the state after the restore.
        before: The file with the state just before the save, under the trajectory's names.
        dtype: What the parameters were saved in.
    """

    step: int
    before: str
    dtype: str


@dataclass(frozen=True)
class Trajectory:
    """A file of states, and how the original ran when it was written.

    Attributes:
        file: Its name.
        execution: How the original ran: a name of `statekit.state.constants`.
        first: The step of its first state.
        sqrt_units: How far the original's square roots may be from the exact ones, in units of 2^-24 of the value;
            0 where they are correctly rounded.
        resumed: Where the original went on from its own rounded save, if it did.
    """

    file: str
    execution: Execution
    first: int = 0
    sqrt_units: float = 0.0
    resumed: Resumption | None = None


@dataclass(frozen=True)
class Recording(AbstractContextManager["Recording"]):
    """One recorded run. Its files are opened when asked for, and closed when the context is left.

    Attributes:
        folder: Where it lies; all paths below are relative to it.
        system: Name of the module in `statekit.verify.systems`.
        first: State with which it begins (updates done before; 0 for a fresh run).
        last: State with which it ends.
        phases: Hyperparameters, by ranges of updates.
        learning_rate: For each update from first+1 on: a number, or one for each parameter group.
        trajectories: The recorded states; the first is the judge of free runs.
        checkpoint: Native checkpoint, or "" if there is none.
        checkpoint_step: Updates done when it was written.
        numbered_from: The number of state `first` in the names of tensors.
        gradients_per_update: Gradients whose running mean makes one update; each has a number of its own in the names.
    """

    folder: Path
    system: str
    first: int
    last: int
    phases: tuple[Phase, ...]
    learning_rate: tuple[Rate, ...]
    trajectories: tuple[Trajectory, ...]
    checkpoint: str = ""
    checkpoint_step: int | None = None
    numbered_from: int = 0
    gradients_per_update: int = 1
    _opened: dict[str, OpenFile] = field(default_factory=dict, repr=False, compare=False)
    _numbered: dict[str, dict[str, dict[str, Tensor]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def name(self) -> str:
        """The last two parts of the path: `t5x/momentum_f32`."""
        return "/".join(self.folder.resolve().parts[-2:])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()
        self._numbered.clear()

    def states(self, trajectory: Trajectory) -> Mapping[str, Tensor]:
        """Returns all tensors of a trajectory, by `{step}/...`."""
        return self._tensors(trajectory.file)

    def _tensors(self, file: str) -> Mapping[str, Tensor]:
        if file not in self._opened:
            self._opened[file] = open_safetensors(self.folder / file)
        return self._opened[file].tensors

    def _below(self, file: str, number: int) -> Mapping[str, Tensor]:
        """Returns the tensors of a file whose names begin with a number, by what follows it."""
        if file not in self._numbered:
            parts = self._numbered[file] = {}
            for name, tensor in self._tensors(file).items():
                first, slash, rest = name.partition("/")
                if slash:
                    parts.setdefault(first, {})[rest] = tensor
        return self._numbered[file].get(f"{number}", {})

    def phase(self, update: int) -> Phase:
        """Returns the phase of an update (first+1 .. last).

        Raises:
            FormatError: No phase covers it.
        """
        phase = next((phase for phase in self.phases if phase.first <= update <= phase.last), None)
        if phase is None:
            raise FormatError("No phase covers an update.", place=self.folder / DESCRIPTION, found=update)
        return phase

    def hints(self, update: int) -> CheckpointRef:
        """Returns what the recording says about the optimizer, for opening its checkpoint."""
        return CheckpointRef(hparams=dict(self.phase(update).hyperparameters))

    def number(self, step: int) -> int:
        """Returns the number that a state, or the update that makes it, has in the names of tensors."""
        return (step - self.first) * self.gradients_per_update + self.numbered_from

    def gradients(self, update: int) -> Mapping[str, Tensor]:
        """Returns the gradients of one update, by path."""
        xp, parts = NumpyBackend(), self._parts(update)
        if len(parts) == 1:
            return parts[0]
        return {path: in_memory(xp.numpy(mean)) for path, mean in self.gradients_in(xp, update).items()}

    def gradients_in(self, xp: Backend, update: int) -> dict[str, Value]:
        """Returns the gradients of one update in a backend, the mean of several computed there."""
        parts = self._parts(update)
        return {path: running_mean(xp, [xp.asarray(p[path].read()) for p in parts]) for path in parts[0]}

    def _parts(self, update: int) -> list[Mapping[str, Tensor]]:
        first, last = self.number(update - 1) + 1, self.number(update)
        return [self._below(GRADS, number) for number in range(first, last + 1)]

    def state(self, step: int, trajectory: Trajectory, update: int) -> TrainState:
        """Returns a recorded state, with the hyperparameters of an update."""
        return self._state(trajectory.file, step, update)

    def outcome(self, update: int, trajectory: Trajectory) -> TrainState:
        """Returns what an update led to, before the original may have rounded it by a save and a restore."""
        resumed = trajectory.resumed
        file = resumed.before if resumed is not None and resumed.step == update else trajectory.file
        return self._state(file, update, update)

    def _state(self, file: str, step: int, update: int) -> TrainState:
        tensors = self._below(file, self.number(step))
        if not tensors:
            raise FormatError("A recording lacks a state.", place=self.folder / file, found=f"step {step}")
        with _understood(self._description):
            return system(self.system).decode(tensors, step, self.phase(update))

    @property
    def _description(self) -> Path:
        """The file that describes it: ours, or its system's."""
        described = self.folder / DESCRIPTION
        return described if described.is_file() else self.folder / FOREIGN

    def rate(self, update: int) -> Rate:
        """Returns the learning rate of an update."""
        return self.learning_rate[update - self.first - 1]


def running_mean(xp: Backend, gradients: Sequence[Value]) -> Value:
    """Returns the mean of gradients as it runs, in their dtype.

    Source: google-deepmind/optax, optax/transforms/_accumulation.py, `MultiSteps`.
    """
    if len(gradients) == 1:
        return gradients[0]
    mean = xp.widen(gradients[0])
    for done, gradient in enumerate(gradients[1:], start=1):
        mean = mean + (xp.widen(gradient) - mean) / float(done + 1)
    return xp.narrow(mean, xp.dtype(gradients[0]))


def system(name: str) -> System:
    """Returns the module that reads one system's recordings.

    Raises:
        NotFoundError: No such module.
    """
    if name not in SYSTEMS:
        raise NotFoundError(
            "statekit can't read recordings of this system yet.", expected=", ".join(SYSTEMS), found=name
        )
    return SYSTEMS[name]


def open_recording(folder: Path) -> Recording:
    """Opens a recording; reads headers only.

    Raises:
        NotFoundError: The folder isn't a recording that can be judged, or its system isn't known.
        FormatError: Its description breaks the form.
    """
    missing = [name for name in (GRADS, TRAJECTORY) if not (folder / name).is_file()]
    described, foreign = folder / DESCRIPTION, folder / FOREIGN
    if missing or not (described.is_file() or foreign.is_file()):
        raise NotFoundError(
            "The path isn't a recording.",
            place=folder,
            expected=f"a folder with {DESCRIPTION} or meta.json, {GRADS} and {TRAJECTORY}",
            found=f"without {', '.join(missing) or DESCRIPTION}",
        )
    if described.is_file():
        return from_json(folder, _json(described))
    meta = _json(foreign)
    _check_sequence(folder / TRAJECTORY)
    with _understood(foreign):
        description = system(str(meta.get("system"))).describe(folder, meta)
    return from_json(folder, description)


@contextmanager
def _understood(place: Path) -> Iterator[None]:
    """Makes what a description's values of other types lead to an error of the description."""
    try:
        yield
    except StatekitError:
        raise
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        OverflowError,
        StopIteration,
    ) as error:
        raise FormatError(
            "A recording's description isn't what its system's recordings have.",
            place=place,
            found=f"{type(error).__name__}: {error}",
        ) from None


def _check_sequence(path: Path) -> None:
    with closing(open_safetensors(path)) as opened:
        steps = sorted(
            {int(step) for step in (n.partition("/")[0] for n in opened.tensors) if step.isdigit()}
        )
    if not steps or steps != list(range(steps[0], steps[-1] + 1)):
        raise NotFoundError(
            "No update can be judged without the states before and after it.",
            place=path,
            expected="states that follow one another",
            found=f"states {', '.join(map(str, steps)) or 'none'}",
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_small(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError("A description isn't JSON.", place=path, found=error) from None
    if not isinstance(data, dict):
        raise FormatError("A description isn't a JSON object.", place=path, found=type(data).__name__)
    return data


def from_json(folder: Path, data: Mapping[str, Any]) -> Recording:
    """Builds a recording from the content of `recording.json`.

    Raises:
        FormatError: The description breaks the form.
    """
    try:
        if data["format"] != FORMAT or data["version"] != 1:
            raise UsageError(f"{data['format']} version {data['version']}")
        first, last = data["steps"]
        if not data["trajectories"]:
            raise ValueError("no trajectory")
        checkpoint = data.get("checkpoint") or {}
        recording = Recording(
            folder=folder,
            system=_of(str, data["system"]),
            first=_of(int, first),
            last=_of(int, last),
            phases=tuple(
                Phase(_of(int, start), _of(int, end), _of(dict, phase["hyperparameters"]))
                for phase in data["phases"]
                for start, end in [phase["updates"]]
            ),
            learning_rate=tuple(rate_from(rate) for rate in data["learning_rate"]),
            trajectories=tuple(_trajectory(trajectory, first) for trajectory in data["trajectories"]),
            checkpoint=_of(str, checkpoint.get("path", "")),
            checkpoint_step=None if checkpoint.get("step") is None else _of(int, checkpoint["step"]),
            numbered_from=_of(int, data.get("numbered_from", first)),
            gradients_per_update=_of(int, data.get("gradients_per_update", 1)),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FormatError(
            "A recording's description breaks the form.",
            place=folder / DESCRIPTION,
            expected="schemas/statekit-recording.schema.json",
            found=f"{type(error).__name__}: {error}",
        ) from None
    if len(recording.learning_rate) != last - first:
        raise FormatError(
            "A recording needs one learning rate for each update.",
            place=folder / DESCRIPTION,
            expected=last - first,
            found=len(recording.learning_rate),
        )
    return recording


def _trajectory(data: Mapping[str, Any], first: int) -> Trajectory:
    resumed = data.get("resumed")
    return Trajectory(
        _of(str, data["file"]),
        data["execution"],
        _of(int, data.get("first", first)),
        float(data.get("sqrt_units", 0.0)),
        Resumption(_of(int, resumed["step"]), _of(str, resumed["before"]), _of(str, resumed["dtype"]))
        if resumed
        else None,
    )


def _of(kind: type[T], value: Any) -> T:
    """Returns a value of a kind; raises TypeError of another, and of a truth value in the place of a number."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{value!r:.60} in the place of {kind.__name__}")
    return value


def rate_from(rate: Any) -> Rate:
    """Returns a learning rate from a number, a sequence of numbers, or None."""
    if rate is None:
        return None
    return tuple(float(number) for number in rate) if isinstance(rate, (list, tuple)) else float(rate)


def to_json(recording: Recording) -> dict[str, Any]:
    """Returns the content of `recording.json`."""
    checkpoint = (
        {"path": recording.checkpoint, "step": recording.checkpoint_step} if recording.checkpoint else None
    )
    return {
        "format": FORMAT,
        "version": 1,
        "system": recording.system,
        "steps": [recording.first, recording.last],
        "phases": [
            {"updates": [p.first, p.last], "hyperparameters": dict(p.hyperparameters)}
            for p in recording.phases
        ],
        "learning_rate": [
            list(rate) if isinstance(rate, tuple) else rate for rate in recording.learning_rate
        ],
        "trajectories": [
            {
                "file": t.file,
                "execution": t.execution,
                "first": t.first,
                "sqrt_units": t.sqrt_units,
                "resumed": None if t.resumed is None else asdict(t.resumed),
            }
            for t in recording.trajectories
        ],
        "checkpoint": checkpoint,
        "numbered_from": recording.numbered_from,
        "gradients_per_update": recording.gradients_per_update,
    }
