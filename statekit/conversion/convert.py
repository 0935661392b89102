"""The two verbs of the library: `plan` says what a conversion will do, `convert` does it.

p = plan(Path("t5x-ckpt"), Path("torch-ckpt"))
print(p.exactness, p.bytes)
report = convert(p)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from statekit.conversion import registry
from statekit.conversion.cards import LayoutCard
from statekit.conversion.contracts import (
    Container,
    Encoded,
    Evidence,
    Exactness,
    Fitting,
    Hints,
    KeepsMasters,
    Layout,
)
from statekit.conversion.open_state import OpenState
from statekit.conversion.plan import NO_HINTS, Plan, Request, Side, StepOffset, build_plan
from statekit.conversion.rule_change import RuleChange, best_rule_change
from statekit.conversion.source_digests import (
    content_digest,
    digest_rest,
    passed_through,
    prove,
    source_digests,
)
from statekit.conversion.target import check_apart, choose_container, choose_layout, source_container
from statekit.errors import CommitError, CorruptError, Faults, StateError, UsageError, printable
from statekit.files.checkpoint import Checkpoint
from statekit.files.durable import writing
from statekit.files.manifest import tensor_faults
from statekit.files.stage import Entries, Kind, OnProgress, Stage, check_target, silent, staged
from statekit.state.masters import as_params
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState


@dataclass(frozen=True, repr=False)
class Report:
    """What a conversion did.

    Attributes:
        target: Where the result is.
        plan: What was carried out.
        files: Name -> size and digest of every file written.
        bytes: Size of all files written.
        seconds: How long it took.
        verified: How many tensors were read again from the target and found as meant: all of them.
        source_digest: Digest of the source's tensors.
        source_proven: How many tensors of the source had a digest in its manifest, and fit it.
    """

    target: Path
    plan: Plan
    files: Entries
    bytes: int
    seconds: float
    verified: int
    source_digest: str
    source_proven: int

    def __repr__(self) -> str:
        return printable(f"<Report {self.target}: {self.bytes} bytes, {self.verified} tensors verified>")

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain JSON."""
        return {
            "target": str(self.target),
            "plan": self.plan.digest,
            "files": dict(self.files),
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "verified": self.verified,
            "source_digest": self.source_digest,
            "source_proven": self.source_proven,
        }


def open_state(
    path: Path,
    *,
    container: str | None = None,
    layout: str | None = None,
    step: int | None = None,
    hints: Hints = NO_HINTS,
) -> OpenState:
    """Opens a checkpoint and decodes it; reads headers and scalars only.

    Args:
        path: A checkpoint, or a run's folder.
        container: Name of its container; found by its content if None.
        layout: Name of its layout; found by its names if None.
        step: Which step of a run's folder; the newest if None.
        hints: What the checkpoint doesn't say.

    Raises:
        NotFoundError: Nothing is there, or no such step or name.
        FormatError: The bytes can't be trusted, or no format fits.
        StateError: The names break the layout.
    """
    if container is not None:
        named, implied = source_container(container)
        layout, seen = layout or implied, Evidence(0, "named by the user")
    else:
        named, seen = registry.detect_container(path)
    checkpoint = named.open(path, step)
    try:
        _check_manifest(checkpoint)
        if layout is not None:
            meaning, why = registry.layout(layout), Evidence(0, "named by the user")
        else:
            meaning, why = registry.detect_layout(checkpoint)
        state = registry.decoded(meaning, checkpoint, hints)
        return OpenState(checkpoint, meaning.name, (seen, why), state)
    except BaseException:
        checkpoint.close()
        raise


def _check_manifest(checkpoint: Checkpoint) -> None:
    faults = Faults(tensor_faults(checkpoint.manifest, checkpoint.tensors) if checkpoint.manifest else ())
    faults.check(CorruptError, "The checkpoint doesn't hold what its manifest says", place=checkpoint.path)


def plan(
    source: Path,
    target: Path,
    *,
    from_: str | None = None,
    to: str | None = None,
    layout: str | None = None,
    step: int | None = None,
    hints: Hints = NO_HINTS,
    step_offset: StepOffset = "keep",
    require: Exactness = Exactness.ROUNDING,
) -> Plan:
    """Says what a conversion will do, without reading a value.

    Args:
        source: A checkpoint, or a run's folder.
        target: Where the result shall be.
        from_: Container of the source; found by its content if None.
        to: Container of the target, or `<layout>-<container>`; by the target's name if None.
        layout: Layout of the target; the container's usual one if None.
        step: Which step of a run's folder; the newest if None.
        hints: What the source doesn't say.
        step_offset: `keep`; `reset`, so that the second-moment decay starts anew; or the step where it starts.
        require: The worst exactness allowed.

    Raises:
        UsageError: The options, or source and target, don't go together.
        InexactError: The conversion would be less exact than required.
        NotFoundError, FormatError, StateError: The source can't be opened.
    """
    request = Request(Path(source), Path(target), from_, to, layout, step, hints, step_offset, require)
    with _prepared(request) as prepared:
        return prepared.plan


def convert(plan: Plan, *, replace: bool = False, on_progress: OnProgress | None = None) -> Report:
    """Carries out a plan: writes beside the target, proves what was written, gives it the target's name.

    Args:
        plan: What to do.
        replace: Whether an existing target may be replaced; it stays until the new one is proven and synced.
        on_progress: Told about every block.

    Raises:
        TargetExistsError: The target exists and mustn't be replaced.
        UsageError: The source isn't what it was when the plan was made.
        CorruptError: A tensor of the source isn't what the source's manifest says.
        CommitError: Writing failed, or what was written isn't what was meant; nothing was left at the target.
    """
    began = time.monotonic()
    tell = on_progress or silent
    check_target(plan.request.target, replace=replace)
    with _prepared(plan.request) as prepared:
        if prepared.plan.digest != plan.digest:
            raise UsageError(
                "The source isn't what it was when the plan was made.",
                place=plan.request.source,
                expected=f"plan {plan.digest}",
                found=f"plan {prepared.plan.digest}",
                remedy="make a new plan",
            )
        checkpoint, tree = prepared.opened.checkpoint, prepared.encoded.tree
        passed = passed_through(checkpoint, tree)
        rest: dict[str, str] = {}

        def fields(streamed: Entries) -> Mapping[str, Any]:
            digest = content_digest(checkpoint, source_digests(rest, passed, streamed))
            return _manifest_fields(plan, digest)

        with staged(
            plan.request.target,
            prepared.kind,
            replace=replace,
            on_progress=tell,
            fields=fields,
            total=plan.bytes,
        ) as stage:
            rest.update(digest_rest(checkpoint, passed, tell))
            prove(checkpoint, rest)
            with writing(stage.target):  # a container may make files by other means than the stage's
                prepared.container.write(prepared.encoded, stage)
            _check_streamed(plan, stage)
            digests = source_digests(rest, passed, stage.tensors)
            proven = prove(checkpoint, digests)
            files = stage.commit(prepared.reopen)
        return Report(
            target=stage.target,
            plan=plan,
            files=files,
            bytes=sum(int(entry["bytes"]) for entry in files.values()),
            seconds=time.monotonic() - began,
            verified=len(stage.tensors),
            source_digest=content_digest(checkpoint, digests) or "",
            source_proven=proven,
        )


@dataclass(frozen=True)
class _Prepared:
    """A conversion up to the first byte: the source open, the state encoded, the plan made."""

    opened: OpenState
    state: TrainState
    container: Container
    layout: Layout
    encoded: Encoded
    plan: Plan

    @property
    def kind(self) -> Kind:
        assert self.container.target_kind is not None  # choose_container saw to it
        return self.container.target_kind

    def reopen(self, path: Path) -> Checkpoint:
        """Opens what was written, and checks that it decodes to the same step and params."""
        written = self.container.open(path)
        try:
            found = _outline(self.layout.decode(written, NO_HINTS))
            meant = _outline(self.state)
            faults = Faults(
                (f"is {found.get(key)}, meant {meant.get(key)}", key)
                for key in {**meant, **found}
                if found.get(key) != meant.get(key)
            )
            faults.check(StateError, "It decodes to another state", place=path)
        except BaseException:
            written.close()
            raise
        return written


@contextmanager
def _prepared(request: Request) -> Iterator[_Prepared]:
    check_apart(request.source, request.target)
    container, implied = choose_container(request.target, request.to)
    with open_state(
        request.source, container=request.from_, step=request.step, hints=request.hints
    ) as opened:
        state, offset = with_offset(opened.state, request.step_offset)
        name = request.layout or implied
        layout = choose_layout(container, state.optimizer.schema, name, opened.layout)
        rule_change = rule_change_to(layout, state, opened.layout)
        if rule_change is not None:
            rule_change.check(request.require, lambda: _nearest(opened, request))
            state = rule_change.state
        encoded, state = _encoded(layout, state)
        if isinstance(container, Fitting):
            encoded = container.fitted(encoded)
        options = {
            "hparams": dict(request.hints.hyperparameters),
            "variant": request.hints.variant,
            **({"param_names": list(names)} if (names := request.hints.param_names) else {}),
            "step_offset": {"asked": request.step_offset, "value": offset},
            "require": request.require.name.lower(),
        }
        target = Side(container.name, layout.name, encoded.step)
        built = build_plan(
            opened.checkpoint, opened.layout, state, encoded, target, options, request, rule_change
        )
        built.check()
        yield _Prepared(opened, state, container, layout, encoded, built)


def _encoded(layout: Layout, state: TrainState) -> tuple[Encoded, TrainState]:
    """Returns a state in native form, and as it is there: masters are the parameters of layouts without their place."""
    if isinstance(layout, KeepsMasters):
        return layout.encode(state), state
    state, left = as_params(state)
    encoded = layout.encode(state)
    return replace(encoded, dropped={**encoded.dropped, **left}), state


def with_offset(state: TrainState, asked: StepOffset) -> tuple[TrainState, int | None]:
    """Returns the state with its `step_offset` as asked for, and the new value; None where it stays.

    Raises:
        UsageError: The optimizer has none, or the offset lies beyond the step.
    """
    if asked == "keep":
        return state, None
    updates = state.counts.updates
    if "step_offset" not in load_schema(state.optimizer.schema).hyperparameters:
        raise UsageError(
            f"{state.optimizer.schema} has no step_offset.", place="--step-offset", expected="keep"
        )
    value = updates if asked == "reset" else asked
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= updates:
        raise UsageError(  # (step - offset + 1) ** -decay_rate would be NaN from then on
            "The step_offset isn't usable: the decay of the second moment would be NaN.",
            place="--step-offset",
            expected=f"keep, reset, or a number from 0 to the step, {updates}",
            found=asked,
        )
    return state.with_hyperparameters(step_offset=value), value


def rule_change_to(layout: Layout | LayoutCard, state: TrainState, source: str) -> RuleChange | None:
    """Returns how a state goes on where a layout is at home; None if it may follow its own rule there.

    Args:
        layout: The target's layout.
        state: The state.
        source: Name of the layout it is from, which knows the candidates where the state doesn't say its variant.
    """
    schema = state.optimizer.schema
    return best_rule_change(
        state, registry.layout_card(source).variants.get(schema, ()), layout.variants.get(schema, ())
    )


def _nearest(opened: OpenState, request: Request) -> list[str]:
    """Returns the layouts that hold the optimizer and go on as exactly as was required."""
    state = opened.state
    cards = map(registry.layout_card, registry.layout_names())
    layouts = [one for one in cards if state.optimizer.schema in one.variants]
    ways = {one.name: rule_change_to(one, opened.state, opened.layout) for one in layouts}
    return [name for name, way in ways.items() if way is None or way.exactness <= request.require]


def _outline(state: TrainState) -> dict[str, Any]:
    return {"step": state.counts.updates, **{path: tensor.shape for path, tensor in state.params.items()}}


def _check_streamed(plan: Plan, stage: Stage) -> None:
    planned = {entry.name: (list(entry.shape), entry.dtype) for entry in plan.entries}
    written = {name: (entry["shape"], entry["dtype"]) for name, entry in stage.tensors.items()}
    faults = Faults(
        (f"is {written.get(name, 'not written')}, planned {planned.get(name, 'not at all')}", name)
        for name in {**planned, **written}
        if written.get(name) != planned.get(name)
    )
    faults.check(CommitError, "What was written isn't what was planned", place=stage.target)


def _manifest_fields(plan: Plan, digest: str | None) -> Mapping[str, Any]:
    return {
        "target": plan.target.to_json(),
        "source": {**plan.source.to_json(), "digest": digest},
        "plan": plan.digest,
        "options": dict(plan.options),
        "state": dict(plan.state),
        "dropped": dict(plan.dropped),
        "inexact": {
            entry.name: {"exactness": entry.exactness.name.lower(), "reason": entry.reason}
            for entry in plan.entries
            if entry.exactness > Exactness.BITWISE
        },
    }
