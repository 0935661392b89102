"""Where a PyTorch checkpoint has its parts, and how its schedule is made again: as both stand in lines of Python."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from statekit.state.run import Schedule

_TORCH = "extra/torch/"
"""Where the canonical names of what lay beside model and optimizer in a torch file begin."""
_STATE = ("/state/", "/state.")
"""What stands between an optimizer's place and a parameter's, in its forms by index or name, and flat."""
_ELSEWHERE = ("Eden", "Eden2")
"""Schedules that aren't torch's own."""


def model_keys(tensors: Iterable[str], paths: Sequence[str]) -> str | None:
    """Returns the keys of a file's model, as `["model"]`; None where no tensor's name tells.

    Args:
        tensors: Names of the file's tensors.
        paths: Some of its parameters.
    """
    ends = tuple("/" + path.replace("/", ".") for path in paths)
    places = (name.removesuffix(end) for name in tensors for end in ends if name.endswith(end))
    return next((_keys(place) for place in places if "/state" not in place), None)


def optimizer_keys(tensors: Iterable[str]) -> str | None:
    """Returns the keys of a file's optimizer, as `["optimizer"]`; None where no tensor's name tells.

    Args:
        tensors: Names of the file's tensors.
    """
    places = (name.partition(mark)[0] for name in tensors for mark in _STATE if mark in name)
    return next((_keys(place) for place in places), None)


def schedule_keys(schedules: Iterable[Schedule]) -> str | None:
    """Returns the keys of the record of a run's schedule, as `["scheduler"]`; None where torch has none."""
    schedule = _of_torch(schedules)
    return None if schedule is None else _keys(schedule.place.removeprefix(_TORCH))


def schedule_call(schedules: Iterable[Schedule], arguments: Mapping[str, Sequence[str]]) -> str | None:
    """Returns the call that makes a run's schedule, for an `optimizer`; None where torch has none.

    Args:
        schedules: What is known of the run's schedules.
        arguments: Class -> arguments that its state holds too. `...` stands for those of other classes; a LambdaLR's
            function is in no state, and called `lr_lambda`.
    """
    schedule = _of_torch(schedules)
    if schedule is None:
        return None
    if schedule.kind is None:
        return "..."
    if schedule.kind == "LambdaLR":
        said = "lr_lambda"
    elif schedule.kind in arguments and set(arguments[schedule.kind]) <= schedule.parameters.keys():
        said = ", ".join(f"{name}={schedule.parameters[name]!r}" for name in arguments[schedule.kind])
    else:
        said = "..."
    return f"torch.optim.lr_scheduler.{schedule.kind}(optimizer, {said})"


def makes_its_own(schedules: Iterable[Schedule]) -> bool:
    """Tells whether a run's schedule may be one that Transformers' Trainer makes of its arguments."""
    schedule = _of_torch(schedules)
    return schedule is None or schedule.kind in (None, "LambdaLR")


def _of_torch(schedules: Iterable[Schedule]) -> Schedule | None:
    kept = [one for one in schedules if one.place.startswith(_TORCH) and one.kind not in _ELSEWHERE]
    return kept[0] if len(kept) == 1 else None


def _keys(place: str) -> str:
    return "".join(f"[{key if key.isdecimal() else json.dumps(key)}]" for key in place.split("/"))
