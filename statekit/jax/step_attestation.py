"""Whether the next update of a live run in JAX is the one that its rule makes of the checkpoint's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

import jax
import numpy as np
import optax

from statekit.arrays.backend import backend
from statekit.arrays.intervals import Interval
from statekit.attestation.attest import Sides
from statekit.attestation.attestation import Attestation
from statekit.attestation.next_update import NextUpdate, enclosed_rate, next_update
from statekit.attestation.update import Gradient
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.dropin.by_name import path_of
from statekit.dropin.overrides import rate_of
from statekit.errors import UsageError
from statekit.jax.attestation import Live, live_run
from statekit.jax.leaves import leaves_of
from statekit.jax.live import LiveArray
from statekit.jax.transformation import Rate
from statekit.state.constants import of_xla
from statekit.state.options import rate_needed, stored_rate
from statekit.state.schema import WEIGHTS, load_schema
from statekit.state.train_state import Group
from statekit.tensors.tensor import Array


class AttestedStep:
    """An update that is attested, where the run shows it."""

    def __init__(self, live: Live, update: NextUpdate) -> None:
        self._live, self._update = live, update
        self._leaves = leaves_of(live.params)
        self._waiting, self._steps = self._accumulated(live.opt_state), _steps(live.opt_state)

    @property
    def result(self) -> Attestation | None:
        """What was found of the state before the update, and of the update; None within the block."""
        return self._update.result

    def check(self, grads: Any, params: Any, opt_state: Any) -> None:
        """Shows what a call of the transformation made; the first that makes an update is taken.

        With `optax.MultiSteps` show every call, or the last before an update at least; what `optax.apply_if_finite` has
        skipped is no update.

        Args:
            grads: The gradients as the transformation's `update` gets them, in a tree like the parameters.
            params: The parameters after the update.
            opt_state: The optimizer's state after it.

        Raises:
            UsageError: A tree is another than before the update.
        """
        if not self._update.is_awaited:
            return
        given = self._by_name("grads", grads)
        self._by_name("params", params)
        present = {path_of(name): LiveArray(grad, name) for name, grad in given.items() if _is_array(grad)}
        before, self._steps = self._steps, _steps(opt_state)
        waits = bool(before) and self._steps == before
        if waits or not all(map(_is_finite, _parts(opt_state, optax.ApplyIfFiniteState))):
            self._waiting = self._accumulated(opt_state)
            return
        self._live.params, self._live.opt_state = params, opt_state
        (waiting, calls), blocks = self._waiting, self._update.blocks
        taken = {
            path: Gradient(
                np.array(present[path].read(index)),
                waiting=waiting.get(path),
                mean_of=calls + 1 if waiting else 0,
                fused=True,
            )
            for path, index in blocks.items()
            if path in present
        }
        ran = of_xla(jax.default_backend())
        self._update.judge(
            taken, present.keys(), backend("jax").sqrt_units, [_MEAN] if waiting else (),
            None if ran == "compiled" else ran,
        )  # fmt: skip

    def _accumulated(self, opt_state: Any) -> tuple[dict[str, Array], int]:
        """Returns the blocks of what waits in `optax.MultiSteps`, and of how many calls it is the mean."""
        for part in _parts(opt_state, optax.MultiStepsState):
            means = {
                path_of(name): LiveArray(grad, name)
                for name, grad in self._by_name("opt_state", part.acc_grads).items()
            }
            read = {path: np.array(means[path].read(index)) for path, index in self._update.blocks.items()}
            return read, int(part.mini_step)
        return {}, 0

    def _by_name(self, subject: str, tree: Any) -> dict[str, Any]:
        try:
            return self._leaves.like(tree)
        except ValueError as error:
            raise UsageError(
                "A tree isn't like the parameters before the update.",
                place=f"check({subject})",
                expected=str(self._leaves.treedef),
                found=str(error),
            ) from error


_MEAN = "optax.MultiSteps takes the mean of gradients (use_grad_mean), as it usually does: its state doesn't say it."


def _parts(opt_state: Any, kind: type) -> list[Any]:
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def _steps(opt_state: Any) -> list[int]:
    """Returns the updates done as `optax.MultiSteps` counts them."""
    return [int(part.gradient_step) for part in _parts(opt_state, optax.MultiStepsState)]


def _is_finite(part: Any) -> bool:
    return bool(part.last_finite)


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and value.dtype != jax.dtypes.float0


@contextmanager
def attested_step(
    params: Any,
    opt_state: Any,
    path: CheckpointRef | str | PathLike[str],
    *,
    learning_rate: Rate | Mapping[str, Rate] = None,
    sample: int | None = 32,
    seed: int = 0,
    strict: bool = False,
    **options: Any,
) -> Iterator[AttestedStep]:
    """Compares a live run with its checkpoint, as `attest`, and then the run's next update with that of its rule.

        with statekit.jax.attested_step(params, opt_state, "ckpt", learning_rate=schedule) as step:
            params, opt_state, grads = train_step(params, opt_state, batch)  # jitted, donating, sharded
            step.check(grads, params, opt_state)
        print(step.result)

    Sampled parameters are stepped from the checkpoint's state; what the run has made of them must lie within what the
    rule's arithmetic can return. That shows what the state can't: powers of betas that were cached before the count was
    restored, a learning rate of another step, state that is moved elsewhere. Optax keeps hyperparameters in no file:
    those that aren't its defaults are said in `hparams`, as `{"b2": 0.95, "weight_decay": 0.1,
    "global_norm_clip_threshold": 1.0}`; what was assumed the result says. An optimizer whose rule no schema has is
    attested for its state alone, which is said; so is what a rule takes as a whole where this process has a part.

    Args:
        params: As in `attest`.
        opt_state: As in `attest`.
        path: As in `attest`.
        learning_rate: As in `load_optimizer`: a number or a schedule, where the checkpoint has none.
        sample: How many parameters are stepped, drawn with `seed`; all if None. Where a rule takes the gradients of a
            group together, those of the group are. The state is compared whole.
        seed: Of the sample.
        strict: Whether to raise what is wrong, after the block.
        **options: Other arguments of `attest`.

    Raises:
        UsageError: No update was shown in the block, or the learning rate is in no file and wasn't given.
        UnknownRuleError: The rule needs a hyperparameter that the checkpoint doesn't say.
        StateError: With `strict`, the state or the update isn't the checkpoint's; others as of `attest`.
    """
    live = Live(params, opt_state)
    awaited = (
        "statekit.jax.attested_step",
        "a call of step.check(grads, params, opt_state)",
        "call it in the block, with what the update made",
    )

    def rates(sides: Sides) -> Callable[[Group], Any]:
        return _rates(sides, learning_rate)

    with next_update(
        live_run(live, path, **options),
        path,
        sample=sample,
        seed=seed,
        strict=strict,
        awaited=awaited,
        rate=rates,
    ) as update:
        yield AttestedStep(live, update)


def _rates(sides: Sides, given: Rate | Mapping[str, Rate]) -> Callable[[Group], Any]:
    """Returns what gives the learning rate of a group, if the caller says it."""
    state = sides.right

    def rate(group: Group) -> Any:
        number = rate_of(given, group, state, "learning_rate")
        return _enclosed(number, state.counts.schedule) if callable(number) else number

    for group in state.optimizer.groups:
        schema, variant = state.optimizer.kind(group)
        if schema == WEIGHTS or variant not in load_schema(schema).stepped:
            continue
        is_known = rate(group) is not None or stored_rate(group.hyperparameters) is not None
        if not is_known and rate_needed(schema, str(variant), group.hyperparameters):
            raise UsageError(
                "The update needs a learning rate, and the checkpoint has none.",
                place="learning_rate",
                expected="a number, or the run's schedule",
                found="none",
                remedy="statekit.jax.attested_step(..., learning_rate=...); of several optimizers {schema: rate}",
            )
    return rate


def _enclosed(schedule: Callable[[Any], Any], updates: int) -> Interval:
    """Returns what a schedule may give in a step after so many updates, compiled or not."""
    count = jax.numpy.int32(updates)
    return enclosed_rate([float(function(count)) for function in (schedule, jax.jit(schedule))])
