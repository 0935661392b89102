"""From differences between a live run and its checkpoint to findings: what most probably went wrong, by name.

A fault of loading leaves many differences of one kind. They are gathered here, and told apart where the state tells:
moments that are another parameter's, or the checkpoint's in lower precision, or that were never loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from statekit.attestation.attestation import Finding
from statekit.attestation.faults import fault
from statekit.state.comparison import Difference, is_zero
from statekit.state.hyperparameters import alike
from statekit.state.options import RATE_NAMES
from statekit.state.schema import load_schema
from statekit.state.stored_params import MASTER, stale_masters
from statekit.state.train_state import GONE, Group, TrainState
from statekit.tensors.digest import tensor_digest
from statekit.tensors.tensor import Tensor, parts_of


def diagnosed(right: TrainState, live: TrainState, differences: Sequence[Difference]) -> list[Finding]:
    """Returns the findings that differences come to."""
    return list(_Diagnosis(right, live, differences).findings())


def is_new(live: TrainState) -> bool:
    """Tells whether an optimizer has nothing that an update leaves behind."""
    return {live.counts.updates, *live.counts.behind.values()} == {0} and _is_all_zero(live)


def _is_all_zero(live: TrainState) -> bool:
    return all(is_zero(slot) for slots in live.slots.values() for slot in slots.values())


class _Diagnosis:
    def __init__(self, right: TrainState, live: TrainState, differences: Sequence[Difference]) -> None:
        self._right, self._live, self._all = right, live, differences

    def findings(self) -> Iterator[Finding]:
        yield from self._of_rule()
        empty = self._is_empty()
        if empty:
            missing = self._of("missing", slots=True)
            steps = {update.path: update for update in self._of("updates")}
            done = max((int(step.expected) for step in steps.values()), default=0)
            where = dict.fromkeys([*(difference.path for difference in missing), *steps])
            count = sum(len(self._right.slots.get(path, {})) for path in where)
            yield fault("optimizer-empty", where, f"{count} slots after {done} updates", "a new optimizer's")
        yield from self._of_params()
        yield from self._of_slots(empty)
        if not empty:
            yield from _gathered("step", self._of("updates"), lambda n: f"{n} updates done")
        yield from self._of_beside()
        yield from self._of_options()
        yield from self._of_run()
        yield from masters_that_are_stale(self._live)

    def _of(self, aspect: str, slots: bool | None = None) -> list[Difference]:
        differences = [
            difference
            for difference in self._all
            if difference.what == aspect and not difference.place.startswith("extra/")
        ]
        if slots is None:
            return differences
        return [difference for difference in differences if bool(difference.item) == slots]

    def _of_beside(self) -> Iterator[Finding]:
        """Yields what differs of tensors that are no parameters and no slots."""
        differing = [difference for difference in self._all if difference.place.startswith("extra/")]
        yield from _values(
            "beside-differs", [difference for difference in differing if difference.what == "values"]
        )
        for aspect in ("shape", "dtype"):
            yield from _gathered(
                aspect, [difference for difference in differing if difference.what == aspect]
            )

    def _is_empty(self) -> bool:
        """Tells whether the live optimizer has nothing that an update leaves behind."""
        lacks = bool(self._of("missing", slots=True)) or bool(self._of("updates"))
        return lacks and is_new(self._live)

    def _of_rule(self) -> Iterator[Finding]:
        for difference in self._of("rule"):
            yield fault("rule", [difference.place], difference.expected, difference.actual)

    def _of_params(self) -> Iterator[Finding]:
        yield from _gathered("parameter-missing", self._of("missing", slots=False))
        yield from _gathered("parameter-extra", self._of("extra", slots=False))
        yield from _gathered("shape", self._of("shape"))
        yield from self._of_values("parameter", slots=False)

    def _of_slots(self, empty: bool) -> Iterator[Finding]:
        if not empty:
            yield from _gathered("slot-missing", self._of("missing", slots=True))
            missing = {difference.place for difference in self._of("missing", slots=True)}
            gone = [place for words, place in self._live.gaps() if words == GONE and place not in missing]
            if gone:  # of both: the run was resumed from it, and its next update fails
                yield fault("slot-missing", gone, "the slots that the rule needs", "nothing")
        yield from _gathered("slot-extra", self._of("extra", slots=True))
        if not (empty and _is_all_zero(self._live)):
            yield from self._of_values("slot", slots=True)

    def _of_values(self, kind: str, slots: bool) -> Iterator[Finding]:
        """Yields what tells tensors apart that have other values or dtypes."""
        dtypes = {difference.place: difference for difference in self._of("dtype", slots)}
        values = {difference.place: difference for difference in self._of("values", slots)}
        rounded = {
            place: dtype
            for place, dtype in dtypes.items()
            if place in values and (distance := values[place].distance) and distance.is_rounding
        }
        left = [difference for place, difference in values.items() if place not in rounded]
        yield from _gathered(f"{kind}-rounded", [*rounded.values()])
        yield from _gathered("dtype", [dtype for place, dtype in dtypes.items() if place not in values])
        yield from self._of_slot_values(left) if slots else _values(f"{kind}-differs", left)

    def _of_slot_values(self, differing: Sequence[Difference]) -> Iterator[Finding]:
        """Yields what slots with other values are: zero, those of another parameter, or different."""
        zero = {slot.place for slot in differing if is_zero(self._slot(self._live, slot))}
        yield from _values("slot-zero", [slot for slot in differing if slot.place in zero])
        left = [slot for slot in differing if slot.place not in zero]
        others = self._exchanged(left)
        if others:
            where = [f"{slot.place} is {place}'s" for slot, place in others]
            yield fault("slot-of-another-parameter", where, "its own", "another's")
        exchanged = {slot.place for slot, _ in others}
        yield from _values("slot-differs", [slot for slot in left if slot.place not in exchanged])

    def _slot(self, state: TrainState, difference: Difference) -> Tensor:
        if difference.path:
            return state.slots[difference.path][difference.item]
        return state.optimizer.groups[int(difference.place.split("/")[1])].slots[difference.item]

    def _exchanged(self, differing: Sequence[Difference]) -> list[tuple[Difference, str]]:
        """Returns the slots that are those of another parameter, with its path."""
        candidates: dict[tuple[object, ...], dict[str, str]] = {}
        pairs = []
        for difference in differing:
            if not difference.path or parts_of(self._slot(self._live, difference)) is not None:
                continue
            live = self._slot(self._live, difference)
            key = (difference.item, live.shape, live.dtype.name)
            if key not in candidates:
                candidates[key] = {
                    tensor_digest(slots[difference.item]): path
                    for path, slots in self._right.slots.items()
                    if difference.item in slots
                    and (slots[difference.item].shape, slots[difference.item].dtype.name) == key[1:]
                }
            if (path := candidates[key].get(tensor_digest(live))) is not None:
                pairs.append((difference, path))
        return pairs

    def _of_options(self) -> Iterator[Finding]:
        options = self._of("option")
        exchanged = self._are_exchanged(options)
        by_item: dict[str, list[Difference]] = {}
        for option in options:
            by_item.setdefault(option.item, []).append(option)
        for item, differences in by_item.items():
            is_rate = item in RATE_NAMES
            name = "groups-exchanged" if exchanged else "learning-rate" if is_rate else "hyperparameter"
            # mypy can't infer the type of a lambda that has a default.
            yield from _gathered(name, differences, lambda value, item=item: f"{item} {value!r}")  # type: ignore[misc]
        yield from _gathered("frozen", self._of("moved"), lambda moved: "trained" if moved else "frozen")

    def _are_exchanged(self, options: Sequence[Difference]) -> bool:
        """Tells whether every parameter with other options has those of another of the checkpoint's groups."""
        groups = self._right.optimizer.groups
        live = self._live.optimizer.group_of
        paths = {option.path for option in options}
        return bool(paths) and all(
            any(path not in group.paths and self._has_options_of(live[path], group) for group in groups)
            for path in paths
        )

    def _has_options_of(self, live: Group, group: Group) -> bool:
        specs = load_schema(self._right.optimizer.kind(group)[0]).hyperparameters
        return all(
            alike(specs.get(name, {}), value, live.hyperparameters.get(name)) is not None
            for name, value in group.hyperparameters.items()
        )

    def _of_run(self) -> Iterator[Finding]:
        for difference in (*self._of("schedule"), *self._of("later")):
            yield fault(
                "schedule",
                [difference.place],
                f"{difference.item} {difference.expected!r}",
                f"{difference.item} {difference.actual!r}",
            )
        for difference in self._of("part"):
            name = "scaler" if difference.item == "scaler" else "broken"
            yield fault(
                name,
                [difference.place],
                difference.expected or "none in the checkpoint",
                difference.actual or "none",
            )


def _gathered(
    name: str, differences: Sequence[Difference], shown: Callable[[object], str] = str
) -> Iterator[Finding]:
    """Yields one finding for all differences of a kind, with the values of the first."""
    if differences:
        first = differences[0]
        values = [shown(side) if side is not None else "nothing" for side in (first.expected, first.actual)]
        yield fault(name, [difference.place for difference in differences], *values)


def _values(name: str, differences: Sequence[Difference]) -> Iterator[Finding]:
    if differences:
        worst = max(differences, key=lambda change: change.distance.relative if change.distance else 0.0)
        where = [worst.place, *(difference.place for difference in differences if difference is not worst)]
        yield fault(name, where, "the checkpoint's values", worst.distance)


def masters_that_are_stale(live: TrainState) -> Iterator[Finding]:
    """Yields parameters that aren't the rounding of their masters."""
    stale = [*stale_masters(live)]
    if stale:
        where = [f"slots/{path}/{MASTER}" for path, _ in stale]
        yield fault("master-stale", where, "a master that rounds to its parameter", stale[0][1])
