"""Compares a live run with its checkpoint, in any framework."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from statekit.attestation.attestation import Attestation, Finding
from statekit.attestation.diagnosis import diagnosed, is_new
from statekit.attestation.faults import broken, fault
from statekit.attestation.live_run import LiveRun
from statekit.conversion.belonging import UNREAD, half_of, is_spare
from statekit.conversion.checkpoint_ref import CheckpointRef, ref_of
from statekit.conversion.contracts import Exactness
from statekit.conversion.model_settings import with_beside
from statekit.conversion.open_state import OpenState, open_state
from statekit.conversion.rule_change import change_rule
from statekit.dropin.by_name import path_of
from statekit.dropin.matching import renamed, saved_under
from statekit.errors import StateError, StatekitError, UsageError
from statekit.files.checkpoint import Finding as Oddity
from statekit.files.tree import Place
from statekit.maps.links import carried_to_load
from statekit.state.comparison import Difference, compare_states, uncompared
from statekit.state.evidence import OPTIMIZER, TAKEN, Fact, ordered
from statekit.state.facts import facts_of
from statekit.state.param_names import wrapped_names
from statekit.state.run import BUFFERS
from statekit.state.schema import WEIGHTS
from statekit.state.stored_params import as_params
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import tensor_names

ORDERED = (
    "The checkpoint numbers its parameters and nothing in it tells which they are; they are taken in the order of the "
    "live optimizer, so that an order which is wrong can't be seen."
)
LIVE_ORDER = "the order of the live one"
WIDENED = ("float16", "float32")
"""The dtype in which some programs store slots, and the one to which PyTorch brings them when they are loaded.

Source: ultralytics/ultralytics ultralytics/utils/torch_utils.py, `convert_optimizer_state_dict_to_fp16`;
pytorch/pytorch torch/optim/optimizer.py, `Optimizer._process_value_according_to_param_policy`.
"""
_SCALARS = (bool, int, float, str, type(None))
_LACKS = {True: "the checkpoint has it, and none was given", False: "the checkpoint has none"}


def widened(slot: str) -> str:
    """Returns a sentence about slots that the file stores in half precision."""
    return f"the dtype of {slot}: {WIDENED[0]} in the checkpoint, and {WIDENED[1]} since PyTorch loaded it"


@dataclass(frozen=True)
class Sides:
    """A checkpoint and the live run that goes on from it, while the checkpoint is open.

    Attributes:
        result: Whether they are the same run.
        right: The checkpoint's state, as the live optimizer's rule goes on with it.
        live: The live state; None where it breaks its own rules.
        decode: Gives the live state as it has become since.
    """

    result: Attestation
    right: TrainState
    live: TrainState | None
    decode: Callable[[], TrainState]


@contextmanager
def attesting(
    path: CheckpointRef | str | PathLike[str], run: LiveRun, sample: int | None = None, seed: int = 0
) -> Iterator[Sides]:
    """Compares a live run with a checkpoint, through the canonical form of both, and keeps the checkpoint open.

    Args:
        path: Anything statekit reads.
        run: The live run.
        sample: How many parameters are compared by value, drawn with `seed`; all if None. Names, shapes, dtypes,
            counts and hyperparameters are compared of all.
        seed: Of the sample.

    Raises:
        StateError: The checkpoint can't be decoded.
        UsageError: A sample of less than one, or names that don't fit.
        InexactError: A map is less exact than required; lists every parameter.
        NotFoundError, FormatError: The checkpoint can't be read.
    """
    if sample is not None and sample < 1:
        raise UsageError("A sample has at least one parameter.", place="sample", found=sample)
    with _opened(ref_of(path).place, run) as (opened, taken):
        right = as_params(opened.state)[0]
        if run.maps:
            right = carried_to_load(right, with_beside(run.maps, opened), run.require)
        names = run.names or _remembered_in(right, run.remembered)
        spare, oddities = _spare_and_others(opened)
        unread, remarks = _parted_oddities(oddities)
        faults = [*run.findings, *unread]
        omissions = [*run.unchecked, *remarks]
        if run.generators is not None:
            generator_faults, generator_omissions = run.generators(opened)
            faults += generator_faults
            omissions += generator_omissions
        place = str(opened.checkpoint.path)
        state: TrainState | None = None
        try:
            state = _by_path(run.live(opened))
            names = names or _differing_names(run, opened, state, right)
        except StatekitError as error:
            faults += broken(error)
            result = Attestation(place, right.counts.done, tuple(faults), tuple(omissions), (), 0, 0, 0)
        right = _without(_by_path(renamed(right, names, place)), {path_of(name) for name in run.elsewhere})
        if state is not None:
            right, lacking = _with_weights_of(right, state, run.hints.model or {})
            weight_faults, weight_omissions = _of_lacking_weights(right, lacking)
            faults += weight_faults
            omissions += weight_omissions
            right, rule_faults = _under_rule_of(right, state)
            optimizer_faults, optimizer_omissions = _of_lacking_optimizer(right, state)
            faults += [*rule_faults, *optimizer_faults]
            omissions += optimizer_omissions
            paths = [*right.params, *_buffers(right)]
            chosen = sampled(paths, sample, seed)
            if sample is not None:
                omissions.append(
                    f"values of {len(paths) - len(chosen)} of {len(paths)} parameters (sample={sample})"
                )
            sides = "the checkpoint", "the live run"
            compared = compare_states(
                right,
                state,
                by_value=lambda path: not path or path in chosen,
                sides=sides,
                rates=run.live_rates,
                length=run.live_length,
            )
            needed = right.params if run.whole_model else list(right.optimizer.paths)
            parted = _parted(
                compared.differences, right, state, needed, run.shows_schedule, run.strict_schedule
            )
            faults += diagnosed(right, state, parted.faulty)
            omissions += _without_generators(compared.unsaid, run.generators is not None)
            omissions += [*map(_lack, parted.lacking), *map(_assumption, parted.assumed)]
            result = Attestation(
                place,
                right.counts.done,
                tuple(faults),
                tuple(dict.fromkeys(omissions)),
                (*right.assumptions, *taken),
                len(right.params),
                compared.tensors - len(lacking),
                compared.bytes_read,
                warnings=(*spare, *map(_warning, parted.later)),
                facts=tuple(_facts_of(right, state, taken, lacking)),
            )
        yield Sides(result, right, state, lambda: _by_path(run.live(opened)))


def _facts_of(
    right: TrainState, live: TrainState, taken: Sequence[str], lacking: Sequence[str]
) -> Iterator[Fact]:
    """Yields what the verdict rests on.

    Args:
        right: The checkpoint's state.
        live: The live one.
        taken: That the order of numbers is the live optimizer's, if it is.
        lacking: Parameters whose weights the checkpoint lacks.
    """
    if lacking:
        yield Fact("the weights", because="the checkpoint has none")
    if _has_weights_alone(right, live):
        yield Fact("the optimizer's state", because="the checkpoint has weights alone")
    yield from facts_as_live(right, live)
    if taken:
        yield ordered(LIVE_ORDER)


def facts_as_live(right: TrainState, live: TrainState) -> Iterator[Fact]:
    """Yields the facts that the checkpoint leaves open, with the live run's value if it has one."""
    values: dict[str, set[Any]] = {}
    for group in live.optimizer.groups:
        for name, value in group.hyperparameters.items():
            values.setdefault(name, set()).add(value if isinstance(value, _SCALARS) else ...)
    for fact in facts_of(right):
        same = values.get(fact.name.rpartition("/")[2], {...})
        if fact.is_weak and fact.name != OPTIMIZER and not fact.others and len(same) == 1 and ... not in same:
            yield replace(fact, value=next(iter(same)), source="assumed", because="as the live run has it")
        elif fact.is_weak or fact.is_against_file:
            yield fact


def _with_weights_of(
    right: TrainState, live: TrainState, stand_ins: Mapping[str, Tensor]
) -> tuple[TrainState, list[str]]:
    """Returns a checkpoint's state with the live weights where it has none, and the paths of these."""
    absent = {id(tensor) for tensor in stand_ins.values()}
    lacking = [path for path, tensor in right.params.items() if id(tensor) in absent and path in live.params]
    if not lacking:
        return right, []
    weights = {path: live.params[path] for path in lacking}
    return replace(right, params={**right.params, **weights}), lacking


def _of_lacking_weights(right: TrainState, lacking: Sequence[str]) -> tuple[list[Finding], list[str]]:
    """Returns a fault if some parameters lack their weight; an omission if all do."""
    names = [
        f"/{name.replace('.', '/')}" for name in tensor_names(dict(right.extra)) if not _is_average(name)
    ]
    lost = [path for path in lacking if not any(name.endswith(f"/{path}") for name in names)]
    if len(lost) == len(lacking):
        return [], ["the weights: the checkpoint has none"] * bool(lacking)
    return [fault("parts-missing", lost, "a weight of each parameter", "those of others alone")], []


def _is_average(name: str) -> bool:
    return any(half_of(key) == "average" for key in name.split("/"))


def _spare_and_others(opened: OpenState) -> tuple[list[str], list[Oddity]]:
    """Returns a sentence for each average and other rank beside the run, and what else the reader found."""
    oddities = opened.checkpoint.findings
    spare = [odd for odd in oddities if odd.kind == UNREAD and is_spare(odd, opened.state)]
    return [f"{odd.what}, and no update of what was read depends on it" for odd in spare], [
        odd for odd in oddities if odd not in spare
    ]


def _parted_oddities(oddities: Sequence[Oddity]) -> tuple[list[Finding], list[str]]:
    """Returns a fault for each part of the run that nobody has read, and the other remarks of the reader."""
    whole = "a checkpoint whose parts are all read"
    unread = [fault(UNREAD, [odd.place], whole, odd.what) for odd in oddities if odd.kind == UNREAD]
    return unread, [odd.what for odd in oddities if odd.kind != UNREAD]


def _differing_names(
    run: LiveRun, opened: OpenState, state: TrainState, right: TrainState
) -> Mapping[str, str]:
    """Returns a checkpoint's names by the live run's, where wrappers or the model's library make them differ."""
    live_names = [*state.params, *_buffers(state)]
    names = wrapped_names(live_names, [*right.params, *_buffers(right)])
    return names or ({} if run.maps else saved_under(opened, live_names))


def _remembered_in(right: TrainState, remembered: Mapping[str, str]) -> dict[str, str]:
    """Returns the remembered names that the checkpoint has, by the caller's."""
    paths = {path_of(name) for name in (*right.params, *_buffers(right))}
    return {key: native for key, native in remembered.items() if path_of(native) in paths}


def _has_weights_alone(right: TrainState, live: TrainState) -> bool:
    """Tells whether the checkpoint has weights alone, and the live run an optimizer."""
    return right.optimizer.kinds[0][0] == WEIGHTS != live.optimizer.kinds[0][0]


def _of_lacking_optimizer(right: TrainState, live: TrainState) -> tuple[list[Finding], list[str]]:
    """Returns a fault if the checkpoint lacks the live optimizer's state; an omission if the optimizer is new."""
    if not _has_weights_alone(right, live):
        return [], []
    if is_new(live):
        return [], ["the optimizer: the checkpoint has weights alone"]
    updates = "an optimizer's state" if live.counts.done is None else f"{live.counts.done} updates"
    return [fault("optimizer-unknown", ["optimizer"], "weights alone", updates)], []


@dataclass(frozen=True)
class _Parted:
    """The differences of both sides, by what follows from them.

    Attributes:
        lacking: One side alone has it, and need not.
        assumed: One side doesn't say it, so that the usual value stands for it.
        later: The rate of a later update differs, which is a warning.
        faulty: The live run isn't the checkpoint's.
    """

    lacking: Sequence[Difference]
    assumed: Sequence[Difference]
    later: Sequence[Difference]
    faulty: Sequence[Difference]


def _parted(
    differences: Sequence[Difference],
    right: TrainState,
    live: TrainState,
    needed: Container[str],
    shows_schedule: bool,
    strict_schedule: bool,
) -> _Parted:
    """Parts the differences; that of the rule is no fault where the checkpoint has weights alone."""
    has_weights_alone = _has_weights_alone(right, live)
    lacking = [difference for difference in differences if _is_one_sided(difference, needed, shows_schedule)]
    assumed = [difference for difference in differences if _is_assumed(difference, right, live)]
    rules = [difference for difference in differences if has_weights_alone and difference.what == "rule"]
    later = [difference for difference in differences if not strict_schedule and difference.what == "later"]
    harmless = {id(difference) for difference in (*lacking, *assumed, *rules, *later)}
    faulty = [difference for difference in differences if id(difference) not in harmless]
    return _Parted(lacking, assumed, later, faulty)


def _without_generators(sentences: Iterable[str], are_compared: bool) -> list[str]:
    """Returns what can't be compared, without the random generators where they are compared apart."""
    return [sentence for sentence in sentences if not are_compared or sentence != uncompared("random")]


@contextmanager
def _opened(path: Place, run: LiveRun) -> Iterator[tuple[OpenState, tuple[str, ...]]]:
    """Opens a checkpoint by its own names, or else by those of the live run; yields a note of the second case."""
    tries = [(run.hints, ""), *run.instead]
    for i, (hints, sentence) in enumerate(tries):
        try:
            opened, notes = open_state(hints.at(path)), (sentence,) if sentence else ()
            break
        except StateError:
            if i + 1 == len(tries):
                raise
    with opened:
        yield opened, notes


def _by_path(state: TrainState) -> TrainState:
    """Returns a state whose paths have slashes for dots, as names of both sides are compared."""
    if all(path_of(path) == path for path in state.params):
        return state
    return state.renamed(path_of)


def _without(state: TrainState, paths: Collection[str]) -> TrainState:
    """Returns a state without some of its parameters."""
    return state.only(path for path in state.params if path not in paths)


def _buffers(state: TrainState) -> list[str]:
    """Returns the names of buffers, frozen parameters among them."""
    buffers = state.extra.get(BUFFERS)
    return [str(name) for name in buffers] if isinstance(buffers, Mapping) else []


def sampled(paths: Sequence[str], sample: int | None, seed: int) -> set[str]:
    """Returns some of the paths, drawn with a seed; all if None."""
    if sample is None or sample >= len(paths):
        return set(paths)
    return set(random.Random(seed).sample([*paths], sample))


def _under_rule_of(right: TrainState, live: TrainState) -> tuple[TrainState, list[Finding]]:
    """Returns the checkpoint's state under the live optimizer's rule, and the faults of a change of rule."""
    if (
        right.optimizer.several
        or live.optimizer.several
        or WEIGHTS in (right.optimizer.schema, live.optimizer.schema)
    ):
        return right, []
    (schema, variant), (live_schema, live_variant) = right.optimizer.kinds[0], live.optimizer.kinds[0]
    if schema != live_schema or variant == live_variant or variant is None or live_variant is None:
        return right, []
    change = change_rule(right, variant, live_variant)
    worse = [difference for difference in change.differences if difference.exactness > Exactness.ROUNDING]
    return change.state, [
        fault(
            "rule",
            [rule_difference.what],
            f"{rule_difference.source} ({variant})",
            f"{rule_difference.target} ({live_variant})",
        )
        for rule_difference in worse
    ]


def _is_one_sided(difference: Difference, needed: Container[str], shows_schedule: bool) -> bool:
    """Tells whether only one side has what need not be given; a scaler that the checkpoint lost is a fault."""
    if difference.what == "part":
        return difference.actual is None
    if difference.what == "schedule":
        return difference.expected is None or (difference.actual is None and not shows_schedule)
    is_frozen = (
        difference.what == "missing"
        and difference.place == f"params/{difference.path}"
        and difference.path not in needed
    )
    return is_frozen or (
        difference.place.startswith(f"{BUFFERS}/") and difference.what in ("missing", "extra")
    )


def _is_assumed(difference: Difference, right: TrainState, live: TrainState) -> bool:
    """Tells whether a default stands for a hyperparameter that one side doesn't have.

    Or a slot that the file keeps in half precision, as PyTorch's `load_state_dict` brings it to its parameter's.
    """
    if difference.what == "dtype" and difference.place.startswith("slots/"):
        params = (state.params.get(difference.path) for state in (right, live))
        is_full = all(param is not None and param.dtype.name == WIDENED[1] for param in params)
        return is_full and (difference.expected, difference.actual) == WIDENED
    if difference.what != "option":
        return False
    groups = (state.group_of(difference.path) for state in (right, live))
    return any(group is not None and group.known_from.get(difference.item) in TAKEN for group in groups)


def _assumption(difference: Difference) -> str:
    if difference.what == "dtype":
        return widened(difference.item)
    values = f"{difference.expected!r} in the checkpoint, {difference.actual!r} live"
    return f"{difference.item}: it isn't said on both sides; {values}"


def _warning(difference: Difference) -> str:
    rates = f"{difference.actual!r}, by the checkpoint {difference.expected!r}"
    return f"{difference.item} {rates}; the next update isn't concerned"


def _lack(difference: Difference) -> str:
    name = (
        BUFFERS
        if difference.place.startswith(BUFFERS)
        else difference.item or (difference.place if difference.path else difference.what)
    )
    return f"the {name}: {_LACKS[difference.actual is None]}"
