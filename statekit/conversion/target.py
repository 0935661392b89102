"""The choice of a target's container and layout, and the checks before anything is written.

Its path is the user's, taken literally; a container that keeps steps puts the step's folder below it, by its own
template. `--to` names the container, else the path does: a suffix, or a word in the name. Of the layouts that could
hold the state there, statekit.conversion.prepared takes the first that goes on.

A layout that leaves a fact open gets the state as it is. One that stores a value asks for it by name; so does every
target of another framework for an optimizer that the file doesn't distinguish from others.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Container, ForTarget, OnlyReads
from statekit.conversion.plan import Request
from statekit.conversion.registry import ContainerCard, LayoutCard
from statekit.errors import UnknownRuleError, UsageError, meant
from statekit.files.durable import writing
from statekit.files.tree import Place
from statekit.state.evidence import ORDER, Fact
from statekit.state.exactness import Exactness
from statekit.state.facts import candidates, check_steps, facts_of
from statekit.state.schema import NO_OPTIMIZER, WEIGHTS, is_native, named_kinds
from statekit.state.train_state import TrainState


def choose_container(target: Place, to: str | None) -> tuple[Container, str | None]:
    """Chooses the container of a target: by `to`, else by its suffix, else by a word in its name.

    Args:
        target: Where the result shall be.
        to: A container's name, or `<layout>-<container>`, such as `t5x-orbax`; None to go by the target's name.

    Returns:
        The container, and the layout if the name says one.

    Raises:
        UsageError: No name fits, several do, or the container can't be written.
    """
    if to is not None:
        return _writable(*_named(to, "--to"))
    by_suffix = [card.name for card in _containers() if _has_suffix(target, card)]
    if len(by_suffix) == 1:
        return registry.container(by_suffix[0]), None
    words = _words(target.name)
    names = {"-".join(_words(name)): name for name in _all_names()}
    matching = [name for name in names if _holds(words, _words(name))]
    longest = [
        name
        for name in matching
        if not any(name != other and _holds(_words(other), _words(name)) for other in matching)
    ]
    if len(longest) != 1:
        raise UsageError(
            "The target's name doesn't say what to write.",
            place=target,
            expected=f"one of {', '.join(_choices())} as a word of the name, a suffix such as .pt, or --to",
            found=" and ".join(longest) or "none",
            remedy="name the container with --to",
        )
    return _writable(*_named(names[longest[0]], "the target's name"))


def written_as(container: Container, target: Place) -> Container:
    """Returns a container as it writes a target: what it makes may depend on the target's name."""
    return container.for_target(target) if isinstance(container, ForTarget) else container


def agreed_layout(layout: str | None, implied: str | None, option: str) -> str | None:
    """Returns the layout that was named, by `--layout` or by the shorthand of a container, such as `t5x-orbax`.

    Args:
        layout: By `--layout`; None if it wasn't.
        implied: By the shorthand; None without one.
        option: Where the shorthand was said.

    Raises:
        UsageError: They are two.
    """
    if layout is not None and implied is not None and layout != implied:
        raise UsageError(
            "Two layouts are named.",
            place=f"--layout, {option}",
            found=f"{layout}, {implied}",
            remedy="name one",
        )
    return implied if layout is None else layout


def source_container(name: str) -> tuple[Container, str | None]:
    """Returns the container, and the layout if the name says one, of a source that the user named.

    Raises:
        UsageError: No such container.
    """
    return _named(name, "--from")


def layouts_for(
    container: Container, kinds: Sequence[tuple[str, str | None]], name: str | None, source: str = ""
) -> list[LayoutCard]:
    """Returns the layouts that a target may get: the one named, else the source's own first, then those at home there.

    Args:
        container: The target's container.
        kinds: Schema and variant of each optimizer of the state.
        name: The layout's name, if one was given.
        source: The layout of the source.

    Raises:
        UsageError: No such layout, or none that holds the optimizers.
    """
    schemas = list(map(itemgetter(0), kinds))
    kinds_in_words = named_kinds(kinds)
    layouts = _layouts_of(schemas)
    if name is not None:
        card = _named_layout(name, container.name)
        if not card.holds(schemas, container.name):
            alone = len(schemas) > 1 and all(schema in card.variants for schema in schemas)
            raise UsageError(
                f"The layout {name} can't hold the state of {kinds_in_words}{_SEVERAL if alone else ''}.",
                place="--layout",
                expected=f"a layout of {kinds_in_words}: {_names(layouts, len(schemas) > 1)}",
                found=f"{name}{f' in {container.name}' if alone else ''}, which holds {', '.join(card.variants)}",
            )
        _check_written(card, container.name)
        return [card]
    homes = [card for card in layouts if _is_home(card, container.name, schemas, source)]
    if not homes and WEIGHTS in schemas:
        others = dict.fromkeys(home for card in layouts for home in card.containers)
        raise UsageError(
            f"The container {container.name} is of runs with their optimizers, and the source holds {NO_OPTIMIZER}.",
            place="--to",
            expected=f"a container of weights: {', '.join(others)}",
        )
    if not homes:
        raise UsageError(
            f"No layout of the container {container.name} holds the state of {kinds_in_words}"
            f"{_SEVERAL if len(schemas) > 1 else ''}.",
            place="--to",
            expected=f"a layout of {kinds_in_words}: {_names(layouts, len(schemas) > 1)}",
            remedy="name one with --layout, choose another container with --to, or take weights alone: --params-only",
        )
    return sorted(homes, key=lambda card: (card.name != source, card.containers.index(container.name)))


def _named_layout(name: str, container: str) -> LayoutCard:
    """Returns the layout of a name.

    Raises:
        UsageError: There is none; of an optimizer's name it lists the layouts that hold it in the container.
    """
    holding = [card.name for card in _layouts_of([name.lower()]) if container in card.containers]
    if name in registry.layout_names() or not holding:
        return registry.layout_card(name)
    raise UsageError(
        f"{name} is an optimizer, and its layout says whose files it writes.",
        place="--layout",
        expected=f"for the container {container} one of {', '.join(holding)}",
        found=name,
        remedy="leave --layout out to get the first that goes on, or name one",
    )


def _check_written(card: LayoutCard, container: str) -> None:
    """Refuses a layout that only reads what lies in a container."""
    layout = registry.layout(card.name)
    if isinstance(layout, OnlyReads) and container in layout.only_reads:
        why, remedy = layout.only_reads[container]
        places = ", ".join(card.containers)
        raise UsageError(why, place="--layout", expected=places, found=container, remedy=remedy)


def _is_home(card: LayoutCard, container: str, schemas: Collection[str], source: str) -> bool:
    """Tells whether a layout may be taken for a container without being named."""
    at_home = container in card.containers and card.holds(schemas, container)
    return at_home and (not card.only_if_asked or card.name == source)


def check_apart(source: Place, target: Place) -> None:
    """Refuses a target that is the source, lies in it or contains it; links are followed.

    Raises:
        UsageError: The two aren't apart.
    """
    if not isinstance(source, Path) or not isinstance(target, Path):
        if (
            target == source
            or (f"{target}/").startswith(f"{source}/")
            or f"{source}/".startswith(f"{target}/")
        ):
            raise UsageError(
                "Source and target lie in each other.",
                place=target,
                found=f"source {source}",
                remedy="choose another target",
            )
        return
    with writing(target):  # a link may be exchanged for something else while it is followed
        origin, place = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    if not origin.exists():
        return
    ways = (("the source itself", _same(origin, place)), ("inside the source", _within(place, origin)))
    for how, true in (*ways, ("a folder around the source", _within(origin, place))):
        if true:
            raise UsageError(
                f"The target is {how}.",
                place=target,
                found=f"source {source}",
                remedy="choose another target",
            )


def _within(path: Path, folder: Path) -> bool:
    return any(_same(parent, folder) for parent in path.parents)


def _same(left: Path, right: Path) -> bool:
    try:
        return left == right or left.samefile(right)
    except OSError:  # one isn't there
        return False


def _named(name: str, option: str) -> tuple[Container, str | None]:
    name = _other_names().get(name, name)
    if name in registry.container_names():
        return registry.container(name), None
    layout, container = _shorthands().get(name, ("", ""))
    if not container:
        raise UsageError(
            "No container has that name.",
            place=option,
            expected=", ".join(_choices()),
            found=name,
            remedy=meant(name, _all_names()) or registry.SEE_FORMATS,
        )
    return registry.container(container), layout


def _all_names() -> list[str]:
    return [*registry.container_names(), *_other_names(), *_shorthands()]


def _other_names() -> dict[str, str]:
    """Returns further name -> container."""
    return {other: card.name for card in _containers() for other in card.other_names}


def _shorthands() -> dict[str, tuple[str, str]]:
    """Returns `<layout>-<container>` -> layout and container, for every container that a layout is at home in."""
    pairs = {
        f"{card.name}-{home}": (card.name, home)
        for card in map(registry.layout_card, registry.layout_names())
        for home in card.containers
        if card.name != home
    }
    return {name: pair for name, pair in pairs.items() if name not in registry.container_names()}


def _containers() -> list[ContainerCard]:
    return [registry.container_card(name) for name in registry.container_names()]


def target_names() -> list[str]:
    """Returns what may be written: names of containers, and `<layout>-<container>`."""
    others = [name for name, con in _other_names().items() if con in _choices()]
    return [*_choices(), *others, *(name for name, (_, con) in _shorthands().items() if con in _choices())]


def _choices() -> list[str]:
    return [card.name for card in _containers() if card.target_kind is not None]


def _writable(container: Container, layout: str | None) -> tuple[Container, str | None]:
    if container.target_kind is None:
        raise UsageError(
            "This container can only be read.",
            place="--to",
            expected=", ".join(_choices()),
            found=container.name,
        )
    return container, layout


_SEVERAL = " in one run, each moving parameters of its own"


def _layouts_of(schemas: Collection[str]) -> list[LayoutCard]:
    return [card for card in map(registry.layout_card, registry.layout_names()) if card.holds(schemas)]


def _names(layouts: list[LayoutCard], several: bool = False) -> str:
    """Returns names of layouts, with the containers in which they hold several optimizers, if that is asked."""
    where = {card.name: card.holds_several for card in layouts if several}
    named = [
        f"{card.name} in {' and '.join(places)}"
        if isinstance(places := where.get(card.name), tuple)
        else card.name
        for card in layouts
    ]
    return ", ".join(named) or "there is none"


def _has_suffix(target: Place, container: ContainerCard) -> bool:
    return container.target_kind is not None and target.name.lower().endswith(container.suffixes)


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_.]+", name.lower()) if word]


def _holds(words: list[str], part: list[str]) -> bool:
    return any(words[i : i + len(part)] == part for i in range(len(words) - len(part) + 1))


MASK = "exclude_from_weight_decay"
NAME_IT = "name it:"
"""Where a remedy begins that is the whole command to repeat."""
_WEAK = ("assumed", "unknown")
NEUTRAL = "statekit"
"""The layout that holds any state as it is."""


def is_carried(state: TrainState, source: str, target: LayoutCard, sources: LayoutCard) -> bool:
    """Tells whether a state stays in its own system, or goes into the neutral folder: nothing is asked there."""
    if target.name in (source, NEUTRAL) or state.optimizer.schema == WEIGHTS:
        return True
    if any(map(is_native, state.optimizer.schemas)):  # only layouts of its own system hold one
        return {*state.optimizer.schemas} <= target.variants.keys()
    return all(
        {*target.variants.get(schema, ())} <= _homes(variant, sources.variants.get(schema, ()), source)
        for schema, variant in state.optimizer.kinds
    )


def _homes(variant: str | None, followed: Sequence[str], source: str) -> set[str]:
    """Returns the variants in whose files a state is at home; statekit's own layouts hold those of any system."""
    itself = set() if variant is None else {variant}
    return itself if source.startswith(NEUTRAL) else itself | {*followed}


def check_optimizer(state: TrainState, request: Request) -> None:
    """Refuses a state that another system's rule would step, as `check_steps` does; the remedy is the whole command.

    Raises:
        As `check_steps`.
    """
    fact = candidates(state)
    again = (
        ""
        if fact is None
        else f"{NAME_IT} {shlex.join(command_naming(request, next(iter(fact.others), 'NAME')))}"
    )
    check_steps(state, request.ref.place, again if request.asks else "")


def command_naming(request: Request, optimizer: str) -> list[str]:
    """Returns the command that asks for the same conversion and names the optimizer."""
    words = ["statekit", "convert", str(request.ref.place), str(request.target)]
    # Convert's --layout is of the target.
    words += replace(request.ref, optimizer=optimizer, layout=None).words()
    asked = {
        "--to": request.to,
        "--layout": request.layout,
        "--like": request.like,
        "--step-offset": None if request.step_offset == "keep" else request.step_offset,
        "--require": None if request.require == Exactness.ROUNDING else request.require.name.lower(),
    }
    pairs = [(flag, str(value)) for flag, value in asked.items() if value is not None]
    pairs += [pair for model_map in request.maps for pair in _said_of_map(model_map.to_json())]
    changed = request.changes.words() if request.changes is not None else []
    return [*words, *(word for pair in pairs for word in pair), *changed]


def _said_of_map(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the options that make a plan's map again, without the values from beside the checkpoint."""
    if "name" in record:
        yield "--map", str(record["name"])
    yield from (("--config", f"{key}={value}") for key, value in record.get("config", {}).items())
    yield from (("--rename", f"{pattern}={to}") for pattern, to in record.get("rename", ()))


def unsaid(state: TrainState, there: TrainState, hints: CheckpointRef) -> list[Fact]:
    """Returns the facts that a target stores and that nobody says; with a flag, documented defaults are said.

    Args:
        state: The source's state.
        there: The state as the target's rule goes on with it.
        hints: What the user says.
    """
    facts_by_name = {fact.name: fact for fact in facts_of(state)}
    needed = {fact.name: fact for fact in facts_of(there)}
    # Groups say which parameters are decayed: a mask that nobody knows would be filled in by them.
    needed |= {name: fact for name, fact in facts_by_name.items() if name.rpartition("/")[2] == MASK}
    # A target names its parameters; in which order the source numbers them is its own matter, and in the headline.
    facts = [facts_by_name.get(n, fact) for n, fact in needed.items() if fact.source in _WEAK and n != ORDER]
    accepted = ("assumed",) if hints.assume_defaults else ()
    return [fact for fact in facts if fact.source in _WEAK and fact.source not in accepted]


def check_said(facts: Sequence[Fact], place: object, layout: str) -> None:
    """Refuses a target that would store values which are not given.

    Raises:
        UnknownRuleError: Names every one, with its documented default where there is one.
    """
    if not facts:
        return
    assumed = [fact for fact in facts if fact.source == "assumed"]
    unknown = [fact for fact in facts if fact.source == "unknown"]
    unstated = [f"{fact.name} ({fact.because})" for fact in unknown]
    unstated += [
        f"{fact.name} ({'none' if fact.value is None else fact.value} is {fact.because})" for fact in assumed
    ]
    options = " ".join(f"--hparams {fact.name}=..." for fact in (unknown if assumed else facts))
    accept = "--assume-defaults" if assumed else ""
    raise UnknownRuleError(
        f"The layout {layout} stores facts that no file has and the user did not give.",
        place=place,
        expected=", ".join(fact.name for fact in facts),
        found="; ".join(unstated),
        remedy=f"say it: {' '.join(part for part in (options, accept) if part)}",
    )
