"""Whether a live run in Keras is the run of its checkpoint: any of Keras' optimizers that a layout knows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import escape, glob
from os import PathLike
from string import Formatter
from time import monotonic
from typing import Any, Unpack

import keras

from statekit.attestation.attestation import Attestation, Finding
from statekit.attestation.each_save import OnSave, SealsEachSave, written_at
from statekit.attestation.faults import fault
from statekit.attestation.live_run import LiveRun
from statekit.attestation.once import AttestsOnce
from statekit.attestation.unknown_rule import attested
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.open_state import OpenState
from statekit.conversion.registry import detect_container
from statekit.dropin.loading import AttestOptions, Call
from statekit.errors import Faults, UsageError
from statekit.files.tree import Place
from statekit.maps.model_map import maps_of
from statekit.state.train_state import TrainState
from statekit.tensorflow.from_checkpoint import Variables, hints_of, model_of, renumbered
from statekit.tensorflow.live import canonical_names, live_checkpoint, live_state
from statekit.tensorflow.naming import names_in, path_of, twice, variables_of
from statekit.tensorflow.optimizer import SchemaOptimizer


def attest(
    optimizer: Any,
    variables: Variables,
    path: CheckpointRef | str | PathLike[str],
    *,
    generators: bool = False,
    strict: bool = False,
    sample: int | None = None,
    seed: int = 0,
    strict_schedule: bool = True,
    **options: Unpack[AttestOptions],
) -> Attestation:
    """Compares a live run with the checkpoint that it goes on from, by name and bit for bit.

    Call it after all is loaded and before the first update. Nothing is changed. Compared are variables, every slot with
    its dtype, averages, the count of updates, hyperparameters, the learning rate and its schedule.

    Args:
        optimizer: What makes the updates: Keras' own, or one of `statekit.tensorflow`; built or not.
        variables: The model, or its variables; those that aren't trained are compared where they are given.
        path: Anything statekit reads: a `.keras` or `.weights.h5` file, one of `tf.train.Checkpoint`, a torch file.
        generators: Whether to name the random generators that can't be compared: Keras keeps none in its files, so that
            dropout goes on otherwise than it would have.
        strict: Whether to raise what is wrong.
        sample: How many variables are compared by value, drawn with `seed`; all if None.
        seed: Of the sample.
        strict_schedule: Whether it is a finding that only an update after the next has another learning rate; a
            warning otherwise.
        **options: As in `load_params`: what the files don't say, `names`, and a map.

    Returns:
        The verdict with every finding. `print` shows it, `.json()` is for programs.

    Raises:
        StateError: With `strict`, the live run isn't the checkpoint's; or the checkpoint can't be decoded.
        UsageError: Variables have one path; lists every one.
        InexactError: A map is less exact than required; lists every parameter.
        NotFoundError: Nothing is there.
        FormatError: The bytes can't be trusted, or no format fits.
    """
    run = live_run(
        optimizer, variables, path, generators=generators, strict_schedule=strict_schedule, **options
    )
    return attested(run.run, path, sample, seed, strict)


@dataclass(frozen=True)
class KerasRun:
    """A run in memory, and what it is made of.

    Attributes:
        optimizer: What makes the updates, without wrappers.
        named: The variables by the names that the live state has them by; filled when that is read.
        run: It, as it is held against a checkpoint.
    """

    optimizer: Any
    named: Mapping[str, Any]
    run: LiveRun


def live_run(
    optimizer: Any,
    variables: Variables,
    path: CheckpointRef | str | PathLike[str],
    *,
    generators: bool = False,
    strict_schedule: bool = True,
    **options: Unpack[AttestOptions],
) -> KerasRun:
    """Returns a run as it is held against a checkpoint; arguments are those of `attest`."""
    variables, keys = variables_of(variables), names_in(variables)
    given = _floating(variables)
    Faults(
        ("is the path of several variables", given_variable)
        for given_variable in twice(path_of(v) for v in given)
    ).check(UsageError, "The variables can't be told apart", remedy="give layers names of their own")
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    call = Call.of(path, options).alone()
    call = replace(call, names=call.names or keys)
    names, remembered = call.names, {} if call.names else canonical_names(optimizer)
    hints = hints_of(call, variables)

    note = _periods(call.path, hints, optimizer)
    if note:
        hints = replace(hints, hparams={**hints.hparams, _PERIODS: note})

    order = [
        {**remembered, **names}.get(path_of(given_variable), path_of(given_variable))
        for given_variable in given
        if given_variable.trainable
    ]

    named: dict[str, Any] = {}

    def live(opened: OpenState) -> TrainState:
        # The optimizer remembers the names of what it moves; batch statistics aren't among that.
        here = {} if names or call.map else renumbered(opened, given)
        here = {path: name for path, name in here.items() if path not in remembered}
        named.update({here.get(path_of(variable), path_of(variable)): variable for variable in given})
        return live_state(named, optimizer)

    by_path = {path_of(variable): variable for variable in given}
    run = LiveRun(
        live=live,
        findings=_strangers(optimizer, given),
        generators=partial(_generators, variables) if generators else None,
        unchecked=[f"{_PERIODS}: the checkpoint doesn't say it"] if note else (),
        names=names,
        remembered=remembered,
        maps=maps_of(call.map, call.config, builds=False, model=model_of(given, {**remembered, **names})),
        require=call.require,
        shows_schedule=True,
        strict_schedule=strict_schedule,
        whole_model=isinstance(variables, keras.Model),
        hints=hints,
        instead=_otherwise(hints, call.ref.param_names, optimizer, order),
        checkpoint=lambda: live_checkpoint(by_path, optimizer),
    )
    return KerasRun(optimizer, named, run)


class AttestCallback(AttestsOnce, keras.callbacks.Callback):  # type: ignore[misc]  # its base is untyped
    """Attests a run of `fit` before its first update: `model.fit(..., callbacks=[AttestCallback("run.keras")])`.

    Args:
        path: The checkpoint that the run goes on from.
        strict: Whether to raise what is wrong, or to print it alone.
        **options: Those of `statekit.tensorflow.attest`.

    Attributes:
        result: What was found; None before the first update.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets what was said of an earlier run."""
        self._forget()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Attests, the first time.

        Raises:
            StateError: With `strict`, the live run isn't the checkpoint's.
        """
        self._once(lambda: attest(self.model.optimizer, self.model, self.path, **self.options))


_PAUSE = 20
"""How many times as long as a look into a folder took no batch looks again: large folders and networks are slow."""


class SealCallback(SealsEachSave, keras.callbacks.Callback):  # type: ignore[misc]  # its base is untyped
    """Seals each file that `ModelCheckpoint` writes, and has doctor look into it.

    `model.fit(..., callbacks=[ModelCheckpoint(file), SealCallback(file)])`, in this order. No batch waits for it; the
    end of `fit` does.

    Args:
        filepath: The files, as `ModelCheckpoint` has them.
        on_save: Told what came of each checkpoint, by another thread; what didn't pass is printed if None.

    Attributes:
        saves: What came of the checkpoints so far.
    """

    def __init__(self, filepath: str, on_save: OnSave | None = None) -> None:
        super().__init__(on_save)
        parts = Formatter().parse(os.fspath(filepath))
        self._pattern = "".join(escape(text) + "*" * (field is not None) for text, field, *_ in parts)
        self._seen, self._next_look = self._written(), 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begins to seal what was written since the batch before, where looking for it takes little of the time."""
        if monotonic() >= self._next_look:
            self._look()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins to seal what was written since."""
        self._look()

    def on_train_end(self, logs: Any = None) -> None:
        """Waits for the last seal."""
        self._look()
        self.wait()

    def _look(self) -> None:
        begun, written = monotonic(), self._written()
        self._next_look = monotonic() + _PAUSE * (monotonic() - begun)
        for path in sorted(written - self._seen):
            self.begin(path[0])
        self._seen |= written

    def _written(self) -> set[tuple[str, int]]:
        """Returns the files that are there, each with the time when it was written."""
        times = {path: written_at(path) for path in glob(self._pattern)}
        return {(path, time) for path, time in times.items() if time is not None}


_PERIODS = "gradient_accumulation_steps"
_KEPT = ("use_ema", "amsgrad", _PERIODS)
"""Arguments that decide which variables an optimizer of Keras has."""
_NUMBERED = (
    "The checkpoint numbers the optimizer's variables and nothing in it tells what they are; they are taken for those "
    "of the live optimizer, in its order."
)


def _periods(path: Place, hints: CheckpointRef, optimizer: Any) -> int | None:
    """Returns over how many calls the live optimizer accumulates, where a file of Keras' weights counts calls alone."""
    silent = (
        detect_container(path)[0].name in ("keras-h5", "tf-bundle") and _PERIODS not in hints.hyperparameters
    )
    return optimizer.gradient_accumulation_steps if silent else None


def _otherwise(
    hints: CheckpointRef, given: Sequence[str] | None, optimizer: Any, order: Sequence[str]
) -> list[tuple[CheckpointRef, str]]:
    """Returns what to read a checkpoint with that doesn't fit the model's order: its own, then the live optimizer's."""
    alone = replace(hints, param_names=None if given is None else tuple(given))
    tries = [(alone, "")] if alone != hints else []
    if isinstance(optimizer, SchemaOptimizer):
        return tries
    config = optimizer.get_config()
    kept = {name: config[name] for name in _KEPT if config.get(name)}
    names = hints.param_names if hints.param_names is not None else tuple(order)
    values = {**kept, **hints.hyperparameters}
    return [*tries, (replace(hints, hparams=values, param_names=names), _NUMBERED)]


def _floating(variables: Variables) -> list[Any]:
    """Returns what is compared: of a model its weights, without the seeds of random generators."""
    every = variables.weights if isinstance(variables, keras.Model) else list(variables)
    return [variable for variable in every if "float" in str(getattr(variable.dtype, "name", variable.dtype))]


def _generators(variables: Variables, opened: OpenState) -> tuple[list[Finding], list[str]]:
    """Says of each random generator of a model that it isn't compared: Keras keeps none.

    Source: keras-team/keras keras/src/random/seed_generator.py, `SeedGenerator`, which is no `KerasSaveable`.
    """
    layers = list(variables._flatten_layers()) if isinstance(variables, keras.Model) else []
    kinds = keras.random.SeedGenerator
    live = [layer.name for layer in layers if isinstance(getattr(layer, "seed_generator", None), kinds)]
    kept = [name for name in opened.checkpoint.tensors if "seed_generator" in name]
    unsaid = [f"random: the seed generator of {name}: Keras keeps it in no file" for name in live]
    unsaid += [f"random: {name}: nothing tells whose generator's state it is" for name in kept]
    return [], [*unsaid, "random: generators that are no layer's: no file of Keras keeps them"]


def _strangers(optimizer: Any, variables: Sequence[Any]) -> list[Finding]:
    identities = {id(variable) for variable in variables}
    strange = [
        path_of(variable) for variable in optimizer._trainable_variables if id(variable) not in identities
    ]
    if not strange:
        return []
    return [fault("optimizer-elsewhere", strange, "the model's variables", f"{len(strange)} others")]
