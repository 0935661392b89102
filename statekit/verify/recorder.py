"""Records a run of anyone's optimizer, so that `statekit replay` can judge a continuation of it.

Example, in any framework whose arrays NumPy understands:

    recorder = Recorder("my_run", system="t5x", hyperparameters={"beta1": 0.9, "min_dim_size_to_factor": 128})
    recorder.start(params, slots)                       # {path: array}, {path: {slot: array}}
    for batch in batches:
        ...
        recorder.update(grads, params, slots, learning_rate)
    recorder.close(checkpoint="checkpoints/checkpoint_10", checkpoint_step=10)
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from statekit.errors import Faults, TargetExistsError, UsageError
from statekit.files.durable import replace_file
from statekit.files.safetensors import save_safetensors
from statekit.optim.steps import USUAL, Execution
from statekit.state.constants import variant_constants
from statekit.state.train_state import TrainState
from statekit.tensors.digest import tensor_bytes
from statekit.tensors.tensor import Array, Index, Stored, Tensor
from statekit.verify.contract import DESCRIPTION, GRADS, TRAJECTORY, Phase
from statekit.verify.recording import Rate, Recording, Trajectory, rate_from, system, to_json


@dataclass
class Spool:
    """Tensors put aside on disk until all their names are known, as a safetensors header must."""

    folder: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)
    _file: BinaryIO | None = None

    def add(self, name: str, array: Array) -> None:
        """Puts one array aside."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  (lives as long as the spool)
        native = np.asarray(array, order="C")  # ascontiguousarray would give a 0-d array an axis
        descriptor, offset = self._file.fileno(), self._file.seek(0, os.SEEK_END)
        self._file.write(native.tobytes())
        self._file.flush()

        def fetch(index: Index) -> Array:
            stored = os.pread(descriptor, native_bytes, offset)
            return np.array(np.frombuffer(stored, dtype).reshape(shape)[index])

        native_bytes, shape, dtype = native.nbytes, native.shape, native.dtype
        self.tensors[name] = Stored(shape, dtype, fetch, name, "spool")

    def write(self, path: Path) -> None:
        """Writes everything as one safetensors file."""
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with unfinished.open("xb") as output:
                save_safetensors(self.tensors, output, lambda _, tensor: tensor_bytes(tensor), {})
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
            if self._file is not None:
                self._file.close()


class Recorder:
    """Writes a recording: description, gradients, trajectory.

    Args:
        folder: A new folder.
        system: Whose names are used: a module of `statekit.verify.systems`.
        hyperparameters: In that system's own names.
        execution: `compiled`, or `op_by_op` if no compiler fuses the original's operations; None: as it usually runs,
            PyTorch's optimizers op by op and all others compiled.
        first: Updates done before the start.

    Raises:
        TargetExistsError: The folder is there already.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        system: str,
        hyperparameters: Mapping[str, Any],
        execution: Execution | None = None,
        first: int = 0,
    ) -> None:
        self.folder = Path(folder)
        if self.folder.exists():
            raise TargetExistsError(
                "A recording needs a new folder.", place=self.folder, remedy="name another"
            )
        self.folder.mkdir(parents=True)
        self._system, self._execution = system, execution or _usual(hyperparameters)
        self._hyperparameters = dict(hyperparameters)
        self._first = self._step = first
        self._rates: list[Rate] = []
        self._grads, self._states = Spool(self.folder), Spool(self.folder)

    def start(self, params: Mapping[str, Array], slots: Mapping[str, Mapping[str, Array]]) -> None:
        """Records the state before the first update.

        Raises:
            UsageError: It was recorded already, or slots are of no parameter.
        """
        if self._states.tensors:
            raise UsageError("A recording starts once.", place=self.folder)
        _check_named(params, {"slots": slots})
        self._state(params, slots)

    def update(
        self,
        grads: Mapping[str, Array],
        params: Mapping[str, Array],
        slots: Mapping[str, Mapping[str, Array]],
        learning_rate: float | Sequence[float] | None,
    ) -> None:
        """Records one update: its gradients, the learning rate (of each group), and the state after it.

        Args:
            grads: Gradients by path.
            params: Parameters by path.
            slots: Slots by path and name.
            learning_rate: A number, one for each group, or None where the optimizer computes its own.

        Raises:
            UsageError: Nothing was recorded before, or gradients or slots are of no parameter; lists every one.
        """
        if not self._states.tensors:
            raise UsageError(
                "A recording needs the state before its first update.", remedy="call start() first"
            )
        _check_named(params, {"gradient": grads, "slots": slots})
        self._step += 1
        for path, grad in grads.items():
            self._grads.add(f"{self._step}/{path}", np.asarray(grad))
        self._rates.append(rate_from(learning_rate))
        self._state(params, slots)

    def close(self, checkpoint: str = "", checkpoint_step: int | None = None) -> None:
        """Writes the files.

        Args:
            checkpoint: What the original's own save code wrote, relative to the folder.
            checkpoint_step: Updates done when it was written.
        """
        recording = Recording(
            folder=self.folder,
            system=self._system,
            first=self._first,
            last=self._step,
            phases=(Phase(self._first + 1, self._step, self._hyperparameters),),
            learning_rate=tuple(self._rates),
            trajectories=(Trajectory(TRAJECTORY, self._execution, self._first),),
            checkpoint=checkpoint,
            checkpoint_step=checkpoint_step,
            numbered_from=self._first,
        )
        self._grads.write(self.folder / GRADS)
        self._states.write(self.folder / TRAJECTORY)
        text = json.dumps(to_json(recording), indent=1, sort_keys=True)
        replace_file(self.folder / DESCRIPTION, f"{text}\n".encode())

    def _state(self, params: Mapping[str, Array], slots: Mapping[str, Mapping[str, Array]]) -> None:
        for path, value in params.items():
            self._states.add(f"{self._step}/param/{path}", np.asarray(value))
            for slot, array in slots.get(path, {}).items():
                self._states.add(f"{self._step}/slot/{path}/{slot}", np.asarray(array))


def _check_named(params: Mapping[str, Array], given: Mapping[str, Mapping[str, object]]) -> None:
    """Refuses what is of no parameter, which no name in a recording could stand for."""
    faults = Faults(
        (f"{subject} of no parameter", p)
        for subject, paths in given.items()
        for p in paths
        if p not in params
    )
    faults.check(
        UsageError, "What is recorded isn't of the parameters", remedy="use the paths of the parameters"
    )


def _usual(hyperparameters: Mapping[str, Any]) -> Execution:
    """Returns how the original that a recording names usually runs; compiled if it doesn't name a variant."""
    groups = [{**hyperparameters, **group} for group in hyperparameters.get("groups", [{}])]
    if not all({"schema", "variant"} <= spec.keys() for spec in groups):
        return "compiled"
    constants = (variant_constants(str(spec["schema"]), str(spec["variant"])) for spec in groups)
    usual = {USUAL.get(constant.get("compute_dtype", ""), "compiled") for constant in constants}
    return usual.pop() if len(usual) == 1 else "compiled"


def write_trajectory(path: Path, states: Iterator[TrainState], recording: Recording) -> TrainState:
    """Writes states under the recording's own names, as one safetensors file, and returns the last of them."""
    spool, first = Spool(path.parent), recording.first
    # What a checkpoint of the run held beside is in its own form: that of the recorded states counts here.
    extra = recording.state(first, recording.trajectories[0], first + 1).extra
    last: TrainState | None = None
    for last in states:
        phase = recording.phase(max(last.counts.updates, first + 1))
        for name, tensor in system(recording.system).encode(replace(last, extra=extra), phase).items():
            spool.add(f"{recording.number(last.counts.updates)}/{name}", tensor.read())
    if last is None:
        raise UsageError("There is no state to write.", place=path)
    spool.write(path)
    return last
