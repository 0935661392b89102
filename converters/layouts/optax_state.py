"""Layout `optax`: parameters and the state of an Optax optimizer, bare, in a flax TrainState, or in items of a step.

    params/...  opt_state/<link>/{count, v_row, v_col, v | mu, nu | ema}/...  step

The links are found by their fields wherever they hang: in chains, inject_hyperparams, MultiSteps, masked,
multi_transform. What the tree is like beside parameters and slots is kept in extra/optax, and rebuilt from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statekit.checkpoint import Checkpoint
from statekit.converters.layouts.optax_chain import encoded
from statekit.converters.layouts.optax_frame import frame_of
from statekit.converters.layouts.optax_settings import (
    FACTOR_MAP,
    VARIANT,
    Engine,
    canonical,
    engine,
    inferred,
    schema_of,
)
from statekit.converters.layouts.optax_slots import Factoring, factoring, rule_of
from statekit.converters.layouts.optax_tree import ENGINES, Link, find_params, is_tensor, leaves, links, under
from statekit.converters.layouts.told import Settings, manifest_state
from statekit.errors import StateError, fault_list
from statekit.format import Encoded, Evidence, Hints
from statekit.optim.factoring import first_entry, labels, map_entries
from statekit.schema import OptimizerSchema, load_schema
from statekit.state import Counts, Group, Optimizer, Rule, TrainState
from statekit.tensor import Tensor
from statekit.tree import Path, Tree

_SHOWN = 3
_STRANGE = "Other links act on the same parameters with statistics of their own, which statekit keeps but doesn't step."


@dataclass(frozen=True)
class Optax:
    """The state of Optax' Adafactor, AdamW and LAMB."""

    name: str = "optax"
    title: str = (
        "Optax: params and opt_state, bare or in a TrainState; chains, MultiSteps, inject_hyperparams, masked"
    )
    optimizers: tuple[str, ...] = ("adafactor", "adamw", "lamb")
    containers: tuple[str, ...] = ("orbax",)

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for the fields of a link's state, and for parameters that fit them."""
        found = [link for link in links(checkpoint.tree) if link.kind in ENGINES]
        if not found or find_params(checkpoint.tree, found) is None:
            return None
        place = "/".join(map(str, found[0].path)) or "the top"
        return Evidence(20, f"{place} has {', '.join(found[0].state)}, as a state of Optax has them")

    def decode(self, checkpoint: Checkpoint, hints: Hints) -> TrainState:
        """Returns the canonical state.

        Hyperparameters come, the stronger first, from the hints, from the manifest of a conversion, from the state of
        inject_hyperparams, from what links and shapes prove, and from Optax' defaults.

        Raises:
            StateError: The links don't fit each other or the parameters; lists every fault.
            UsageError: A hint that Optax doesn't take.
        """
        tree = checkpoint.tree
        found = links(tree)
        where = find_params(tree, found)
        if where is None:
            raise StateError("There are no links of Optax with their parameters.", place=checkpoint.path)
        faults: list[tuple[str, str]] = []
        params = dict(_params(tree, where, faults))
        engines = [engine(link, found, tree, where) for link in found if link.kind in ENGINES]
        schema, notes = _schema(engines, hints, faults)
        parts = [_part(own, schema, params, faults) for own in engines]
        faults += _shared(parts)
        updates = _updates(engines, faults)
        told = canonical(schema, hints.hyperparameters)
        rules = dict(_rules(params, parts, told.get(FACTOR_MAP), faults))
        if faults:
            raise StateError(
                f"The checkpoint isn't a state of Optax that statekit knows: {len(faults)} faults.",
                place=checkpoint.path,
                found=fault_list(faults),
            )
        known = manifest_state(checkpoint, schema.name)
        moved = {path for part in parts for path in part.slots}
        if known is not None and {path for group in known.groups for path in group.paths} == moved:
            groups = [_group(member.paths, member.told.over(told, "given")) for member in known.groups]
            variant = hints.variant or known.variant
            rules = {**{path: Rule.from_json(rule) for path, rule in known.rules.items()}, **_given(rules)}
            notes = [] if hints.hyperparameters else [*known.assumptions]
        else:
            groups, more = _settled(parts, schema, told)
            strange = any(own.others for own in engines)
            variant = hints.variant or (None if strange else VARIANT)
            notes += [*more, *_rule_notes(rules), *([_STRANGE] if strange else [])]
        schedule = next((_count(link) for link in found if link.kind == "schedule"), updates)
        slots = {
            path: _canonical(schema, own, part.shown.get(path))
            for part in parts
            for path, own in part.slots.items()
        }
        frame = frame_of(
            tree, where, found, {path for own in engines for path in own.links}, updates, schedule
        )
        optimizer = Optimizer(schema.name, variant, tuple(groups))
        counts = Counts(updates, schedule)
        return TrainState(
            params, slots, optimizer, counts, rules, _extra(checkpoint, frame, updates), tuple(notes)
        )

    def encode(self, state: TrainState) -> Encoded:
        """Returns Optax' tree: in the form the state was read in, else as Optax' own functions make it.

        Raises:
            InexactError: Optax can't hold the state; lists every reason.
        """
        return encoded(state)


@dataclass(frozen=True)
class _Part:
    """What one engine moves.

    Attributes:
        own: The engine.
        slots: For each path, its slots by Optax' names.
        shown: For each path, how Adafactor's slots show it to be factored.
    """

    own: Engine
    slots: Mapping[str, Mapping[str, Tensor]]
    shown: Mapping[str, Factoring]


def _params(tree: Tree, where: Path, faults: list[tuple[str, str]]) -> Iterator[tuple[str, Tensor]]:
    seen: set[str] = set()
    for keys, leaf in leaves(under(tree, where)):
        path = "/".join(map(str, keys))
        if is_tensor(leaf):
            if path in seen:
                faults.append(("is the path of two parameters", path))
            seen.add(path)
            yield path, leaf
        elif leaf not in (None, {}, [], ()):
            faults.append((f"is no tensor but {type(leaf).__name__}", path))


def _schema(
    engines: Sequence[Engine], hints: Hints, faults: list[tuple[str, str]]
) -> tuple[OptimizerSchema, list[str]]:
    found = [schema_of(own, hints.hyperparameters) for own in engines]
    names = list(dict.fromkeys(name for name, _ in found))
    if len(names) > 1:
        faults.append(
            ("are optimizers of one run, which statekit keeps in one state only alike", " and ".join(names))
        )
    return load_schema(names[0]), list(dict.fromkeys(why for _, why in found if why))


def _part(
    own: Engine, schema: OptimizerSchema, params: Mapping[str, Tensor], faults: list[tuple[str, str]]
) -> _Part:
    slots: dict[str, dict[str, Tensor]] = {}
    fields: list[str] = []
    for link in (own.link, own.momentum):
        for name, tree in link.trees() if link is not None else ():
            fields.append(name)
            for keys, leaf in leaves(tree):
                path = "/".join(map(str, keys))
                if is_tensor(leaf):
                    slots.setdefault(path, {})[name] = leaf
    place = "/".join(map(str, own.link.path))
    shown: dict[str, Factoring] = {}
    for path, held in slots.items():
        missing = [name for name in fields if name not in held]
        faults += [(f"has no {name} in {place}", path) for name in missing]
        if schema.name == "adafactor" and not missing:
            found = factoring(params[path].shape, held)
            if isinstance(found, str):
                faults.append((found, path))
            else:
                shown[path] = found
    return _Part(own, slots, shown)


def _shared(parts: Sequence[_Part]) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for part in parts:
        yield from (("has slots in two optimizers", path) for path in part.slots if path in seen)
        seen |= part.slots.keys()


def _count(link: Link) -> int:
    return int(link.state["count"].read())


def _updates(engines: Sequence[Engine], faults: list[tuple[str, str]]) -> int:
    counts = {_count(own.link) for own in engines}
    if len(counts) > 1 or min(counts) < 0:
        faults.append((f"are the counts of updates: {', '.join(map(str, sorted(counts)))}", "opt_state"))
    return max(counts)


def _rules(
    params: Mapping[str, Tensor], parts: Sequence[_Part], given: Any, faults: list[tuple[str, str]]
) -> Iterator[tuple[str, Rule]]:
    entries = () if given is None else map_entries(given, FACTOR_MAP)
    for path, shown in ((path, shown) for part in parts for path, shown in part.shown.items()):
        slots = next(part.slots[path] for part in parts if path in part.shown)
        rule = rule_of(shown.shape, slots, shown.factored)
        entry = first_entry(entries, path)
        axes = None if entry is None else labels(entry.value)
        if axes is not None and shown.factored:
            told = Rule(axes, "given")
            fits = len(axes) == len(shown.shape) and told.factored
            if not fits or any(told.slot_shape(n, shown.shape) != slots[n].shape for n in ("v_row", "v_col")):
                faults.append((f"is factored in another way than {FACTOR_MAP} says", path))
            rule = told
        yield path, rule


def _given(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    return {path: rule for path, rule in rules.items() if rule.known_from == "given"}


def _settled(
    parts: Sequence[_Part], schema: OptimizerSchema, told: Mapping[str, Any]
) -> tuple[list[Group], list[str]]:
    groups, notes = [], []
    for part in parts:
        found, open_points = inferred(part.own, schema, list(part.shown.values()))
        settings = found.over(told, "given")
        groups.append(_group(tuple(part.slots), settings))
        notes += open_points
        if assumed := settings.assumed():
            shown = ", ".join(f"{name}={value}" for name, value in assumed.items())
            notes.append(f"Optax stores no hyperparameters; assumed: {shown}.")
    return groups, notes


def _group(paths: tuple[str, ...], settings: Settings) -> Group:
    kept = settings.without(FACTOR_MAP)
    return Group(paths, dict(kept.values), dict(kept.known_from))


def _rule_notes(rules: Mapping[str, Rule]) -> Iterator[str]:
    ties = [path for path, rule in rules.items() if rule.known_from == "assumed"]
    if ties:
        shown = ", ".join(ties[:_SHOWN]) + (f" and {len(ties) - _SHOWN} more" if len(ties) > _SHOWN else "")
        yield (
            f"Which of several equal axes v_row and v_col average isn't told by their shapes ({shown}): it depends on"
            f" numpy and the machine that ran; a step needs {FACTOR_MAP}."
        )


def _canonical(
    schema: OptimizerSchema, slots: Mapping[str, Tensor], shown: Factoring | None
) -> dict[str, Tensor]:
    """Returns a parameter's slots by canonical name; what isn't in use is left out."""
    unused = () if shown is None else (("v",) if shown.factored else ("v_row", "v_col"))
    names = {slot.aliases[VARIANT]: name for name, slot in schema.slots.items() if VARIANT in slot.aliases}
    return {names[native]: tensor for native, tensor in slots.items() if native not in unused}


def _extra(checkpoint: Checkpoint, frame: Tree, updates: int) -> dict[str, Tree]:
    """Returns the form of the tree, and where and beside what it lay."""
    optax: dict[str, Tree] = {"tree": frame}
    if len(checkpoint.meta.get("items", ())) > 1:
        optax["items"] = True
    if checkpoint.step not in (None, updates):
        optax["step"] = checkpoint.step
    beside = list(checkpoint.meta.get("files_beside", ()))
    return {"optax": optax, **({"files_beside": beside} if beside else {})}


LAYOUT = Optax()
