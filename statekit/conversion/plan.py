"""The plan of a conversion, tensor by tensor, made before any value is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from statekit.conversion.belonging import uncounted
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Exactness
from statekit.conversion.kept import Kept, by_leaf, kept_of
from statekit.conversion.rule_change import RuleChange
from statekit.errors import Faults, InexactError, printable
from statekit.files.checkpoint import Checkpoint, Finding
from statekit.files.tree import Place
from statekit.maps.links import Mapped, StateMap, inexact
from statekit.state.evidence import MOST_NAMED, Fact, headline
from statekit.state.run import RunState, run_of
from statekit.state.train_state import StepOffset, TrainState
from statekit.tensors.digest import json_digest
from statekit.tensors.tensor import Shape, Tensor, dtype_name, nbytes
from statekit.tensors.tree import empty_names, tensor_names, to_json

if TYPE_CHECKING:  # entered only where something is asked for
    from statekit.conversion.changing.changes import Change, Changes

FORMAT = "statekit-plan"
VERSION = 1
Origin: TypeAlias = Literal["kept", "derived", "synthesised"]


@dataclass(frozen=True)
class Request:
    """What was asked for; with it a plan can be carried out. Not part of the plan's digest.

    Attributes:
        ref: The source, with what the user says about it.
        target: Where the result shall be.
        to: Container of the target, or a shorthand such as `t5x-orbax`, if given.
        layout: Layout of the target, if given.
        step_offset: `keep`, `reset` (to the number of updates done) or a number.
        require: The worst exactness allowed.
        like: A file of the same model, whose places the target's parameters get.
        maps: What gives the parameters the names and axes of another model, one after the other.
        changes: What shall be changed of the run; None if nothing.
        map_options: `map`, `config` and `rename` as the user gave them; another process makes `maps` of them again.
        asks: Whether facts that the target stores and nobody says are refused; a proof looks at them itself.
    """

    ref: CheckpointRef
    target: Place
    to: str | None = None
    layout: str | None = None
    step_offset: StepOffset = "keep"
    require: Exactness = Exactness.ROUNDING
    like: Place | None = None
    maps: tuple[StateMap, ...] = ()
    changes: Changes | None = None
    asks: bool = True
    map_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Side:
    """A source or target: its container, its layout, its step."""

    container: str
    layout: str
    step: int | None

    def to_json(self) -> dict[str, Any]:
        """Returns the side as it stands in a plan and in a manifest."""
        return {"container": self.container, "layout": self.layout, "step": self.step}


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the target.

    Attributes:
        name: Native name in the target.
        expression: The source tensors it is made of, and how.
        shape: Shape in the target.
        dtype: Name of the dtype in the target.
        bytes: Size of the values.
        exactness: How exact the result is.
        reason: Why it isn't bitwise; empty if it is.
        origin: `kept` as it is, `derived` from source tensors, or `synthesised` without one.
        unasked: How exact it is, and why, apart from what was asked for by name.
    """

    name: str
    expression: Mapping[str, Any]
    shape: Shape
    dtype: str
    bytes: int
    exactness: Exactness
    reason: str
    origin: Origin
    unasked: tuple[Exactness, str] = (Exactness.BITWISE, "")

    def to_json(self) -> dict[str, Any]:
        """Returns the entry as it stands in a plan."""
        return {
            "name": self.name,
            "expression": dict(self.expression),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "bytes": self.bytes,
            "exactness": self.exactness.name.lower(),
            "reason": self.reason,
            "origin": self.origin,
        }


@dataclass(frozen=True, repr=False)
class Plan:
    """What a conversion will do.

    Attributes:
        source: What is read.
        target: What is written.
        entries: Every tensor of the target, in its order.
        dropped: What the target has no place for, each leaf: canonical name -> reason.
        kept: What the target has no place for and its manifest keeps, for when it comes back: canonical names.
        run: Schedule, epoch, scaler and what else is known of the run.
        assumptions: What was assumed because the source doesn't say.
        options: What was asked for that changes the result.
        state: Schema, variant, steps, groups, rules: the state without its tensors, as the target has it.
        rule_change: How the run goes on under another rule; None if the target may follow the source's own.
        mapped: What the maps made of every parameter; empty without one.
        findings: What was odd about the source; not part of the digest, as it names places on this machine.
        uncounted: Files of the source that nothing shows to be of its step
            (statekit/conversion/belonging.py); not part of the digest.
        facts: What the source's updates depend on, and how each is known.
        request: What was asked for, with paths; not part of the digest.
        empty: Names of the target's leaves that hold nothing; not part of the digest.
        variables: The target's parts that are states of nnx, as `Encoded` has them; not part of the digest.
        version: The version of the library that wrote the source, where its file says that; not part of the digest.
        changed: What was changed of the run as it was asked for.
        next_update: What the next update of each group will use, as `changing.next_update.measured` has it,
            where something was asked that it depends on; not part of the digest.
    """

    source: Side
    target: Side
    entries: tuple[PlannedTensor, ...]
    dropped: Mapping[str, str]
    kept: tuple[str, ...]
    run: RunState
    assumptions: tuple[str, ...]
    options: Mapping[str, Any]
    state: Mapping[str, Any]
    rule_change: RuleChange | None
    mapped: tuple[Mapped, ...]
    findings: tuple[Finding, ...]
    request: Request
    empty: tuple[str, ...] = field(default=(), repr=False, compare=False)
    changed: tuple[Change, ...] = ()
    next_update: tuple[Mapping[str, Any], ...] = field(default=(), repr=False, compare=False)
    uncounted: tuple[str, ...] = field(default=(), repr=False, compare=False)
    facts: tuple[Fact, ...] = ()
    variables: tuple[str, ...] = field(default=(), repr=False, compare=False)
    version: str | None = field(default=None, repr=False, compare=False)

    @property
    def headline(self) -> str:
        """How exact the conversion is, and the weakest facts that this rests on, in one line."""
        line = headline(self.exactness.name, self.facts)
        reasons = {entry.reason for entry in self.entries}
        reasons_in_words = [text for reason, text in IN_FEW_BITS.items() if reason in reasons]
        worse = (
            mapping.reason
            for mapping in self.mapped
            if mapping.exactness is self.exactness >= Exactness.STATISTICS
        )
        return "; ".join([line, *reasons_in_words, *islice(dict.fromkeys(worse), MOST_NAMED)])

    @property
    def bytes(self) -> int:
        """Size of all values that will be written."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def exactness(self) -> Exactness:
        """The exactness of the least exact tensor, or of the rule; what is dropped of the state counts as `lossy`."""
        whole = [Exactness.LOSSY for _ in _lost(self.dropped)]
        if self.rule_change is not None:
            whole.append(self.rule_change.exactness)
        whole += [mapping.exactness for mapping in self.mapped]
        whole += [change.exactness for change in self.changed]
        return max([Exactness.BITWISE, *whole, *(entry.exactness for entry in self.entries)])

    @cached_property
    def digest(self) -> str:
        """The BLAKE3 digest of `to_json`, the same on every machine."""
        return json_digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain JSON, without a path of this machine."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "source": self.source.to_json(),
            "target": self.target.to_json(),
            "bytes": self.bytes,
            "exactness": self.exactness.name.lower(),
            "headline": self.headline,
            "facts": [fact.to_json() for fact in self.facts],
            "options": dict(self.options),
            "assumptions": list(self.assumptions),
            "dropped": dict(self.dropped),
            "kept": list(self.kept),
            "run": self.run.to_json(),
            "state": dict(self.state),
            "crossing": self.rule_change.to_json() if self.rule_change is not None else None,  # a stored key
            "tensors": [entry.to_json() for entry in self.entries],
            **({"mapped": [mapping.to_json() for mapping in self.mapped]} if self.mapped else {}),
            **({"changed": [change.to_json() for change in self.changed]} if self.changed else {}),
        }

    def __repr__(self) -> str:
        ends = f"{self.request.ref.place} -> {self.request.target}"
        sides = f"{self.source.container} to {self.target.container}"
        return printable(
            f"<Plan {ends}: {sides}, {len(self.entries)} tensors, {self.exactness.name.lower()}>"
        )

    def check(self) -> None:
        """Refuses a plan that is less exact than was required; its rule was checked before there was a plan.

        Raises:
            InexactError: Lists every tensor that is.
        """
        allowed = self.request.require
        faults = Faults(
            (f"{exactness.name.lower()}: {reason}", entry.name)
            for entry in self.entries
            for exactness, reason in (entry.unasked,)
            if exactness > allowed
        )
        faults += inexact(self.mapped, allowed) if self.mapped else ()  # a map is entered where there is one
        if allowed < Exactness.LOSSY:
            faults += [(f"dropped: {self.dropped[name]}", name) for name in _lost(self.dropped)]
        faults.check(
            InexactError,
            "The conversion would be less exact than required",
            place=self.request.target,
            expected=f"{allowed.name.lower()} or better",
            remedy=f"allow it with --require {self.exactness.name.lower()}, or choose another layout",
        )


def build_plan(
    checkpoint: Checkpoint,
    layout: str,
    state: TrainState,
    encoded: Encoded,
    target: Side,
    options: Mapping[str, Any],
    request: Request,
    rule_change: RuleChange | None = None,
    mapped: tuple[Mapped, ...] = (),
    keeps_manifest: bool = True,
    changed: tuple[Change, ...] = (),
    done: int | None = None,
    facts: tuple[Fact, ...] = (),
) -> Plan:
    """Builds the plan of a conversion from names, shapes and dtypes alone.

    Args:
        checkpoint: The opened source.
        layout: Its layout.
        state: What it decodes to, with the options applied.
        encoded: What the state encodes to.
        target: What will be written.
        options: What was asked for that changes the result.
        request: What was asked for.
        rule_change: How the state came under another rule, if it did.
        mapped: What maps made of its parameters.
        keeps_manifest: Whether the target has a manifest, to keep what the target itself has no place for.
        changed: What was changed of the run as it was asked for.
        done: Updates that the source has done, where the state counts others.
        facts: What its updates depend on.
    """
    sources = {
        name for tensor in checkpoint.tensors.values() for name in _stored_names(nodes(tensor.to_json()))
    }
    names = tensor_names(encoded.tree)
    kept = Kept()
    if encoded.dropped:
        dropped = by_leaf(encoded.dropped, state.extra)
        kept = kept_of(state.extra, dropped) if keeps_manifest else Kept(dropped=dropped)
    step = checkpoint.step if checkpoint.step is not None else state.counts.done if done is None else done
    return Plan(
        source=Side(checkpoint.container, layout, step),
        target=target,
        entries=tuple(_entry(name, tensor, encoded, sources) for name, tensor in names.items()),
        dropped=kept.dropped,
        kept=kept.names,
        run=run_of(state.extra),
        assumptions=(*state.assumptions, *encoded.assumptions),
        options=to_json(options),
        state=to_json(state.to_json()),
        rule_change=rule_change,
        mapped=mapped,
        findings=checkpoint.findings,
        request=request,
        empty=tuple(empty_names(encoded.tree)),
        variables=encoded.variables,
        version=checkpoint.meta.get("keras_version"),
        changed=changed,
        uncounted=uncounted(checkpoint),
        facts=facts,
    )


def _entry(name: str, tensor: Tensor, encoded: Encoded, sources: set[str]) -> PlannedTensor:
    expression = tensor.to_json()
    parts = [*nodes(expression)]
    losses = _losses(name, parts, encoded)
    exactness, reason = max(losses)
    return PlannedTensor(
        name=name,
        expression=to_json(expression),
        shape=tensor.shape,
        dtype=dtype_name(tensor.dtype),
        bytes=nbytes(tensor),
        exactness=exactness,
        reason=reason,
        origin=_origin(parts, sources),
        unasked=max((loss for loss in losses if loss[1] not in AS_ASKED), default=(Exactness.BITWISE, "")),
    )


def _losses(name: str, parts: Iterable[Mapping[str, Any]], encoded: Encoded) -> list[tuple[Exactness, str]]:
    """Returns what a tensor loses on its way into native form, by the nodes of its expression: how exact, and why."""
    losses = [encoded.exactness.get(name, (Exactness.BITWISE, ""))]
    return losses + [loss for node in parts if (loss := INEXACT.get(str(node.get("op"))))]


def losses_in(encoded: Encoded) -> dict[str, Exactness]:
    """Returns why tensors of a native form aren't the source's to the bit: exactness by reason."""
    tensors = tensor_names(encoded.tree).items()
    losses = (loss for name, tensor in tensors for loss in _losses(name, nodes(tensor.to_json()), encoded))
    return {reason: exactness for exactness, reason in losses if exactness > Exactness.BITWISE}


DEQUANTIZED = "a moment in few bits, as the values that the next update starts from"
QUANTIZED = "quantized: each value is the nearest of a few levels times its block's largest"
NARROWED = "rounded to a narrower dtype, as asked"
AS_ASKED = (NARROWED,)
"""Reasons that the user asked for by name, whatever exactness was required otherwise."""
IN_FEW_BITS: Mapping[str, str] = {
    DEQUANTIZED: "the next update is the source's; later ones part, as its optimizer rounds moments to few bits",
    QUANTIZED: "moments are rounded to few bits, now and after each update",
}
"""What a headline says of moments in few bits, by the reason of a tensor's exactness."""
INEXACT: Mapping[str, tuple[Exactness, str]] = {
    "mean": (Exactness.STATISTICS, "a full slot, averaged along an axis"),
    "reconstructed": (Exactness.ESTIMATE, "the second moment that its factors stand for"),
    "padded": (Exactness.ESTIMATE, "new places along an axis, by the map's rule"),
    "combined": (Exactness.STATISTICS, "made of those of the parts that were fused"),
    "rescaled": (Exactness.ESTIMATE, "averaged over an axis of which this is a part, and rescaled to it"),
    "eighth_root": (Exactness.ROUNDING, "stored as an eighth power, decoded"),
    "eighth_power": (Exactness.ROUNDING, "stored as an eighth power in bfloat16"),
    "scaled": (Exactness.ROUNDING, "times a number, rounded once"),
    "narrowed": (Exactness.LOSSY, NARROWED),
    "dequantized": (Exactness.ROUNDING, DEQUANTIZED),
    "quantized": (Exactness.LOSSY, QUANTIZED),
}
"""How exact tensors are that are made by an operation which changes values, and why."""


def _origin(parts: Sequence[Mapping[str, Any]], sources: set[str]) -> Origin:
    """Returns how a tensor was made: kept as it is, derived, or synthesised. The first node is the whole tensor."""
    if sources.isdisjoint(_stored_names(parts)):
        return "synthesised"
    return "kept" if parts[0].get("op") == "stored" else "derived"


def _stored_names(parts: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the names of the stored tensors among the nodes of an expression."""
    return (str(node["name"]) for node in parts if node.get("op") == "stored")


def nodes(expression: Any) -> Iterator[Mapping[str, Any]]:
    """Yields an expression and all that it is made of."""
    if isinstance(expression, Mapping):
        yield expression
        expression = [*expression.values()]
    if isinstance(expression, (list, tuple)):
        for part in expression:
            if not isinstance(part, (str, int, float)):  # most are: to ask each for its parts takes longer
                yield from nodes(part)


def _lost(dropped: Mapping[str, str]) -> list[str]:
    """Returns the dropped names that belong to the training state."""
    return [name for name in dropped if name.startswith(("params/", "slots/", "groups/"))]
