"""A run's next update beside the one that its rule makes of the checkpoint: the same in every framework.

What a framework adds is where its gradients are and when an update is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np

from statekit.arrays.intervals import UNIT, Interval
from statekit.attestation.attest import Sides, attesting, sampled
from statekit.attestation.attestation import Attestation, Finding
from statekit.attestation.faults import broken
from statekit.attestation.live_run import LiveRun
from statekit.attestation.unknown_rule import attested
from statekit.attestation.update import Chosen, Gradient, chosen_blocks, update_findings
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.errors import StatekitError, UnknownFormatError, UsageError
from statekit.state.train_state import Group
from statekit.tensors.tensor import Index

SCHEDULE_UNITS = 4
"""How far a schedule may be in a compiled step from what it gives by itself, in units of 2^-24.

Chosen, not derived (docs/bounds.md): a schedule is any function, and how it is fused with the step isn't known.
"""


def enclosed_rate(rates: Sequence[float]) -> Interval:
    """Returns the interval of a schedule's rate inside a compiled step, from its rates compiled and not."""
    low, high = np.asarray(min(rates)), np.asarray(max(rates))
    room = SCHEDULE_UNITS * UNIT
    return Interval(low - np.abs(low) * room, high + np.abs(high) * room, "float32", True)


class NextUpdate:
    """The first update that a run makes while its checkpoint is open.

    Args:
        sides: The checkpoint's state and the live one before the update; None where no schema has the rule.
        sample: How many parameters are stepped, drawn with `seed`; all if None.
        seed: Of the sample.
        rate: Learning rate of a group where the caller says it: a number, or an interval that encloses it; None: as the
            checkpoint has it.
        unstepped: Parameters that the rule alone doesn't move, and why, a phrase each.

    Attributes:
        result: What was found of the state before the update, and of the update; None within the block.

    Raises:
        UnknownRuleError: The rule needs a hyperparameter that the checkpoint doesn't say.
    """

    def __init__(
        self,
        sides: Sides | None,
        sample: int | None,
        seed: int,
        rate: Callable[[Group], Any] = lambda group: None,
        unstepped: Mapping[str, str] = {},
    ) -> None:
        self.result: Attestation | None = None
        self._sides, self._rate = sides, rate
        self._made: Attestation | None = None
        self._chosen = Chosen({}, ("the update: the live state can't be read",))
        if sides is not None and sides.live is not None:
            paths = list(sides.right.optimizer.paths)
            self._chosen = chosen_blocks(sides.right, sides.live, sampled(paths, sample, seed), unstepped)

    @property
    def blocks(self) -> Mapping[str, Index]:
        """The block that is stepped of each parameter, whose gradient is asked for."""
        return self._chosen.blocks

    @property
    def is_awaited(self) -> bool:
        """Whether an update is still to be judged."""
        return self._sides is not None and self._made is None

    @property
    def updates(self) -> int | None:
        """Updates done before it, by the live run's count; None if that is unknown."""
        live = None if self._sides is None else self._sides.live
        return None if live is None else live.counts.updates

    def judge(
        self,
        grads: Mapping[str, Gradient],
        moved: Collection[str],
        sqrt_units: float,
        assumptions: Sequence[str] = (),
        execution: str | None = None,
    ) -> None:
        """Compares the live state after an update with the update that the rule makes.

        Args:
            grads: Gradients of the blocks, by path.
            moved: The parameters that have a gradient.
            sqrt_units: How far the framework's square roots may be from the exact ones, in units of 2^-24.
            assumptions: What was assumed of the gradients, a sentence each.
            execution: How the run rounds: a name of `statekit.state.constants`; None: as its rule usually runs.
        """
        assert self._sides is not None
        chosen, before = self._chosen, self._sides.result
        findings, notes, tensors = list[Finding](), list[str](), 0
        try:
            after = self._sides.decode()
        except StatekitError as error:
            # Else it was before, which is said.
            findings = broken(error) if self._sides.live is not None else []
        else:
            findings, notes, tensors = update_findings(
                self._sides.right, after, chosen, grads, moved, sqrt_units, self._rate, execution
            )
        self._made = replace(
            before,
            findings=tuple(findings),
            unchecked=(*before.unchecked, *chosen.unchecked, *notes),
            assumptions=(*before.assumptions, *assumptions),
            tensors=before.tensors + tensors,
            stepped=len(chosen.blocks) if tensors else 0,
            execution=execution if tensors else None,
        )


@contextmanager
def next_update(
    run: LiveRun,
    path: CheckpointRef | str | PathLike[str],
    *,
    sample: int | None,
    seed: int,
    strict: bool,
    awaited: tuple[str, str, str],
    rate: Callable[[Sides], Callable[[Group], Any]] = lambda sides: lambda group: None,
    unstepped: Callable[[], Mapping[str, str]] = dict,
) -> Iterator[NextUpdate]:
    """Compares a run with its checkpoint, and gives its next update to be judged within the block.

    Args:
        run: The run.
        path: The checkpoint.
        sample: How many parameters are stepped, drawn with `seed`; all if None.
        seed: Of the sample.
        strict: Whether to raise what is wrong, after the block.
        awaited: Who awaits an update, what counts as one, and what to do where there was none.
        rate: Gives the learning rate of a group where the caller says it, once the checkpoint is open.
        unstepped: Gives the parameters that the rule alone doesn't move, and why, once the live state has been read.

    Raises:
        UsageError: No update was judged in the block.
        UnknownRuleError: The rule needs a hyperparameter that the checkpoint doesn't say.
        StateError: With `strict`, the state or the update isn't the checkpoint's; others as of `attest`.
    """
    with ExitStack() as stack:
        try:
            sides = stack.enter_context(attesting(path, run))
        except UnknownFormatError:
            state = attested(run, path, None, seed)  # which says that no schema has the rule
            update = NextUpdate(None, sample, seed)
            yield update
            update.result = state
        else:
            state = run.gathered(lambda: sides.result)
            update = NextUpdate(sides, sample, seed, rate(sides), unstepped())
            yield update
            comparison = update._made
            if comparison is None:
                place, expected, remedy = awaited
                raise UsageError(
                    "The block has ended without an update.", place=place, expected=expected, remedy=remedy
                )
            update.result = run.gathered(
                lambda: replace(comparison, findings=(*state.findings, *comparison.findings))
            )
    if strict:
        update.result.check()
