"""TrainState: the canonical state of a training run, whatever system wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, TypeAlias

from statekit.errors import Faults, StateError, UsageError
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import Tree

StepOffset: TypeAlias = Literal["keep", "reset"] | int
"""Where the decay of the second moment starts: `keep`; `reset`: at the updates done; or after so many."""
KnownFrom: TypeAlias = Literal["file", "given", "assumed"]


class Axis(Enum):
    """What a factored second moment does with one axis of its parameter.

    `v_row` has averaged the COLUMN axes away, `v_col` the ROW axes. BATCH axes are kept by both and also bound the
    means of parameter scale and clipping; NONE axes are kept by both and averaged over by those two.
    Source: T5X t5x/adafactor.py, `FactorDim`.
    """

    ROW = "ROW"
    COLUMN = "COLUMN"
    BATCH = "BATCH"
    NONE = "NONE"


@dataclass(frozen=True)
class Rule:
    """How one parameter is factored: a label for each axis, and how that is known."""

    axes: tuple[Axis, ...]
    known_from: KnownFrom

    def dims(self, *labels: Axis) -> tuple[int, ...]:
        """Returns the positions of the axes that carry one of the labels."""
        return tuple(i for i, axis in enumerate(self.axes) if axis in labels)

    @property
    def factored(self) -> bool:
        """Whether the second moment is kept as `v_row` and `v_col` instead of `v`."""
        return bool(self.dims(Axis.ROW, Axis.COLUMN))

    def slot_shape(self, slot: str, shape: Shape) -> Shape:
        """Returns the shape of `v_row` or `v_col` for a parameter's shape."""
        gone = self.dims(Axis.COLUMN if slot == "v_row" else Axis.ROW)
        return tuple(n for i, n in enumerate(shape) if i not in gone)

    def to_json(self) -> dict[str, Any]:
        """Returns the rule as it stands in a manifest."""
        return {"axes": [axis.value for axis in self.axes], "known_from": self.known_from}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Rule:
        """Reads a rule as it stands in a manifest."""
        return Rule(tuple(Axis(label) for label in data["axes"]), data["known_from"])


@dataclass(frozen=True)
class Group:
    """Parameters that one set of hyperparameters moves.

    Attributes:
        paths: The parameters, in the source's order.
        hyperparameters: Canonical names and values; a name that is missing is unknown.
        known_from: For each hyperparameter: `file`, `given` or `assumed`.
        slots: State of the group as a whole, by canonical slot name, e.g. ScaledAdam's `model_norms`.
    """

    paths: tuple[str, ...]
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    known_from: Mapping[str, KnownFrom] = field(default_factory=dict)
    slots: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Optimizer:
    """Which update rule made the slots.

    Attributes:
        schema: Name of the schema: `adafactor`, `adamw`, ...
        variant: Name of the variant in that schema, or None where the file can't tell.
        groups: Parameter groups. A parameter in no group is frozen.
    """

    schema: str
    variant: str | None
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Counts:
    """The steps of a run; `step_offset` is the third, and stands with the hyperparameters.

    Attributes:
        updates: Updates done so far by the optimizer.
        schedule: Where the learning-rate schedule stands: the argument it gets for the next update.
        behind: Updates done by path, of parameters that have a count of their own and missed some.
    """

    updates: int
    schedule: int
    behind: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the counts as they stand in a manifest."""
        behind = {"behind": dict(self.behind)} if self.behind else {}
        return {"updates": self.updates, "schedule": self.schedule, **behind}


@dataclass(frozen=True)
class TrainState:
    """Parameters, slots and what is known about the optimizer.

    Attributes:
        params: Parameter by path (`/`-joined, no leading slash), in native order.
        slots: For each path, its slots by canonical name. A slot that the implementation doesn't use is absent.
        rules: For each path, how it is factored; empty for optimizers that don't factor.
        optimizer: Schema, variant, groups with hyperparameters.
        counts: The steps.
        extra: Whatever else the source held, as a tree; may hold tensors.
        assumptions: What was assumed because the source doesn't say, one sentence each.
    """

    params: Mapping[str, Tensor]
    slots: Mapping[str, Mapping[str, Tensor]]
    optimizer: Optimizer
    counts: Counts
    rules: Mapping[str, Rule] = field(default_factory=dict)
    extra: Mapping[str, Tree] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        faults = Faults(self._faults(load_schema(self.optimizer.schema)))
        faults.check(
            StateError,
            f"The state isn't a valid {self.optimizer.schema} state",
            remedy="check that the layout, the factor rules and the hyperparameters are those of the run",
        )

    def _faults(self, schema: OptimizerSchema) -> Iterator[tuple[str, str]]:
        for path in [*self.slots, *self.rules, *(p for g in self.optimizer.groups for p in g.paths)]:
            if path not in self.params:
                yield "names a parameter that doesn't exist", path
        seen: set[str] = set()
        for path in (p for group in self.optimizer.groups for p in group.paths):
            if path in seen:
                yield "stands in two parameter groups", path
            seen.add(path)
        for i, group in enumerate(self.optimizer.groups):
            for name, value in group.hyperparameters.items():
                if name in schema.hyperparameters and (fault := schema.fault(name, value)):
                    yield f"is {value!r:.80}, {fault}", f"groups/{i}/{name}"
        for path, rule in self.rules.items():
            if path in self.params and len(rule.axes) != len(self.params[path].shape):
                yield f"has rank {len(self.params[path].shape)} but a rule for {len(rule.axes)} axes", path
        for path, slots in self.slots.items():
            if path in self.params:
                yield from self._slot_faults(schema, path, slots)

    def _slot_faults(
        self, schema: OptimizerSchema, path: str, slots: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, str]]:
        shape, rule = self.params[path].shape, self.rules.get(path)
        for name, tensor in slots.items():
            if name not in schema.slots:
                yield f"has slot {name}, which {schema.name} doesn't know", path
                continue
            kind = schema.slots[name].shape
            expected = shape
            if kind in ("row", "column"):
                if rule is None or not rule.factored or len(rule.axes) != len(shape):
                    yield f"has slot {name} but no rule that factors it", path
                    continue
                expected = rule.slot_shape(name, shape)
            if kind in ("parameter", "row", "column") and tensor.shape != expected:
                yield f"slot {name} has shape {tensor.shape}, expected {expected}", path
        if rule is not None and rule.factored and "v" in slots:
            yield "is factored but has a full v", path

    def group_of(self, path: str) -> Group | None:
        """Returns the group that moves a parameter, or None if it is frozen."""
        return next((group for group in self.optimizer.groups if path in group.paths), None)

    def switched_on(self, group: Group) -> dict[str, str]:
        """Returns the hyperparameters that a group's slots prove to be on, although nobody said their values.

        Returns:
            Hyperparameter -> the slot that shows it: `beta1` of an Adafactor that has momentum.
        """
        slots = {name for path in group.paths for name in self.slots.get(path, {})} | group.slots.keys()
        evidence: dict[str, str] = {}
        for name, spec in load_schema(self.optimizer.schema).hyperparameters.items():
            shown = next(
                (slot for slot in spec.get("decides", {}).get("existence", ()) if slot in slots), None
            )
            if shown is not None and name not in group.hyperparameters:
                evidence[name] = shown
        return evidence

    def with_hyperparameters(self, **changes: Any) -> TrainState:
        """Returns the state with hyperparameters changed in every group, known from then on as `given`."""
        groups = tuple(
            replace(
                g,
                hyperparameters={**g.hyperparameters, **changes},
                known_from={**g.known_from, **dict.fromkeys(changes, "given")},
            )
            for g in self.optimizer.groups
        )
        return replace(self, optimizer=replace(self.optimizer, groups=groups))

    def with_step_offset(self, asked: StepOffset) -> TrainState:
        """Returns the state with its second moment's decay starting where it is asked to.

        Raises:
            UsageError: The optimizer has no `step_offset`, or it would lie beyond the step.
        """
        if asked == "keep":
            return self
        updates = self.counts.updates
        if "step_offset" not in load_schema(self.optimizer.schema).hyperparameters:
            raise UsageError(
                f"{self.optimizer.schema} has no step_offset.", place="--step-offset", expected="keep"
            )
        value = updates if asked == "reset" else asked
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= updates:
            raise UsageError(  # (step - offset + 1) ** -decay_rate would be NaN from then on
                "The step_offset isn't usable: the decay of the second moment would be NaN.",
                place="--step-offset",
                expected=f"keep, reset, or a number from 0 to the step, {updates}",
                found=asked,
            )
        return self.with_hyperparameters(step_offset=value)

    def to_json(self) -> dict[str, Any]:
        """Describes the state without its tensors, as it stands in a manifest."""
        return {
            "schema": self.optimizer.schema,
            "variant": self.optimizer.variant,
            "counts": self.counts.to_json(),
            "groups": [
                {
                    "paths": list(g.paths),
                    "hyperparameters": dict(g.hyperparameters),
                    "known_from": dict(g.known_from),
                }
                for g in self.optimizer.groups
            ],
            "rules": {path: rule.to_json() for path, rule in self.rules.items()},
            "assumptions": list(self.assumptions),
        }
