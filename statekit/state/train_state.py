"""TrainState: the canonical state of a training run, whatever system wrote it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict, TypeVar

from statekit.errors import Faults, StateError, UsageError
from statekit.state.evidence import SCALED, Fact, FactRecord
from statekit.state.evidence import KnownFrom as KnownFrom  # noqa: PLC0414 - part of a state
from statekit.state.schema import BESIDE_NARROW, NATIVE_SHAPE, OptimizerSchema, is_native, load_schema
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import Tree
from statekit.tensors.typed import Name, Natural

Value = TypeVar("Value")

StepOffset: TypeAlias = Literal["keep", "reset"] | int
"""Where the decay of the second moment starts: `keep`; `reset`: at the updates done; or after so many."""

SCALE = "multiply_by_parameter_scale"
EXCLUDED = "exclude_from_weight_decay"
MULTIPLIERS = ("lr_mult", "wd_mult")
BY_NAME = (SCALE, EXCLUDED, *MULTIPLIERS)
"""Hyperparameters that may have a value for each parameter: {path: value}, in PyTorch {name: value}."""

PER_PARAMETER = "per_parameter"
"""Key in `extra`: what a parameter has besides its slots, by path; it follows the parameter under another name."""

_RANKS = {"group": 0, "group_history": 1}
"""Ranks of slots that a group has as a whole, by shape rule."""


class RuleRecord(TypedDict):
    """A parameter's factor rule, as it stands in a manifest."""

    axes: list[Literal["ROW", "COLUMN", "BATCH", "NONE"]]
    known_from: KnownFrom


class CountsRecord(TypedDict):
    """The steps of a run, as they stand in a manifest."""

    updates: Natural
    schedule: Natural
    behind: NotRequired[dict[Name, Natural]]
    says_updates: NotRequired[bool]


class GroupRecord(TypedDict):
    """A group without its slots, as it stands in a manifest."""

    paths: list[Name]
    hyperparameters: dict[Name, Any]
    known_from: dict[Name, KnownFrom]
    schema: NotRequired[Name]
    variant: NotRequired[Name | None]
    facts: NotRequired[list[FactRecord]]
    label: NotRequired[Name]


class StateRecord(TypedDict):
    """A state without its tensors, as `TrainState.to_json` gives it and a manifest holds it."""

    schema: Name
    variant: Name | None
    counts: CountsRecord
    groups: list[GroupRecord]
    rules: dict[Name, RuleRecord]
    assumptions: list[Name]


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

    def kept(self, slot: str) -> tuple[int, ...]:
        """Returns the parameter's axes that `v_row` or `v_col` has kept, in order."""
        gone = self.dims(Axis.COLUMN if slot == "v_row" else Axis.ROW)
        return tuple(i for i in range(len(self.axes)) if i not in gone)

    def slot_shape(self, slot: str, shape: Shape) -> Shape:
        """Returns the shape of `v_row` or `v_col` for a parameter's shape."""
        return tuple(shape[i] for i in self.kept(slot))

    def to_json(self) -> dict[str, Any]:
        """Returns the rule as it stands in a manifest."""
        return {"axes": [axis.value for axis in self.axes], "known_from": self.known_from}

    @staticmethod
    def from_json(data: RuleRecord) -> Rule:
        """Returns the rule of a record."""
        return Rule(tuple(Axis(label) for label in data["axes"]), data["known_from"])


@dataclass(frozen=True)
class Group:
    """Parameters that one set of hyperparameters moves.

    Attributes:
        paths: The parameters, in the source's order.
        hyperparameters: Canonical names and values; a name that is missing is unknown.
        known_from: For each hyperparameter: `file`, `given`, `inferred` or `assumed`.
        slots: State of the group as a whole, by canonical slot name, e.g. ScaledAdam's `model_norms`.
        schema: Name of its schema, where a run has several optimizers; None where it is the `Optimizer`'s.
        variant: Name of its variant there, or None where the file can't tell.
        label: Its name in the run, such as the label of a part of `optax.partition`; None if it has none.
        facts: What else its layout noticed that updates depend on: which optimizers fit, a mask that nobody knows.
    """

    paths: tuple[str, ...]
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    known_from: Mapping[str, KnownFrom] = field(default_factory=dict)
    slots: Mapping[str, Tensor] = field(default_factory=dict)
    schema: str | None = None
    variant: str | None = None
    facts: tuple[Fact, ...] = ()
    label: str | None = None

    @property
    def scale(self) -> float:
        """The number that a map multiplied the parameters by; what is said of the whole run is said of 1."""
        return next((float(fact.value) for fact in self.facts if fact.name == SCALED), 1.0)

    def renamed(self, rename: Callable[[str], str]) -> Group:
        """Returns the group with other paths, also in hyperparameters that have a value for each path."""
        hyperparameters = {
            name: {rename(path): value for path, value in setting.items()}
            if name in BY_NAME and isinstance(setting, Mapping)
            else setting
            for name, setting in self.hyperparameters.items()
        }
        return replace(self, paths=tuple(map(rename, self.paths)), hyperparameters=hyperparameters)

    def only(self, paths: Collection[str]) -> Group:
        """Returns the group without the parameters that are not among `paths`; those that stay keep their order."""
        gone = {path for path in self.paths if path not in paths}
        hyperparameters = {
            name: _without(setting, gone) if isinstance(setting, Mapping) else setting
            for name, setting in self.hyperparameters.items()
        }
        kept = tuple(path for path in self.paths if path not in gone)
        return replace(self, paths=kept, hyperparameters=hyperparameters)


def _without(values: Mapping[str, Value], gone: Collection[str]) -> dict[str, Value]:
    return {name: value for name, value in values.items() if name not in gone}


Kind: TypeAlias = tuple[str, str | None]
"""Whose rule moves a group: a schema and a variant in it, None where the file can't tell."""


@dataclass(frozen=True)
class Optimizer:
    """Which update rule made the slots.

    A run may have several optimizers, each for groups of its own: `Optimizer.of` makes that from theirs. `schema` is
    then their names joined by `+`, which is no schema; what can't hold several refuses it by that name, and what can
    goes by `TrainState.parts`.

    Attributes:
        schema: Name of the schema: `adafactor`, `adamw`, ...
        variant: Name of the variant in that schema, or None where the file can't tell.
        groups: Parameter groups. A parameter in no group is frozen.
    """

    schema: str
    variant: str | None
    groups: tuple[Group, ...]

    @staticmethod
    def of(groups: Iterable[Group], kinds: Iterable[Kind]) -> Optimizer:
        """Returns what moves groups, of which each has its kind: one optimizer, if they are alike."""
        pairs = list(zip(groups, kinds, strict=True))
        distinct = list(dict.fromkeys(kind for _, kind in pairs))
        if len(distinct) == 1:
            return Optimizer(
                *distinct[0], tuple(replace(group, schema=None, variant=None) for group, _ in pairs)
            )
        own_groups = tuple(replace(group, schema=kind[0], variant=kind[1]) for group, kind in pairs)
        return Optimizer("+".join(schema for schema, _ in distinct), None, own_groups)

    def kind(self, group: Group) -> Kind:
        """Returns whose rule moves a group."""
        return (self.schema, self.variant) if group.schema is None else (group.schema, group.variant)

    def followed(self, group: Group, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns hyperparameters that are said of the whole run as a group has them whose parameters a map scaled."""
        schema, variant = self.kind(group)
        return load_schema(schema).rescaled(variant, {**group.hyperparameters, **values}, group.scale, values)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The optimizers, each once, in the order of the groups; one, where there are no groups."""
        return tuple(dict.fromkeys(map(self.kind, self.groups))) or ((self.schema, self.variant),)

    @property
    def schemas(self) -> tuple[str, ...]:
        """The schemas of the optimizers, in the order of the groups."""
        return tuple(schema for schema, _ in self.kinds)

    @property
    def paths(self) -> tuple[str, ...]:
        """The moved parameters, in the order of the groups."""
        return tuple(path for group in self.groups for path in group.paths)

    @property
    def group_of(self) -> dict[str, Group]:
        """The group of each moved parameter."""
        return {path: group for group in self.groups for path in group.paths}

    @property
    def group_numbers(self) -> dict[str, int]:
        """The number of each moved parameter's group."""
        return {path: number for number, group in enumerate(self.groups) for path in group.paths}

    @property
    def several(self) -> bool:
        """Whether the run has several optimizers."""
        return any(group.schema is not None for group in self.groups)


@dataclass(frozen=True)
class Counts:
    """The steps of a run; `step_offset` is the third, and stands with the hyperparameters.

    Attributes:
        updates: Updates done so far by the optimizer.
        schedule: Where the learning-rate schedule stands: the argument it gets for the next update.
        behind: Updates done by path, of parameters that have a count of their own and missed some.
        says_schedule: Whether the source says where the schedule stands; else it is taken to stand at the updates.
        says_updates: Whether the source counts updates. SGD and Adagrad do without; `updates` is 0 then.
    """

    updates: int
    schedule: int
    behind: Mapping[str, int] = field(default_factory=dict)
    says_schedule: bool = field(default=True, compare=False)
    says_updates: bool = field(default=True, compare=False)

    @property
    def done(self) -> int | None:
        """Updates done so far; None where the source doesn't count them."""
        return self.updates if self.says_updates else None

    def to_json(self) -> dict[str, Any]:
        """Returns the counts as they stand in a manifest."""
        behind = {"behind": dict(self.behind)} if self.behind else {}
        unsaid = {} if self.says_updates else {"says_updates": False}
        return {"updates": self.updates, "schedule": self.schedule, **behind, **unsaid}


def _lasting(facts: Iterable[Fact]) -> list[dict[str, Any]]:
    """Returns the facts that stay true of what is written: what was given stands in its files in place of the old."""
    return [fact.to_json() for fact in facts if not fact.is_against_file]


_FULL_BYTES = 4
"""Bytes of a float32."""
GONE = "isn't there"
"""What is said of a slot that the rule needs, and that isn't there."""


@dataclass(frozen=True)
class TrainState:
    """Parameters, slots and what is known about the optimizer.

    Attributes:
        params: Parameter by path (`/`-joined, no leading slash), in native order.
        slots: For each path, its slots by canonical name, in the schema of its group. A slot that the implementation
            doesn't use is absent.
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
        faults = Faults(self._faults())
        faults.check(
            StateError,
            f"The state isn't a valid {self.optimizer.schema} state",
            remedy="check that the layout, the factor rules and the hyperparameters are those of the run",
        )

    def _faults(self) -> Iterator[tuple[str, str]]:
        schemas = self._schemas()
        for path in [*self.slots, *self.rules, *(p for g in self.optimizer.groups for p in g.paths)]:
            if path not in self.params:
                yield "names a parameter that doesn't exist", path
        yield from self._group_faults()
        for path, rule in self.rules.items():
            if path in self.params and len(rule.axes) != len(self.params[path].shape):
                yield f"has rank {len(self.params[path].shape)} but a rule for {len(rule.axes)} axes", path
        for path, slots in self.slots.items():
            if path in schemas:
                yield from self._slot_faults(schemas[path], path, slots)
            elif path in self.params:
                yield "has slots, but no group says of which optimizer", path

    def _group_faults(self) -> Iterator[tuple[str, str]]:
        optimizer = self.optimizer
        alike = Optimizer.of(optimizer.groups, map(optimizer.kind, optimizer.groups))
        if optimizer.several and optimizer != alike:
            yield f"is {optimizer.schema}, but its groups are of {alike.schema}", "optimizer"
        seen: set[str] = set()
        for path in (p for group in optimizer.groups for p in group.paths):
            if path in seen:
                yield "stands in two parameter groups", path
            seen.add(path)
        for i, group in enumerate(optimizer.groups):
            schema = load_schema(optimizer.kind(group)[0])
            for name, value in group.hyperparameters.items():
                if name in schema.hyperparameters and (fault := schema.fault(name, value)):
                    yield f"is {value!r:.80}, {fault}", f"groups/{i}/{name}"
            for name, tensor in group.slots.items():
                rank = _RANKS.get(schema.slots[name].shape) if name in schema.slots else None
                if rank is not None and len(tensor.shape) != rank:
                    yield f"has shape {tensor.shape}, expected rank {rank}", f"groups/{i}/{name}"

    def _schemas(self) -> dict[str, OptimizerSchema]:
        """Returns the schema that each parameter's slots are held to."""
        optimizer = self.optimizer
        if not optimizer.several:
            return dict.fromkeys(self.params, load_schema(optimizer.schema))
        return {
            path: load_schema(optimizer.kind(group)[0])
            for group in optimizer.groups
            for path in group.paths
            if path in self.params
        }

    def _slot_faults(
        self, schema: OptimizerSchema, path: str, slots: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, str]]:
        shape, rule = self.params[path].shape, self.rules.get(path)
        for name, tensor in slots.items():
            if name not in schema.slots:
                yield f"has slot {name}, which {schema.name} doesn't know", path
                continue
            kind, expected = schema.slots[name].shape, shape
            if kind == NATIVE_SHAPE:
                continue
            if kind in ("row", "column"):
                if rule is None or not rule.factored or len(rule.axes) != len(shape):
                    yield f"has slot {name} but no rule that factors it", path
                    continue
                expected = rule.slot_shape(name, shape)
            elif kind == "scalar_per_parameter":
                expected = (1,) * len(shape)
            elif kind == "scale_history":  # as long as the period is
                expected = (*(tensor.shape[:1] or (1,)), *(1,) * len(shape))
            if tensor.shape != expected:
                yield f"slot {name} has shape {tensor.shape}, expected {expected}", path
        if rule is not None and rule.factored and "v" in slots:
            yield "is factored but has a full v", path

    def gaps(self) -> Iterator[tuple[str, str]]:
        """Yields the slots that the rule needs and a parameter lacks, or has in a dtype of whole numbers.

        No original goes on from such a state. A parameter without any slot was frozen or had no gradient yet.
        """
        groups, kind_of = self.optimizer.group_of, self.optimizer.kind
        shared = {
            (kind_of(groups[p]), name) for p, kept in self.slots.items() if p in groups for name in kept
        }
        for path, schema in self._schemas().items() if self.counts.updates else ():
            slots = self.slots.get(path, {})
            if not slots or path not in groups:
                continue
            needed = schema.needed(slots, groups[path].hyperparameters)
            if self.params[path].dtype.itemsize < _FULL_BYTES:  # where others have masters, it has one
                needed |= {name for name in BESIDE_NARROW if (kind_of(groups[path]), name) in shared}
            yield from ((GONE, f"slots/{path}/{name}") for name in sorted(needed - slots.keys()))
            yield from () if is_native(schema.name) else self._whole_numbers(path, slots)

    def _whole_numbers(self, path: str, slots: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
        """Yields what of a parameter has a dtype in which no update moves it."""
        kinds = "fVc" if self.params[path].dtype.kind == "c" else "fV"
        tensors = {
            f"params/{path}": self.params[path],
            **{f"slots/{path}/{name}": tensor for name, tensor in slots.items()},
        }
        for place, tensor in tensors.items():
            if tensor.dtype.kind not in kinds:
                yield f"has dtype {tensor.dtype}", place

    def group_of(self, path: str) -> Group | None:
        """Returns the group that moves a parameter, or None if it is frozen."""
        return next((group for group in self.optimizer.groups if path in group.paths), None)

    def parts(self) -> tuple[TrainState, ...]:
        """Returns the state of each optimizer by itself: of one, the state as it is.

        Each has its own parameters with their slots and rules, its groups, and all of `extra` and `assumptions`.
        """
        if not self.optimizer.several:
            return (self,)
        return tuple(self._part(kind) for kind in self.optimizer.kinds)

    def _part(self, kind: Kind) -> TrainState:
        groups = [group for group in self.optimizer.groups if self.optimizer.kind(group) == kind]
        paths = {path for group in groups for path in group.paths}
        part = self.only(path for path in self.params if path in paths)
        return replace(part, optimizer=Optimizer.of(groups, [kind] * len(groups)))

    def renamed(self, rename: Callable[[str], str]) -> TrainState:
        """Returns the state with every path renamed, also in the parts of `extra` that go by parameter.

        Args:
            rename: The new path of each path. Two paths must not become one.
        """
        groups = tuple(group.renamed(rename) for group in self.optimizer.groups)
        forms: Any = self.extra.get(PER_PARAMETER)
        moved = {PER_PARAMETER: {rename(path): form for path, form in forms.items()}} if forms else {}
        return replace(
            self,
            extra={**self.extra, **moved},
            params={rename(path): param for path, param in self.params.items()},
            slots={rename(path): slots for path, slots in self.slots.items()},
            rules={rename(path): rule for path, rule in self.rules.items()},
            optimizer=replace(self.optimizer, groups=groups),
            counts=replace(
                self.counts, behind={rename(path): count for path, count in self.counts.behind.items()}
            ),
        )

    def only(self, paths: Iterable[str]) -> TrainState:
        """Returns the state of some of its parameters, in the order given; groups keep theirs, `extra` stays as it is.

        Args:
            paths: Paths of parameters. A group that loses all of its own stays, empty.
        """
        params = {path: self.params[path] for path in paths}
        gone = self.params.keys() - params.keys()
        groups = tuple(group.only(params) for group in self.optimizer.groups)
        return replace(
            self,
            params=params,
            slots=_without(self.slots, gone),
            rules=_without(self.rules, gone),
            optimizer=replace(self.optimizer, groups=groups),
            counts=replace(self.counts, behind=_without(self.counts.behind, gone)),
        )

    def _in_order(self, by_path: Mapping[str, Value]) -> dict[str, Value]:
        """Returns what parameters have in the order of the parameters."""
        return {path: by_path[path] for path in self.params if path in by_path}

    def of_parts(self, parts: Sequence[TrainState]) -> TrainState:
        """Returns the state with its parts as they have become; their parameters are the same.

        Raises:
            StateError: Their counts aren't the same any more.
        """
        if not self.optimizer.several:
            (part,) = parts
            return part
        counts = {(part.counts.updates, part.counts.schedule) for part in parts}
        if len(counts) > 1:
            raise StateError(
                "The optimizers of the run don't count the same updates any more, and a state has one count.",
                expected="one",
                found=", ".join(f"{part.optimizer.schema}: {part.counts.updates}" for part in parts),
                remedy="carry each optimizer with its parameters over by itself",
            )
        params = _joined([part.params for part in parts])
        behind = _joined([part.counts.behind for part in parts])
        slots, rules = _joined([part.slots for part in parts]), _joined([part.rules for part in parts])
        return TrainState(
            {path: params.get(path, param) for path, param in self.params.items()},
            self._in_order(slots),
            self._optimizer_of(parts),
            replace(parts[0].counts, behind=behind),
            self._in_order(rules),
            _joined([part.extra for part in parts]),
            tuple(dict.fromkeys([*self.assumptions, *(text for part in parts for text in part.assumptions)])),
        )

    def _optimizer_of(self, parts: Sequence[TrainState]) -> Optimizer:
        """Returns the optimizer of all parts, its groups in the order in which the state has their parameters."""
        place = self.optimizer.group_numbers
        groups = [(group, part.optimizer.kind(group)) for part in parts for group in part.optimizer.groups]
        groups.sort(key=lambda pair: place[pair[0].paths[0]] if pair[0].paths else len(place))
        return Optimizer.of([group for group, _ in groups], [kind for _, kind in groups])

    def per_optimizer(self, change: Callable[[TrainState], TrainState]) -> TrainState:
        """Returns the state with a change made to the part of each optimizer."""
        return self.of_parts([change(part) for part in self.parts()])

    def switched_on(self, group: Group) -> dict[str, str]:
        """Returns the hyperparameters that a group's slots prove to be on, although nobody said their values.

        Returns:
            Hyperparameter -> the slot that shows it: `beta1` of an Adafactor that has momentum.
        """
        slots = {name for path in group.paths for name in self.slots.get(path, {})} | group.slots.keys()
        shown = load_schema(self.optimizer.kind(group)[0]).shown_by(slots)
        return {name: slot for name, slot in shown.items() if name not in group.hyperparameters}

    def with_hyperparameters(self, **changes: Any) -> TrainState:
        """Returns the state with hyperparameters changed in every group, known from then on as `given`.

        A group whose parameters a map scaled gets what moves them as the run's value would have moved them before.
        """
        groups = tuple(
            replace(
                g,
                hyperparameters={**g.hyperparameters, **self.optimizer.followed(g, changes)},
                known_from={**g.known_from, **dict.fromkeys(changes, "given")},
            )
            for g in self.optimizer.groups
        )
        return replace(self, optimizer=replace(self.optimizer, groups=groups))

    def with_facts(self, change: Callable[[Sequence[Fact]], Iterable[Fact]]) -> TrainState:
        """Returns the state with other facts in every group: those that its layout noticed."""
        groups = tuple(replace(group, facts=tuple(change(group.facts))) for group in self.optimizer.groups)
        return replace(self, optimizer=replace(self.optimizer, groups=groups))

    def with_step_offset(self, asked: StepOffset) -> TrainState:
        """Returns the state with its second moment's decay starting where it is asked to.

        Raises:
            UsageError: The optimizer has no `step_offset`, or it would lie beyond the step.
        """
        if asked == "keep":
            return self
        updates = self.counts.updates
        having = [
            schema
            for schema, _ in self.optimizer.kinds
            if "step_offset" in load_schema(schema).hyperparameters
        ]
        if not having:
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
        return self.per_optimizer(
            lambda part: (
                part.with_hyperparameters(step_offset=value) if part.optimizer.schema in having else part
            )
        )

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
                    **({} if g.schema is None else {"schema": g.schema, "variant": g.variant}),
                    **({"facts": lasting} if (lasting := _lasting(g.facts)) else {}),
                    **({} if g.label is None else {"label": g.label}),
                }
                for g in self.optimizer.groups
            ],
            "rules": {path: rule.to_json() for path, rule in self.rules.items()},
            "assumptions": list(self.assumptions),
        }


def next_decay(updates: int, step_offset: int, decay_rate: float) -> float:
    """Returns the decay of Adafactor's second moment in the next update, by `decay_type` pow, as a number for people.

    Raises:
        UsageError: The offset lies beyond the updates done, where the decay is -inf or NaN.
    """
    if step_offset > updates:
        raise UsageError(
            "The step offset lies beyond the step; the second moment would become NaN for good.",
            expected=f"step_offset <= {updates}",
            found=step_offset,
        )
    return 1.0 - math.pow(updates - step_offset + 1, -decay_rate)


def _joined(tables: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """Returns the entries of all tables; of one name the last."""
    return {name: value for table in tables for name, value in table.items()}
