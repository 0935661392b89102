"""A state as Optax' tree: in the form that it was read in, or as Optax' own functions make it of parameters.

    adafactor   FactoredState, clipping, rate, parameter scale, EmaState, decay, sign; what is off is absent
    adamw       ScaleByAdamState, decay, rate
    lamb        ScaleByAdamState, decay, trust ratio, rate

A rate that isn't a number, or that a scheduler moves, is a schedule, which counts. Groups that differ in weight decay
alone, with and without it, are one optimizer with a mask; groups that differ in anything else are the parts of
`optax.partition`, each under its number. Parameters that no group moves are masked, or the part `frozen`.
Source: google-deepmind/optax optax/_src/alias.py, optax/transforms/_combining.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from statekit.conversion.contracts import Encoded, Exactness
from statekit.converters.layouts.hyperparameters import MINIMUM, require_optimizer
from statekit.converters.layouts.optax.construction import (
    BY_RATE,
    DECAY,
    FROZEN,
    INNER,
    PARTS,
    RULES,
    form_of_groups,
    part_labels,
)
from statekit.converters.layouts.optax.factoring import usual_axes
from statekit.converters.layouts.optax.inferred_hyperparameters import VARIANT, native_names
from statekit.converters.layouts.optax.links import is_tensor, leaves, replaced
from statekit.converters.layouts.optax.skeleton import (
    COUNT,
    Contents,
    buffers_of,
    count,
    count_faults,
    counted,
    in_own_form,
    names_of_others,
    own_form,
    placed,
    slot_paths,
    usual_tree,
)
from statekit.errors import Faults, InexactError, StateError
from statekit.state.factoring import FACTORED, WHOLE, turned_matrices, with_placeholders
from statekit.state.run import run_of
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis, Group, Rule, TrainState
from statekit.tensors.tensor import DTYPES, Tensor, in_memory
from statekit.tensors.tree import Path, Tree, nested, walk

WAITING = "acc_grads"
"""The field of `optax.MultiSteps` with the gradients that wait for their update."""
_HELD = ("adafactor", "adamw", "lamb", "muon")
_SCHEDULED = re.compile(r"scheduler|^initial_lr$")
"""Names under which others keep that a scheduler moves the rate."""


def encoded(state: TrainState) -> Encoded:
    """Returns Optax' tree of a state.

    Raises:
        InexactError: Optax can't hold the state; lists every reason.
        StateError: The form that the state carries isn't one of its parameters.
    """
    require_optimizer(state, _HELD, "optax")
    form = own_form(state, VARIANT)
    if form is not None and not any(_foreign(state)):
        Faults(_strayed(form, state)).check(
            InexactError,
            "Gradients that wait for their update (acc_grads) don't follow parameters under other names or axes",
            remedy="save the run after an update, and convert from optax without MultiSteps around it",
        )
        if not names_of_others(form, state.params):
            return counted(in_own_form(state, VARIANT, _with_given(form, state), _contents(state)), state)
    faults = Faults(_faults(state))
    faults.check(InexactError, "Optax can't hold the state")
    return counted(placed(state, VARIANT, _opt_state(state), _contents(state), dict(_inexact(state))), state)


def _strayed(form: Tree, state: TrainState) -> Iterator[tuple[str, str]]:
    """Yields the gradients in a form that are of no parameter of the state."""
    for path, leaf in leaves(form):
        if WAITING in path and is_tensor(leaf):
            name = "/".join(map(str, path[path.index(WAITING) + 1 :]))
            param = state.params.get(name)
            if param is None or param.shape != leaf.shape:
                of_what = "of no parameter" if param is None else f"of shape {leaf.shape}, not {param.shape}"
                yield f"is {of_what}", "/".join(map(str, path))


def _foreign(state: TrainState) -> Iterator[str]:
    """Yields what a state never has that was read from Optax: then the form it carries is of an earlier conversion."""
    yield from state.counts.behind
    yield from (path for path in state.optimizer.paths if path not in state.slots)
    for path, slots in state.slots.items():
        rule = state.rules.get(path)
        if "v_row" in slots and rule is not None and _as_usual(rule, state.params[path].shape) is not False:
            yield path


def _contents(state: TrainState) -> Contents:
    whose = {path: part for part in state.parts() for path in part.slots}
    natives = {part.optimizer.schema: slot_names(part.optimizer.schema) for part in state.parts()}

    def slot(path: str, native: str) -> Tensor | None:
        if path not in whose:
            return None
        slot_names = natives[whose[path].optimizer.schema]
        of_another = native not in slot_names and any(native in names for names in natives.values())
        return None if of_another else _slots(whose[path], path)[native]

    counts = state.counts
    return Contents(state.params, slot, counts.updates, counts.schedule, buffers=buffers_of(state))


def slot_names(schema: str) -> dict[str, str]:
    """Returns Optax' name of each slot -> its canonical name."""
    slots = load_schema(schema).slots.items()
    return {slot.aliases[VARIANT]: name for name, slot in slots if VARIANT in slot.aliases}


def _slots(state: TrainState, path: str) -> dict[str, Tensor]:
    """Returns a parameter's slots by Optax' names, with placeholders where Adafactor doesn't use one."""
    schema = load_schema(state.optimizer.schema)
    slots = state.slots[path]
    if schema.name == "adafactor":
        slots = with_placeholders(VARIANT, slots, (*FACTORED, *WHOLE), DTYPES[state.params[path].dtype.name])
    return {schema.slots[name].aliases[VARIANT]: tensor for name, tensor in slots.items()}


def _with_given(frame: Tree, state: TrainState) -> Tree:
    """Returns a frame whose inject_hyperparams hold what the user gave."""
    changes: dict[tuple[Any, ...], Tensor] = {}
    for keys, leaf in leaves(frame):
        if keys[-2:-1] != ("hyperparams",) or not is_tensor(leaf):
            continue
        for group in _groups_below(frame, keys[:-2], state):
            native = native_names(load_schema(state.optimizer.kind(group)[0]))
            name = native.get(str(keys[-1]), str(keys[-1]))
            if group.known_from.get(name) == "given":
                changes[keys] = in_memory(np.asarray(group.hyperparameters[name], leaf.dtype), name)
    return replaced(frame, changes)


def _groups_below(frame: Tree, above: Path, state: TrainState) -> list[Group]:
    """Returns the groups whose slots lie below a node of a frame."""
    if len(state.optimizer.groups) == 1:
        return list(state.optimizer.groups)
    contents = _contents(state)
    paths: set[str] = set()
    for mark in (mark for keys, mark in leaves(frame) if keys[: len(above)] == above):
        paths.update(slot_paths(mark, contents) or ())
    return [group for group in state.optimizer.groups if paths.intersection(group.paths)]


def _faults(state: TrainState) -> Iterator[tuple[str, str]]:
    if not state.slots:
        yield "holds parameters and no optimizer state", "slots"
    yield from count_faults(state)
    for path, updates in state.counts.behind.items():
        yield f"has made {updates} of {state.counts.updates} updates; Optax counts them together", path
    for path in state.optimizer.paths:
        if path not in state.slots:
            yield "has no slots yet; Optax makes them all at once", path
    for part in state.parts():
        yield from _slot_faults(part)
        turned = [] if part.optimizer.variant is None else turned_matrices(part)
        yield from (
            ("has its outputs where Optax looks for inputs: name its dimensions", path) for path in turned
        )
    for chain in _chains(state):
        yield from _chain_faults(state, chain)
    for i, group in enumerate(state.optimizer.groups):
        yield from ((f"has slot {name} as a whole", f"groups/{i}") for name in group.slots)
        yield from ((fault, f"groups/{i}") for fault in _unsaid(group, state.optimizer.kind(group)[0]))


def _slot_faults(part: TrainState) -> Iterator[tuple[str, str]]:
    schema = load_schema(part.optimizer.schema)
    for path, slots in part.slots.items():
        unknown = [name for name in slots if VARIANT not in schema.slots[name].aliases]
        yield from ((f"has slot {name}, for which Optax has no place", path) for name in unknown)
        if "v_max" in slots and part.optimizer.variant != VARIANT:
            yield "has v_max of another rule: Optax keeps the maximum of the corrected moment", path


def _chain_faults(state: TrainState, chain: _Chain) -> Iterator[tuple[str, str]]:
    kept = {frozenset(state.slots[path]) & {"m", "v_max"} for path in chain.paths if path in state.slots}
    if len(kept) > 1:
        yield (
            "some parameters have momentum or v_max and others don't; Optax keeps them in two optimizers",
            "slots",
        )
    if chain.of.optimizer.schema == "adafactor":
        yield from _factor_faults(state, chain.paths)


def _unsaid(group: Group, schema: str) -> Iterator[str]:
    """Yields the settings that no link of Optax takes."""
    specs, offered = load_schema(schema).hyperparameters, load_schema(schema).variant(VARIANT)["defaults"]
    for name, value in group.hyperparameters.items():
        is_known = name in offered or VARIANT in specs[name].get("native", {})
        if not is_known and name not in (*BY_RATE, *RULES) and value != specs[name].get("if_absent"):
            yield f"{name} is {value!r:.80}, which no link of Optax does"
    scale = group.hyperparameters.get("multiply_by_parameter_scale")
    if isinstance(scale, Mapping) and len(set(scale.values())) > 1:
        yield "multiply_by_parameter_scale differs between parameters"


def _factor_faults(state: TrainState, paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for path, slots in ((path, state.slots[path]) for path in paths if path in state.slots):
        shape, rule = state.params[path].shape, state.rules.get(path)
        factored = "v_row" in slots
        if len(shape) > 1:
            sizes[factored].append(sorted(shape)[-2])
        if not factored and "v" not in slots:
            yield "has no second moment", path
        if factored and rule is not None and _as_usual(rule, shape) is None:
            axes = ", ".join(axis.value for axis in rule.axes)
            yield f"is factored along {axes}; Optax factors the two largest axes of {shape}", path
    if not all(sizes.values()):
        return
    low, high = min(sizes[True]), max(sizes[False])
    if high >= low:
        yield (
            f"a parameter with a size of {low} is factored, one with {high} isn't; no {MINIMUM} does that",
            "slots",
        )


def _as_usual(rule: Rule, shape: tuple[int, ...]) -> bool | None:
    """Tells whether row and column change places in Optax; None if it averages other axes away."""
    usual = usual_axes(shape)
    roles = tuple(axis if axis in (Axis.ROW, Axis.COLUMN) else Axis.NONE for axis in rule.axes)
    swapped = {Axis.ROW: Axis.COLUMN, Axis.COLUMN: Axis.ROW}
    if roles == usual:
        return False
    return True if roles == tuple(swapped.get(axis, axis) for axis in usual) else None


def _inexact(state: TrainState) -> Iterator[tuple[str, tuple[Exactness, str]]]:
    """Yields the slots that go on by another rule: Optax clips and scales a stack as a whole."""
    place = {path: chain.place for chain in _chains(state) for path in chain.paths}
    for path, rule in state.rules.items():
        if Axis.BATCH in rule.axes and path in state.slots:
            why = "Optax takes parameter scale and clipping over the whole stack, not over each of its parts"
            for native in ("v_row", "v_col") if rule.factored else ("v",):
                yield "/".join((*place[path], "0", native, path)), (Exactness.STATISTICS, why)


@dataclass(frozen=True)
class _Chain:
    """One optimizer of Optax: all of the state, or a part of it.

    Attributes:
        place: Its keys below the optimizer's state.
        of: The state of the optimizer.
        paths: Its parameters.
        hyperparameters: Its hyperparameters.
        masked_decay: Whether a mask says which of them are decayed.
    """

    place: tuple[str, ...]
    of: TrainState
    paths: tuple[str, ...]
    hyperparameters: Mapping[str, Any]
    masked_decay: bool = False


def _chains(state: TrainState) -> list[_Chain]:
    """Returns the optimizers that a state's groups become."""
    optimizer, whose = state.optimizer, dict(zip(state.optimizer.kinds, state.parts(), strict=True))
    groups = [(str(i), group) for i, group in enumerate(optimizer.groups) if group.paths]
    settings = [group.hyperparameters for _, group in groups]
    frozen = any(path not in state.slots for path in state.params)
    form = form_of_groups(settings, frozen, [group.schema for _, group in groups])
    if form == "parts":
        named = part_labels([group.schema for _, group in groups])
        return [
            _Chain(
                (PARTS, named.get(str(group.schema), number), INNER),
                whose[optimizer.kind(group)],
                group.paths,
                group.hyperparameters,
            )
            for number, group in groups
        ]
    place = (INNER,) if frozen else ()
    decayed = [setting for setting in settings if setting.get(DECAY)]
    return [_Chain(place, state, tuple(state.slots), next(iter([*decayed, *settings]), {}), form == "mask")]


def _opt_state(state: TrainState) -> Tree:
    trees: dict[tuple[str, ...], Tree] = {
        chain.place: _LINKS.get(chain.of.optimizer.schema, _adam)(state, chain) for chain in _chains(state)
    }
    frozen = any(path not in state.slots for path in state.params)
    if () not in trees and (INNER,) not in trees and frozen:
        trees[PARTS, FROZEN, INNER] = None
    return trees[()] if () in trees else nested(trees)


def _adafactor(state: TrainState, chain: _Chain) -> list[Tree]:
    hyperparameters = chain.hyperparameters
    scale = hyperparameters.get("multiply_by_parameter_scale", True)
    momentum = any("m" in state.slots[path] for path in chain.paths)
    links: list[Tree] = [_link(state, chain, "v_row", "v_col", "v")]
    links += [None] if hyperparameters.get("clipping_threshold", 1.0) is not None else []
    links += [_rate(state, chain)]
    links += [None] if (all(scale.values()) if isinstance(scale, Mapping) else scale) else []
    links += [_link(state, chain, "ema")] if momentum else []
    links += [_decay(chain)] if hyperparameters.get(DECAY) else []
    return [*links, None]


def _adam(state: TrainState, chain: _Chain) -> list[Tree]:
    most = any("v_max" in state.slots[path] for path in chain.paths)
    first = _link(state, chain, "mu", "nu", *(("nu_max",) if most else ()))
    ratio = [None] if chain.of.optimizer.schema == "lamb" else []
    return [first, _decay(chain), *ratio, _rate(state, chain)]


def _muon(state: TrainState, chain: _Chain) -> list[Tree]:
    precision = chain.hyperparameters.get(
        "ns_coefficients", load_schema("muon").settings(VARIANT)["ns_coefficients"]
    )
    table = in_memory(np.asarray(precision, np.float32), "ns_coeffs")
    first: Tree = {**_link(state, chain, "mu"), "ns_coeffs": table}
    return [first, None, _decay(chain), _rate(state, chain)]


_LINKS = {"adafactor": _adafactor, "muon": _muon}
"""What makes the links of a schema's optimizer; Adam and LAMB differ in one."""


def _decay(chain: _Chain) -> Tree:
    return {INNER: None} if chain.masked_decay else None


def _rate(state: TrainState, chain: _Chain) -> Tree:
    constant = isinstance(chain.hyperparameters.get("learning_rate"), (int, float))
    return None if constant and not _is_scheduled(state) else {COUNT: count(state.counts.schedule)}


def _is_scheduled(state: TrainState) -> bool:
    """Tells whether a scheduler moved the rate: the one in the groups is then that of a moment."""
    return bool(run_of(state.extra).schedules) or any(
        leaf is not None and any(isinstance(key, str) and _SCHEDULED.search(key) for key in keys)
        for keys, leaf in walk(dict(state.extra))
    )


def _link(state: TrainState, chain: _Chain, *natives: str) -> Tree:
    """Returns the state of a link: its count, and a tree for each field."""
    slots = {path: _turned(chain.of, path) for path in chain.paths if path in state.slots}
    lacking = Faults((f"lacks {name}", path) for path in slots for name in natives if name not in slots[path])
    lacking.check(
        StateError,
        "Optax keeps these of each parameter",
        remedy="if the checkpoint is complete, --drop-slots-of lets the parameter begin anew",
    )
    fields = {
        native: usual_tree({path: slots[path][native] if path in slots else None for path in state.params})
        for native in natives
    }
    return {COUNT: count(state.counts.updates), **fields}


def _turned(state: TrainState, path: str) -> dict[str, Tensor]:
    fields, rule = _slots(state, path), state.rules.get(path)
    is_turned = rule is not None and "v_row" in fields and _as_usual(rule, state.params[path].shape)
    if is_turned:
        fields = {**fields, "v_row": fields["v_col"], "v_col": fields["v_row"]}
    return fields
