"""inspect: what a checkpoint holds, as data, without reading more than its headers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from statekit.budget import Budget, collecting_rarely
from statekit.conversion import registry
from statekit.conversion.belonging import contents_without_optimizer, disagreements, uncounted, unread
from statekit.conversion.checkpoint_ref import CheckpointRef, ref_of
from statekit.conversion.contracts import Contents, Unnamed
from statekit.conversion.open_state import chosen_container, chosen_layout
from statekit.errors import (
    NamesError,
    NotFoundError,
    StateError,
    StatekitError,
    UnknownFormatError,
    printable,
    some,
)
from statekit.files.checkpoint import Checkpoint, Finding
from statekit.files.integrity import Means, means_of
from statekit.files.proving import proving
from statekit.files.tree import Place
from statekit.state.run import RunState, run_of
from statekit.state.schema import WEIGHTS, is_native, load_schema
from statekit.state.train_state import Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.quantized import Quantized
from statekit.tensors.stats import Stats, measure
from statekit.tensors.tensor import DTYPES, Shape, Tensor, dtype_name, nbytes
from statekit.tensors.tree import tensor_names, to_json

FACTORING = frozenset({"factor_map", "logical_factor_rules"})


@dataclass(frozen=True)
class Choice:
    """A container or layout, and why it is this one."""

    name: str
    title: str
    because: str


@dataclass(frozen=True)
class TensorSummary:
    """One tensor: its name, shape, dtype, bytes and, where they were asked for, statistics.

    `quantized` says in how many bits and blocks its values lie, which then have dtype float32; "" elsewhere.
    """

    name: str
    shape: Shape
    dtype: str
    nbytes: int
    stats: Stats | None = None
    quantized: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the summary as plain data, without the name."""
        plain = {"shape": list(self.shape), "dtype": self.dtype, "bytes": self.nbytes}
        plain |= {"quantized": self.quantized} if self.quantized else {}
        return plain if self.stats is None else {**plain, "stats": self.stats.to_json()}


@dataclass(frozen=True)
class ParameterSummary:
    """One parameter with its slots.

    Attributes:
        tensor: The parameter; its name is the path.
        slots: Its slots, named canonically.
        group: Index of the parameter group that moves it, or None if it is frozen.
        rule: How it is factored, where the optimizer factors.
    """

    tensor: TensorSummary
    slots: tuple[TensorSummary, ...]
    group: int | None
    rule: Rule | None

    def to_json(self) -> dict[str, Any]:
        """Returns the summary as plain data."""
        return {
            "path": self.tensor.name,
            **self.tensor.to_json(),
            "group": self.group,
            "rule": self.rule.to_json() if self.rule else None,
            "slots": {slot.name: slot.to_json() for slot in self.slots},
        }


@dataclass(frozen=True, repr=False)
class Inspection:
    """What a checkpoint holds.

    Attributes:
        path: The checkpoint that was opened: of a run's folder, the step's.
        container: How its arrays lie in files.
        layout: What its names mean, or None where no layout fits.
        step: The step in its name, if it has one there.
        meta: What the container knows besides.
        optimizer: Which update rule, or None without a layout, or of weights alone.
        counts: The steps, or None as well.
        parameters: The parameters that match the filter.
        others: Further tensors that match: what belongs to no parameter; without a layout, all of them.
        extra: Names of what else there is.
        run: Schedule, epoch, scaler and what else is known of the run.
        assumptions: What was assumed because the checkpoint doesn't say.
        findings: What is missing or odd.
        integrity: What it can be proven by.
        uncounted: Its files that nothing shows to be of this step (statekit/conversion/belonging.py).
        contents: What it holds, in words, where no layout fits, and then slots have their own names; or that weights
            stand alone.
        undecoded: Why no state was made of it; None where one was.
    """

    path: Place
    container: Choice
    layout: Choice | None
    step: int | None
    meta: Mapping[str, Any]
    optimizer: Optimizer | None = None
    counts: Counts | None = None
    parameters: tuple[ParameterSummary, ...] = ()
    others: tuple[TensorSummary, ...] = ()
    extra: tuple[str, ...] = ()
    run: RunState = field(default_factory=RunState)
    assumptions: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    integrity: Means = field(default_factory=Means)
    uncounted: tuple[str, ...] = ()
    contents: str | None = None
    undecoded: str | None = None

    def __repr__(self) -> str:
        kind = f"{self.container.name}, {self.layout.name if self.layout else 'no layout'}"
        listed = f"{len(self.parameters)} parameters, {len(self.others)} other tensors"
        return printable(f"<Inspection {self.path}: {kind}, {listed}>")

    @property
    def tensors(self) -> Iterator[TensorSummary]:
        """Every tensor listed: each parameter followed by its slots, then the others."""
        for parameter in self.parameters:
            yield parameter.tensor
            yield from parameter.slots
        yield from self.others

    def totals(self) -> dict[str, Any]:
        """Returns counts and bytes of what is listed."""
        slots = [slot for parameter in self.parameters for slot in parameter.slots]
        dtypes: dict[str, int] = {}
        for tensor in self.tensors:
            dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor.nbytes
        return {
            "parameters": len(self.parameters),
            "elements": sum(math.prod(p.tensor.shape) for p in self.parameters),
            "parameter_bytes": sum(p.tensor.nbytes for p in self.parameters),
            "slots": len(slots),
            "slot_bytes": sum(slot.nbytes for slot in slots),
            "others": len(self.others),
            "other_bytes": sum(other.nbytes for other in self.others),
            "bytes_by_dtype": dtypes,
        }

    def to_json(self) -> dict[str, Any]:
        """Returns everything as plain data."""
        return {
            "path": str(self.path),
            "container": vars(self.container),
            "layout": vars(self.layout) if self.layout else None,
            "step": self.step,
            "meta": to_json(dict(self.meta)),
            "optimizer": _optimizer_json(self.optimizer, self.counts),
            "parameters": [parameter.to_json() for parameter in self.parameters],
            "others": [{"name": other.name, **other.to_json()} for other in self.others],
            "extra": list(self.extra),
            "run": self.run.to_json(),
            "totals": self.totals(),
            "assumptions": list(self.assumptions),
            "findings": [vars(finding) for finding in self.findings],
            "integrity": {**self.integrity.to_json(), "uncounted": list(self.uncounted)},
            "contents": self.contents,
        }


def unknown_hyperparameters(optimizer: Optimizer, group: Group) -> list[str]:
    """Returns the hyperparameters of the variant (of the whole schema, if that isn't known) that a group lacks.

    What says how parameters are factored isn't among them: each parameter has its rule.
    """
    name, variant = optimizer.kind(group)
    schema = load_schema(name)
    names = schema.variant(variant)["defaults"] if variant else schema.hyperparameters
    return [name for name in names if name not in group.hyperparameters and name not in FACTORING]


def _optimizer_json(optimizer: Optimizer | None, counts: Counts | None) -> dict[str, Any] | None:
    if optimizer is None or counts is None:
        return None
    groups = [
        {
            "parameters": len(group.paths),
            "hyperparameters": to_json(dict(group.hyperparameters)),
            "known_from": dict(group.known_from),
            "unknown": unknown_hyperparameters(optimizer, group),
            **({"schema": group.schema, "variant": group.variant} if group.schema else {}),
            **({"facts": [fact.to_json() for fact in group.facts]} if group.facts else {}),
        }
        for group in optimizer.groups
    ]
    return {
        "schema": optimizer.schema,
        "variant": optimizer.variant,
        "updates": counts.done,
        "schedule": None if counts.done is None else counts.schedule,
        "groups": groups,
    }


@dataclass(frozen=True)
class Request:
    """What to inspect, and how.

    Attributes:
        pattern: Glob for parameter paths and names of other tensors; `*` also matches `/`. All of them if None.
        stats: Whether to read all values and add statistics.
    """

    pattern: str | None = None
    stats: bool = False

    def matches(self, name: str) -> bool:
        """Tells whether a name is asked for."""
        return self.pattern is None or fnmatchcase(name, self.pattern)


OnProgress = Callable[[int, int], object]
"""Gets bytes read so far and bytes to read."""


@collecting_rarely()
def inspect(
    source: CheckpointRef | Place,
    request: Request = Request(),
    on_progress: OnProgress = lambda done, all_: None,
) -> Inspection:
    """Opens a checkpoint and describes it, whether or not a layout fits.

    Raises:
        NotFoundError: Nothing is there, no such step, or nothing matches the pattern.
        UsageError: No such container or layout.
        FormatError: The bytes don't follow their format or can't be trusted.
        CorruptError: The checkpoint isn't what its manifest says.
    """
    ref = ref_of(source)
    ref, chosen, evidence = chosen_container(ref)
    container = Choice(chosen.name, chosen.title, evidence.because)
    budget = ref.job_budget()
    budget.few_counts = not request.stats
    with registry.opened(chosen, ref.place, ref.step, ref, budget) as whole:
        checkpoint = replace(whole, few_counts=budget.counts_apart)
        headers = Inspection(
            checkpoint.path,
            container,
            layout=None,
            step=checkpoint.step,
            meta=checkpoint.meta,
            findings=checkpoint.findings,
            integrity=means_of(checkpoint),
            uncounted=uncounted(checkpoint),
        )
        if not request.stats:
            return _with_contents(headers, checkpoint, ref, budget, request, on_progress)
        used = proving(checkpoint, budget, accept=ref.accept_damaged)
        inspection = _with_contents(headers, used.checkpoint, ref, budget, request, on_progress)
        used.finish()
        return replace(inspection, findings=(*inspection.findings, *used.damage))


def _with_contents(
    inspection: Inspection,
    checkpoint: Checkpoint,
    ref: CheckpointRef,
    budget: Budget,
    request: Request,
    on_progress: OnProgress,
) -> Inspection:
    """Adds the canonical state, or, if no layout decodes the checkpoint, its tensors by their own names."""
    try:
        layout, why = chosen_layout(checkpoint, ref.layout)
        inspection = replace(inspection, layout=Choice(layout.name, layout.title, why.because))
        state = registry.decoded(layout, checkpoint, ref)
    except (UnknownFormatError, StateError) as error:
        if ref.layout or ref.options("meaning").keys() - {"model_key", "optimizer_key"}:
            raise
        undecoded = replace(
            inspection, findings=(*inspection.findings, *unread(checkpoint, None, ref, budget))
        )
        return _native(undecoded, checkpoint, error, request, on_progress)
    findings = (
        *inspection.findings,
        *disagreements(checkpoint, state),
        *unread(checkpoint, state, ref, budget),
    )
    named = replace(inspection, findings=findings)
    return _canonical(named, state, request, on_progress)


def _check_matched(seen: Inspection, request: Request, names: Iterable[str]) -> None:
    if request.pattern is None or seen.parameters or seen.others:
        return
    part = request.pattern.strip("*")
    near = [name for name in names if part and fnmatchcase(name, f"*{part}*")]
    raise NotFoundError(
        "Nothing matches the filter.",
        place=seen.path,
        expected="a glob for whole paths, such as *mlp*",
        found=request.pattern,
        remedy=f"try *{part}*, which matches {some(near)}" if near else "leave it out to see the names",
    )


def _native(
    inspection: Inspection,
    checkpoint: Checkpoint,
    error: StatekitError,
    request: Request,
    on_progress: OnProgress,
) -> Inspection:
    contents = registry.contents(checkpoint) or Contents("", {}, {}, checkpoint.tensors)
    params = {path: tensor for path, tensor in contents.params.items() if request.matches(path)}
    slots = {path: contents.slots.get(path, {}) for path in params}
    chosen = {name: tensor for name, tensor in contents.others.items() if request.matches(name)}
    read = [*params.values(), *(t for tensors in slots.values() for t in tensors.values()), *chosen.values()]
    describe = _describer(read, request.stats, on_progress)
    parameters = tuple(
        ParameterSummary(
            describe(path, tensor), tuple(describe(n, t) for n, t in slots[path].items()), None, None
        )
        for path, tensor in params.items()
    )
    others = tuple(describe(name, tensor) for name, tensor in chosen.items())
    seen = replace(inspection, parameters=parameters, others=others, contents=contents.what or None)
    seen = _with_unnamed(seen, contents.unnamed if isinstance(error, NamesError) else None)
    seen = replace(seen, undecoded=_why_undecoded(checkpoint, error))
    _check_matched(seen, request, [*contents.params, *contents.others])
    findings = _of_no_layout(checkpoint, contents, error)
    return replace(seen, findings=(*seen.findings, *findings, *_bad_values(seen)))


def _why_undecoded(checkpoint: Checkpoint, error: StatekitError) -> str:
    """Returns why no state was made of a checkpoint, in a sentence and what was found, or the first fault of many."""
    if not checkpoint.tensors:
        return "It holds no tensor."
    first = "The first: {} @ {}".format(*error.faults[0]) if len(error.faults) > 1 else None
    return " ".join(f"{error.subject} {first or error.found or ''}".split())


def _of_no_layout(checkpoint: Checkpoint, contents: Contents, error: StatekitError) -> tuple[Finding, ...]:
    """Returns why a checkpoint is listed by its own names; none where its contents tell that already."""
    if contents.what and isinstance(error, UnknownFormatError):
        return ()
    line = error.line if contents.what else f"its tensors are listed by their own names: {error.line}"
    return (Finding(line, str(checkpoint.path)),)


def _with_unnamed(seen: Inspection, unnamed: Unnamed | None) -> Inspection:
    """Returns an inspection with the run of an optimizer that numbers its parameters, or else without a layout."""
    if unnamed is None:
        return replace(seen, layout=None)
    return replace(
        seen,
        optimizer=unnamed.optimizer,
        counts=unnamed.counts,
        contents=None if seen.parameters else seen.contents,
        extra=tuple(unnamed.extra),
        run=run_of(unnamed.extra),
        assumptions=unnamed.assumptions,
    )


def _of_groups(state: TrainState) -> dict[str, Tensor]:
    """Returns the slots of groups as wholes, by name."""
    return {
        f"groups/{i}/{name}": tensor
        for i, group in enumerate(state.optimizer.groups)
        for name, tensor in group.slots.items()
    }


def _canonical(
    inspection: Inspection, state: TrainState, request: Request, on_progress: OnProgress
) -> Inspection:
    params = {path: t for path, t in state.params.items() if request.matches(path)}
    rest = {**_of_groups(state), **tensor_names(dict(state.extra))}
    extra = {name: tensor for name, tensor in rest.items() if request.matches(name)}
    slots = {path: state.slots.get(path, {}) for path in params}
    read = [*params.values(), *(t for named in slots.values() for t in named.values()), *extra.values()]
    describe = _describer(read, request.stats, on_progress)
    groups = state.optimizer.group_numbers
    parameters = tuple(
        ParameterSummary(
            describe(path, tensor),
            tuple(describe(name, slot) for name, slot in slots[path].items()),
            groups.get(path),
            state.rules.get(path),
        )
        for path, tensor in params.items()
    )
    alone = state.optimizer.schema == WEIGHTS
    seen = replace(
        inspection,
        optimizer=None if alone else state.optimizer,
        counts=None if alone else state.counts,
        contents=contents_without_optimizer(inspection.findings, run_of(state.extra)) if alone else None,
        parameters=parameters,
        others=tuple(describe(name, tensor) for name, tensor in extra.items()),
        extra=tuple(state.extra),
        run=run_of(state.extra),
        assumptions=state.assumptions,
    )
    _check_matched(seen, request, [*state.params, *rest])
    odd = () if alone else _odd(state, parameters)
    return replace(seen, findings=(*seen.findings, *odd, *_bad_values(seen)))


def _describer(
    tensors: Iterable[Tensor], with_stats: bool, on_progress: OnProgress
) -> Callable[[str, Tensor], TensorSummary]:
    to_read = sum(map(nbytes, tensors)) if with_stats else 0
    done = 0

    def on_read(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, to_read)

    def describe(name: str, tensor: Tensor) -> TensorSummary:
        stats = measure(tensor, on_read) if with_stats else None
        dtype = dtype_name(tensor.dtype)
        if isinstance(tensor, Quantized):
            return TensorSummary(name, tensor.shape, dtype, tensor.stored_bytes, stats, tensor.kind)
        return TensorSummary(name, tensor.shape, dtype, nbytes(tensor), stats)

    return describe


def _odd(state: TrainState, parameters: Iterable[ParameterSummary]) -> Iterator[Finding]:
    schemas = {path: load_schema(part.optimizer.schema) for part in state.parts() for path in part.params}
    without = _without_slots(state)
    for parameter in parameters:
        path = parameter.tensor.name
        if parameter.group is None:
            yield Finding("is in no parameter group: frozen", path)
        elif not parameter.slots and state.counts.updates and path not in without:
            yield Finding(f"has no slots after {state.counts.updates} updates", path)
        for slot in parameter.slots:
            usual = schemas[path].slots[slot.name].dtype
            if usual in DTYPES and slot.dtype != usual:
                yield Finding(f"slot {slot.name} is {slot.dtype}, usually {usual}", path)
            if state.counts.updates and _is_all_zeros(slot):
                yield Finding(f"slot {slot.name} is all zeros after {state.counts.updates} updates", path)


def _is_all_zeros(slot: TensorSummary) -> bool:
    return bool(slot.stats and slot.stats.finite and slot.stats.zeros == math.prod(slot.shape))


def _without_slots(state: TrainState) -> set[str]:
    """Returns the parameters of groups without any slot whose optimizer may be one without, such as plain SGD."""
    return {
        path
        for group in state.optimizer.groups
        if is_native(state.optimizer.kind(group)[0]) and not any(map(state.slots.get, group.paths))
        for path in group.paths
    }


def _bad_values(seen: Inspection) -> Iterator[Finding]:
    slots = [(f"{p.tensor.name}/{slot.name}", slot) for p in seen.parameters for slot in p.slots]
    tensors = [(tensor.name, tensor) for tensor in (*(p.tensor for p in seen.parameters), *seen.others)]
    for place, tensor in (*tensors, *slots):
        if tensor.stats and (tensor.stats.nans or tensor.stats.infs):
            yield Finding(f"holds {tensor.stats.nans} NaN and {tensor.stats.infs} infinite values", place)
