"""Layout `optax`: parameters and the state of an Optax optimizer, bare, in a flax TrainState, or in items of a step.

    params/...  opt_state/<link>/{count, v_row, v_col, v | mu, nu | ema}/...  step

The links are found by their fields wherever they hang: in chains, inject_hyperparams, MultiSteps, masked,
multi_transform. Which optimizer they are of is told by all that stands around them. What the tree is like beside
parameters and slots is kept in extra/optax, and rebuilt from there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Contents as Described
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.layouts.hyperparameters import ManifestRecord
from statekit.converters.layouts.optax.decode import (
    FACTOR_MAP,
    Opened,
    Slots,
    described,
    entries_of,
    foreign,
    given_rule,
    group_of,
    groups_of,
    move_more,
    opened,
    rules_of,
    slots_of,
    stated,
    tree_of,
    updates_of,
)
from statekit.converters.layouts.optax.encode import encoded, slot_names
from statekit.converters.layouts.optax.factoring import Factoring, factoring, rule_of
from statekit.converters.layouts.optax.inferred_hyperparameters import VARIANT, canonical, inferred
from statekit.converters.layouts.optax.kinds import ACCUMULATES, FINITE, SPIKES
from statekit.converters.layouts.optax.lines import optax_lines
from statekit.converters.layouts.optax.links import CORE_LINKS, Link, integer, links
from statekit.converters.layouts.optax.places import has_network
from statekit.converters.layouts.optax.recognition import (
    PLATEAU_LOST,
    STORED_SCALE,
    Recognised,
    recognised_all,
    stored_scale,
)
from statekit.converters.layouts.optax.surroundings import CoreLink, core_link, wrapped
from statekit.errors import Faults, NoSchemaError, StateError, some
from statekit.files.checkpoint import Checkpoint, Finding
from statekit.lines.printing import SavedRun, State
from statekit.state.evidence import OPTIMIZER, Fact, beyond, fits_several, taken_for
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.state.train_state import Counts, Group, Kind, Optimizer, Rule, TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Path

Specified: TypeAlias = Mapping[str, Mapping[str, Any]]
"""By schema, or by the label of a partition, the hyperparameters that the user gave."""
_RATE = "learning_rate"


_STRANGE = "Other links act on the same parameters with statistics of their own, which statekit keeps but doesn't step."
_BEGUN = (
    "Gradients of an update are being accumulated (acc_grads); where they have no place, the run loses them."
)


@dataclass(frozen=True)
class Optax:
    """The state of Optax' Adafactor, AdamW, LAMB and Muon.

    Attributes:
        usual: The variant that the program's optimizers are.
        makes: The optimizers that the program makes, by their names in Optax; empty for all.
        assumes: By schema, the defaults of the program that aren't those of Optax.
    """

    name: str = "optax"
    title: str = "Optax: params and opt_state, bare or in a TrainState; chained, masked, MultiSteps, injected"
    variants: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: dict.fromkeys(("adafactor", "adamw", "lamb", "muon"), (VARIANT,))
    )
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"adamw": ("maxtext_pax",)})
    containers: tuple[str, ...] = ("orbax", "flax")
    schedule_in: str = "apart"
    holds_several: bool = True
    usual: str = VARIANT
    makes: tuple[str, ...] = ()
    assumes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for the fields of a link's state, and for parameters that fit them."""
        tree = tree_of(checkpoint)
        all_links = links(tree)
        core_links = [link for link in all_links if link.kind in CORE_LINKS]
        if not has_network(tree, all_links, CORE_LINKS) or move_more(tree, core_links):
            return None
        place = "/".join(map(str, core_links[0].path)) or "the top"
        return Evidence(20, f"{place} has {', '.join(core_links[0].state)}, as a state of Optax has them")

    def describe(self, checkpoint: Checkpoint, names: Sequence[str] | None = None) -> Described | None:
        """Names the optimizers without a schema, and lists their slots by parameter."""
        return described(checkpoint)

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the canonical state.

        Hyperparameters come, the stronger first, from the hints, from the manifest of a conversion, from the state of
        inject_hyperparams, from what links and shapes prove, and from Optax' defaults.
        """
        faults = Faults()
        tree = opened(checkpoint, CORE_LINKS, faults)
        parts = _parts(tree, hints, faults, self.makes)
        specified = _specified(parts, hints, self.usual)
        slots = [part.slots for part in parts]
        updates = updates_of([part.core.link for part in parts], slots, faults)
        rules = dict(_rules(tree.params, parts, specified, faults))
        faults.check(
            StateError, "The checkpoint isn't a state of Optax that statekit knows", place=checkpoint.path
        )
        Faults(_without_schema(tree, slots)).check(
            NoSchemaError,
            "A part of the run has an optimizer that statekit has no schema of",
            place=checkpoint.path,
            remedy="`statekit inspect` lists its tensors",
        )
        manifest = stated(checkpoint, [part.schema.name for part in parts], slots)
        groups, kinds, notes = _groups(parts, specified, manifest, hints, self)
        rules = rules if manifest is None else rules_of(manifest, rules)
        notes += [] if manifest is not None else [*_rule_notes(rules)]
        notes += tree.notes
        notes += [_BEGUN] if _is_begun(tree) and _BEGUN not in notes else []
        tree = replace(tree, schedules=_rate_schedules(parts))
        params, buffers = tree.split(slots)
        extra = tree.extra(VARIANT, {path for part in parts for path in part.core.paths}, updates)
        return TrainState(
            params,
            {path: dict(part.canonical(path)) for part in parts for path in part.slots},
            Optimizer.of(groups, kinds),
            Counts(updates, tree.schedule(updates), says_schedule=tree.has_schedule),
            rules,
            {**extra, **buffers},
            tuple(notes),
        )

    def losses(self, checkpoint: Checkpoint) -> Iterator[Finding]:
        """Yields what wrappers of Optax do that no other system goes on with."""
        tree = tree_of(checkpoint)
        core_links = [link for link in links(tree) if link.kind in CORE_LINKS]
        for wrapper, path, state in wrapped(tree, core_links):
            yield from _lost(wrapper.name, path, state)

    def encode(self, state: TrainState) -> Encoded:
        """Returns Optax' tree: in the form the state was read in, else as Optax' own functions make it."""
        return encoded(state)

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return optax_lines(state, saved)


@dataclass(frozen=True)
class _Part:
    """What the optimizer of one core link moves.

    Attributes:
        core: The core link.
        recognised: What it is of.
        schema: The optimizer's.
        slots: For each path, its slots by Optax' names.
        shown: For each path, how Adafactor's slots show it to be factored.
    """

    core: CoreLink
    recognised: Recognised
    schema: OptimizerSchema
    slots: Slots
    shown: Mapping[str, Factoring]

    def canonical(self, path: str) -> Iterator[tuple[str, Tensor]]:
        """Yields a parameter's slots by canonical name; what isn't in use is left out."""
        shown, names = self.shown.get(path), slot_names(self.schema.name)
        unused = () if shown is None else (("v",) if shown.factored else ("v_row", "v_col"))
        for native, tensor in self.slots[path].items():
            if native not in unused:
                yield names[native], tensor

    def given(self, specified: _Specified) -> dict[str, Any]:
        """Returns the hyperparameters that were told of it: of its label, then of its schema."""
        given = {**specified.by_schema[self.schema.name], **specified.by_label.get(self.core.label or "", {})}
        scale = stored_scale(self.core)
        if scale is not None and isinstance(given.get(_RATE), (int, float)):
            given[_RATE] = given[_RATE] * scale
        return given


@dataclass(frozen=True)
class _Specified:
    """What the user says of a run's optimizers.

    Attributes:
        by_schema: Hyperparameters by canonical name, for each schema.
        by_label: The same, for labels of a partition.
        variants: By schema, the variant.
    """

    by_schema: Specified
    by_label: Specified
    variants: Mapping[str, str | None]


def _parts(tree: Opened, hints: CheckpointRef, faults: Faults, makes: Sequence[str]) -> list[_Part]:
    """Returns the optimizers of a tree, each with its slots."""
    core_links = [link for link in tree.all_links if link.kind in CORE_LINKS]
    cores = [
        core_link(link, tree.all_links, tree.checkpoint.tree, tree.where, tree.strangers, tree.left_out)
        for link in core_links
    ]
    return [
        _part(core, recognised, tree.params, faults)
        for core, recognised in zip(
            cores, recognised_all(cores, hints.optimizer, hints.variants, makes), strict=True
        )
    ]


def _part(core: CoreLink, recognised: Recognised, params: Mapping[str, Tensor], faults: Faults) -> _Part:
    schema = load_schema(recognised.alias.schema or "adamw")
    slots = slots_of(core.links)
    fields = [name for link in core.links for name, _ in link.trees()]
    shown: dict[str, Factoring] = {}
    for path, param_slots in slots.items():
        missing = [name for name in fields if name not in param_slots]
        faults += [(f"has no {name} in {'/'.join(map(str, core.link.path))}", path) for name in missing]
        if schema.name == "adafactor" and not missing:
            inferred_factoring = factoring(params[path].shape, param_slots)
            if isinstance(inferred_factoring, str):
                faults.add(inferred_factoring, path)
            else:
                shown[path] = inferred_factoring
    return _Part(core, recognised, schema, slots, shown)


def _specified(parts: Sequence[_Part], hints: CheckpointRef, usual: str) -> _Specified:
    """Returns what is said of each optimizer; a name may begin with a schema, or with the label of a partition."""
    schemas = {part.schema.name: part.schema for part in parts}
    labelled = {part.core.label: part.schema for part in parts if part.core.label not in (None, *schemas)}
    by_label: dict[str, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for key, value in hints.hparams.items():
        label, _, name = key.rpartition("/")
        if label in labelled:
            by_label.setdefault(label, {})[name] = value
        else:
            rest[key] = value
    by_schema = replace(hints, optimizer=None, hparams=rest).of(schemas)
    return _Specified(
        {name: canonical(schemas[name], part.hparams, usual) for name, part in by_schema.items()},
        {label: canonical(labelled[label], values, usual) for label, values in by_label.items()},
        {name: part.variant for name, part in by_schema.items()},
    )


def _without_schema(tree: Opened, slots: Sequence[Slots]) -> Iterator[tuple[str, str]]:
    """Yields the parts of the run whose optimizer has no schema, and where they lie."""
    for part in foreign(tree, slots):
        yield f"has the state of {part.name}, for {some(list(part.slots))}", part.place


def _lost(wrapper: str, path: Path, state: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Yields what a wrapper's state says that the run loses without it."""
    place = "/".join(map(str, path))
    if wrapper == ACCUMULATES:
        waiting = integer(state["mini_step"], (*path, "mini_step"))
        lost = (
            f"lost here: {waiting} gradients of k" if waiting else "the run sums up k gradients for an update"
        )
        yield Finding(f"{lost} (k isn't in the file); set gradient accumulation yourself", place)
    elif wrapper == FINITE and (count := integer(state["notfinite_count"], (*path, "notfinite_count"))):
        sentence = f"the last {count} updates weren't finite and were left out (apply_if_finite)"
        yield Finding(
            f"{sentence}; how many it leaves out before it lets one through isn't in the file", place
        )
    elif wrapper == SPIKES:
        yield Finding(f"{SPIKES} left updates out that spiked: the target looks for no spikes", place)


def _is_begun(tree: Opened) -> bool:
    """Tells whether gradients of an update are being accumulated."""
    return any(link.kind == "accumulate" and bool(link.state["mini_step"].read()) for link in tree.all_links)


def _rate_schedules(parts: Sequence[_Part]) -> tuple[Link, ...]:
    """Returns the links that count for the schedule of the rate, each once."""
    rates = {part.recognised.rate.path: part.recognised.rate for part in parts if part.recognised.rate}
    return tuple(rates.values())


def _rules(
    params: Mapping[str, Tensor], parts: Sequence[_Part], specified: _Specified, faults: Faults
) -> Iterator[tuple[str, Rule]]:
    for part in parts:
        entries = entries_of(part.given(specified))
        for path, shown in part.shown.items():
            slots = part.slots[path]
            given = given_rule(entries, path, shown.shape, slots, faults) if shown.factored else None
            yield path, given or rule_of(shown.shape, slots, shown.factored)


def _groups(
    parts: Sequence[_Part],
    specified: _Specified,
    manifest: ManifestRecord | None,
    hints: CheckpointRef,
    layout: Optax,
) -> tuple[list[Group], list[Kind], list[str]]:
    """Returns the groups, whose rule each follows, and what was assumed for that."""
    if manifest is not None:
        kinds = [(schema, specified.variants[schema] or variant) for schema, variant in manifest.kinds]
        notes = [] if hints.hparams else [*manifest.assumptions]
        return _labelled(groups_of(manifest, specified.by_schema), parts), kinds, notes
    strange = any(part.core.others for part in parts)
    kinds = [
        (
            part.schema.name,
            specified.variants[part.schema.name] or part.recognised.variant(layout.usual, strange),
        )
        for part in parts
    ]
    several = len({part.schema.name for part in parts}) > 1
    groups, open_points = [], dict[str, None]()
    for part in parts:
        group, notes = _hyperparameters(part, specified, several, layout)
        groups.append(group)
        open_points.update(dict.fromkeys(notes))
    return groups, kinds, [*open_points, *([_STRANGE] if strange else [])]


def _labelled(groups: Sequence[Group], parts: Sequence[_Part]) -> list[Group]:
    """Returns groups with the labels of the parts that move them."""
    labels = {path: part.core.label for part in parts for path in part.slots}
    return [replace(group, label=labels[group.paths[0]]) if group.paths else group for group in groups]


def _hyperparameters(
    part: _Part, specified: _Specified, several: bool, layout: Optax
) -> tuple[Group, list[str]]:
    """Returns the group of one optimizer, and what was assumed or is open."""
    given = part.given(specified)
    hyperparameters, unknown = inferred(
        part.core, part.recognised, part.schema, list(part.shown.values()), given, layout.usual
    )
    program = {
        name: value
        for name, value in layout.assumes.get(part.schema.name, {}).items()
        if hyperparameters.known_from.get(name) == "assumed"
    }
    hyperparameters = hyperparameters.over(program, "assumed")
    settings = hyperparameters.over(given, "given")
    notes = [*part.recognised.notes(), *unknown]
    if assumed := settings.assumed():
        shown = ", ".join(f"{name}={value}" for name, value in assumed.items())
        whose = f" of {part.schema.name}" if several else ""
        system = "Optax" if layout.usual == VARIANT and not layout.assumes else "MaxText"
        notes.append(f"{system} stores no hyperparameters{whose}; assumed: {shown}.")
    scale = stored_scale(part.core)
    if scale is not None:
        notes.append(
            f"reduce_on_plateau multiplies the rate by {scale:g}, which the file has. {PLATEAU_LOST}"
        )
    group = group_of(tuple(part.slots), settings)
    facts = (*_facts(part.recognised), *_unknown_facts(unknown, given, scale))
    return replace(group, label=part.core.label, facts=facts), notes


def _facts(recognised: Recognised) -> Iterator[Fact]:
    """Yields which optimizer it may be, and what else the run does."""
    others = tuple(name for name in recognised.fitting if name != recognised.name)
    if others and (recognised.settled or recognised.beyond):  # which it is decides nothing then
        yield taken_for(recognised.name, others, recognised.because)
    elif others:
        yield fits_several(recognised.fitting, recognised.because)
    elif recognised.name != recognised.alias.schema:
        yield Fact(OPTIMIZER, recognised.name, "file", recognised.because)
    yield from map(beyond, recognised.beyond)


def _unknown_facts(
    unknown: Mapping[str, tuple[str, ...]], given: Collection[str], scale: float | None
) -> Iterator[Fact]:
    """Yields the hyperparameters that something in the file leaves open, each with what that is."""
    for why, names in unknown.items():
        yield from (Fact(name, because=why.rstrip(".")) for name in names if name not in given)
    if scale is not None:
        yield Fact(STORED_SCALE, scale, "file", "reduce_on_plateau multiplies the rate by it")
    if scale is not None and _RATE not in given:
        yield Fact(_RATE, because=f"reduce_on_plateau has it multiplied by {scale:g} by now")


def _rule_notes(rules: Mapping[str, Rule]) -> Iterator[str]:
    ties = [path for path, rule in rules.items() if rule.known_from == "assumed"]
    if ties:
        yield (
            f"Which of several equal axes v_row and v_col average isn't told by their shapes ({some(ties)}): it depends"
            f" on numpy and the machine that ran; a step needs {FACTOR_MAP}."
        )


LAYOUT = Optax()
