"""Optimizers of Keras 3 that have no schema: their slots and options under their own names, and nothing else told.

    optimizer/vars/0, 1, 2 ...      iteration, the rate where no schedule makes it, then rounds of slots
    optimizer/_variables/2/...      the same in tf.train.Checkpoint, whose object graph has the names of variables

A round has a variable, or several, of each parameter. Which rounds a class has, `signatures.json` says; those of
another class are numbered. The rows of a state, each a parameter and what it is, keep their order in `extra`.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.converters.layouts.hyperparameters import ManifestRecord
from statekit.converters.layouts.keras.state import (
    ACCUMULATOR,
    AVERAGE,
    HOME,
    ITERATION,
    RATE,
    SCHEMAS,
    called,
    called_by,
    calls_of,
    order_of,
    origin_in_keras2,
    rate_of,
    variables_of,
)
from statekit.converters.layouts.keras.variables import snake_case
from statekit.errors import Faults, InexactError, StateError
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import DTYPES, Shape, Tensor, in_memory
from statekit.tensors.tree import plain, shipped_json
from statekit.tensors.typed import Name, fits

SCHEMA = "keras_native"
ROWS = "rows"
"""Key in the home: for each of the optimizer's variables its parameter's path, "" of none, and what it is."""
KERAS2 = "keras2"
"""Key in the home: that Keras 2 laid out the variables."""
_OPTIONS = {AVERAGE: "use_ema", ACCUMULATOR: "gradient_accumulation_steps"}
_PERIODS = _OPTIONS[ACCUMULATOR]


@dataclass(frozen=True)
class Signature:
    """What a class of optimizers keeps.

    Attributes:
        kind: The class.
        settings: Its arguments; None where no file has them.
        slots: Rounds of slots, each with its names, and the option that has it; None of a class that isn't known.
        lists: The attributes that hold the slots of a name.
        alone: Numbers of no parameter, which stand behind all slots.
        some: Slots that not every parameter has.
        is_keras2: Whether it is one of Keras 2, which has its rate in the config alone.
    """

    kind: str
    settings: Mapping[str, Any] | None = None
    slots: tuple[tuple[tuple[str, ...], str | None], ...] | None = None
    lists: Mapping[str, str] | None = None
    alone: tuple[str, ...] = ()
    some: tuple[str, ...] = ()
    is_keras2: bool = False


@cache
def _known() -> Mapping[str, Mapping[str, Any]]:
    return dict(shipped_json(__package__, "signatures.json")["optimizers"])


def kinds() -> tuple[str, ...]:
    """Returns the classes of Keras 3 that no schema describes and whose slots have names."""
    return tuple(_known())


_SEVERAL = "multi_optimizer"


def signature_of(kind: str, settings: Mapping[str, Any] | None = None, is_keras2: bool = False) -> Signature:
    """Returns the signature of a class; one without rounds where the class isn't known.

    Raises:
        StateError: It is a MultiOptimizer, whose optimizers have their variables below its own.
            Source: keras-team/keras 3.15.1, keras/src/optimizers/multi_optimizer.py.
    """
    if re.fullmatch(rf"{_SEVERAL}(_\d+)?", snake_case(kind)):
        raise StateError(
            "Several optimizers move the model, and statekit reads the state of one.",
            expected="one optimizer of Keras",
            found=f"{kind}, a MultiOptimizer",
            remedy="--params-only takes the weights",
        )
    entry = _known().get(kind)
    if entry is None:
        return Signature(kind, settings, is_keras2=is_keras2)
    if is_keras2:
        entry = {"lists": None, "slots": entry["slots"]} | entry.get("keras2", {})
    rounds = tuple((tuple(slots["names"]), slots.get("if")) for slots in entry["slots"])
    some = tuple(name for slots in entry["slots"] for name in slots.get("some", ()))
    return Signature(kind, settings, rounds, entry["lists"], tuple(entry.get("alone", ())), some, is_keras2)


def usual_name(kind: str) -> str:
    """Returns what an optimizer of a class is called unless it was given a name."""
    return str(_known().get(kind, {}).get("name", snake_case(kind)))


def signature_in(config: Any, name: Any, written_class: Any, given: str | None) -> Signature | None:
    """Returns which optimizer without a schema a file is about; None if nothing tells one.

    Args:
        config: The model's.
        name: What the optimizer is called.
        written_class: The class that statekit wrote.
        given: The class that the user names, however it is written.
    """
    compiled = config.get("compile_config") if isinstance(config, Mapping) else None
    record = compiled.get("optimizer") if isinstance(compiled, Mapping) else None
    if isinstance(record, Mapping):
        kind, settings = called(record)
        is_own = record.get("registered_name") is None and kind in SCHEMAS
        return None if is_own or settings is None else signature_of(kind, settings)
    if fits(written_class, Name):
        return None if written_class in SCHEMAS else signature_of(written_class)
    plain_name = re.sub(r"_\d+$", "", name) if isinstance(name, str) else ""
    wanted = (given or "").replace("_", "").casefold()
    kinds = (k for k, card in _known().items() if card["name"] == plain_name or k.casefold() == wanted)
    return next(map(signature_of, kinds), None)


@dataclass(frozen=True)
class Numbered:
    """An optimizer's variables, told apart.

    Attributes:
        shapes: Shape of each parameter, in the optimizer's order.
        rows: For each variable the number of its parameter, None of none, and what it is.
        notes: What was assumed.
    """

    shapes: tuple[Shape, ...]
    rows: tuple[tuple[int | None, str], ...]
    notes: tuple[str, ...] = ()


def numbered(signature: Signature, variables: Sequence[Tensor], trained: Sequence[Shape]) -> Numbered:
    """Tells an optimizer's variables apart.

    Args:
        signature: Its class.
        variables: They, in their order.
        trained: The shapes of the parameters that it may move.

    Raises:
        StateError: They aren't the variables of such an optimizer, or could be several ways.
    """
    is_begun = bool(variables) and variables[0].shape == () and variables[0].dtype.kind in "iu"
    possible = [*_ways(signature, [variable.shape for variable in variables], trained)] if is_begun else []
    ways = _likeliest(possible, trained)
    owners = {tuple(i for i, _ in way.rows): way for way in ways}
    if len(owners) != 1 and is_begun and signature.slots is None:
        return _of_nobody(signature, variables, trained)
    if len(owners) != 1:
        raise _unfit(signature, variables, bool(ways))
    (way,) = owners.values()
    alike = zip(*(other.rows for other in ways if other.shapes == way.shapes), strict=True)
    # Where nothing tells two names of a slot apart, it has both.
    return Numbered(
        way.shapes,
        tuple((rows[0][0], " or ".join(dict.fromkeys(slot for _, slot in rows))) for rows in alike),
        _assumed(possible, way),
    )


_NO_AVERAGES = "Taken for an optimizer without use_ema and accumulated gradients: only a .keras file says it."


def _assumed(possible: Sequence[Numbered], chosen: Numbered) -> tuple[str, ...]:
    """Returns what was assumed of the base class' options, where another way has some."""
    return (_NO_AVERAGES,) if any(map(_has_options, possible)) and not _has_options(chosen) else ()


def _has_options(way: Numbered) -> bool:
    return not _OPTIONS.keys().isdisjoint(slot for _, slot in way.rows)


def _likeliest(ways: Sequence[Numbered], trained: Sequence[Shape]) -> list[Numbered]:
    """Returns what variables may be: of the model's parameters, and without what the base class has if asked."""
    fitting = [way for way in ways if Counter(way.shapes) == Counter(trained)] or ways
    return [way for way in fitting if not _has_options(way)] or [*fitting]


def _unfit(signature: Signature, variables: Sequence[Tensor], is_several: bool) -> StateError:
    relation = "could be several things of" if is_several else "aren't those of"
    return StateError(
        f"The optimizer's {len(variables)} variables {relation} Keras' {signature.kind}.",
        expected="iteration, learning_rate unless there is a schedule, then slots of each parameter",
        found=f"shapes {[variable.shape for variable in variables][:20]}",
        remedy="read the .keras file, which has the optimizer's config",
    )


def _of_nobody(signature: Signature, variables: Sequence[Tensor], trained: Sequence[Shape]) -> Numbered:
    """Returns the variables of a class that isn't known, where nothing tells which parameters they belong to."""
    has_rate = _has_rate(signature) is not False
    head = [ITERATION, RATE] if has_rate and len(variables) > 1 and variables[1].shape == () else [ITERATION]
    names = [*head, *(f"variable_{number}" for number in range(len(head), len(variables)))]
    return Numbered(tuple(trained), tuple((None, name) for name in names))


def _has_rate(signature: Signature) -> bool | None:
    """Tells whether an optimizer has a variable for its rate; None where no file says it."""
    if signature.is_keras2:
        return False
    return None if signature.settings is None else not isinstance(signature.settings.get(RATE), Mapping)


def _ways(signature: Signature, shapes: Sequence[Shape], trained: Sequence[Shape]) -> Iterator[Numbered]:
    """Yields the ways to number an optimizer's variables that the shapes allow."""
    has_rate = _has_rate(signature)
    for rate in (True, False) if has_rate is None else (has_rate,):
        head = [ITERATION, RATE] if rate else [ITERATION]
        if any(shape != () for shape in shapes[: len(head)]):
            continue
        behind = len(shapes) - len(signature.alone)
        rest = shapes[len(head) : behind]
        if any(shape != () for shape in shapes[behind:]):
            continue
        for rounds in _rounds(signature, len(rest), len(trained)):
            for way in _placed(rounds, rest, trained, signature.some):
                before, after = ([(None, name) for name in names] for names in (head, signature.alone))
                yield Numbered(way.shapes, (*before, *way.rows, *after))


def _rounds(signature: Signature, rest: int, trained: int) -> Iterator[list[tuple[str, ...]]]:
    """Yields the rounds of slots that an optimizer may have, each with its names."""
    base = [((name,), option) for name, option in _OPTIONS.items()]
    if signature.slots is None:
        length = max(rest // max(trained, 1), 0)
        names = [f"slot_{number}" for number in range(length)]
        yield [(name,) for name in names]
        if length > 1:
            yield [tuple(names)]
        return
    choices = [_having(option, signature.settings) for _, option in (*base, *signature.slots)]
    for chosen in itertools.product(*choices):
        yield [names for (names, _), has in zip((*base, *signature.slots), chosen, strict=True) if has]


def _having(option: str | None, settings: Mapping[str, Any] | None) -> tuple[bool, ...]:
    if option is None:
        return (True,)
    return (False, True) if settings is None else (bool(settings.get(option)),)


def _placed(
    rounds: Sequence[Sequence[str]], rest: Sequence[Shape], trained: Sequence[Shape], some: Sequence[str]
) -> Iterator[Numbered]:
    """Yields variables by rounds, where they make a whole number of parameters of one shape each; two ways at most."""
    if not some:
        way = _placed_alike(rounds, rest, trained)
        yield from () if way is None else (way,)
        return
    names = rounds[-1]
    before = (len(rounds) - 1) * len(trained)  # what the base class has, of every parameter
    head = _placed_alike(rounds[:-1], rest[:before], trained)
    for rows in _placed_apart(names, rest[before:], trained, some):
        if head is not None and head.shapes == tuple(trained):
            yield Numbered(tuple(trained), (*head.rows, *rows))


def _placed_apart(
    names: Sequence[str], rest: Sequence[Shape], trained: Sequence[Shape], some: Sequence[str]
) -> Iterator[list[tuple[int, str]]]:
    """Yields the rows of a round in which not every parameter has all of its slots; two ways at most."""
    forms = (tuple(names), tuple(name for name in names if name not in some))
    ways: dict[int, list[Any]] = {0: [None]}  # by the variables that are placed: each way, and the one before
    for shape in trained:
        after: dict[int, list[Any]] = {}
        for at, form in itertools.product(ways, forms):
            if list(rest[at : at + len(form)]) == [shape] * len(form):
                after.setdefault(at + len(form), []).extend((way, form) for way in ways[at])
        ways = {at: several[:2] for at, several in after.items()}
    for end in ways.get(len(rest), []):
        chosen, link = [], end
        while link is not None:
            link, form = link
            chosen.append(form)
        yield [(i, name) for i, form in enumerate(reversed(chosen)) for name in form]


def _placed_alike(
    rounds: Sequence[Sequence[str]], rest: Sequence[Shape], trained: Sequence[Shape]
) -> Numbered | None:
    """Returns variables by rounds; None if they don't make a whole number of parameters of one shape each."""
    length = sum(map(len, rounds))
    if not length:
        return None if rest else Numbered(tuple(trained), ())
    count, left = divmod(len(rest), length)
    rows = [(i, name) for names in rounds for i in range(count) for name in names]
    shapes: dict[int, set[Shape]] = {}
    for (i, _), shape in zip(rows, rest, strict=False):
        shapes.setdefault(i, set()).add(shape)
    if left or any(len(several) > 1 for several in shapes.values()):
        return None
    return Numbered(tuple(next(iter(shapes[i])) for i in range(count)), tuple(rows))


def _by_slots(paths: Iterable[str], slots: Mapping[str, Mapping[str, Tensor]]) -> list[tuple[str, ...]]:
    """Returns parameters in groups of those that have the same slots: one optimizer moves them by several rules."""
    parts: dict[tuple[str, ...], list[str]] = {}
    for path in paths:
        parts.setdefault(tuple(slots.get(path, ())), []).append(path)
    return [tuple(part) for part in parts.values()]


def native_state(
    signature: Signature,
    rows: Sequence[tuple[str | None, str, Tensor]],
    moved: Mapping[str, Tensor],
    frozen: Mapping[str, Tensor],
    home: Mapping[str, Any],
    record: ManifestRecord | None,
    hints: CheckpointRef,
    notes: Sequence[str] = (),
) -> TrainState:
    """Returns the state of an optimizer without a schema; the hyperparameters among the hints aren't in force yet.

    Args:
        signature: Its class.
        rows: Its variables in their order: each one's parameter, None of none, what it is, and its value.
        moved: The parameters that it moves, in its order.
        frozen: Those that it doesn't.
        home: What a file of this kind holds besides.
        record: What a conversion's manifest says.
        hints: What the user says.
        notes: What was assumed.

    Raises:
        StateError: The optimizer doesn't count its calls.
    """
    slots: dict[str, dict[str, Tensor]] = {}
    for path, name, tensor in rows:
        if path is not None:
            slots.setdefault(path, {})[name] = tensor
    alone = {name: tensor for path, name, tensor in rows if path is None}
    _check_single(alone)
    settings = _settings(signature, record)
    if RATE in alone:
        settings[RATE] = float(alone[RATE].read())
    calls = _calls(alone)
    periods = hints.hyperparameters.get(_PERIODS, settings.get(_PERIODS))
    updates = calls // periods if isinstance(periods, int) and periods > 0 else calls
    others = {name: tensor for name, tensor in alone.items() if name not in (ITERATION, RATE)}
    kept = {
        **home,
        **dict.fromkeys([KERAS2] * signature.is_keras2, True),
        "class": signature.kind,
        ITERATION: calls,
        "iteration_dtype": alone[ITERATION].dtype.name,
        ROWS: [[path or "", name] for path, name, _ in rows],
        **({"alone": others} if others else {}),
    }
    parts = _by_slots(moved, slots) if signature.some else [tuple(moved)]
    groups = tuple(Group(paths, settings, dict.fromkeys(settings, "file")) for paths in parts)
    return TrainState(
        {**moved, **frozen},
        slots,
        Optimizer(SCHEMA, signature.kind, groups),
        Counts(updates, calls),
        {},
        {HOME: kept, **called_by(signature.settings)},
        tuple(notes),
    )


def _check_single(alone: Mapping[str, Tensor]) -> None:
    arrays = Faults(
        (f"has shape {alone[name].shape}", name)
        for name in (ITERATION, RATE)
        if name in alone and alone[name].shape
    )
    arrays.check(StateError, "What an optimizer has once is no single number")


def _calls(alone: Mapping[str, Tensor]) -> int:
    calls = int(alone[ITERATION].read()) if ITERATION in alone else -1
    if calls < 0:
        raise StateError("The calls aren't counted from 0 on.", expected=ITERATION, found=", ".join(alone))
    return calls


def _settings(signature: Signature, manifest: ManifestRecord | None) -> dict[str, Any]:
    """Returns the options of an optimizer, as its config or a manifest has them."""
    stated = signature.settings
    if stated is None:
        stated = manifest.groups[0].hyperparameters.values if manifest is not None and manifest.groups else {}
    return {key: plain(value) for key, value in stated.items() if _is_option(key, value)}


def _is_option(key: Any, value: Any) -> bool:
    return fits(key, Name) and (value is None or isinstance(value, (bool, int, float, str)))


def _require_form(state: TrainState, home: Mapping[str, Any], layout: str) -> None:
    """Checks that a layout writes the form of file that Keras 2 wrote a state in, whose variables Keras 3 has not."""
    origin = origin_in_keras2(home)
    if origin not in (None, layout):
        raise InexactError(
            f"Keras 2 keeps other variables of its {state.optimizer.variant} than the layout {layout} writes.",
            expected=f"the layout {origin}, in whose form Keras 2 wrote the state",
            found=layout,
            remedy=f"--layout {origin} goes on in Keras 2; --params-only takes the weights alone",
        )


def values_of_slots(
    state: TrainState, home: Mapping[str, Any], layout: str
) -> dict[tuple[str | None, str], Tensor]:
    """Returns an optimizer's variables by parameter and slot; a variable of no parameter has None.

    Raises:
        InexactError: No optimizer of Keras holds the state; lists every reason.
    """
    if state.optimizer.schema == SCHEMA:
        return {(path, slot): tensor for path, slot, tensor in native_rows(state, home, layout)}
    _, rows = variables_of(state, home, layout)
    order = order_of(state)
    return {(None if i is None else order[i], slot): tensor for i, slot, tensor in rows}


def native_rows(
    state: TrainState, home: Mapping[str, Any], layout: str
) -> list[tuple[str | None, str, Tensor]]:
    """Returns an optimizer's variables in their order; undoes `native_state`.

    Raises:
        InexactError: The state wasn't read from Keras, has other slots than it had, or is of another form of Keras 2's
            files; lists every slot.
    """
    _require_form(state, home, layout)
    rows: Any = home.get(ROWS)
    if not fits(rows, list[list[Name]]):
        raise InexactError(
            f"The layout {layout} writes such an optimizer as Keras had it, and the state doesn't say that.",
            place=f"extra/{HOME}/{ROWS}",
            expected="a state that was read from Keras",
            found=state.optimizer.schema,
        )
    alone = dict(home.get("alone", {}))
    dtype = DTYPES[str(home.get("iteration_dtype", "int64"))]
    alone[ITERATION] = in_memory(np.asarray(calls_of(state, home), dtype), ITERATION)
    rate = rate_of(state)
    alone[RATE] = in_memory(np.asarray(np.nan if rate is None else rate, np.float32), RATE)
    left = {path: dict(slots) for path, slots in state.slots.items()}
    built: list[tuple[str | None, str, Tensor]] = []
    faults = Faults()
    for path, slot in rows:
        tensor = left.get(path, {}).pop(slot, None) if path else alone.get(slot)
        if tensor is None:
            faults.add(f"has no {slot}", path or ROWS)
        else:
            built.append((path or None, slot, tensor))
    faults += [
        (f"has slot {name}, for which there is no place", path)
        for path, slots in left.items()
        for name in slots
    ]
    faults.check(InexactError, "Keras' optimizer has other variables")
    return built


def owner_of(name: str, paths: Sequence[str]) -> tuple[str | None, str]:
    """Returns the parameter and the slot of a variable, by the name that Keras 3 gave it.

    Example:
        >>> owner_of("dense_kernel_momentum", ["dense/kernel", "dense/bias"])
        ('dense/kernel', 'momentum')
    """
    fitting = [path for path in paths if name.startswith(f"{path.replace('/', '_')}_")]
    if not fitting:
        return None, name
    path = max(fitting, key=len)
    return path, name[len(path) + 1 :]
