"""cold-start: how far the first updates of a run without its optimizer's state are from the continued run's.

Both start from the checkpoint's parameters and get the same gradients, as large as those that made its second moment;
one has the slots and counts of the checkpoint, the other those that its optimizer begins with. People can tell by it
whether the state matters for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from statekit.arrays.numpy_backend import NumpyBackend
from statekit.conversion.checkpoint_ref import CheckpointRef, ref_of
from statekit.conversion.contracts import NO_HINTS
from statekit.conversion.open_state import open_state
from statekit.errors import StateError, UsageError, plural, printable
from statekit.files.tree import Place
from statekit.optim.run import load, mover
from statekit.state.facts import check_decay, check_steps
from statekit.state.schema import WEIGHTS, load_schema
from statekit.state.stored_params import as_params
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array
from statekit.tensors.tree import report_json
from statekit.verify.controls import cold
from statekit.verify.probes import USUAL, drawn, sampled
from statekit.verify.stepping import rates_of

UPDATES = 10
"""Updates that are looked at, unless somebody says another number."""
ALIKE = 0.1
"""A difference from which on two updates count as the same for people, over the size of the continued run's."""


@dataclass(frozen=True)
class Layer:
    """One parameter.

    Attributes:
        path: The parameter.
        apart: For each update, how far the cold start's is from the continued run's, over the size of that (Euclidean).
        cosine: Of the angle between the two.
        size: How many times as large the cold start's is.
        stands_for: How many more parameters are of its kind.
    """

    path: str
    apart: tuple[float, ...]
    cosine: tuple[float, ...]
    size: tuple[float, ...]
    stands_for: int

    @property
    def alike_from(self) -> int | None:
        """The first update, counted from 1, from which on the two are alike; None if they never are."""
        far = [i for i, distance in enumerate(self.apart) if not distance <= ALIKE]
        first = far[-1] + 2 if far else 1
        return first if first <= len(self.apart) else None

    def to_json(self) -> dict[str, Any]:
        """Returns the layer as plain data."""
        numbers = {name: report_json(getattr(self, name)) for name in ("apart", "cosine", "size")}
        return {"path": self.path, **numbers, "alike_from": self.alike_from, "stands_for": self.stands_for}


@dataclass(frozen=True, repr=False)
class ColdStart:
    """How much a checkpoint's optimizer state matters for the next updates.

    Attributes:
        path: The checkpoint.
        updates: Updates done.
        layers: Every parameter that was stepped, the farthest first.
        sample: What was stepped, as a certificate has it.
        notes: What was made up, a sentence each.
    """

    path: Place
    updates: int
    layers: tuple[Layer, ...]
    sample: dict[str, Any]
    notes: tuple[str, ...]

    def median(self, update: int) -> float:
        """Returns the median over the layers of how far an update, counted from 0, is apart."""
        return float(np.median([layer.apart[update] for layer in self.layers]))

    def __repr__(self) -> str:
        return printable(f"<ColdStart of {self.path}: first updates {self.median(0):.2g} of an update apart>")

    def to_json(self) -> dict[str, Any]:
        count = len(self.layers[0].apart)
        return {
            "path": str(self.path),
            "updates_done": self.updates,
            "median": [report_json(self.median(i)) for i in range(count)],
            "layers": [layer.to_json() for layer in self.layers],
            "sample": self.sample,
            "notes": list(self.notes),
        }


def cold_start(
    source: CheckpointRef | str | PathLike[str],
    *,
    container: str | None = None,
    layout: str | None = None,
    step: int | None = None,
    hints: CheckpointRef = NO_HINTS,
    updates: int = UPDATES,
    seed: int = 0,
    everything: bool = False,
    on_update: Callable[[int], object] = lambda update: None,
) -> ColdStart:
    """Compares the next updates of a run with those of one that begins with a new optimizer.

    Args:
        source: A checkpoint, or a run's folder; a ref says what follows.
        container: Name of its container; found by its content if None.
        layout: Name of its layout.
        step: Which step of a run's folder; the newest if None.
        hints: What the checkpoint doesn't say.
        updates: How many are looked at.
        seed: Of the sample and the gradients.
        everything: Whether every element of every parameter is stepped.
        on_update: Told the number of each update.

    Raises:
        NotFoundError, FormatError: It can't be read.
        StateError: There is no optimizer, it moves nothing, or statekit has no step of it.
        UnknownRuleError: A step needs what nobody said; names it.
        UsageError: Nobody said whose rule it is.
    """
    if updates < 1:
        raise UsageError("At least one update is looked at.", place="--updates", found=updates)
    ref = ref_of(source, hints, container=container, layout=layout, step=step)
    with open_state(ref) as opened:
        state = as_params(opened.state)[0]
        if any(schema == WEIGHTS for schema, _ in state.optimizer.kinds):
            raise StateError("The checkpoint has no optimizer to start fresh.", place=ref.place)
        check_steps(state, ref.place)
        check_decay(state, ref.place)
        for schema, variant in state.optimizer.kinds:
            if variant is None:
                raise UsageError(
                    "A step needs the variant of its rule, and the files do not tell it.",
                    place="--variant",
                    expected=", ".join(load_schema(schema).stepped),
                )
        chosen = sampled(state, seed, everything)
        if not chosen.paths:
            raise StateError(
                "No parameter is moved by the optimizer, so that no update can be compared.",
                place=ref.place,
                expected="a parameter with elements in one of its groups",
                found=f"{plural(len(state.params), 'parameter')}, none of them such a one",
            )
        warm = chosen.of(state)
        rates, notes = rates_of(warm)
        (probe, *_) = [
            candidate for candidate in drawn(warm, ("random",), updates, seed) if candidate.name == USUAL
        ]
        sides = [_updates(run, probe.updates, rates, on_update) for run in (warm, cold(warm, warm))]
        count: dict[str, int] = {}
        for other in chosen.stands_for.values():
            count[other] = count.get(other, 0) + 1
        layers = [_layer(p, [s[p] for s in sides], count.get(p, 0)) for p in chosen.paths]
        layers.sort(key=lambda layer: -layer.apart[0])
        place = opened.checkpoint.path
    return ColdStart(place, state.counts.updates, tuple(layers), chosen.to_json(), notes)


def _updates(
    state: TrainState, grads: Any, rates: Any, on_update: Callable[[int], object]
) -> dict[str, list[Array]]:
    """Returns what each of the updates changes, by parameter."""
    xp = NumpyBackend()
    move, live = mover(xp, state), load(xp, state)
    changes: dict[str, list[Array]] = {path: [] for path in state.params}
    for i, grads_of_update in enumerate(grads):
        after = move(live, {path: xp.asarray(grad) for path, grad in grads_of_update.items()}, rates)
        for path, old in live.params.items():
            changes[path].append(after.params[path].astype(np.float64) - old.astype(np.float64))
        live = after
        on_update(i + 1)
    return changes


def _layer(path: str, sides: list[list[Array]], stands_for: int) -> Layer:
    apart, cosine, size = [], [], []
    for warm, new in zip(*sides, strict=True):
        lengths = [float(np.linalg.norm(update)) for update in (warm, new)]
        apart.append(_over(float(np.linalg.norm(new - warm)), lengths[0]))
        cosine.append(_over(float(np.vdot(warm, new)), lengths[0] * lengths[1]))
        size.append(_over(lengths[1], lengths[0]))
    return Layer(path, tuple(apart), tuple(cosine), tuple(size), stands_for)


def _over(top: float, bottom: float) -> float:
    return top / bottom if bottom else (float("inf") if top else 0.0)
