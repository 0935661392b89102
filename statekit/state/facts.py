"""The facts that a state's updates depend on: its hyperparameters with their sources, and what its layout noticed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from statekit.errors import Faults, InexactError, UnknownRuleError, UsageError
from statekit.state.evidence import BEYOND, COUNT, OPTIMIZER, Fact, against_file
from statekit.state.options import RATE_NAMES
from statekit.state.rates import Rates
from statekit.state.run import run_of
from statekit.state.schema import WEIGHTS, OptimizerSchema, is_native, load_schema, named_native, schema_names
from statekit.state.train_state import Group, Optimizer, TrainState

_FACTORING = ("factor_map", "logical_factor_rules", "factored", "min_dim_size_to_factor")
"""What says how parameters are factored: each parameter has its rule."""
_ASSUMED = "; assumed: "
_UNCOUNTED = "neither the optimizer nor its files count updates"
_ASSIGNMENT = re.compile(r", (?=\w+=)")


def candidates(state: TrainState) -> Fact | None:
    """Returns the fact that several optimizers fit a state; None if it is settled which one ran."""
    facts = (fact for group in state.optimizer.groups for fact in group.facts)
    return next((fact for fact in facts if fact.name == OPTIMIZER and fact.source == "unknown"), None)


def coupled_decay(state: TrainState) -> str:
    """Returns why a state of Adam has no step: its weight decay is a part of the gradient; "" where it isn't.

    Source: pytorch/pytorch torch/optim/adam.py, `Adam`, against adamw.py, `AdamW`.
    """
    values = (group.hyperparameters for group in state.optimizer.groups)
    has_it = any(
        group.get("decoupled_weight_decay") is False and group.get("weight_decay_rate") for group in values
    )
    return (
        "statekit has no step of Adam with weight decay in the gradient, which isn't AdamW" if has_it else ""
    )


def check_decay(state: TrainState, place: object) -> None:
    """Refuses to step a state of Adam whose weight decay is a part of the gradient; other systems may hold it.

    Args:
        state: A state that a step shall move.
        place: The checkpoint.

    Raises:
        UnknownRuleError: statekit has no step of it.
    """
    if why := coupled_decay(state):
        raise UnknownRuleError(
            f"{why}.",
            place=place,
            expected="decoupled_weight_decay true, or a weight decay of 0",
            remedy="go on with torch.optim.Adam, which takes the state as it is carried",
        )


def check_steps(state: TrainState, place: object, remedy: str = "") -> None:
    """Refuses a state that may be of several optimizers, or whose run does more than its schema's steps.

    Args:
        state: A state that steps of its schema would move.
        place: The checkpoint.
        remedy: How to name the optimizer; the option and the argument if it is empty.

    Raises:
        UnknownRuleError: Nobody said which optimizer it is, it has no schema, or its count is unknown.
        InexactError: What the run does besides has no place there; lists it.
    """
    without = [named_native(*kind) for kind in state.optimizer.kinds if is_native(kind[0])]
    if without:
        raise UnknownRuleError(
            f"statekit has no step of {' and '.join(without)}.",
            place=place,
            expected="an optimizer that has a schema",
            remedy="go on with the original, which takes the state as it is carried",
        )
    fact = candidates(state)
    if fact is not None:
        raise UnknownRuleError(
            "The file doesn't tell which optimizer its state is of.",
            place=place,
            expected=f"--optimizer NAME, one of {', '.join(fact.others)}",
            found=fact.because,
            remedy=remedy or 'name it: --optimizer NAME, in Python optimizer="NAME"',
        )
    check_count(state, place)
    besides = dict.fromkeys(
        fact.because for group in state.optimizer.groups for fact in group.facts if fact.name == BEYOND
    )
    Faults((sentence, state.optimizer.schema) for sentence in besides).check(
        InexactError,
        "The run does more than its optimizer's steps, and the target has no place for that",
        place=place,
        remedy="carry it within its own system, or into a folder of statekit (--to statekit)",
    )


def check_count(state: TrainState, place: object) -> None:
    """Refuses to step a state whose updates depend on how many there were, where nothing counts them.

    Raises:
        UnknownRuleError: The count is unknown.
    """
    if any(_counts(state, *state.optimizer.kind(group)) for group in state.optimizer.groups):
        raise UnknownRuleError(
            "The next update depends on how many updates were done, and no file says it.",
            place=place,
            expected=COUNT,
            found=_UNCOUNTED,
            remedy=f'give the number of updates done: --hparams {COUNT}=..., in Python hparams={{"{COUNT}": ...}}',
        )


def _counts(state: TrainState, name: str, variant: str | None) -> bool:
    """Tells whether a rule counts updates, and the state does not."""
    if state.counts.says_updates or name == WEIGHTS or is_native(name):
        return False
    schema = load_schema(name)
    kept = [
        schema.variant(maker)["native_state"].values()
        for maker in ([variant] if variant else schema.variants)
    ]
    return any(part["becomes"] == "counts" for parts in kept for part in parts)


def facts_of(state: TrainState, makers: Mapping[str, Sequence[str]] = {}) -> tuple[Fact, ...]:
    """Returns the facts that a state's updates depend on, each once, with the groups that it bears on.

    Args:
        state: The state.
        makers: By schema, the variants that may have made the state, where it doesn't say its own.
    """
    numbers: dict[str, tuple[Fact, tuple[int, ...]]] = {}
    for i, group in enumerate(state.optimizer.groups):
        for fact in _of_group(state, group, makers) if group.paths else ():
            key = repr(replace(fact, groups=()))
            numbers[key] = fact, (*numbers.get(key, (fact, ()))[1], i)
    return tuple(replace(fact, groups=groups) for fact, groups in numbers.values())


def _of_group(state: TrainState, group: Group, makers: Mapping[str, Sequence[str]]) -> Iterator[Fact]:
    name, variant = state.optimizer.kind(group)
    if name == WEIGHTS:
        return
    if (called := _without_steps(name, group)) is not None:
        yield Fact(f"the rule of {called.value}", because=load_schema(name).data["look_alikes"][called.value])
        return
    yield from group.facts
    if is_native(name):
        yield Fact(f"the rule of {named_native(name, variant)}", because="statekit has no schema of it")
        return
    if _counts(state, name, variant):
        yield Fact(COUNT, because=_UNCOUNTED)
    prefix = f"{name}/" if state.optimizer.several else ""
    possible = (variant,) if variant is not None else tuple(makers.get(name, ()))
    if variant is None and len(possible) != 1:
        yield Fact(f"{prefix}variant", because="the files don't say whose rule it is", others=possible)
    if not possible:
        return
    schema = load_schema(name)
    names = {fact.name for fact in group.facts}
    shown = state.switched_on(group)
    for fact in _hyperparameters(schema, possible[0], group, shown):
        if fact.name not in names:
            yield replace(fact, name=f"{prefix}{fact.name}")


def _without_steps(name: str, group: Group) -> Fact | None:
    """Returns what the user calls a group's optimizer, where its state is like a schema's and its rule another."""
    others = load_schema(name).data.get("look_alikes", {})
    facts = (fact for fact in group.facts if fact.name == OPTIMIZER and fact.source == "given")
    return next((fact for fact in facts if fact.value in others), None)


def _hyperparameters(
    schema: OptimizerSchema, variant: str, group: Group, shown: Mapping[str, str]
) -> Iterator[Fact]:
    """Yields the hyperparameters on which a group's updates depend."""
    settings = {**schema.settings(variant), **group.hyperparameters}
    before = schema.rescaled(variant, group.hyperparameters, 1 / group.scale)
    for name in schema.variant(variant)["defaults"]:
        value = before.get(name)
        if name in _FACTORING or not _matters(schema, variant, name, settings):
            continue
        if name not in group.hyperparameters or (name in RATE_NAMES and value is None):
            slot = shown.get(name)
            yield Fact(name, because=f"the slot {slot} shows that it is on" if slot else "nothing says it")
            continue
        source = group.known_from.get(name, "assumed")
        yield Fact(name, value, source, f"the default of {variant}.{schema.name}" * (source == "assumed"))


def _matters(schema: OptimizerSchema, variant: str, name: str, settings: Mapping[str, Any]) -> bool:
    """Tells whether a hyperparameter changes updates, as the others are."""
    if name in RATE_NAMES:  # of those that make their rate themselves, some take one as its bound
        return not settings.get("relative_step") or schema.variant(variant)["defaults"][name] is not None
    spec = schema.hyperparameters[name]
    idle = any(settings.get(other) in values for other, values in spec.get("unless", {}).items())
    return spec["effect"] not in ("none", "rounding") and not idle


def contradictions(group: Group, stored: Mapping[str, Group]) -> Iterator[Fact]:
    """Yields the hyperparameters that the user gives a group in place of the file's.

    Args:
        group: The group, with what the user says.
        stored: The group of each parameter as the file has it.
    """
    given = [name for name, source in group.known_from.items() if source == "given"]
    sources = [stored[path] for path in group.paths if path in stored]
    for name in given:
        value = group.hyperparameters[name]
        values = [g.hyperparameters.get(name) for g in sources if g.known_from.get(name) == "file"]
        others = dict.fromkeys(f"{other}" for other in values if not _is_same(value, other))
        if others:
            yield against_file(name, value, " or ".join(others))


def _is_same(given: Any, stored: Any) -> bool:
    """Tells whether two values are equal, or one number in single precision."""
    numbers = isinstance(given, float | int) and isinstance(stored, float | int)
    return bool(given == stored) or (numbers and bool(np.float32(given) == np.float32(stored)))


def with_optimizer(state: TrainState, name: str | None) -> TrainState:
    """Returns a state with the optimizer that the user names.

    Args:
        state: The state, as its layout decoded it.
        name: What the user says; None where nothing is said.

    Raises:
        UsageError: The state can't be of that optimizer.
    """
    if name is None:
        return state
    if any(is_native(schema) for schema, _ in state.optimizer.kinds):
        return _called(state, name)
    facts = [fact for group in state.optimizer.groups for fact in group.facts if fact.name == OPTIMIZER]
    fitting = dict.fromkeys(
        optimizer for fact in facts for optimizer in (fact.value, *fact.others) if optimizer is not None
    )
    names = dict.fromkeys(fitting or [schema for schema, _ in state.optimizer.kinds])
    if all(group.hyperparameters.get("decoupled_weight_decay") is False for group in state.optimizer.groups):
        names["adam"] = None
    if name not in names:
        raise UsageError(
            "The optimizer can't be that.",
            place="--optimizer",
            expected=", ".join(names),
            found=name,
        )
    others = load_schema(state.optimizer.kinds[0][0]).data.get("look_alikes", {})
    return state.with_facts(lambda facts: _told(facts, name, others.get(name)))


def _called(state: TrainState, name: str) -> TrainState:
    """Returns a state of an optimizer without a schema under the name that the user gives it."""
    optimizer = state.optimizer
    variants = [variant or "" for schema, variant in optimizer.kinds if is_native(schema)]
    wanted = _plain(name)
    fits = any(wanted in map(_plain, re.findall(r"[\w-]+", variant)) for variant in variants)
    if not fits and (name in schema_names() or all(variants)):
        raise UsageError(
            "The optimizer can't be that.",
            place="--optimizer",
            expected=", ".join(filter(None, variants)) or "an optimizer that has no schema",
            found=name,
        )
    named = state.with_facts(lambda facts: [*facts, Fact(OPTIMIZER, name, "given")])
    if fits or optimizer.several:
        return replace(named, optimizer=narrowed(named.optimizer, name))
    return replace(named, optimizer=replace(named.optimizer, variant=name))


_ALIKE = re.compile(r"(?P<bits>8-bit )?(?P<names>.+ or .+) of (?P<library>\w+)")
"""What an optimizer without a schema is called whose state several of a library have."""


def narrowed(optimizer: Optimizer, *words: str) -> Optimizer:
    """Narrows a library's optimizers with the same state to the one that a word names, if exactly one does."""
    match = None if optimizer.several else _ALIKE.fullmatch(optimizer.variant or "")
    if match is None or not is_native(optimizer.schema):
        return optimizer
    names = {_plain(name): name for name in re.split(r", | or ", match["names"])}
    fitting = [names[word] for word in map(_plain, words) if word in names]
    if len(fitting) != 1:
        return optimizer
    return replace(optimizer, variant=f"{match['bits'] or ''}{fitting[0]} of {match['library']}")


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").casefold()


def _told(facts: Sequence[Fact], name: str, otherwise: str | None) -> Iterator[Fact]:
    """Yields the facts of a group whose optimizer is told; one without steps can only be carried."""
    for fact in facts:
        if fact.name != OPTIMIZER:
            yield fact
    yield Fact(OPTIMIZER, name, "given")
    if otherwise is not None and not any(fact.name == BEYOND for fact in facts):
        yield Fact(BEYOND, None, "given", f"it is {name}, of which statekit has no steps: {otherwise}")


def assumed_values(sentence: str) -> tuple[str, dict[str, str]]:
    """Returns the reason of an assumption, and the values that it lists by name; no values of another sentence.

    Example:
        >>> assumed_values("The file holds no config; assumed: beta1=None, decay_rate=0.8.")
        ('The file holds no config', {'beta1': 'None', 'decay_rate': '0.8'})
    """
    reason, _, values = sentence.partition(_ASSUMED)
    assignments = _ASSIGNMENT.split(values.removesuffix("."))
    return reason, {
        name: value for name, sign, value in (text.partition("=") for text in assignments) if sign
    }


def still_assumed(state: TrainState) -> tuple[str, ...]:
    """Returns a state's assumptions without the values that every group has from elsewhere by now."""
    groups = state.optimizer.groups
    sentences = []
    for sentence in state.assumptions:
        reason, values = assumed_values(sentence)
        origins = {name: {group.known_from.get(name) for group in groups} - {None} for name in values}
        kept = [f"{name}={value}" for name, value in values.items() if origins[name] != {"given"}]
        if len(kept) == len(values):
            sentences.append(sentence)
        elif kept:
            sentences.append(f"{reason}{_ASSUMED}{', '.join(kept)}.")
    return tuple(sentences)


def with_own_rate(state: TrainState) -> TrainState:
    """Adds an assumption if the user gave a constant rate and the run has a schedule that no file tells."""
    groups = state.optimizer.groups
    given = [
        group.hyperparameters[n] for group in groups for n in RATE_NAMES if group.known_from.get(n) == "given"
    ]
    schedules = run_of(state.extra).schedules if given else ()
    if not schedules or all(isinstance(rate, Rates) for schedule in schedules for rate in schedule.rates):
        return state
    sentence = (
        f"The run's learning rate follows a schedule ({schedules[0].kind or 'whose function no file has'}):"
        f" {' and '.join(map(repr, dict.fromkeys(given)))} is taken for the next update's, and what goes on without a"
        " schedule keeps it. --schedule tells the function."
    )
    return replace(state, assumptions=(*state.assumptions, sentence))
