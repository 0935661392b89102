"""The learning rate of a run that goes on: as code that makes its schedule anew, or as a comment.

Input: the run's schedules and its state; output: lines that make the schedule where the run stands, wherever it is a
function of the updates done. Where it isn't, or it is unknown, a comment says so: a rate is never taken for constant
because nothing else is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statekit.lines.rate_classes import keras_lines, mxnet_lines
from statekit.lines.rate_code import JAX_NUMPY, MATH, optax_code, python_code
from statekit.state.evidence import SCALED
from statekit.state.options import stored_rate
from statekit.state.rates import Rates, Told, piece
from statekit.state.run import KERAS_SCHEDULE, Schedule
from statekit.state.schedules.function import says
from statekit.state.schedules.icefall import FUNCTIONS, SETTINGS
from statekit.state.schedules.pytorch import STATES, annealing, torch_kind

_TORCH = "extra/torch/"
"""Where the canonical names of what lay beside model and optimizer in a torch file begin."""
_ELSEWHERE = ("Eden", "Eden2")
"""Schedules that aren't torch's own."""


_ARGUMENTS = {
    "LinearLR": ("start_factor", "end_factor", "total_iters"),
    "ConstantLR": ("factor", "total_iters"),
    "StepLR": ("step_size", "gamma"),
    "ExponentialLR": ("gamma",),
    "PolynomialLR": ("total_iters", "power"),
    "CosineAnnealingLR": ("T_max", "eta_min"),
    "CosineAnnealingWarmRestarts": ("T_0", "T_mult", "eta_min"),
    "ReduceLROnPlateau": ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "eps"),
}
"""Class of PyTorch -> arguments that its state holds too.

Source: pytorch/pytorch torch/optim/lr_scheduler.py."""


def _of_scaled(schedule: Schedule, number: int, group: Mapping[str, Any]) -> Told:
    """Returns the rates of a group; a schedule of one rate for all knows nothing of what a map multiplied."""
    rates = schedule.of_group(number)
    if isinstance(rates, str) or len(schedule.rates) != 1 or schedule.bases:
        return rates
    facts = group.get("facts", ())
    return rates.times(next((float(fact["value"]) for fact in facts if fact["name"] == SCALED), 1.0))


@dataclass(frozen=True)
class RatesOf:
    """The learning rates of a run.

    Attributes:
        schedules: What is known of its schedules.
        state: The state without its tensors.
    """

    schedules: Sequence[Schedule]
    state: Mapping[str, Any]

    @property
    def done(self) -> int:
        """Where the schedule stands: its argument for the next update."""
        return int(self.state["counts"]["schedule"])

    def of(self, number: int) -> Told:
        """Returns the rate of a group as a function of the updates done, or why nobody knows one; "" if it has none."""
        candidates = [schedule for schedule in self.schedules if schedule.moves(number)]
        if len(candidates) != 1:
            return "the run has several schedules, and nothing tells what each moves" if candidates else ""
        (moving,) = candidates
        groups = len(self.state["groups"])
        if not moving.groups and 0 < len(moving.bases) < groups:
            return f"{moving.kind} moves {len(moving.bases)} of the {groups} groups, and nothing tells which"
        rates = _of_scaled(moving, number, self.state["groups"][number])
        # What a schedule of PyTorch has counted is its argument; MXNet's gets the number of updates.
        if isinstance(rates, Rates) and moving.place.startswith("extra/torch/") and moving.at != self.done:
            stands = f"{moving.kind} stands at {moving.at}"
            if not self._is_counted:
                return f"{stands}, and nothing counts the updates done"
            return f"{stands} after {self.done} updates: it counts something else, such as epochs"
        if (
            isinstance(rates, Rates)
            and moving.place == KERAS_SCHEDULE
            and self.state["counts"]["updates"] != self.done
        ):
            return "Keras counts the calls of its optimizer, of which several make an update"
        return rates

    def next(self, number: int) -> Any:
        """Returns the rate of a group's next update; None where it is unknown."""
        rates = self.of(number)
        if isinstance(rates, Rates) and self._is_counted:
            return rates.rate(self.done)
        return self._stored(number)

    @property
    def _is_counted(self) -> bool:
        return bool(self.state["counts"].get("says_updates", True))

    def _stored(self, number: int) -> Any:
        return stored_rate(self.state["groups"][number]["hyperparameters"])

    def _each(self) -> list[Rates]:
        """Returns the rates of all groups; none if one isn't known."""
        groups = [self._of_one(number) for number in range(len(self.state["groups"]))]
        known_rates = [rates for rates in groups if isinstance(rates, Rates)]
        return known_rates if len(known_rates) == len(groups) else []

    def _of_one(self, number: int) -> Told:
        """Returns the rate of a group, a constant one where the run's schedules move others alone."""
        rates, stored = self.of(number), self._stored(number)
        constant = rates == "" and type(stored) in (int, float)
        return Rates((piece("constant", rate=stored),)) if constant else rates

    def _same(self) -> Rates | None:
        """Returns the rates that all groups have; None if they differ, one isn't known, or the run has no schedule."""
        calls = self._each() if self.schedules else []
        return calls[0] if len({json.dumps(rates.to_json()) for rates in calls}) == 1 else None

    def in_optax(self, number: int) -> dict[str, Any]:
        """Returns the code for a group's schedule in Optax, `schedule`, or why there is none, `unscheduled`."""
        rates = self.of(number)
        if isinstance(rates, Rates):
            return {"schedule": optax_code(rates), "unscheduled": None}
        return {"schedule": None, "unscheduled": self._why(rates, number)}

    def _why(self, reason: str, number: int) -> str:
        rate = self._stored(number)
        next_rate = f"the next update's is {rate!r}" if type(rate) in (int, float) and reason else ""
        return "; ".join(reason_given for reason_given in (reason, next_rate) if reason_given)

    def comment(self) -> list[str]:
        """Returns a line that says why the lines beside it don't make the run's schedule; none if it has none."""
        groups = range(len(self.state["groups"]))
        why = next((f"{rates}" for rates in map(self.of, groups) if isinstance(rates, str) and rates), "")
        why = why or ("groups have several" if self.schedules and self._same() is None and groups else "")
        return [f"# the run's learning rate follows a schedule that is not made here: {why}"] if why else []

    @property
    def torch_place(self) -> str:
        """Where the record of PyTorch's schedule lies in the file, keys joined by `/`."""
        schedule = self._of_torch()
        return "" if schedule is None else schedule.place.removeprefix(_TORCH)

    def torch_call(self) -> str | None:
        """Returns the call that makes the schedule of a state of PyTorch for an `optimizer`; None if it has none."""
        schedule = self._of_torch()
        if schedule is None:
            return None
        call = _call(schedule)
        if "lr_lambda)" in call and (code := self.lambdas()):
            return call.replace("lr_lambda)", f"{code})")
        return call

    def function_comment(self) -> list[str]:
        """Returns a line about the function of a LambdaLR, where its name stands for it: no file has it."""
        named = "lr_lambda" in (self.torch_call() or "")
        return (
            ["# lr_lambda: the run's own factor of the rate as a function of the updates done"]
            if named
            else []
        )

    @property
    def may_be_trainers(self) -> bool:
        """Whether the schedule's class may be the one of which Transformers' Trainer makes all of its own."""
        schedule = self._of_torch()
        return schedule is not None and schedule.kind in (None, "LambdaLR")

    def _of_torch(self) -> Schedule | None:
        """Returns the schedule of torch that moves all of a run's groups; None if there isn't one."""
        kept = [schedule for schedule in self.schedules if _is_torchs(schedule)]
        groups = len(self.state["groups"])
        alone = len(kept) == 1 and not kept[0].groups and len(kept[0].bases or range(groups)) >= groups
        return kept[0] if alone else None

    def python_function(self) -> str | None:
        """Returns the rate of all groups as a function of the updates done; None if it is unknown."""
        rates = self._same()
        return None if rates is None else python_code(rates)

    def torch_lines(self) -> list[str]:
        """Returns the lines that make the schedule of an `optimizer` of PyTorch; none if it is unknown."""
        calls = self._each() if self.schedules else []
        if not calls:
            return []
        codes = [python_code(rates) for rates in calls]
        code = codes[0] if len({*codes}) == 1 else f"[{', '.join(codes)}]"
        return [
            *(["import math"] if MATH in code else []),
            "import torch",
            "for group in optimizer.param_groups:",
            '    group["initial_lr"] = 1.0  # the function gives the rate itself',
            f"scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, {code}, last_epoch={self.done - 1})",
        ]

    def torch_lines_of_each(self, sides: Iterable[Sequence[int]]) -> list[str]:
        """Returns the lines that make the schedules of several `optimizers` of PyTorch; none if it is unknown.

        Args:
            sides: Numbers of each optimizer's groups.
        """
        calls = self._each() if self.schedules else []
        if not calls:
            return []
        codes = []
        for side in sides:
            of_side = [python_code(calls[number]) for number in side]
            codes.append(of_side[0] if len({*of_side}) == 1 else f"[{', '.join(of_side)}]")
        return [
            *(["import math"] if any(MATH in code for code in codes) else []),
            "functions = [",
            *(f"    {code}," for code in codes),
            "]",
            "schedulers = []",
            "for optimizer, function in zip(optimizers, functions):",
            "    for group in optimizer.param_groups:",
            '        group["initial_lr"] = 1.0  # the function gives the rate itself',
            f"    made = torch.optim.lr_scheduler.LambdaLR(optimizer, function, last_epoch={self.done - 1})",
            "    schedulers.append(made)",
        ]

    def torch_calls(self, sides: Sequence[Sequence[int]]) -> dict[str, str]:
        """Returns the calls that make the schedules of several `optimizers` of PyTorch, by where their records lie.

        Args:
            sides: Numbers of each optimizer's groups.

        Returns:
            Calls in the order of the schedules; none where one isn't torch's own, or nothing tells whose it is.
        """
        whose = {tuple(side): number for number, side in enumerate(sides)}
        if any(not _is_torchs(schedule) or schedule.groups not in whose for schedule in self.schedules):
            return {}
        return {
            schedule.place.removeprefix(_TORCH): _call(schedule, f"optimizers[{whose[schedule.groups]}]")
            for schedule in self.schedules
        }

    def icefall_call(self) -> str | None:
        """Returns the call of icefall's own schedule, `...` for what nobody said; None if the run has another."""
        if len(self.schedules) != 1 or self.schedules[0].kind not in FUNCTIONS:
            return None
        (schedule,) = self.schedules
        names = [name for name in FUNCTIONS[str(schedule.kind)].parameters if name in SETTINGS]
        arguments = ", ".join(f"{name}={schedule.parameters.get(name, ...)!r}" for name in names)
        return f"{schedule.kind}(optimizer, {arguments})".replace("Ellipsis", "...")

    def jax_lines(self) -> list[str]:
        """Returns the lines that make the schedule of Optax, `schedule`; none if it is unknown for all groups."""
        rates = self._same()
        if rates is None:
            return []
        code = optax_code(rates)
        imports = [*(["import jax"] if JAX_NUMPY in code else []), "import optax"]
        return [*imports, f"schedule = {code}"]

    def keras_lines(self) -> list[str]:
        """Returns the lines that make Keras' `schedule`; none if it is unknown for all groups."""
        rates = self._same()
        return [] if rates is None else keras_lines(rates)

    def mxnet_lines(self) -> list[str]:
        """Returns the lines that make MXNet's `schedule`; none if it is unknown, or the file has it."""
        rates = None if self.in_mxnet else self._same()
        return [] if rates is None else mxnet_lines(rates)

    @property
    def in_mxnet(self) -> bool:
        """Whether an optimizer of MXNet has the schedule among its attributes."""
        return any(schedule.place.startswith("extra/mxnet/") for schedule in self.schedules)

    @property
    def in_keras(self) -> bool:
        """Whether an optimizer of Keras has the schedule in the place of a variable for the rate."""
        stored = [self._stored(number) for number in range(len(self.state["groups"]))]
        rated = any(rate is not None for rate in stored)
        return not rated and any(schedule.place == KERAS_SCHEDULE for schedule in self.schedules)

    def lambdas(self) -> str | None:
        """Returns the functions of a LambdaLR that multiply the rates which its state has, where they are known."""
        (schedule,) = self.schedules
        bases = schedule.parameters.get("base_lrs") or ()
        of_groups = [schedule.of_group(number) for number in range(len(bases))]
        codes = [
            python_code(rates, base)
            for rates, base in zip(of_groups, bases, strict=True)
            if isinstance(rates, Rates) and base
        ]
        if not bases or len(codes) < len(bases):
            return None
        return codes[0] if len({*codes}) == 1 else f"[{', '.join(codes)}]"


def _call(schedule: Schedule, optimizer: str = "optimizer") -> str:
    """Returns the call that makes a schedule of PyTorch, for an `optimizer`.

    `...` stands for the arguments of classes that aren't among those whose state holds them; a LambdaLR's function is
    in no state, and called `lr_lambda`.
    """
    return _made(schedule.kind, schedule.parameters, optimizer)


def _made(kind: str | None, state: Mapping[str, Any], optimizer: str) -> str:
    parts: Any = state.get("_schedulers")
    if kind is None:
        return "..."
    if kind == "LambdaLR":
        arguments = "lr_lambda"
    elif kind in ("SequentialLR", "ChainedScheduler") and _are_records(parts):
        parts_code = ", ".join(_made(torch_kind(part), part, optimizer) for part in parts)
        if kind == "ChainedScheduler":
            return f"torch.optim.lr_scheduler.{kind}([{parts_code}])"
        arguments = f"[{parts_code}], milestones={state.get('_milestones')!r}"
    elif kind == "MultiStepLR" and says(state, STATES[kind]):
        each_at = [at for at, times in state["milestones"].items() for _ in range(times)]
        arguments = f"milestones={each_at!r}, gamma={state['gamma']!r}"
    else:
        arguments = _stated_arguments(kind, state)
    module = "swa_utils" if kind == "SWALR" else "lr_scheduler"
    return f"torch.optim.{module}.{kind}({optimizer}, {arguments})"


def _stated_arguments(kind: str, state: Mapping[str, Any]) -> str:
    """Returns the arguments of a class of PyTorch that its state holds by name; `...` where it doesn't hold enough."""
    strategy = f"anneal_strategy={annealing(state)!r}"
    # Where these lead a rate comes with the optimizer's groups, or with the state.
    match kind:
        case "OneCycleLR" if {"total_steps"} <= state.keys():
            return f"max_lr=1.0, total_steps={state['total_steps']!r}, {strategy}{_momenta(state)}"
        case "SWALR":
            return f"swa_lr=1.0, anneal_epochs={state['anneal_epochs']!r}, {strategy}"
        case "CyclicLR" if {"max_lrs", "mode"} <= state.keys() and state.get("_scale_fn_custom") is None:
            return f"base_lr=1.0, max_lr=1.0, mode={state['mode']!r}{_momenta(state)}"
    names = _ARGUMENTS.get(kind)
    if names is None or not {*names} <= state.keys():
        return "..."
    return ", ".join(f"{name}={state[name]!r}" for name in names)


def _momenta(state: Mapping[str, Any]) -> str:
    return "" if state.get("cycle_momentum", True) else ", cycle_momentum=False"


def _are_records(parts: Any) -> bool:
    return isinstance(parts, (list, tuple)) and all(isinstance(part, Mapping) for part in parts)


def _is_torchs(schedule: Schedule) -> bool:
    return schedule.place.startswith(_TORCH) and schedule.kind not in _ELSEWHERE
