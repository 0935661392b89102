"""One loader for all frameworks: from a checkpoint to the state that goes on with a model.

A framework brings a `Framework`: the names and shapes of a model, what it makes of a state, and how values get into
the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Generic, TypedDict, TypeVar

from statekit.conversion.belonging import UNREAD
from statekit.conversion.changing.at_loading import changed_at_loading
from statekit.conversion.checkpoint_ref import (
    OPTIONS,
    CheckpointRef,
    HintOptions,
    LinkOptions,
    PlaceOptions,
    RefOptions,
)
from statekit.conversion.model_settings import with_beside
from statekit.conversion.open_state import OpenState, state_to_load
from statekit.conversion.resume import module_map
from statekit.dropin.matching import renamed, require_resumable
from statekit.dropin.options import Overrides
from statekit.dropin.overrides import overridden
from statekit.errors import StateError, UsageError, meant
from statekit.files.tree import Place
from statekit.maps.links import StateMap, carried_to_load
from statekit.state.exactness import Level
from statekit.state.stored_params import as_params
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import DType, Shape

Target = TypeVar("Target")
Built = TypeVar("Built")


class _Loading(TypedDict, total=False):
    """What a loader takes beside a checkpoint and a model.

    `names` are names in the checkpoint by the model's, or by modules around them; `map` leads from the checkpoint's
    model to another codebase's, `config` says what the map needs, and `require` is the least exactness of the map.
    """

    names: Mapping[str, str] | None
    map: str | None
    config: Mapping[str, Any] | None
    require: Level


class LoadOptions(RefOptions, _Loading, total=False):
    """What `load_params` takes in every framework."""


class AttestOptions(HintOptions, LinkOptions, PlaceOptions, _Loading, total=False):
    """What `attest` takes in every framework; which optimizer ran a `CheckpointRef` tells, as `optimizer` is live."""


class ResumeOptions(LoadOptions, Overrides, total=False):
    """What `load_optimizer` takes in every framework: the options of a loader, and hyperparameters."""


@dataclass(frozen=True)
class Call:
    """What a caller says to a loader.

    Attributes:
        ref: The checkpoint, and what its files don't say.
        names: Names in the checkpoint by the model's, or by modules around them, where they differ.
        map: The map from the checkpoint's model to another codebase's.
        config: What the map needs to know of the model.
        require: The least exactness of the map.
        others: What no loader takes by itself: hyperparameters and changes.
    """

    ref: CheckpointRef
    names: Mapping[str, str]
    map: str | None
    config: Mapping[str, Any] | None
    require: Level
    others: Mapping[str, Any]

    @classmethod
    def of(cls, source: CheckpointRef | str | PathLike[str], options: Mapping[str, Any]) -> Call:
        """Returns a call with its options in their places.

        Raises:
            UsageError: The ref can't be made.
        """
        option_names = {option.name for option in OPTIONS}
        given = {name: value for name, value in options.items() if name in option_names}
        others = {name: value for name, value in options.items() if name not in {*option_names, *_LOADING}}
        return cls(
            CheckpointRef.given(source, **given),
            dict(options.get("names") or {}),
            options.get("map"),
            options.get("config"),
            options.get("require", "rounding"),
            others,
        )

    @property
    def path(self) -> Place:
        """Where the checkpoint is."""
        return self.ref.place

    def alone(self) -> Call:
        """Returns the call, which says nothing of hyperparameters.

        Raises:
            UsageError: It has an option that this function doesn't take.
        """
        names = [*(option.name for option in OPTIONS), *_LOADING]
        for name in self.others:
            raise UsageError(
                "There is no such argument.", place=name, expected=", ".join(names), remedy=meant(name, names)
            )
        return self


_LOADING = tuple(_Loading.__annotations__)


@dataclass(frozen=True)
class Framework(Generic[Target, Built]):
    """What a framework brings to its loaders.

    Attributes:
        home: The package whose optimizers go on.
        makers: Schema -> the name of its class or function there.
        rate: What an optimizer's learning rate is called.
        anew: What stands behind the maker's name where an error says how to begin anew.
        hints: Gives what a layout decodes by: the ref, and the model as far as it tells what the files leave open.
        modules: Whose modules models are of, in the names of maps: `flax`.
        maps: Gives the maps to the model.
        names: Gives the names in an opened checkpoint by the model's, and all names of the model.
        shapes: Gives shape and dtype of each trained parameter, by its name in the state.
        build: Makes the optimizer of a state, with the learning rate and the other arguments of the call.
        arguments: Names of a call that are the optimizer's arguments and no hyperparameters of a state.
        renames: Whether the state gets the model's names; else it keeps the checkpoint's.
    """

    home: str
    makers: Mapping[str, str]
    rate: str
    modules: str
    hints: Callable[[Call, Target], CheckpointRef]
    maps: Callable[[Call, Target], tuple[StateMap, ...]]
    names: Callable[[OpenState, Call, Target], tuple[Mapping[str, str], Iterable[str]]]
    shapes: Callable[[Target, Mapping[str, str]], Mapping[str, tuple[Shape, DType]]]
    build: Callable[[Loaded, Target, Any], Built]
    anew: str = "(...)"
    arguments: Callable[[TrainState], frozenset[str]] = lambda state: frozenset()
    renames: bool = True


@dataclass(frozen=True)
class Loaded:
    """A state that goes on with a model, while its checkpoint is open.

    Attributes:
        opened: The checkpoint.
        state: The state, under the model's names as far as the framework renames.
        names: Names in the checkpoint by the model's.
        place: Where the checkpoint is, for errors.
        arguments: Arguments of the call that are the optimizer's.
    """

    opened: OpenState
    state: TrainState
    names: Mapping[str, str]
    place: Place
    arguments: Mapping[str, Any]


def resumed(
    framework: Framework[Target, Built],
    source: CheckpointRef | str | PathLike[str],
    target: Target,
    rate: Any,
    options: Mapping[str, Any],
) -> Built:
    """Returns the optimizer that a checkpoint records, with its state.

    Args:
        framework: The framework.
        source: The checkpoint.
        target: The model, as the framework takes it.
        rate: The learning rate; as the checkpoint has it if None.
        options: Those of `ResumeOptions`.

    Raises:
        As the frameworks' `load_optimizer`.
    """
    call = Call.of(source, options)
    with state_to_load(framework.hints(call, target)) as opened, _proposing_map(framework, call, opened):
        loaded = _loaded(framework, call, target, opened, slots=True)
        state = loaded.state
        shapes = framework.shapes(target, loaded.names)
        state, others = changed_at_loading(state, call.others, shapes, opened.makers)
        kept = framework.arguments(state)
        arguments = {name: value for name, value in others.items() if name in kept}
        overrides = {name: value for name, value in others.items() if name not in kept}
        home = framework.home
        state = overridden(
            state,
            overrides,
            framework.rate,
            lambda schema: f"{home}.{framework.makers[schema]}{framework.anew}",
        )
        return framework.build(replace(loaded, state=state, arguments=arguments), target, rate)


def put(
    framework: Framework[Target, Any],
    source: CheckpointRef | str | PathLike[str],
    target: Target,
    options: Mapping[str, Any],
    into: Callable[[Loaded, Target], Built],
) -> Built:
    """Copies a checkpoint's parameters into a model.

    Args:
        framework: The framework.
        source: The checkpoint.
        target: The model, as the framework takes it.
        options: Those of `LoadOptions`.
        into: Copies a state's parameters into the model, or returns a model that has them.

    Raises:
        As the frameworks' `load_params`.
    """
    call = Call.of(source, options).alone()
    loaded = state_to_load(framework.hints(call, target), params_only=True)
    with loaded as opened, _proposing_map(framework, call, opened):
        return into(_loaded(framework, call, target, opened, slots=False), target)


@contextmanager
def _proposing_map(framework: Framework[Any, Any], call: Call, opened: OpenState) -> Iterator[None]:
    """Adds to the remedy of a state that doesn't fit the map between the two codebases' modules."""
    try:
        yield
    except StateError as error:
        pair = module_map((opened.checkpoint.container, opened.layout), framework.modules)
        if pair is not None and call.map is None:
            error.also(f'map="{pair}" takes it to the same modules here')
        raise


def _loaded(
    framework: Framework[Target, Any], call: Call, target: Target, opened: OpenState, slots: bool
) -> Loaded:
    """Returns a checkpoint's state under the model's names."""
    names, paths = framework.names(opened, call, target)
    state = as_params(opened.state)[0]
    if maps := framework.maps(call, target):
        state = carried_to_load(state, with_beside(maps, opened), call.require, slots=slots)
    if slots:
        unread = "; ".join(odd.what for odd in opened.checkpoint.findings if odd.kind == UNREAD)
        require_resumable(state, call.path, framework.home, framework.makers, unread)
    if framework.renames:
        state = renamed(state, names, call.path, paths)
    return Loaded(opened, state, names, call.path, {})
