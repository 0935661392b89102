"""Layout `optax`: parameters and the state of an Optax optimizer, bare, in a flax TrainState, or in items of a step.

    params/...  opt_state/<link>/{count, v_row, v_col, v | mu, nu | ema}/...  step

The links are found by their fields wherever they hang: in chains, inject_hyperparams, MultiSteps, masked,
multi_transform. What the tree is like beside parameters and slots is kept in extra/optax, and rebuilt from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statekit.conversion.contracts import Encoded, Evidence, Hints
from statekit.converters.layouts.optax.decode import (
    FACTOR_MAP,
    Faults,
    Slots,
    entries_of,
    given_rule,
    group_of,
    groups_of,
    opened,
    rules_of,
    slots_of,
    stated,
    updates_of,
)
from statekit.converters.layouts.optax.encode import encoded
from statekit.converters.layouts.optax.factoring import Factoring, factoring, rule_of
from statekit.converters.layouts.optax.hyperparameters import (
    VARIANT,
    Engine,
    canonical,
    engine,
    inferred,
    schema_of,
)
from statekit.converters.layouts.optax.links import ENGINES, find_params, links
from statekit.errors import StateError, fault_list, some
from statekit.files.checkpoint import Checkpoint
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.state.train_state import Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import Tensor

_STRANGE = "Other links act on the same parameters with statistics of their own, which statekit keeps but doesn't step."
_BEGUN = (
    "Gradients of an update are being accumulated (acc_grads); where they have no place, the run loses them."
)


@dataclass(frozen=True)
class Optax:
    """The state of Optax' Adafactor, AdamW and LAMB."""

    name: str = "optax"
    title: str = (
        "Optax: params and opt_state, bare or in a TrainState; chains, MultiSteps, inject_hyperparams, masked"
    )
    variants: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"adafactor": (VARIANT,), "adamw": (VARIANT,), "lamb": (VARIANT,)}
    )
    containers: tuple[str, ...] = ("orbax", "flax")

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
        faults: Faults = []
        tree = opened(checkpoint, ENGINES, faults)
        found = [link for link in tree.found if link.kind in ENGINES]
        engines = [engine(link, tree.found, tree.checkpoint.tree, tree.where) for link in found]
        schema, notes = _schema(engines, hints, faults)
        told = canonical(schema, hints.hyperparameters)
        parts = [_part(own, schema, tree.params, faults) for own in engines]
        slots = [part.slots for part in parts]
        updates = updates_of(found, slots, faults)
        rules = dict(_rules(tree.params, parts, told, faults))
        if faults:
            raise StateError(
                f"The checkpoint isn't a state of Optax that statekit knows: {len(faults)} faults.",
                place=checkpoint.path,
                found=fault_list(faults),
            )
        known = stated(checkpoint, schema.name, slots)
        begun = [link for link in tree.found if link.kind == "accumulate" and link.state["mini_step"].read()]
        if known is not None:
            groups, rules, variant = groups_of(known, told), rules_of(known, rules), known.variant
            notes = [] if hints.hyperparameters else [*known.assumptions]
        else:
            groups, more = _settled(parts, schema, told)
            strange = any(own.others for own in engines)
            variant = None if strange else VARIANT
            notes += [*more, *_rule_notes(rules), *([_STRANGE] if strange else [])]
        notes += [_BEGUN] if begun and _BEGUN not in notes else []
        kept = {
            path: _canonical(schema, own, part.shown.get(path))
            for part in parts
            for path, own in part.slots.items()
        }
        return TrainState(
            tree.params,
            kept,
            Optimizer(schema.name, hints.variant or variant, tuple(groups)),
            Counts(updates, tree.schedule(updates)),
            rules,
            tree.extra("optax", {path for own in engines for path in own.paths}, updates),
            tuple(notes),
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
    slots: Slots
    shown: Mapping[str, Factoring]


def _schema(engines: Sequence[Engine], hints: Hints, faults: Faults) -> tuple[OptimizerSchema, list[str]]:
    found = [schema_of(own, hints.hyperparameters) for own in engines]
    names = list(dict.fromkeys(name for name, _ in found))
    if len(names) > 1:
        faults.append(
            ("are optimizers of one run, which statekit keeps in one state only alike", " and ".join(names))
        )
    return load_schema(names[0]), list(dict.fromkeys(why for _, why in found if why))


def _part(own: Engine, schema: OptimizerSchema, params: Mapping[str, Tensor], faults: Faults) -> _Part:
    slots = slots_of(own.links)
    fields = [name for link in own.links for name, _ in link.trees()]
    shown: dict[str, Factoring] = {}
    for path, held in slots.items():
        missing = [name for name in fields if name not in held]
        faults += [(f"has no {name} in {'/'.join(map(str, own.link.path))}", path) for name in missing]
        if schema.name == "adafactor" and not missing:
            found = factoring(params[path].shape, held)
            if isinstance(found, str):
                faults.append((found, path))
            else:
                shown[path] = found
    return _Part(own, slots, shown)


def _rules(
    params: Mapping[str, Tensor], parts: Sequence[_Part], told: Mapping[str, Any], faults: Faults
) -> Iterator[tuple[str, Rule]]:
    entries = entries_of(told)
    for part in parts:
        for path, shown in part.shown.items():
            slots = part.slots[path]
            given = given_rule(entries, path, shown.shape, slots, faults) if shown.factored else None
            yield path, given or rule_of(shown.shape, slots, shown.factored)


def _settled(
    parts: Sequence[_Part], schema: OptimizerSchema, told: Mapping[str, Any]
) -> tuple[list[Group], list[str]]:
    groups, notes = [], []
    for part in parts:
        found, open_points = inferred(part.own, schema, list(part.shown.values()), told)
        settings = found.over(told, "given")
        groups.append(group_of(tuple(part.slots), settings))
        notes += open_points
        if assumed := settings.assumed():
            shown = ", ".join(f"{name}={value}" for name, value in assumed.items())
            notes.append(f"Optax stores no hyperparameters; assumed: {shown}.")
    return groups, notes


def _rule_notes(rules: Mapping[str, Rule]) -> Iterator[str]:
    ties = [path for path, rule in rules.items() if rule.known_from == "assumed"]
    if ties:
        yield (
            f"Which of several equal axes v_row and v_col average isn't told by their shapes ({some(ties)}): it depends"
            f" on numpy and the machine that ran; a step needs {FACTOR_MAP}."
        )


def _canonical(
    schema: OptimizerSchema, slots: Mapping[str, Tensor], shown: Factoring | None
) -> dict[str, Tensor]:
    """Returns a parameter's slots by canonical name; what isn't in use is left out."""
    unused = () if shown is None else (("v",) if shown.factored else ("v_row", "v_col"))
    names = {slot.aliases[VARIANT]: name for name, slot in schema.slots.items() if VARIANT in slot.aliases}
    return {names[native]: tensor for native, tensor in slots.items() if native not in unused}


LAYOUT = Optax()
