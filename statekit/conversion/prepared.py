"""A conversion up to its first byte: the source opened and decoded, the state encoded for the target, the plan made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import finalize

from statekit.conversion import registry
from statekit.conversion.belonging import open_parts
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import (
    APART,
    NO_HINTS,
    BuildsOptimizer,
    Container,
    Cuttable,
    Encoded,
    Fitting,
    Hints,
    KeepsEncoding,
    KeepsManifest,
    KeepsMasters,
    Layout,
    LikeModel,
    NamesLosses,
    Paced,
)
from statekit.conversion.open_state import OpenState, open_beside, open_params, open_state, require_whole
from statekit.conversion.plan import Plan, Request, Side, build_plan
from statekit.conversion.registry import ContainerCard, LayoutCard
from statekit.conversion.rule_change import RuleChange, best_rule_change, change_rule, joined_rule_change
from statekit.conversion.target import (
    agreed_layout,
    check_apart,
    check_optimizer,
    check_said,
    choose_container,
    is_carried,
    layouts_for,
    unsaid,
    written_as,
)
from statekit.errors import (
    Faults,
    InexactError,
    StateError,
    StatekitError,
    UnknownFormatError,
    UsageError,
    some,
)
from statekit.files.checkpoint import PRETRAINED, Checkpoint, Finding
from statekit.files.homes import TargetKind
from statekit.files.integrity import files_of, proven
from statekit.files.tree import Facts, Place, stat_of
from statekit.maps.links import StateMap, carried_through
from statekit.state.evidence import Fact
from statekit.state.facts import facts_of
from statekit.state.options import RATE_NAMES, stored_rate
from statekit.state.run import BESIDE, Schedule, run_of
from statekit.state.schema import WEIGHTS, load_schema
from statekit.state.stored_params import MASTER, as_params, check_known, decoded
from statekit.state.train_state import Counts, StepOffset, TrainState
from statekit.tensors.tensor import dtype_name
from statekit.tensors.tree import at, going_over

if TYPE_CHECKING:  # entered only where something is asked for
    from statekit.conversion.changing.changes import Change

SCHEDULE = "counts/schedule"
"""Canonical name of where a run's schedule stands."""
UPDATES = "counts/updates"
"""Canonical name of how many updates were made."""
_COUNTED = "step_scope"
"""The schemas' difference in whose updates are counted: each parameter's, or all together."""


@dataclass(frozen=True)
class Prepared(AbstractContextManager["Prepared"]):
    """A conversion up to the first byte: the source open, the state encoded. Leaving the context closes the source.

    Attributes:
        opened: The source.
        state: What will be written, in canonical form.
        container: The target's.
        layout: The target's.
        encoded: The state in the target's form.
        files: The source's files as they were when it was opened.
        reads: What has to be said of the target to read it again: the model's parameters, where it has none.
        beside: The file of the target's model, if parameters are taken from it; it is closed too.
        carried: The state under the target's names as the source's rule still has it.
        rule_change: How the target's rule isn't the source's; None where it is.
    """

    opened: OpenState
    state: TrainState
    container: Container
    layout: Layout
    encoded: Encoded
    files: Mapping[Place, Facts]
    reads: CheckpointRef = NO_HINTS
    beside: tuple[OpenState, ...] = ()
    carried: TrainState | None = None
    rule_change: RuleChange | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the source, and what was opened beside it."""
        for opened in (self.opened, *self.beside):
            opened.close()

    @property
    def is_current(self) -> bool:
        """Whether the source's files are as they were."""
        facts_of_sides = (_stats_of(opened.checkpoint) for opened in (self.opened, *self.beside))
        return self.files == {name: fact for facts in facts_of_sides for name, fact in facts.items()}

    @property
    def places(self) -> Iterator[Place]:
        """The source's files, and its folder if it has one of its own."""
        path = self.opened.checkpoint.path
        yield from (path,) if path.is_dir() else ()
        yield from self.files

    @property
    def kind(self) -> TargetKind:
        """What the target is."""
        assert self.container.target_kind is not None  # choose_container saw to it
        return self.container.target_kind

    def cuttable(self) -> Cuttable:
        """Returns the container, which writes many files.

        Raises:
            UsageError: It writes one file.
        """
        if self.kind == "folder" and isinstance(self.container, Cuttable):
            return self.container
        cut = [name for name in registry.container_names() if isinstance(registry.container(name), Cuttable)]
        raise UsageError(
            "The target isn't written in files of a size that may be asked for, nor by many workers.",
            place=self.container.name,
            expected=f"a container of many files: {', '.join(cut)}",
            found="a single file" if self.kind == "file" else "a folder that one process writes",
            remedy="leave --on and --task-bytes out, or name another container with --to",
        )

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Turns the errors of a container that can't take a foreign layout's tree into one that names both.

        Raises:
            InexactError: It can't.
        """
        try:
            yield
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            of_another_kind = isinstance(error, StatekitError) and not isinstance(error, StateError)
            if self.container.name in self.layout.containers or of_another_kind:
                raise
            reason = error.line if isinstance(error, StatekitError) else f"{type(error).__name__}: {error}"
            raise self._misfit_error(reason) from error

    def _check_recognised(self, written: Checkpoint) -> None:
        """Refuses names that tell no layout what they mean; another than the target's may have the same."""
        try:
            registry.detect_layout(written)
        except UnknownFormatError as error:
            raise self._misfit_error(error.line) from error

    def _check_counts(self, back: TrainState) -> None:
        """Refuses a target that has lost counts of parameters by themselves, unless the change of the rule says so."""
        if self.rule_change is not None and any(
            difference.what == _COUNTED for difference in self.rule_change.differences
        ):
            return
        counts, now = self.state.counts, back.counts.behind
        lost = [f"{path}: {n}" for path, n in counts.behind.items() if now.get(path) != n]
        if lost:
            raise InexactError(
                "The target counts the updates of all parameters together, and some have missed updates.",
                place=f"layout {self.layout.name}, container {self.container.name}",
                expected=f"{counts.updates} of each",
                found=some(lost),
                remedy="choose statekit-torch or another layout that counts for each, such as torch-optim",
            )

    def _misfit_error(self, found: str) -> InexactError:
        layout, container = self.layout, self.container.name
        return InexactError(
            f"The layout {layout.name} doesn't go into the container {container}.",
            place="--layout",
            expected=f"a container in which it is at home: {', '.join(layout.containers)}",
            found=found,
            remedy="leave --layout out, or choose another container with --to",
        )

    def reopen(self, path: Place) -> Checkpoint:
        """Opens what was written, and checks that it decodes to the same step and params."""
        written = self.container.open(path, budget=self.opened.budget)
        try:
            written = proven(written, self.opened.budget)
            if self.reads.model is None and self.layout.detect(written) is None:
                self._check_recognised(written)
            with self.joining():
                back = self.layout.decode(written, self.reads)
            self._check_counts(back)
            # Where nothing else tells, what no optimizer moves is a buffer, as a frozen parameter is.
            stored, meant = (_outline(state) | _buffers(state) for state in (back, self.state))
            left = {"step"} if UPDATES in self.encoded.dropped else set()
            faults = Faults(
                (f"is {stored.get(key)}, meant {meant.get(key)}", key)
                for key in {**_outline(self.state), **_outline(back)}
                if stored.get(key) != meant.get(key) and key not in left
            )
            faults.check(StateError, "It decodes to another state", place=path)
        except BaseException:
            written.close()
            raise
        return written


def prepare(request: Request) -> Plan:
    """Makes the plan of a conversion, and keeps its source open for the first execution.

    Raises:
        UsageError: The options, or source and target, don't go together.
        InexactError: The conversion would be less exact than required.
        NotFoundError, FormatError, StateError: The source can't be opened.
    """
    with going_over(request.ref.place):
        return _prepared(request)


def _keeps_encoding(layout: Layout) -> bool:
    """Tells whether a layout keeps the bits of variables that are stored encoded."""
    return isinstance(layout, KeepsEncoding) and layout.keeps_encoding


def _prepared(request: Request) -> Plan:
    check_apart(request.ref.place, request.target)
    container, implied = choose_container(request.target, request.to)
    container = written_as(container, request.target)
    opened = _opened(request)
    neighbours: tuple[OpenState, ...] = ()
    try:
        state, changes = _with_changes(opened, request)
        card, passed_over, state = _layout_for(container, state, opened, request, implied)
        layout = registry.layout(card.name)
        keeps_encoding = _keeps_encoding(layout)
        if not keeps_encoding and not _is_stored_as_moved(state):
            check_known(state, opened.makers)
            state = state.per_optimizer(decoded)
        maps = _with_model_settings(request.maps, opened)
        state, mapped = carried_through(state, maps) if maps else (state, ())
        state, changes, neighbours = _with_init_missing(state, changes, opened, request)
        require_whole(state, opened.checkpoint.path)
        carried, rule_change = state, rule_change_to(card, state, opened.layout)
        makers = registry.layout_card(opened.layout).variants
        if rule_change is not None:
            rule_change.check(request.require, lambda: _layouts_exact_enough(opened, request))
            state = rule_change.state
        if request.like is not None:
            state = _laid_out_like(layout, state, request.like, opened, request.ref)
        encoded, state = encoded_in(layout, state)
        _check_asked_dtypes(state, request)
        encoded = _with_schedule_step(encoded, (card, registry.container_card(container.name)), opened, state)
        encoded = _fitted(encoded, container, state)
        reads = NO_HINTS
        if layout.name == opened.layout and not maps:  # its files number parameters again
            reads = CheckpointRef(param_names=request.ref.param_names)
        if request.changes is not None and request.changes.state_only:
            encoded, changes, reads = _without_model(encoded, (layout.name, container.name), state, changes)
        options = _options(request, maps, opened.state, passed_over)
        target = Side(container.name, layout.name, _step_of(encoded, state))
        keeps = container.target_kind == "folder" or isinstance(container, KeepsManifest)
        plan = build_plan(
            checkpoint=opened.checkpoint,
            layout=opened.layout,
            state=state,
            encoded=encoded,
            target=target,
            options=options,
            request=request,
            rule_change=rule_change,
            mapped=mapped,
            keeps_manifest=keeps,
            changed=changes,
            done=opened.state.counts.done,
            facts=(*facts_of(_with_rates(carried), makers), *open_parts(opened.checkpoint.findings)),
        )
        plan.check()
        plan = _with_next_update(replace(plan, findings=(*plan.findings, *_losses(opened, state, card))))
        files = {
            name: fact for part in (opened, *neighbours) for name, fact in _stats_of(part.checkpoint).items()
        }
    except BaseException:
        for part in (opened, *neighbours):
            part.close()
        raise
    _WAITING[id(plan)] = Prepared(
        opened=opened,
        state=state,
        container=container,
        layout=layout,
        encoded=encoded,
        files=files,
        reads=reads,
        beside=neighbours,
        carried=carried,
        rule_change=rule_change,
    )
    finalize(plan, _close, id(plan))
    return plan


def _step_of(encoded: Encoded, state: TrainState) -> int | None:
    return encoded.step if state.counts.says_updates else None


def _check_asked_dtypes(state: TrainState, request: Request) -> None:
    """Refuses dtypes that were asked for and that the next update doesn't bear."""
    changes = request.changes
    if changes is not None and (changes.slot_dtype or changes.param_dtype):
        from statekit.conversion.changing.next_update import check_dtypes

        check_dtypes(state, changes)


def _fitted(encoded: Encoded, container: Container, state: TrainState) -> Encoded:
    """Returns what is encoded with the rates of its schedules, as the container takes it."""
    if schedules := run_of(state.extra).schedules:
        encoded = replace(encoded, paced=_paces(schedules, state))
    return container.fitted(encoded) if isinstance(container, Fitting) else encoded


def _losses(opened: OpenState, state: TrainState, card: LayoutCard) -> Iterator[Finding]:
    """Yields what the run loses that leaves its own system."""
    layout, source = registry.layout(opened.layout), registry.layout_card(opened.layout)
    if isinstance(layout, NamesLosses) and not is_carried(state, opened.layout, card, source):
        yield from layout.losses(opened.checkpoint)


def _layout_for(
    container: Container, state: TrainState, opened: OpenState, request: Request, implied: str | None
) -> tuple[LayoutCard, dict[str, str], TrainState]:
    """Returns the target's layout, why others before it don't go on, and the state with the rates that it stores."""
    name = _layout_of(request, implied)
    cards = layouts_for(container, state.optimizer.kinds, name, opened.layout)
    with_rates = _with_rates(state)
    source = registry.layout_card(opened.layout)

    def facts_to_ask(card: LayoutCard, change: RuleChange | None) -> list[Fact]:
        if not card.stores_values or not request.asks or is_carried(state, source.name, card, source):
            return []
        return unsaid(with_rates, with_rates if change is None else change.state, request.ref)

    builds = isinstance(container, BuildsOptimizer) and container.builds_optimizer
    card, passed_over = _first_exact_enough(
        cards, with_rates, source.name, request, (lambda *way: []) if builds else facts_to_ask
    )
    is_at_home = is_carried(state, source.name, card, source)
    if not is_at_home:
        check_optimizer(state, request)
    change = rule_change_to(card, with_rates, source.name)
    if change is None or change.exactness <= request.require:  # else the rule itself is refused
        check_said(facts_to_ask(card, change), request.ref.place, card.name)
    # A state that stays in its own system keeps what its file has: a schedule there has no number beside it.
    return card, passed_over, with_rates if card.stores_values and not is_at_home else state


def _with_rates(state: TrainState) -> TrainState:
    """Returns a state whose groups have the next update's rate, where a schedule tells it and they have none."""
    schedules = run_of(state.extra).schedules
    if not schedules:
        return state
    groups = [
        group
        if rate is None or stored_rate(group.hyperparameters) is not None
        else replace(
            group,
            hyperparameters={**group.hyperparameters, RATE_NAMES[0]: rate},
            known_from={**group.known_from, RATE_NAMES[0]: "inferred"},
        )
        for group, rate in zip(state.optimizer.groups, _paces(schedules, state).rates, strict=True)
    ]
    return replace(state, optimizer=replace(state.optimizer, groups=tuple(groups)))


def _layout_of(request: Request, implied: str | None) -> str | None:
    """Returns the layout that was named; what the target's name implies says less than `--layout`."""
    if request.to is None and request.layout is not None:
        return request.layout
    return agreed_layout(request.layout, implied, "--to")


def carried_out(plan: Plan) -> Prepared:
    """Returns what a plan was made from; prepares it anew if it was used up, or if its files have changed.

    Raises:
        UsageError: The source has changed since the plan was made.
    """
    check_apart(plan.request.ref.place, plan.request.target)
    prepared = _WAITING.pop(id(plan), None)
    if prepared is not None:
        if prepared.is_current:
            return prepared
        prepared.close()
    again = prepare(plan.request)
    if again.digest != plan.digest:
        raise UsageError(
            "The source has changed since the plan was made.",
            place=plan.request.ref.place,
            expected=f"plan {plan.digest}",
            found=f"plan {again.digest}",
            remedy="make a new plan",
        )
    return _WAITING.pop(id(again))


_WAITING: dict[int, Prepared] = {}
"""By a plan's identity, what it was made from, still open for the first that carries it out; closed with the plan."""


def _close(plan: int) -> None:
    if (prepared := _WAITING.pop(plan, None)) is not None:
        prepared.close()


def _stats_of(checkpoint: Checkpoint) -> dict[Place, Facts]:
    """Returns what tells whether a checkpoint's files were changed, its manifest's too."""
    paths = [*files_of(checkpoint), *([checkpoint.proof.place] if checkpoint.proof else [])]
    return {path: facts for path in paths if (facts := stat_of(path)) is not None}


def _with_model_settings(maps: tuple[StateMap, ...], opened: OpenState) -> tuple[StateMap, ...]:
    """Returns maps that know what stands beside a checkpoint of its model."""
    if not maps:
        return maps
    from statekit.conversion.model_settings import with_beside

    return with_beside(maps, opened)


def _options(
    request: Request, maps: tuple[StateMap, ...], state: TrainState, passed_over: Mapping[str, str]
) -> dict[str, Any]:
    """Returns what was asked for that changes the result, as it stands in a plan; `state` is the source's."""
    return {
        **request.ref.stored(),
        "step_offset": {"asked": request.step_offset, "value": _offset(state, request.step_offset)},
        "require": request.require.name.lower(),
        **({"like": request.like.name} if request.like is not None else {}),
        **({"passed_over": passed_over} if passed_over else {}),
        **({"maps": [model_map.to_json() for model_map in maps]} if maps else _model_class(state)),
        **({"accept_damaged": True} if request.ref.accept_damaged else {}),
        **({"changes": request.changes.to_json()} if request.changes is not None else {}),
    }


def _model_class(state: TrainState) -> dict[str, Any]:
    """Returns the class of a model that an earlier map made, as its files name it; nothing without one."""
    names = at(state.extra, (BESIDE, PRETRAINED, "config.json", "architectures"))
    is_named = isinstance(names, list) and bool(names) and isinstance(names[0], str)
    return {"model_class": names[0]} if is_named else {}


def _offset(state: TrainState, asked: StepOffset) -> int | None:
    """Returns where the decay of a source's second moment was made to start; None where that stays."""
    return None if asked == "keep" else state.counts.updates if asked == "reset" else asked


def _opened(request: Request) -> OpenState:
    """Returns a conversion's source, open; for its parameters alone, whatever the optimizer is."""
    if request.changes is not None and request.changes.params_only:
        return open_params(request.ref)
    return open_state(request.ref, builds=True)


def _with_changes(opened: OpenState, request: Request) -> tuple[TrainState, tuple[Change, ...]]:
    """Returns a source's state with what was asked to be changed, and what that was."""
    if request.changes is not None and request.changes.params_only and request.step_offset != "keep":
        raise UsageError(
            "Without its slots nothing can be changed of an optimizer.",
            place="--params-only",
            found="--step-offset",
            remedy="leave it out",
        )
    state = opened.state.with_step_offset(request.step_offset)
    if request.changes is None:
        return state, ()
    from statekit.conversion.changing.changed import changed

    return changed(state, request.changes, opened.makers)


def _with_next_update(plan: Plan) -> Plan:
    """Returns a plan with what the next update will use, if an option of the user changes that."""
    request = plan.request
    if (request.changes is None and request.step_offset == "keep") or plan.state["schema"] == WEIGHTS:
        return plan
    from statekit.conversion.changing.next_update import measured

    change = plan.rule_change.to_json() if plan.rule_change is not None else None
    return replace(plan, next_update=tuple(measured(plan.state, plan.run.schedules, request.changes, change)))


def _with_init_missing(
    state: TrainState, changes: tuple[Change, ...], opened: OpenState, request: Request
) -> tuple[TrainState, tuple[Change, ...], tuple[OpenState, ...]]:
    """Returns a state with all that a file of the target's model has, what was changed, and that file, open."""
    if request.changes is None or request.changes.init_missing is None:
        return state, changes, ()
    from statekit.conversion.changing.at_loading import begun_from

    model = open_beside(request.changes.init_missing, request.ref, opened.budget)
    try:
        state, change = begun_from(state, model.state)
    except BaseException:
        model.close()
        raise
    return state, (*changes, change), (model,)


def _trust(source: CheckpointRef) -> CheckpointRef:
    """Returns a ref that trusts a file beside a source as far as the user trusts the source."""
    return replace(NO_HINTS, accept_damaged=source.accept_damaged, follow_links=source.follow_links)


def _without_model(
    encoded: Encoded, target: tuple[str, str], state: TrainState, changes: tuple[Change, ...]
) -> tuple[Encoded, tuple[Change, ...], Hints]:
    """Returns a state in native form without parameters, all that was changed, and what to read it again by."""
    from statekit.conversion.changing.changed import without_model

    encoded, left = without_model(encoded, target, state)
    model = {path.replace("/", "."): param for path, param in state.params.items()}
    return encoded, (*changes, left), Hints(model=model)


def _schedule_step_error(target: str, place: str | None, counts: Counts) -> InexactError:
    """Returns why a target can't set schedule and updates apart: it counts both in one number, or has no place."""
    if place is not None:
        return InexactError(
            "The target counts updates and the schedule's steps in one number.",
            place=target,
            expected=f"as many of both: {place} is both",
            found=f"{counts.updates} updates, the schedule at {counts.schedule}",
            remedy="shift the schedule itself in the program, or choose another layout",
        )
    return InexactError(
        "The target cannot store a schedule's step.",
        place=target,
        found=f"asked for {counts.schedule}",
        remedy="leave --schedule-step out and begin the schedule there in the program, or choose another layout",
    )


def _with_schedule_step(
    encoded: Encoded, cards: tuple[LayoutCard, ContainerCard], opened: OpenState, state: TrainState
) -> Encoded:
    """Returns an encoded state that says where its schedule stands, or why its files don't."""
    layout, container = cards
    target = f"layout {layout.name}, container {container.name}"
    apart = state.counts.schedule - state.counts.updates
    as_in_source = apart == opened.state.counts.schedule - opened.state.counts.updates
    place = next((card.schedule_in for card in cards if card.schedule_in not in (None, APART)), None)
    if not apart or (place is None and layout.schedule_in == APART and SCHEDULE not in encoded.dropped):
        return encoded
    moved = state.counts.schedule != opened.state.counts.schedule
    if not as_in_source and (place is not None or moved):
        raise _schedule_step_error(target, place, state.counts)
    if place is not None and place == registry.layout_card(opened.layout).schedule_in:
        return encoded  # it was kept there before
    if _record_goes_along(state, encoded):
        return encoded
    why = f"{place} counts updates" if place is not None else "its files don't say it"
    return _without(encoded, {SCHEDULE: f"{why}; begin the schedule at {state.counts.schedule} yourself"})


def _record_goes_along(state: TrainState, encoded: Encoded) -> bool:
    """Tells whether a schedule has a record of its own, which the target holds."""
    records = [schedule.place for schedule in run_of(state.extra).schedules if schedule.has_record]
    return any(not _is_lost(record, encoded.dropped) for record in records)


def _is_lost(name: str, dropped: Mapping[str, str]) -> bool:
    """Tells whether something, or a part of it, or all around it, is dropped."""
    return any(f"{path}/".startswith(f"{name}/") or f"{name}/".startswith(f"{path}/") for path in dropped)


def _laid_out_like(
    layout: Layout, state: TrainState, path: Place, opened: OpenState, source: CheckpointRef
) -> TrainState:
    """Lays a state out like a file of the target's model, which is trusted as far as the source."""
    if not isinstance(layout, LikeModel):
        raise UsageError(
            f"The layout {layout.name} needs no file of the model.",
            place="--like",
            found=path,
            remedy="leave it out, or name a layout of Keras with --layout",
        )
    container, _ = registry.detect_container(path)
    with registry.opened(container, path, None, _trust(source), opened.budget) as model:
        return layout.like(state, model)


def _paces(schedules: Sequence[Schedule], state: TrainState) -> Paced:
    from statekit.lines.rates import RatesOf

    rates_of = RatesOf(schedules, state.to_json())
    rates = map(rates_of.of, range(len(state.optimizer.groups)))
    at = state.counts.schedule
    return Paced(at, tuple(None if isinstance(rate, str) else rate.rate(at) for rate in rates))


def encoded_in(layout: Layout, state: TrainState) -> tuple[Encoded, TrainState]:
    """Returns a state in native form, and as it is there: masters are the parameters of layouts without their place.

    Raises:
        InexactError: The layout can't hold it.
    """
    if isinstance(layout, KeepsMasters) or _is_stored_as_moved(state):
        return layout.encode(state), state
    state, left = as_params(state)
    return _without(layout.encode(state), left), state


def _without(encoded: Encoded, left: Mapping[str, str]) -> Encoded:
    """Adds dropped names, with reasons, to an encoded state and to each of its other forms."""
    return replace(
        encoded,
        dropped={**encoded.dropped, **left},
        by_name=encoded.by_name and _without(encoded.by_name, left),
        side_by_side=encoded.side_by_side and _without(encoded.side_by_side, left),
    )


def _is_stored_as_moved(state: TrainState) -> bool:
    """Tells whether parameters are stored as an optimizer moves them: in float32, with no master beside them."""
    masters = any(MASTER in tensors for tensors in state.slots.values())
    return not masters and all(dtype_name(param.dtype) == "float32" for param in state.params.values())


def _first_exact_enough(
    cards: Sequence[LayoutCard],
    state: TrainState,
    source: str,
    request: Request,
    facts_to_ask: Callable[[LayoutCard, RuleChange | None], Sequence[Fact]],
) -> tuple[LayoutCard, dict[str, str]]:
    """Returns the first layout whose rule goes on as exactly as was required, and why others before it don't.

    It is the first of all where none does: what then is refused is that one.
    """
    passed_over: dict[str, str] = {}
    for card in cards:
        change = rule_change_to(card, state, source)
        if change is not None and change.exactness > request.require:
            worst = next(
                difference for difference in change.differences if difference.exactness > request.require
            )
            passed_over[card.name] = f"{worst.exactness.name.lower()}: {worst}"
        elif facts := facts_to_ask(card, change):
            names = some([fact.name for fact in facts])
            passed_over[card.name] = f"it stores {names}, which is not given"
        else:
            return card, passed_over
    return cards[0], {}


def rule_change_to(layout: LayoutCard, state: TrainState, source: str) -> RuleChange | None:
    """Returns how a state goes on where a layout is at home; None if it may follow its own rule there.

    Args:
        layout: The target's layout.
        state: The state.
        source: Name of the layout it is from, which knows the candidates where the state doesn't say its variant.
    """
    ways = []
    for part in state.parts():
        schema, variant = part.optimizer.schema, part.optimizer.variant
        makers = (variant,) if variant else registry.layout_card(source).variants.get(schema, ())
        if layout.keeps_rule(schema, makers):
            # Its own rule may have no place for what was asked: a decay that begins later.
            ways.append(change_rule(part, variant, variant) if variant and _without_offset(part) else None)
        else:
            ways.append(
                best_rule_change(part, makers, _variants_to_follow(schema, layout.variants[schema], state))
            )
    return joined_rule_change(state, ways) if any(ways) else None


def _variants_to_follow(schema: str, variants: Sequence[str], state: TrainState) -> list[str]:
    """Returns the variants that a target may follow; a variant that the run had there before goes first.

    One of a class with two rules is followed by runs of that class alone, where others have a class to themselves.
    """
    definition = load_schema(schema)
    variants = [name for name in variants if "beside" not in definition.variant(name)] or variants
    homes = [home for home in state.extra.values() if isinstance(home, Mapping)]
    before = [home.get("variant") for home in homes]
    return sorted(variants, key=lambda variant: variant not in before)


def _without_offset(state: TrainState) -> bool:
    """Tells whether a state's decay begins later, and its own variant has no hyperparameter that says so."""
    schema, variant = load_schema(state.optimizer.schema), state.optimizer.variant
    if variant is None or "step_offset" in schema.variant(variant)["defaults"]:
        return False
    return any(group.hyperparameters.get("step_offset") for group in state.optimizer.groups)


def _layouts_exact_enough(opened: OpenState, request: Request) -> list[str]:
    """Returns the layouts that hold the optimizer and go on as exactly as was required."""
    state = opened.state
    cards = map(registry.layout_card, registry.layout_names())
    layouts = [card for card in cards if card.holds([schema for schema, _ in state.optimizer.kinds])]
    ways = {card.name: rule_change_to(card, opened.state, opened.layout) for card in layouts}
    return [name for name, way in ways.items() if way is None or way.exactness <= request.require]


def _buffers(state: TrainState) -> dict[str, Any]:
    buffers: Mapping[str, Any] = state.extra.get("buffers") or {}
    return {name.replace(".", "/"): getattr(buffer, "shape", None) for name, buffer in buffers.items()}


def _outline(state: TrainState) -> dict[str, Any]:
    return {"step": state.counts.updates, **{path: tensor.shape for path, tensor in state.params.items()}}
