"""Applies a map: it returns a state under other names, in which every slot follows its parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from statekit.errors import Faults, InexactError, StateError
from statekit.maps.operations import Operation, Piece
from statekit.maps.scale import followed, joined, sentence, unfollowed
from statekit.state.constants import variant_constants
from statekit.state.exactness import Exactness, Level
from statekit.state.factoring import matrix_rule
from statekit.state.schema import load_schema
from statekit.state.stored_params import DECODED
from statekit.state.train_state import BY_NAME, PER_PARAMETER, Group, Kind, TrainState
from statekit.tensors.tensor import TIES

_BY_PATTERN = ("factor_map", "exclude_from_weight_decay", "exclude_from_parameter_scale")
"""Hyperparameters that say something of names that fit a pattern, which other names may not."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class Link:
    """The source parameters of one target parameter, and the operations that make it.

    Attributes:
        sources: Their paths.
        target: Its path.
        operations: What is done to them, in this order.
    """

    sources: tuple[str, ...]
    target: str
    operations: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class Mapped:
    """The result for one parameter of the target, and for its slots.

    Attributes:
        target: Its path.
        sources: The paths that it is made of.
        operations: What was done, in words.
        slots: The slots that went along.
        exactness: How exactly training goes on with it.
        reason: Why that isn't bitwise; empty if it is.
    """

    target: str
    sources: tuple[str, ...]
    operations: tuple[str, ...]
    slots: tuple[str, ...]
    exactness: Exactness
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Returns the result as plans hold it."""
        return {
            "target": self.target,
            "sources": list(self.sources),
            "operations": list(self.operations),
            "slots": list(self.slots),
            "exactness": self.exactness.name.lower(),
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Carried:
    """A state to which a map was applied."""

    state: TrainState
    mapped: tuple[Mapped, ...]


def _targets_of(links: Iterable[Link]) -> dict[str, list[str]]:
    """Returns the targets that each source becomes a part of."""
    targets: dict[str, list[str]] = {}
    for link in links:
        for source in link.sources:
            targets.setdefault(source, []).append(link.target)
    return targets


def _pieces(state: TrainState, links: Iterable[Link], faults: Faults, refused: Faults) -> dict[str, Piece]:
    """Returns what each link makes, by target; adds why one doesn't fit, or isn't exact."""
    group_of = state.optimizer.group_of
    pieces: dict[str, Piece] = {}
    for link in links:
        try:
            pieces[link.target] = _made(state, group_of, link)
        except StateError as error:
            faults.add(error.subject, ", ".join(link.sources))
        except InexactError as error:
            refused.add(error.subject, ", ".join(link.sources))
    return pieces


def _by_targets(
    extra: dict[str, Any], targets: Mapping[str, Sequence[str]], ties: Mapping[str, str] | None
) -> dict[str, Any]:
    """Returns what is beside a state with the targets' paths where it had those of their sources."""
    if DECODED in extra:
        extra[DECODED] = [target for path in extra[DECODED] for target in targets.get(path, ())]
    tied = extra.pop(TIES, {})
    if ties is None:
        ties = {name: target for name, path in tied.items() for target in targets[path][:1]}
    return {**extra, TIES: dict(ties)} if ties else extra


def carried(
    state: TrainState,
    links: Sequence[Link],
    ties: Mapping[str, str] | None = None,
    place: object = None,
    one_rule: str = "",
) -> Carried:
    """Applies links to a state; every parameter must be the source of one.

    Args:
        state: The state.
        links: What becomes of its parameters, in the order of the new state.
        ties: Further names of parameters of the new state: name -> path. Those of the state follow by its paths if
            None.
        place: The map, for errors.
        one_rule: Why the target can't move some parameters at a rate of their own; "" if it can.

    Raises:
        StateError: What the state holds doesn't fit; lists every fault.
        InexactError: What it holds doesn't tell what the target would hold; lists every such parameter.
    """
    faults, refused = Faults(folds=False), Faults()
    targets = _targets_of(links)
    faults += twice(link.target for link in links)
    faults += [("isn't covered by the map", path) for path in state.params if path not in targets]
    pieces = _pieces(state, links, faults, refused)
    faults += _split_groups(state, links)
    groups = [_group(group, links, faults) for group in state.optimizer.groups]
    groups, notes = _followed(state, groups, pieces, one_rule)
    behind = _of_targets(state.counts.behind, links, "updates done", faults)
    extra = _extra(state, links, faults)
    faults.check(StateError, "The map doesn't fit the state", place=place)
    refused.check(InexactError, "The map can't be carried out exactly on the state", place=place)
    with_slots = [link.target for link in links if not state.slots.keys().isdisjoint(link.sources)]
    after = TrainState(
        {path: piece.param for path, piece in pieces.items()},
        {path: pieces[path].slots for path in with_slots},
        replace(state.optimizer, groups=tuple(groups)),
        replace(state.counts, behind=behind),
        {path: piece.rule for path, piece in pieces.items() if piece.rule is not None},
        _by_targets(extra, targets, ties),
        (*state.assumptions, *notes),
    )
    return Carried(after, tuple(_mapped(link, pieces[link.target]) for link in links))


def _extra(state: TrainState, links: Sequence[Link], faults: Faults) -> dict[str, Any]:
    """Returns a state's extra, in which what a parameter has besides its slots has followed it."""
    forms: Any = state.extra.get(PER_PARAMETER)
    moved = {PER_PARAMETER: _of_targets(forms, links, "records of an optimizer", faults)} if forms else {}
    return {**state.extra, **moved}


def _followed(
    state: TrainState, groups: list[Group], pieces: dict[str, Piece], one_rule: str
) -> tuple[list[Group], list[str]]:
    """Returns groups that follow what scaled their parameters, and what to say of them.

    Where the target moves all parameters by one rule, those that would need another are labelled instead.
    """
    scales = {path: piece.scale for path, piece in pieces.items() if piece.slots and piece.scale != 1}
    if not scales:
        return groups, []
    parts = _parts_of(state, groups, scales)
    joined_group = joined([part for part, _ in parts], list(pieces))
    apart = [(part, kind) for part, kind in parts if part.paths[0] in scales and part in joined_group]
    for part, kind in apart:
        if reasons := _otherwise(part, kind, scales[part.paths[0]], one_rule):
            pieces |= {path: pieces[path].labelled(Exactness.STATISTICS, *reasons) for path in part.paths}
    if one_rule and apart:
        return groups, []
    return joined_group, [sentence(part, scales[part.paths[0]]) for part, _ in apart]


def _parts_of(
    state: TrainState, groups: list[Group], scales: Mapping[str, float]
) -> list[tuple[Group, Kind]]:
    """Returns groups with their kinds, those whose parameters were scaled apart from the others."""
    kinds = [(group, state.optimizer.kind(group)) for group in groups]
    return [(part, kind) for group, kind in kinds for part in followed(group, kind, scales)]


def _otherwise(group: Group, kind: Kind, number: float, one_rule: str) -> list[str]:
    """Returns why a group of scaled parameters goes on by another rule; nothing where it doesn't."""
    reasons = [f"{name} doesn't follow a parameter that is scaled" for name in unfollowed(group, kind)]
    return reasons + (
        [f"{one_rule}; these values would need {number:.6g} times the rate"] if one_rule else []
    )


def twice(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the names that stand for several tensors, each as a fault."""
    yield from (
        ("would be the name of two parameters", n) for n, count in Counter(names).items() if count > 1
    )


class StateMap(Protocol):
    """What makes another state of one."""

    def apply(self, state: TrainState) -> Carried:
        """Returns the state under other names."""

    def to_json(self) -> dict[str, Any]:
        """Returns the map as the user asked for it, for plans."""


def carried_through(state: TrainState, maps: Iterable[StateMap]) -> tuple[TrainState, tuple[Mapped, ...]]:
    """Returns what maps make of a state, one after the other, and of every parameter by the names of the source."""
    mapped: tuple[Mapped, ...] = ()
    for model_map in maps:
        result = model_map.apply(state)
        state, mapped = result.state, _after(mapped, result.mapped)
    return state, mapped


def inexact(mapped: Iterable[Mapped], allowed: Exactness) -> Iterator[tuple[str, str]]:
    """Yields what became less exact than is allowed, with how and why, and its path."""
    for mapping in mapped:
        if mapping.exactness > allowed:
            yield f"{mapping.exactness.name.lower()}: {mapping.reason}", mapping.target


def carried_to_load(
    state: TrainState, maps: Sequence[StateMap], require: Level, slots: bool = True
) -> TrainState:
    """Returns what maps make of a state that is loaded at once, for a model.

    Args:
        state: The state.
        maps: The maps, one after the other.
        require: The least exactness allowed.
        slots: Whether its slots are loaded too; else nothing that becomes of them matters.

    Raises:
        UsageError: There is no such level.
        InexactError: Something would be less exact; lists every parameter.
        StateError: A map doesn't fit.
    """
    least = Exactness.named(require)
    if maps and not slots:
        state = replace(state, slots={})
    after, mapped = carried_through(state, maps)
    worst = max((mapping.exactness for mapping in mapped), default=Exactness.BITWISE)
    Faults(inexact(mapped, least)).check(
        InexactError,
        "The map would load parameters less exactly than required",
        expected=f"{require} or better",
        remedy=f"allow it: require={worst.name.lower()!r}",
    )
    return after


def _after(before: Sequence[Mapped], mapped: Sequence[Mapped]) -> tuple[Mapped, ...]:
    """Returns what became of every parameter in both of two maps."""
    if not before:
        return tuple(mapped)
    by_target = {link.target: link for link in before}
    joined = []
    for link in mapped:
        # What a map takes from beside the parameters is in no account of the map before it.
        parts = [
            by_target.get(path, Mapped(path, (path,), (), (), Exactness.BITWISE, "")) for path in link.sources
        ]
        worst = max([link, *parts], key=lambda part: part.exactness)
        words = dict.fromkeys(word for part in parts for word in part.operations)
        joined.append(
            replace(
                link,
                sources=tuple(path for part in parts for path in part.sources),
                operations=(*words, *link.operations),
                exactness=worst.exactness,
                reason=worst.reason,
            )
        )
    return tuple(joined)


def _mapped(link: Link, piece: Piece) -> Mapped:
    words = tuple(map(str, link.operations))
    return Mapped(link.target, link.sources, words, tuple(piece.slots), piece.exactness, piece.reason)


def _made(state: TrainState, group_of: Mapping[str, Group], link: Link) -> Piece:
    pieces = tuple(_piece(state, group_of.get(path), path) for path in link.sources)
    for operation in link.operations:
        pieces = operation.of(pieces)
    (piece,) = pieces
    return piece


def _piece(state: TrainState, group: Group | None, path: str) -> Piece:
    param, rule = state.params[path], state.rules.get(path)
    piece = Piece(state.optimizer.schema, param, state.slots.get(path, {}), rule, over=())
    if group is None:
        return piece
    name, variant = state.optimizer.kind(group)
    schema = load_schema(name)
    if rule is None and variant is not None:
        piece = replace(piece, rule=matrix_rule(variant_constants(name, variant), len(param.shape)))
    usual = {} if variant is None else schema.settings(variant)
    values_by_path = {
        key: _of_path(value, path) for key, value in group.hyperparameters.items() if key in BY_NAME
    }
    over = schema.over_tensor(variant, {**usual, **group.hyperparameters, **values_by_path})
    return replace(piece, schema=name, over=over)


def _of_path(value: Any, path: str) -> Any:
    """Returns what a hyperparameter that may be said path by path is for one."""
    return value.get(path) if isinstance(value, Mapping) else value


def _group(group: Group, links: Sequence[Link], faults: Faults) -> Group:
    moved = set(group.paths)
    links = [link for link in links if moved.issuperset(link.sources)]
    values = dict(group.hyperparameters)
    for name, value in values.items():
        if name in BY_NAME and isinstance(value, Mapping):
            values[name] = _of_targets(value, links, name, faults)
        elif name in (*_BY_PATTERN, *BY_NAME) and value and not isinstance(value, bool):
            faults.add("is said of names that fit a pattern, and the map changes names", name)
    order = {path: i for i, path in enumerate(group.paths)}
    links.sort(key=lambda link: order[link.sources[0]])
    return replace(group, paths=tuple(link.target for link in links), hyperparameters=values)


def _of_targets(
    values: Mapping[str, Value], links: Iterable[Link], subject: str, faults: Faults
) -> dict[str, Value]:
    """Returns what was said of some parameters, of those that they have become."""
    joined_values: dict[str, Value] = {}
    for link in links:
        present = [values[path] for path in link.sources if path in values]
        if present and (len(present) < len(link.sources) or any(value != present[0] for value in present)):
            faults.add(f"is made of parameters with different {subject}", link.target)
        elif present:
            joined_values[link.target] = present[0]
    return joined_values


def _split_groups(state: TrainState, links: Iterable[Link]) -> Iterator[tuple[str, str]]:
    """Yields the parameters that would be made of some of several groups, or of some that no group moves."""
    group_of = state.optimizer.group_numbers
    for link in links:
        if len({group_of.get(path) for path in link.sources}) > 1:
            yield "is made of parameters of several groups", link.target
