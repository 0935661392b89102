"""The run around an optimizer: its schedule, loss scaler, accumulation, averages, random states, data, epoch and ties.

A state's extra holds what its source said of these, as inert records in the source's own words and places. Here they
are found again, whatever system wrote them and wherever they are kept by now, and named alike. Nothing is computed: a
schedule is its kind, its parameters and where it stands.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase, translate
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from statekit.state.rates import Told
from statekit.state.schedules.called import KEY as CALLED
from statekit.state.schedules.called import called_rates
from statekit.state.schedules.megatron import megatron_rates
from statekit.state.schedules.mxnet import mxnet_rates
from statekit.state.schedules.pytorch import torch_kind, torch_rates
from statekit.tensors.tensor import TIES
from statekit.tensors.tree import Path, Record, Tree, to_json

BUFFERS = "buffers"
"""Key in a state's extra: tensors of a model that no optimizer moves, by name."""
BESIDE = "torch"
"""Key in a state's extra: what lay beside model and optimizer in a file or folder of PyTorch."""
TRAINER_ARGUMENTS = "trainer_arguments"
"""Key beside a Trainer's parts: those of its arguments that make its schedule, as its folder's container reads them."""
PARTS = "torch_places"
"""Key in a state's extra: where model and optimizer lie in a file of PyTorch."""
SIDE_BY_SIDE = "torch_optimizers"
"""Key in `extra`: place of each optimizer of a run that has several, and how many of the groups are its own."""
Part: TypeAlias = Literal["scaler", "accumulation", "averages", "random", "data", "epoch", "trainer"]


@dataclass(frozen=True)
class Schedule:
    """A schedule of the learning rate.

    Attributes:
        kind: Its class, as its system calls it; None where its state doesn't tell.
        parameters: What it was made with, as its state has it.
        at: Steps it has made, as it counts them; None where it doesn't count.
        place: Canonical name of the record that says so.
        rates: What it does to each group, as a function of the updates done, or why there is no such form; one entry
            where it does the same to all.
        groups: Numbers of the groups that it moves, in the order of `rates`; none if these are all.
        last: The rates that it gave last, as its state has them.
    """

    kind: str | None
    parameters: Mapping[str, Any]
    at: int | None
    place: str
    rates: tuple[Told, ...] = ()
    groups: tuple[int, ...] = ()
    last: tuple[Any, ...] = ()

    def following(self, rates: Sequence[Told]) -> Schedule:
        """Returns the schedule with the rates of each group, or the reason where its last rate contradicts them."""
        last = self.last if len(self.last) == len(rates) else (None,) * len(rates)
        return replace(self, rates=tuple(map(self._agreeing, rates, last)))

    def _agreeing(self, rates: Told, last: Any) -> Told:
        if isinstance(rates, str) or self.at is None or type(last) not in (int, float):
            return rates
        due = rates.rate(self.at)
        if math.isclose(due, last, rel_tol=1e-6, abs_tol=1e-12):
            return rates
        return f"its rate after {self.at} updates is {last!r}, and not {due!r}, as what is said of it makes"

    @property
    def bases(self) -> tuple[Any, ...]:
        """The rate that each of its groups began with, where its state has them; a row of schedules has none itself."""
        parts = self.parameters.get("_schedulers")
        rows = [self.parameters, *(parts if isinstance(parts, (list, tuple)) else ())]
        rates = (row.get("base_lrs") for row in rows if isinstance(row, Mapping))
        return next((tuple(row_rates) for row_rates in rates if isinstance(row_rates, (list, tuple))), ())

    @property
    def cycles(self) -> bool:
        """Whether it moves momentum, or Adam's first beta, against the learning rate.

        Source: pytorch/pytorch torch/optim/lr_scheduler.py, `OneCycleLR`, `CyclicLR`.
        """
        return bool(self.parameters.get("cycle_momentum"))

    @property
    def has_record(self) -> bool:
        """Whether its own record says where it is: its step, or the boundary that it passed last."""
        return self.at is not None or "count" in self.parameters

    def moves(self, number: int) -> bool:
        """Tells whether it moves a group, by its number."""
        return not self.groups or number in self.groups

    def of_group(self, number: int) -> Told:
        """Returns the rates of a group that it moves, by the group's number; or why they are unknown."""
        if not self.rates:
            return f"nothing tells the base of {self.kind or 'the schedule'}"
        number = self.groups.index(number) if self.groups else number
        return self.rates[number] if number < len(self.rates) else self.rates[0]

    def last_of(self, number: int) -> float | None:
        """Returns the rate that it gave a group last, by the group's number; None if nothing says it."""
        if not self.moves(number):
            return None
        number = self.groups.index(number) if self.groups else number
        rate = self.last[number] if number < len(self.last) else None
        return rate if isinstance(rate, float) else None

    def to_json(self) -> dict[str, Any]:
        """Returns the schedule as plain data."""
        rates = [rate if isinstance(rate, str) else rate.to_json() for rate in self.rates]
        plain = {
            "kind": self.kind,
            "parameters": to_json(self.parameters),
            "at": self.at,
            "place": self.place,
        }
        moved = {"groups": list(self.groups)} if self.groups else {}
        return {**plain, **({"rates": rates} if rates else {}), **moved}


@dataclass(frozen=True)
class RunPart:
    """One thing that is known of a run.

    Attributes:
        what: Which.
        place: Canonical name of the record or tensor that holds it.
        value: The record without its tensors, of a trainer's only what stands plainly at its top; None where it is a
            tensor, or a file's bytes.
    """

    what: Part
    place: str
    value: Tree

    def to_json(self) -> dict[str, Any]:
        """Returns the part as plain data."""
        return {"place": self.place, "value": to_json(self.value)}


@dataclass(frozen=True)
class RunState:
    """What is known of a run beside parameters, slots and the optimizer's hyperparameters.

    Attributes:
        schedules: Schedules of the learning rate.
        parts: The other things, each with where it is known from.
        ties: Further name of a parameter -> its path.
        optimizers: How many of the groups, in their order, each of several optimizers has that lay side by side.
        places: Where a file of PyTorch has its model and its optimizer, keys joined by `/`; none where unknown.
    """

    schedules: tuple[Schedule, ...] = ()
    parts: tuple[RunPart, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    optimizers: tuple[int, ...] = ()
    places: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the run as plain data; what isn't known is absent."""
        named: dict[str, Any] = {}
        for part in self.parts:
            named.setdefault(part.what, []).append(part.to_json())
        schedules = [schedule.to_json() for schedule in self.schedules]
        return {
            **({"schedule": schedules} if schedules else {}),
            **named,
            **({"ties": dict(self.ties)} if self.ties else {}),
            **({"optimizers": list(self.optimizers)} if self.optimizers else {}),
        }


_PLAIN = (bool, int, float, str)
_PLACE_IN_TIME = frozenset({
    "last_epoch", "_step_count", "step_count", "_last_lr", "_is_initial", "verbose", "_get_lr_called_within_step",
    "batch", "epoch", "best", "num_bad_epochs", "cooldown_counter",
})  # fmt: skip
_TORCH = frozenset({"last_epoch", "base_lrs", "lr_batches", "_schedulers"})
"""One of these is in the state of every schedule of torch, or of icefall."""
_SCHEDULERS = ("*/scheduler", "*/lr_scheduler", "*/lr_schedulers/*", "*/opt_param_scheduler")
"""Where records of schedules lie whose keys don't tell their class.

Source: torch_file.py's own; Lightning, checkpoint_connector.py, `dump_checkpoint`; DeepSpeed, engine.py,
`_save_checkpoint`; Megatron-LM, checkpointing.py, `generate_state_dict`.
"""
COUNTED = ("schedule",)
"""What stands in the form that a state keeps of an Optax checkpoint, where a schedule counts."""
_INJECTED = "hyperparams_states"
_NO_FUNCTION = (
    "a state of Optax has the count of a schedule alone: its function is in no file, and --schedule tells it"
)
KERAS_SCHEDULE = "extra/keras/schedule"
"""Canonical name of what says that an optimizer of Keras has a schedule in the place of a learning rate."""
RATE_FACTORS = "rate_factors"
"""Key in Keras' part of `extra` of what each group multiplies the schedule's rate by."""
_NO_CONFIG = (
    "Keras' weights don't say a schedule, which stands in the config of a .keras file; --schedule tells it"
)
_MMENGINE = {"base_values", "_global_step"}
"""Keys of each of MMEngine's schedules. Source: open-mmlab/mmengine mmengine/optim/scheduler/param_scheduler.py."""
_NOT_READ = "MMEngine's schedules move several options by their own rules, which statekit doesn't read"
_MXNET = "mxnet.lr_scheduler."
"""Where MXNet's schedules are. Source: apache/mxnet python/mxnet/lr_scheduler.py."""
MEGATRON = "OptimizerParamScheduler"
"""Megatron-LM's schedule. Source: NVIDIA/Megatron-LM megatron/core/optimizer_param_scheduler.py, `state_dict`."""
_OF_MEGATRON = frozenset({"lr_decay_style", "lr_decay_steps", "num_steps"})
_COMMON = "megatron_common"
"""Key in a state's extra: what Megatron-Core keeps in common.pt beside the optimizer."""
PLACES: tuple[tuple[str, Part], ...] = (
    ("*/scaler", "scaler"), ("*/grad_scaler", "scaler"), ("*/MixedPrecision", "scaler"),
    ("*/mini_step", "accumulation"), ("*/gradient_step", "accumulation"), ("*/acc_grads", "accumulation"),
    ("*/gradient_accumulators", "accumulation"), ("*/ema", "averages"), ("*/model_avg", "averages"),
    ("*/state_dict_ema", "averages"), ("*/model_ema", "averages"), ("*/ema_model", "averages"),
    ("*/averaging_state", "averages"), ("extra/torch/state_dict", "averages"), ("*/rng", "random"),
    ("*/rngs", "random"), ("*/*_rng", "random"), ("*rng_state*", "random"), ("*/random_states_*", "random"),
    ("*/sampler", "data"), ("*/sampler*.bin", "data"), ("*/data_iter", "data"), ("*/train_ds*", "data"),
    ("*/epoch", "epoch"), ("*/cur_epoch", "epoch"), ("*/trainer_state", "trainer"), ("*/loops", "trainer"),
)  # fmt: skip
"""Pattern of a record's canonical name -> what it is; the first that fits is meant.

Source: transformers trainer_callback.py, `TrainerState`; accelerate utils/constants.py; Lightning
checkpoint_connector.py, `dump_checkpoint`; icefall checkpoint.py, `save_checkpoint`; optax transforms/_accumulation.py;
keras-team/keras keras/src/optimizers/base_optimizer.py, `_accumulated_gradients`.
"""
GRADIENTS: Mapping[str, int] = {
    "*/acc_grads": 1,
    "*/acc_grads/*": 1,
    "*/gradient_accumulators/*": 1,
    "*/derived_v/*": 2,
}
"""Pattern of what is made of gradients and no slot -> their power in it: sums or means of those that wait for their
update, and the second moments that Keras makes of its factors."""


def rate_factors(extra: Mapping[str, Tree]) -> tuple[float, ...]:
    """Returns what each group multiplies the rate of Keras' schedule by; none where all have that rate."""
    home = extra.get("keras")
    factors = home.get(RATE_FACTORS) if isinstance(home, Mapping) else None
    numbers = factors if isinstance(factors, (list, tuple)) else ()
    return tuple(float(factor) for factor in numbers if isinstance(factor, (int, float)))


def run_of(extra: Mapping[str, Tree]) -> RunState:
    """Returns what a state's extra says of the run."""
    schedules: list[Schedule] = []
    parts: list[RunPart] = []
    around = _Around.of(extra)
    counts: list[Schedule] = []
    for path, node in _nodes({key: part for key, part in extra.items() if key != CALLED}, ("extra",)):
        name = "/".join(map(str, path))
        if (schedule := _schedule(node, name, around)) is not None:
            if not _lies_twice(schedule, schedules):
                schedules.append(schedule)
        elif why := _has_only_a_count(node, path):
            counts.append(Schedule(None, {}, None, name, (why,)))
        elif (kind := _what(name)) is not None:
            parts.append(RunPart(kind, name, _value(node, kind)))
    ties = extra.get(TIES)
    schedules = _own(schedules)
    foreign_bases = _bases_beside(extra) - {*around.bases}
    schedules = [schedule for schedule in schedules if not _has_base(schedule, foreign_bases)]
    schedules = _of_own_name(schedules, _places_of(extra.get(PARTS)))
    schedules = _with_call(_with_groups(schedules, around.bases) or counts[:1], around)
    return RunState(
        tuple(schedules),
        tuple(parts),
        dict(ties) if isinstance(ties, Mapping) else {},
        _counts_of(extra.get(SIDE_BY_SIDE)),
        _places_of(extra.get(PARTS)),
    )


def _own(schedules: Sequence[Schedule]) -> list[Schedule]:
    """Returns the schedules of the run itself.

    A LambdaLR without its bases isn't one that was saved: folders of Trainer need it to say where a run stands. Beside
    one of Megatron that a conversion wrote, the manifest keeps the run's.
    """
    saved = [schedule for schedule in schedules if schedule.bases or schedule.kind != "LambdaLR"]
    return [schedule for schedule in saved if schedule.kind != MEGATRON] or saved


def _of_own_name(schedules: list[Schedule], places: Sequence[str]) -> list[Schedule]:
    """Returns schedules without those of other networks, where one is called as the run's own model or optimizer.

    One without words is anybody's, but of `model` and `model_1` each has its own, as Accelerate numbers them.
    """
    words = {schedule.place: words_of(schedule.place.split("/")[2:]) for schedule in schedules}
    names = {words_of(place.split("/")) for place in places}
    if not names & {*words.values()}:
        return schedules
    numbers = {name for name in (*words.values(), *names) if "".join(name).isdigit()}
    rivals = {(), *numbers} if names <= {(), *numbers} else {*words.values()} - {()}
    return [
        schedule
        for schedule in schedules
        if words[schedule.place] in names or words[schedule.place] not in rivals
    ]


def _has_base(schedule: Schedule, bases: set[Any]) -> bool:
    return any(type(base) in (int, float) and base in bases for base in schedule.bases)


def _bases_beside(extra: Mapping[str, Tree]) -> set[Any]:
    """Returns the rates from which schedules set out whose optimizers lie beside the run's own, of another network.

    A schedule of PyTorch writes them into its optimizer's groups.
    Source: pytorch/pytorch torch/optim/lr_scheduler.py, `LRScheduler.__init__`.
    """
    neighbours = {key: part for key, part in extra.items() if key != "param_groups" and extra.get(PARTS)}
    groups = [node for _, node in _nodes(neighbours, ("extra",)) if isinstance(node, Mapping)]
    rates = [group["initial_lr"] for group in groups if "initial_lr" in group]
    return {rate for rate in rates if type(rate) in (int, float)}


def _places_of(parts: Tree) -> tuple[str, ...]:
    """Returns the places of a model and its optimizer; none where nothing says them."""
    rows = parts if isinstance(parts, (list, tuple)) else ()
    return tuple("/".join(map(str, place)) for place in rows if isinstance(place, (list, tuple)))


def _lies_twice(schedule: Schedule, others: Sequence[Schedule]) -> bool:
    """Tells whether a schedule is another's copy: Trainer saves beside DeepSpeed what DeepSpeed saves itself."""
    folder, _, name = schedule.place.rpartition("/")
    twin = {"scheduler": "lr_scheduler", "lr_scheduler": "scheduler"}.get(name)
    return twin is not None and any(
        replace(other, place=schedule.place) == schedule
        for other in others
        if other.place == f"{folder}/{twin}"
    )


def _has_only_a_count(node: Tree, path: tuple[Any, ...]) -> str:
    """Returns why nothing tells the rates of a schedule that lies there; empty if there is none."""
    if isinstance(node, Mapping) and node.get("count") == COUNTED and _is_of_rate(path):
        return _NO_FUNCTION
    if isinstance(node, Mapping) and node.keys() >= _MMENGINE:
        return _NOT_READ
    return _NO_CONFIG if node is True and "/".join(map(str, path)) == KERAS_SCHEDULE else ""


def _counts_of(optimizers: Tree) -> tuple[int, ...]:
    """Returns the number of groups of each optimizer of a run that has several; empty if unknown."""
    rows = optimizers if isinstance(optimizers, (list, tuple)) else ()
    counts = [
        row[1] for row in rows if isinstance(row, (list, tuple)) and len(row) == 2 and type(row[1]) is int
    ]
    return tuple(counts) if len(counts) == len(rows) else ()


def _with_groups(schedules: list[Schedule], bases: Sequence[float | None]) -> list[Schedule]:
    """Returns the schedules of a run with the groups that each moves, if they don't move all, or aren't told apart.

    A schedule of PyTorch writes into each group of its optimizer the rate from which it sets out, and keeps these
    itself: in their order they say which is whose.
    Source: pytorch/pytorch torch/optim/lr_scheduler.py, `LRScheduler.__init__`.
    """
    moved = [number for number, base in enumerate(bases) if base is not None]
    bases_by_schedule = [schedule.bases for schedule in schedules]
    alone = len(schedules) == 1 and len(moved) == len(bases)
    if (
        alone
        or not all(bases_by_schedule)
        or [base for rates in bases_by_schedule for base in rates] != [bases[i] for i in moved]
    ):
        return schedules
    ends = list(accumulate(map(len, bases_by_schedule)))
    return [
        replace(schedule, groups=tuple(moved[end - len(rates) : end]))
        for schedule, rates, end in zip(schedules, bases_by_schedule, ends, strict=True)
    ]


@dataclass(frozen=True)
class _Around:
    """What lies around a schedule's record and says more of it.

    Attributes:
        arguments: Those of the Trainer that made it.
        bases: The rate that each group began with, None where its options don't say it.
        call: The call that makes it.
        iterations: The updates of a run of Megatron-LM.
        program: The arguments of Megatron-LM, where its files have them.
        factors: What each group multiplies the rate of Keras' schedule by.
        ends: The rate of each group that SWALR leads it to, None where it has none.
    """

    arguments: Mapping[str, Any] | None = None
    bases: tuple[float | None, ...] = ()
    call: Mapping[str, Any] | None = None
    iterations: Any = None
    program: Mapping[str, Any] = field(default_factory=dict)
    factors: tuple[float, ...] = ()
    ends: tuple[Any, ...] = ()

    @staticmethod
    def of(extra: Mapping[str, Tree]) -> _Around:
        neighbours, groups, call = extra.get(BESIDE), extra.get("param_groups"), extra.get(CALLED)
        arguments = neighbours.get(TRAINER_ARGUMENTS) if isinstance(neighbours, Mapping) else None
        options = (
            [group if isinstance(group, Mapping) else {} for group in groups]
            if isinstance(groups, list)
            else []
        )
        bases = [option.get("base_lr", option.get("initial_lr")) for option in options]
        return _Around(
            arguments if isinstance(arguments, Mapping) else None,
            tuple(base if type(base) in (int, float) else None for base in bases),
            call if isinstance(call, Mapping) else None,
            *_of_megatron(extra.get(_COMMON)),
            rate_factors(extra),
            tuple(option.get("swa_lr") for option in options),
        )

    def of_groups(self, rates: Told) -> tuple[Told, ...]:
        """Returns a schedule's rates as each group has them."""
        if isinstance(rates, str):
            return (rates,)
        return tuple(rates.times(factor) for factor in self.factors) or (rates,)


def _of_megatron(common: Tree) -> tuple[Any, Mapping[str, Any]]:
    """Returns the iterations of a run of Megatron-LM, and the arguments of its program."""
    record = common if isinstance(common, Mapping) else {}
    arguments = record.get("args")
    state = arguments.state if isinstance(arguments, Record) else arguments
    return record.get("iteration"), state if isinstance(state, Mapping) else {}


def _is_of_rate(path: Path) -> bool:
    """Tells whether a count of Optax is that of the learning rate's schedule, and not of another hyperparameter's."""
    return _INJECTED not in path or path[-1] == "learning_rate"


def _with_call(schedules: list[Schedule], around: _Around) -> list[Schedule]:
    """Returns the schedules of a run with the call that makes them; a single schedule gets the call's rates."""
    if around.call is None:
        return schedules
    name, arguments = around.call.get("function"), around.call.get("arguments")
    place = f"extra/{CALLED}"
    if len(schedules) != 1:
        stated = arguments if isinstance(arguments, Mapping) else {}
        return [
            Schedule(str(name), stated, None, place, around.of_groups(called_rates(around.call))),
            *schedules,
        ]
    (schedule,) = schedules
    bases = schedule.bases or (around.bases if around.bases and None not in around.bases else (None,))
    stated = {**schedule.parameters, **(arguments if isinstance(arguments, Mapping) else {})}
    paces = [called_rates(around.call, base) for base in bases]
    if schedule.kind == MEGATRON and any(isinstance(rates, str) for rates in paces):
        return schedules  # its state says all; the call that it was made of multiplies a rate that stands elsewhere
    paced = schedule.following(around.of_groups(paces[0]) if len(paces) == 1 else paces)
    return [replace(paced, kind=schedule.kind or str(name), parameters=stated)]


def _nodes(tree: Tree, path: Path) -> Iterator[tuple[Path, Tree]]:
    """Yields the nodes of a tree from the top, none below one that speaks of the run; of a trainer's, the epoch."""
    for key, node in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        here = (*path, key)
        name = "/".join(map(str, here))
        yield here, node
        part = _what(name)
        if part == "trainer" and isinstance(node, Mapping) and "epoch" in node:
            yield (*here, "epoch"), node["epoch"]
        elif part is None and _schedule(node, name) is None and isinstance(node, (Mapping, list, tuple)):
            yield from _nodes(node, here)


def _value(node: Tree, part: Part) -> Tree:
    """Returns a record without what is no plain value; of a trainer's, only the plain values at its top."""
    if isinstance(node, Mapping):
        deep = () if part == "trainer" else (Mapping, list, tuple)
        plain = {
            key: item for key, item in node.items() if item is None or isinstance(item, (*_PLAIN, *deep))
        }
        return {key: _value(item, part) for key, item in plain.items()}
    return node if isinstance(node, (*_PLAIN, list, tuple)) else None


_ANY_PLACE = re.compile("|".join(translate(pattern) for pattern, _ in PLACES))
"""Matches what one of the places does: most names match none, and there may be as many as there are tensors."""


_LINK = re.compile(r"extra/optax/(.*/)?(\d+|opt_state|inner_state)/ema")
"""Matches where a link of Optax averages updates, and no parameters.

Source: google-deepmind/optax optax/transforms/_accumulation.py, `EmaState`.
"""


def _what(name: str) -> Part | None:
    if _ANY_PLACE.match(name) is None or _LINK.fullmatch(name) is not None:
        return None
    return next(part for pattern, part in PLACES if fnmatchcase(name, pattern))


def _schedule(node: Tree, name: str, around: _Around = _Around()) -> Schedule | None:
    if isinstance(node, Record) and node.name.startswith(_MXNET):
        record = node.state if isinstance(node.state, Mapping) else {}
        kind = node.name.rpartition(".")[2]
        # It is given the updates done, and counts none: its `count` is the boundary that it passed last.
        return Schedule(kind, dict(record), None, name, (mxnet_rates(kind, record),))
    if isinstance(node, Mapping) and node.keys() >= _OF_MEGATRON:
        given = {key: value for key, value in node.items() if key != "num_steps"}
        does = megatron_rates(node, around.iterations, around.program)
        return Schedule(MEGATRON, given, _count(node, "num_steps"), name, (does,))
    if not isinstance(node, Mapping) or not _is_scheduler(node, name):
        return None
    torch_class = torch_kind(node)
    given = {key: value for key, value in node.items() if key not in _PLACE_IN_TIME}
    last = node.get("_last_lr")
    rates_then = tuple(last) if isinstance(last, (list, tuple)) else ()
    schedule = Schedule(torch_class, given, _step(node), name, last=rates_then)
    rates = tuple(_torch_rates(schedule, node, around))
    return schedule.following(rates) if torch_class == "LambdaLR" else replace(schedule, rates=rates)


def _torch_rates(schedule: Schedule, state: Mapping[Any, Any], around: _Around) -> Iterator[Told]:
    """Yields what a schedule of PyTorch does to each group that its state has the base of."""
    has_all = len(schedule.bases) == len(schedule.last) == len(around.ends)
    for number, base in enumerate(schedule.bases):
        group = {"lr": schedule.last[number], "swa_lr": around.ends[number]} if has_all else {}
        yield torch_rates(schedule.kind, {**state, **group}, base, around.arguments)


def _count(node: Mapping[Any, Any], *keys: str) -> int | None:
    """Returns the first whole number that lies under one of some keys."""
    return next((node[key] for key in keys if type(node.get(key)) is int), None)


def _step(node: Mapping[Any, Any]) -> int | None:
    """Returns the step of a schedule of PyTorch; a chained one keeps none, but its parts step as one."""
    parts = node.get("_schedulers")
    rows = [node, *(parts if isinstance(parts, (list, tuple)) else ())]
    steps = (_count(row, "last_epoch", "batch") for row in rows if isinstance(row, Mapping))
    return next((step for step in steps if step is not None), None)


def _is_scheduler(node: Mapping[Any, Any], name: str) -> bool:
    """Tells whether a record is the state of a schedule, by its keys or by where it lies."""
    placed = any(fnmatchcase(name, pattern) for pattern in _SCHEDULERS)
    return bool(_TORCH & node.keys()) or (
        placed and any(type(item) in (int, float) for item in node.values())
    )


_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_GENERIC = frozenset({
    "state", "states", "dict", "model", "models", "net", "nets", "network", "networks", "module", "weights", "params",
    "opt", "opts", "optim", "optims", "optimizer", "optimizers", "optimiser",
    "lr", "sched", "scheds", "scheduler", "schedulers", "schedule", "schedules",
})  # fmt: skip
"""Words that don't say whose something is."""


def words_of(path: Iterable[object]) -> tuple[str, ...]:
    """Returns the words of a path that say whose it is.

    Example:
        >>> words_of(["optimizerG"]), words_of(["critic", "scheduler"])
        (('g',), ('critic',))
    """
    words = [word.lower() for key in path for word in _WORDS.findall(str(key))]
    return tuple(word for word in words if word not in _GENERIC)
