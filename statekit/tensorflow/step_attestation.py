"""Whether the next update of a live run in Keras is the one that its rule makes of the checkpoint's state.

A training step mostly runs as a graph, in which nothing can be looked at. So the optimizer's `apply` is told to leave
the gradients that it gets in variables, and these are read when the graph has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from statekit.arrays.backend import backend
from statekit.attestation.attest import Sides
from statekit.attestation.next_update import NextUpdate, enclosed_rate, next_update
from statekit.attestation.update import Gradient
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.dropin.by_name import path_of as canonical
from statekit.errors import UsageError
from statekit.state.train_state import Group, Optimizer
from statekit.tensorflow.attestation import KerasRun, live_run
from statekit.tensorflow.from_checkpoint import Variables
from statekit.tensorflow.live import rate_factor

_PLACE = "statekit.tensorflow.attested_step"


@contextmanager
def attested_step(
    optimizer: Any,
    variables: Variables,
    path: CheckpointRef | str | PathLike[str],
    *,
    sample: int | None = 32,
    seed: int = 0,
    strict: bool = False,
    **options: Any,
) -> Iterator[NextUpdate]:
    """Compares a live run with its checkpoint, as `attest`, and then the run's next update with that of its rule.

        with statekit.tensorflow.attested_step(model.optimizer, model, "run.keras") as step:
            model.fit(...)  # or train_on_batch, or optimizer.apply_gradients
        print(step.result)

    Sampled variables are stepped from the checkpoint's state, with its hyperparameters; what the run has made of them
    must lie within what the rule's arithmetic can return. That shows what the state can't: a hyperparameter or learning
    rate that is used once before it is restored, gradients that are changed on the way, state that is moved elsewhere.
    The first update in the block that isn't skipped is taken. What the checkpoint doesn't say and the live optimizer
    does, as a file of weights without its config, is taken from that, which is said.

    Args:
        optimizer: As in `attest`.
        variables: As in `attest`. Given the model, any number of its steps may be made in the block, one a call of its
            compiled function (`steps_per_execution=1`); a step of your own in a `tf.function` must be traced in the
            block, and make one update there.
        path: As in `attest`.
        sample: How many variables are stepped, drawn with `seed`; all if None. Where a rule takes the gradients of a
            group together, those of the group are. The state is compared whole.
        seed: Of the sample.
        strict: Whether to raise what is wrong, after the block.
        **options: Other arguments of `attest`.

    Raises:
        UsageError: No update was seen in the block, or several before one could be looked at, or several replicas make
            it together.
        StateError: With `strict`, the state or the update isn't the checkpoint's; others as of `attest`.
    """
    run = live_run(optimizer, variables, path, **options)
    awaited = (
        _PLACE,
        "an update by the optimizer that isn't skipped",
        "make it in the block; a tf.function that was traced before isn't seen: trace it there",
    )

    def unstepped() -> dict[str, str]:
        inner = run.optimizer
        if inner.loss_scale_factor and inner.gradient_accumulation_steps:
            why = "gradients that wait were divided by loss_scale_factor already, and its own not yet"
            return {canonical(name): why for name in run.named}
        return {
            canonical(name): "its constraint moves it too"
            for name, variable in run.named.items()
            if getattr(variable, "constraint", None) is not None
        }

    watch = _Watch(run)
    with next_update(
        run.run,
        path,
        sample=sample,
        seed=seed,
        strict=strict,
        awaited=awaited,
        rate=watch.rates,
        unstepped=unstepped,
    ) as update:
        watch.begin(update)
        with watch.watching(variables if isinstance(variables, keras.Model) else None):
            yield update
            watch.look()


class _Watch:
    """Looks at an optimizer's next update."""

    _update: NextUpdate

    def __init__(self, run: KerasRun) -> None:
        self._run, self._optimizer = run, run.optimizer
        self._left: dict[str, list[Any]] = {}
        self._moved: set[str] = set()

    def begin(self, update: NextUpdate) -> None:
        """Awaits an update."""
        self._update = update
        self._paths = {id(variable): canonical(name) for name, variable in self._run.named.items()}
        # Not the optimizer's own count, which may be what is wrong.
        self._calls = tf.Variable(0, dtype=tf.int64)
        self._calls_before = int(
            backend("tensorflow").numpy(tf.convert_to_tensor(self._optimizer._iterations))
        )

    def rates(self, sides: Sides) -> Callable[[Group], Any]:
        """Returns what gives the rate of a group where a schedule does: the live one, which is the checkpoint's."""
        schedule = self._optimizer._learning_rate
        live = sides.live.optimizer.groups if sides.live is not None else ()

        def rate(group: Group) -> Any:
            if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
                return None
            number = next(
                (i for i, group_of_live in enumerate(live) if group.paths[0] in group_of_live.paths), 0
            )
            calls = tf.constant(self._calls_before + int(self._calls) - 1, tf.int64)
            rates = [
                float(function(calls)) for function in (schedule, tf.function(schedule, jit_compile=True))
            ]
            decoded = Optimizer("", None, ()) if sides.live is None else sides.live.optimizer
            factor = rate_factor(self._optimizer, decoded, number)
            return enclosed_rate([rate * factor for rate in rates])

        return rate

    @contextmanager
    def watching(self, model: keras.Model | None) -> Iterator[None]:
        """Has the optimizer leave its gradients, and looks after each call of a model's compiled function."""
        strategy = getattr(self._optimizer, "_distribution_strategy", None)
        if strategy is not None and strategy.num_replicas_in_sync > 1:
            raise UsageError(
                "The update of several replicas can't be looked at.",
                place=_PLACE,
                expected="one replica, which has the whole gradient",
                found=f"{strategy.num_replicas_in_sync}",
                remedy="attest the state alone: statekit.tensorflow.attest",
            )
        # Past Keras' own __setattr__, which would keep both as parts of the model.
        object.__setattr__(self._optimizer, "apply", self._leaving(self._optimizer.apply))
        if model is not None:
            object.__setattr__(model, "make_train_function", self._looking(model, model.make_train_function))
            model.train_function = None
        try:
            yield
        finally:
            object.__delattr__(self._optimizer, "apply")
            if model is not None:
                object.__delattr__(model, "make_train_function")
                model.train_function = None

    def _leaving(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def leaving(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
            if not self._update.is_awaited:
                return apply(grads, trainable_variables)
            given = (
                self._optimizer._trainable_variables if trainable_variables is None else trainable_variables
            )
            self._leave(list(grads), list(given))
            self._calls.assign_add(1)
            result = apply(grads, trainable_variables)
            if not tf.inside_function():
                self.look()
            return result

        return leaving

    def _leave(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Leaves the gradients of the blocks where they can be read, and what waits to be added to them."""
        waiting = getattr(self._optimizer, "_accumulated_gradients", None) or ()
        summed = dict(zip(map(id, self._optimizer._trainable_variables), waiting, strict=False))
        for grad, variable in zip(grads, variables, strict=True):
            path = self._paths.get(id(variable))
            if grad is None or path is None:
                continue
            self._moved.add(path)
            index = self._update.blocks.get(path)
            if index is None:
                continue
            parts = [tf.convert_to_tensor(grad)[index] if index else tf.convert_to_tensor(grad)]
            if (total := summed.get(id(variable))) is not None:
                parts.append(total.value[index] if index else tf.convert_to_tensor(total.value))
            if path not in self._left:
                with tf.init_scope():
                    self._left[path] = [tf.Variable(tf.zeros(part.shape, part.dtype)) for part in parts]
            for holder, part in zip(self._left[path], parts, strict=True):
                holder.assign(part)

    def _looking(self, model: keras.Model, make: Callable[..., Any]) -> Callable[..., Any]:
        def making(force: bool = False) -> Any:
            if model.train_function is not None and not force:
                return model.train_function
            make(force)
            run = model.train_function

            def running(*args: Any, **kwargs: Any) -> Any:
                result = run(*args, **kwargs)
                self.look()
                return result

            model.train_function = running
            return running

        return making

    def look(self) -> None:
        """Judges the update if one was made since."""
        if not self._update.is_awaited:
            return
        steps = self._optimizer.gradient_accumulation_steps or 1
        calls = self._calls_before + int(self._calls)
        updates = calls // steps - self._calls_before // steps
        if not updates:
            return
        if updates > 1:
            raise UsageError(
                "Several updates were made before the first could be looked at.",
                place=_PLACE,
                expected="1",
                found=updates,
                remedy="compile the model with steps_per_execution=1; call a tf.function of your own once",
            )
        grads = {}
        for path, left in self._left.items():
            value, *waiting = (np.array(part) for part in left)
            grads[path] = Gradient(value, float(steps), waiting[0] if waiting else None, fused=True)
        self._update.judge(grads, self._moved, backend("tensorflow").sqrt_units)
