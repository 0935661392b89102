"""Layout `statekit-jax`: parameters and the state of one of statekit.jax's transformations.

    params/...     the parameters
    opt_state      count, and a tree like the parameters for each slot, by its canonical name; None where a parameter
                   has no such slot; ScaledAdam also model_norms, model_norm_threshold, num_clipped; where groups
                   differ, one of these for each in the parts of `optax.partition`

It may hang in chains and wrappers of Optax. What the tree is like besides is kept in extra/jax, and rebuilt from there.
Source: statekit/jax/states.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.layouts.hyperparameters import Hyperparameters, require_optimizer
from statekit.converters.layouts.optax.construction import FROZEN, INNER, PARTS, form_of_groups
from statekit.converters.layouts.optax.decode import (
    Opened,
    Slots,
    entries_of,
    foreign,
    given_rule,
    group_of,
    groups_of,
    opened,
    rules_of,
    slots_of,
    stated,
    updates_of,
)
from statekit.converters.layouts.optax.lines import own_lines
from statekit.converters.layouts.optax.links import (
    OWN_CORE_LINKS,
    OWN_FIELDS,
    OWN_GROUP_FIELDS,
    Link,
    is_tensor,
    links,
)
from statekit.converters.layouts.optax.places import has_network
from statekit.converters.layouts.optax.skeleton import (
    Contents,
    buffers_of,
    count,
    count_faults,
    counted,
    group_slots,
    in_own_form,
    own_form,
    placed,
    usual_tree,
)
from statekit.errors import Faults, InexactError, StateError, some
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.factoring import shown_rule
from statekit.state.options import RATE_NAMES
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, Group, Kind, Optimizer, Rule, TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree

_KEY = "jax"


@dataclass(frozen=True)
class StatekitJax:
    """The checkpoint of a run with statekit.jax."""

    name: str = "statekit-jax"
    title: str = "params and opt_state of a run with statekit.jax, by canonical slot names"
    containers: tuple[str, ...] = ("orbax", "flax")
    schedule_in: str = "apart"
    holds_several: bool = True

    @property
    def variants(self) -> Mapping[str, tuple[str, ...]]:
        """Those that statekit steps."""
        return {schema: load_schema(schema).stepped for schema in OWN_FIELDS}

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for the fields of a state, and for parameters that fit them."""
        all_links = links(checkpoint.tree)
        core_links = [link for link in all_links if link.kind in OWN_CORE_LINKS]
        if not has_network(checkpoint.tree, all_links, OWN_CORE_LINKS):
            return None
        place = "/".join(map(str, core_links[0].path)) or "the top"
        return Evidence(
            30, f"{place} has {', '.join(core_links[0].state)}, as a state of statekit.jax has them"
        )

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the canonical state.

        Hyperparameters and the variant come from the hints, under their canonical names, and from the manifest of a
        conversion; with a variant that is given, its defaults are assumed.
        """
        faults = Faults()
        tree = opened(checkpoint, OWN_CORE_LINKS, faults)
        core_links = [link for link in tree.all_links if link.kind in OWN_CORE_LINKS]
        schemas = [_schema_of(link) for link in core_links]
        slots = [slots_of([link]) for link in core_links]
        updates = updates_of(core_links, slots, faults)
        faults += _foreign_faults(tree, slots)
        manifest = stated(checkpoint, schemas, slots)
        hints_of, recorded = hints.of(schemas), dict(manifest.kinds if manifest else ())
        kinds = [(schema, hints_of[schema].variant or recorded.get(schema)) for schema in schemas]
        rules = _all_rules(tree, kinds, slots, hints_of, faults)
        faults.check(StateError, "The checkpoint isn't a state of statekit.jax", place=checkpoint.path)
        if manifest is not None:
            groups, rules, notes = groups_of(manifest, {}), rules_of(manifest, rules), [*manifest.assumptions]
            kinds = [(schema, hints_of[schema].variant or variant) for schema, variant in manifest.kinds]
        else:
            groups, notes = _groups(kinds, slots)
            notes += _rule_notes(rules)
        notes += tree.notes
        params, buffers = tree.split(slots)
        together = set(chain(*(OWN_GROUP_FIELDS.get(schema, ()) for schema in schemas)))
        state = TrainState(
            params,
            {path: param_slots for part in slots for path, param_slots in part.items()},
            Optimizer.of(_with_slots(groups, core_links, slots), kinds),
            Counts(updates, tree.schedule(updates), says_schedule=tree.has_schedule),
            rules,
            {**tree.extra(_KEY, {link.path for link in core_links}, updates, together), **buffers},
            tuple(notes),
        )
        return hints.applied(state)

    def encode(self, state: TrainState) -> Encoded:
        """Returns the tree that statekit.jax goes on from; every tensor as it is."""
        require_optimizer(state, OWN_FIELDS, self.name)
        form = own_form(state, _KEY)
        if form is not None:
            return counted(in_own_form(state, _KEY, form, _contents(state)), state)
        faults = Faults(_faults(state))
        faults.check(InexactError, "statekit.jax can't hold the state")
        return counted(placed(state, _KEY, _opt_state(state), _contents(state)), state)

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return own_lines(state, saved)


def _schema_of(link: Link) -> str:
    return link.kind.partition(".")[2]


def _foreign_faults(tree: Opened, slots: Sequence[Slots]) -> list[tuple[str, str]]:
    """Returns the states of other optimizers that move some of the parameters."""
    return [
        (f"has the state of {part.name}, for {some(list(part.slots))}", part.place)
        for part in foreign(tree, slots)
    ]


def _groups(kinds: Sequence[Kind], slots: Sequence[Slots]) -> tuple[list[Group], list[str]]:
    """Returns a group for each state, by its variant's defaults, and what is open."""
    settings = [_settings(kind, part) for kind, part in zip(kinds, slots, strict=True)]
    groups = [
        group_of(tuple(part), hyperparameters)
        for part, (hyperparameters, _) in zip(slots, settings, strict=True)
    ]
    return groups, list(dict.fromkeys(note for _, open_points in settings for note in open_points))


def _with_slots(groups: Sequence[Group], core_links: Sequence[Link], slots: Sequence[Slots]) -> list[Group]:
    """Returns groups with the slots that belong to their parameters together, from the link that moves them."""
    with_slots = []
    for group in groups:
        pairs = zip(core_links, slots, strict=True)
        link = next((link for link, part in pairs if {*group.paths} & part.keys()), None)
        names = OWN_GROUP_FIELDS.get(_schema_of(link), ()) if link else ()
        group_slots = {name: link.state[name] for name in names if link and is_tensor(link.state.get(name))}
        with_slots.append(replace(group, slots=group_slots))
    return with_slots


def _settings(kind: Kind, slots: Slots) -> tuple[Hyperparameters, list[str]]:
    """Returns what is known of the hyperparameters without being told, and what is open."""
    schema, variant = load_schema(kind[0]), kind[1]
    if variant is None:
        candidates = ", ".join(schema.variants)
        return Hyperparameters(), [
            f"The state doesn't say whose rule it follows; a step needs --variant: {candidates}."
        ]
    hyperparameters = (
        Hyperparameters().over(schema.variant(variant)["defaults"], "assumed").without(*RATE_NAMES)
    )
    if any("m" in param_slots for param_slots in slots.values()) and schema.name == "adafactor":
        hyperparameters = hyperparameters.without("beta1")
    shown = ", ".join(f"{name}={value}" for name, value in hyperparameters.values.items())
    return hyperparameters, [
        f"The state holds no hyperparameters; assumed are the defaults of {variant}: {shown}."
    ]


def _all_rules(
    tree: Opened,
    kinds: Sequence[Kind],
    slots: Sequence[Slots],
    hints_of: Mapping[str, CheckpointRef],
    faults: Faults,
) -> dict[str, Rule]:
    """Returns the rule of each parameter of the states that factor theirs."""
    rules: dict[str, Rule] = {}
    for (schema, variant), part in zip(kinds, slots, strict=True):
        if "v_row" in load_schema(schema).slots:
            rules |= _rules(tree, part, variant, hints_of[schema].hyperparameters, faults)
    return rules


def _rules(
    tree: Opened, slots: Slots, variant: str | None, specified: Mapping[str, Any], faults: Faults
) -> Iterator[tuple[str, Rule]]:
    """Yields how each parameter is factored."""
    entries = entries_of(specified)
    for path, param_slots in slots.items():
        shape, factored = tree.params[path].shape, "v_row" in param_slots
        if factored and "v_col" not in param_slots:
            faults.add("has v_row and no v_col", path)
            continue
        given = given_rule(entries, path, shape, param_slots, faults) if factored else None
        rule = given or shown_rule(shape, param_slots, variant)
        if rule is None:
            faults.add(
                f"has v_row {param_slots['v_row'].shape} and v_col {param_slots['v_col'].shape}, which fit no rule",
                path,
            )
        else:
            yield path, rule


def _rule_notes(rules: Mapping[str, Rule]) -> Iterator[str]:
    paths = [path for path, rule in rules.items() if rule.known_from == "assumed"]
    if paths:
        yield f"How these are factored isn't proven by their slots ({some(paths)}): a step needs factor_map."


def _contents(state: TrainState) -> Contents:
    def slot(path: str, name: str) -> Tensor | None:
        return state.slots.get(path, {}).get(name)

    counts = state.counts
    return Contents(
        state.params, slot, counts.updates, counts.schedule, group_slots(state), buffers_of(state)
    )


def _faults(state: TrainState) -> Iterator[tuple[str, str]]:
    if not state.slots:
        yield "holds parameters and no optimizer state", "slots"
    yield from count_faults(state)
    for path, updates in state.counts.behind.items():
        yield f"has made {updates} of {state.counts.updates} updates; the state counts them together", path
    for group in state.optimizer.groups:
        yield from (
            ("has no slots yet, and the state has them all", p) for p in group.paths if p not in state.slots
        )
    for part in state.parts():
        fields = OWN_FIELDS[part.optimizer.schema]
        yield from (
            (f"has slot {name}, for which the state has no field", path)
            for path, param_slots in part.slots.items()
            for name in param_slots
            if name not in fields
        )
    yield from (
        (f"has slot {name}", f"groups/{i}")
        for i, group in enumerate(state.optimizer.groups)
        for name in group.slots
        if name not in OWN_GROUP_FIELDS.get(state.optimizer.kind(group)[0], ())
    )


def _opt_state(state: TrainState) -> Tree:
    frozen = any(path not in state.slots for path in state.params)
    groups = state.optimizer.groups
    moving = [group for group in groups if group.paths]
    settings, schemas = [group.hyperparameters for group in moving], [group.schema for group in moving]
    form = form_of_groups(settings, True, schemas)
    # slots of a group's parameters together are those of one part
    if form == "parts" or (len(moving) > 1 and any(group.slots for group in moving)):
        parts: dict[str, Tree] = {
            str(i): {INNER: _own(state, state.optimizer.kind(group)[0], group.paths)}
            for i, group in enumerate(groups)
            if group.paths
        }
        return {PARTS: {**parts, **({FROZEN: {INNER: None}} if frozen else {})}}
    core_state = _own(state, state.optimizer.schema, state.slots)
    return {INNER: core_state} if frozen else core_state


def _own(state: TrainState, schema: str, paths: Iterable[str]) -> Tree:
    """Returns the state of one transformation: of those parameters that it moves."""
    contents, moved = _contents(state), {*paths}
    trees = {
        name: usual_tree(
            {path: contents.slot(path, name) if path in moved else None for path in state.params}
        )
        for name in OWN_FIELDS[schema]
    }
    together = {
        name: next((tensor for path, tensor in contents.groups.get(name, {}).items() if path in moved), None)
        for name in OWN_GROUP_FIELDS.get(schema, ())
    }
    return {"count": count(state.counts.updates), **trees, **together}


LAYOUT = StatekitJax()
