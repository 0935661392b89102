"""The schedules of PyTorch and Transformers: by their states, and by a Trainer's arguments.

Source: pytorch/pytorch torch/optim/lr_scheduler.py; huggingface/transformers src/transformers/optimization.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeAlias, TypedDict

from statekit.state.rates import Piece, Rates, Told, joined, piece
from statekit.state.schedules.function import Function, fault, says
from statekit.tensors.tree import Record
from statekit.tensors.typed import Finite, Limit, Name, Natural, Positive, fits, misfits

_ANNEALING = {
    "_cosine_anneal": "cos", "_linear_anneal": "linear", "_annealing_cos": "cos", "_annealing_linear": "linear",
}  # fmt: skip
"""Function of SWALR or OneCycleLR, which older releases keep in their state -> how it anneals."""
TORCH_SCHEDULES: tuple[tuple[str, frozenset[str]], ...] = tuple(
    (kind, frozenset(keys.split()))
    for kind, keys in (
        ("Eden", "lr_batches lr_epochs"),
        ("OneCycleLR", "total_steps _anneal_func_type"),
        ("OneCycleLR", "total_steps anneal_func"),
        ("SWALR", "anneal_epochs _anneal_strategy"),
        ("SWALR", "anneal_epochs anneal_func"),
        ("CyclicLR", "total_size step_ratio"),
        ("CosineAnnealingWarmRestarts", "T_0 T_mult"),
        ("CosineAnnealingLR", "T_max eta_min"),
        ("ReduceLROnPlateau", "factor patience num_bad_epochs"),
        ("SequentialLR", "_schedulers _milestones"),
        ("ChainedScheduler", "_schedulers"),
        ("LambdaLR", "lr_lambdas"),
        ("LinearLR", "start_factor end_factor total_iters"),
        ("PolynomialLR", "power total_iters"),
        ("ConstantLR", "factor total_iters"),
        ("StepLR", "step_size gamma"),
        ("MultiStepLR", "milestones gamma"),
        ("ExponentialLR", "gamma"),
    )
)
"""Class -> keys that its state has; the first that fits is meant. LambdaLR is also what transformers' get_scheduler
makes, of functions that no state holds. Older releases keep a function for the name of an annealing.

Source: pytorch/pytorch torch/optim/lr_scheduler.py; k2-fsa/icefall egs/librispeech/ASR/zipformer/optim.py, `Eden`.
"""


def torch_kind(state: Mapping[str, Any]) -> str | None:
    """Returns the class of a schedule of PyTorch by its state; None if that doesn't tell."""
    return next((kind for kind, keys in TORCH_SCHEDULES if keys <= state.keys()), None)


def torch_rates(
    kind: str | None, state: Mapping[str, Any], base: float, arguments: Mapping[str, Any] | None
) -> Told:
    """Returns what a schedule of PyTorch or Transformers does to a group.

    Args:
        kind: Its class.
        state: Its `state_dict()`; of SWALR with the group's `lr` and `swa_lr`.
        base: The group's entry of its `base_lrs`.
        arguments: Those of the Trainer that made it, where they are known: a LambdaLR's state hasn't its function.

    Source: pytorch/pytorch torch/optim/lr_scheduler.py; huggingface/transformers src/transformers/optimization.py.
    """
    if not fits(base, Finite):
        return f"the base of {kind or 'the schedule'} isn't a number"
    if kind == "LambdaLR":
        return _transformers(base, arguments) if arguments else "a LambdaLR's function is in no file"
    if kind == "SequentialLR":
        return _sequence(state, base)
    if kind == "SWALR":
        return _swa(state)
    make = _TORCH.get(kind or "")
    if make is None:
        return f"{kind or 'a schedule of an unknown class'} isn't a function of the updates done that others have"
    if not says(state, STATES[str(kind)]):
        return f"the state of {kind} doesn't say all of its arguments"
    return Rates(tuple(make(state, base)))


_TORCH: Mapping[str, Callable[[Mapping[str, Any], float], list[Piece]]] = {
    "ConstantLR": lambda s, b: [
        piece("constant", rate=b * s["factor"]),
        *([piece("constant", s["total_iters"], rate=b)] if s["total_iters"] else []),
    ],
    "LinearLR": lambda s, b: [
        piece("linear", start=b * s["start_factor"], end=b * s["end_factor"], steps=s["total_iters"])
        if s["total_iters"]
        else piece("constant", rate=b * s["start_factor"])
    ],
    "PolynomialLR": lambda s, b: [
        piece("polynomial", start=b, end=0.0, steps=s["total_iters"], power=s["power"])
        if s["total_iters"]
        else piece("constant", rate=b)
    ],
    "CosineAnnealingLR": lambda s, b: [piece("cosine", start=b, end=s["eta_min"], steps=s["T_max"])],
    "ExponentialLR": lambda s, b: [piece("exponential", start=b, factor=s["gamma"], every=1)],
    "StepLR": lambda s, b: [piece("step", start=b, factor=s["gamma"], every=s["step_size"])],
    "MultiStepLR": lambda s, b: [
        piece(
            "multistep",
            start=b,
            factor=s["gamma"],
            at=sorted(at for at, count in s["milestones"].items() for _ in range(count)),
        )
    ],
}
"""What a class does to a rate. One that lasts for no updates stays as its constructor leaves the rate."""
_Part: TypeAlias = Annotated[float, Limit("a number above 0", lambda n: 0 < n < math.inf)]
_Count: TypeAlias = Annotated[int, Limit("a small number", lambda n: 0 <= n < 1000)]
STATES: Mapping[str, Mapping[str, Any]] = {
    "ConstantLR": {"factor": Finite, "total_iters": Natural},
    "LinearLR": {"start_factor": Finite, "end_factor": Finite, "total_iters": Natural},
    "PolynomialLR": {"power": Finite, "total_iters": Natural},
    "CosineAnnealingLR": {"eta_min": Finite, "T_max": Positive},
    "ExponentialLR": {"gamma": Finite},
    "StepLR": {"gamma": Finite, "step_size": Positive},
    "MultiStepLR": {"gamma": Finite, "milestones": dict[Natural, _Count]},
}
"""What a schedule's state says of its arguments."""
_ROW = {"_schedulers": Sequence[dict[str, Any]], "_milestones": Sequence[Natural]}
"""What a SequentialLR's state says."""


class Arguments(TypedDict, total=False):
    """Those of a Trainer's arguments that make its schedule."""

    lr_scheduler_type: Name | None
    lr_scheduler_kwargs: dict[Name, Finite | Name | None] | None
    max_steps: int | None
    warmup_steps: Finite | None
    warmup_ratio: Finite | None
    learning_rate: Finite | None


class Special(TypedDict, total=False):
    """Arguments that schedules of Transformers take besides these."""

    num_cycles: _Part
    lr_end: Finite
    power: Finite
    timescale: Finite
    min_lr: Finite
    min_lr_rate: Finite
    warmup_lr_rate: Finite
    num_decay_steps: Natural
    num_stable_steps: Natural
    min_lr_ratio: Finite
    warmup_type: Name
    decay_type: Name


def _sequence(state: Mapping[str, Any], base: float) -> Told:
    if not says(state, _ROW) or len(state["_schedulers"]) != len(state["_milestones"]) + 1:
        return "the state of SequentialLR doesn't say its schedules"
    parts: list[Rates] = []
    for part in state["_schedulers"]:
        rates = torch_rates(torch_kind(part), part, base, None)
        if isinstance(rates, str):
            return rates
        parts.append(rates)
    return joined(parts, state["_milestones"])


_SWA = {"swa_lr": Finite, "lr": Finite, "last_epoch": Natural, "anneal_epochs": Natural}
"""What says where SWALR anneals to, and how far it is."""


def annealing(state: Mapping[str, Any]) -> str | None:
    """Returns how SWALR or OneCycleLR anneals, "cos" or "linear"; None if its state doesn't say it."""
    named, function = state.get("_anneal_strategy", state.get("_anneal_func_type")), state.get("anneal_func")
    if isinstance(function, Record):
        named = _ANNEALING.get(function.name.rpartition(".")[2])
    return named if named in ("cos", "linear") else None


def _swa(state: Mapping[str, Any]) -> Told:
    """Returns the rates of SWALR, which anneals a group's rate from its value at the start to `swa_lr`.

    Source: pytorch/pytorch torch/optim/swa_utils.py, `SWALR.get_lr`.
    """
    strategy = annealing(state)
    if strategy is None or not says(state, _SWA):
        return "nothing tells to what rate SWALR anneals, or how: its optimizer's groups have `swa_lr`"
    whole, end, rate = state["anneal_epochs"], state["swa_lr"], state["lr"]
    done = min(1.0, state["last_epoch"] / whole) if whole else 1.0
    share = (1 - math.cos(math.pi * done)) / 2 if strategy == "cos" else done
    if share == 1:
        return Rates((piece("constant", rate=end),))
    start = (rate - share * end) / (1 - share)
    falling = piece("cosine" if strategy == "cos" else "linear", start=start, end=end, steps=whole)
    return Rates((falling, piece("constant", whole, rate=end)))


def _transformers(base: float, arguments: Mapping[str, Any]) -> Told:
    """Returns what `get_scheduler` makes of a Trainer's arguments."""
    if wrong := next(misfits(arguments, Arguments), None):
        return f"of the Trainer's arguments, {wrong[1]} {wrong[0]}"
    kind, whole = arguments.get("lr_scheduler_type"), arguments.get("max_steps")
    given = arguments.get("lr_scheduler_kwargs") or {}
    special = {name: value for name, value in given.items() if value is not None}
    if wrong := next(misfits(special, Special), None):
        return f"of the Trainer's arguments, lr_scheduler_kwargs/{wrong[1]} {wrong[0]}"
    count = whole if type(whole) is int else 0
    warm = _warmup(arguments, count)
    if warm is None or (count <= 0 and kind in _OF_WHOLE):
        return f"{kind}: the number of the run's updates is unknown"
    if kind == "constant":  # it has no warmup, whatever the arguments say
        return Rates((piece("constant", rate=base),))
    arguments = {**arguments, "lr_scheduler_kwargs": special}
    steps = max(1, count - warm)
    pieces = _own_warmup(base, arguments, warm, steps) or _after_linear(base, arguments, warm, steps)
    return Rates(pieces) if pieces else f"Transformers' schedule {kind} isn't one that others have"


def _after_linear(
    base: float, arguments: Mapping[str, Any], warm: int, steps: int
) -> tuple[Piece, ...] | None:
    """Returns a Trainer's schedule that begins with a linear warmup; None if others have no such schedule."""
    restarts = _restarts(base, arguments, warm, steps)
    behind = restarts or filter(None, (_behind_warmup(base, arguments, warm, steps),))
    warmup = [piece("linear", start=0.0, end=base, steps=warm)] if warm else []
    return (*warmup, *pieces) if (pieces := tuple(behind)) else None


def _restarts(base: float, arguments: Mapping[str, Any], warm: int, steps: int) -> tuple[Piece, ...] | None:
    """Returns a cosine that begins anew in whole numbers of updates; None where it is another, or doesn't."""
    special = arguments["lr_scheduler_kwargs"]
    cycles = special.get("num_cycles", 1)
    is_whole = arguments.get("lr_scheduler_type") == "cosine_with_restarts" and special.keys() <= {
        "num_cycles"
    }
    if not is_whole or cycles not in range(1, steps + 1) or steps % cycles:
        return None
    length = steps // int(cycles)
    # Transformers multiplies a rounded quotient: where that misses a whole number, its cosine ends an update late.
    if any((float(cycles) * (at / steps)) % 1.0 for at in range(0, steps, length)):
        return None
    turns = piece("restarts", warm, warm, start=base, end=0.0, steps=length)
    return turns, piece("constant", warm + steps, rate=0.0)


def _own_warmup(base: float, arguments: Mapping[str, Any], warm: int, steps: int) -> tuple[Piece, ...] | None:
    """Returns the pieces of a Trainer's schedule with its own form of warmup; None if it has the usual one."""
    special = arguments["lr_scheduler_kwargs"]
    match arguments.get("lr_scheduler_type"):
        case "warmup_stable_decay":
            return _stable(base, special, warm, steps)
        case "cosine_warmup_with_min_lr" if special.keys() <= {*_LEAST, "num_cycles", "warmup_lr_rate"}:
            least = _least(base, arguments)
            if least is None:
                return None
            first = base * special.get("warmup_lr_rate", 1 / max(warm, 1))
            if warm > 1:
                warmup = piece("linear", start=first, end=base, steps=warm - 1)
            else:
                warmup = piece("constant", rate=first)
            half = steps / (2 * special.get("num_cycles", 0.5))
            cosine = piece("cosine", warm, warm - 1, start=base, end=least, steps=half)
            return (warmup, cosine) if warm else (cosine,)
    return None


_OF_WHOLE = (
    "linear", "cosine", "polynomial", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)  # fmt: skip
"""The schedules of Transformers that know how long the run is."""
_LEAST = ("min_lr", "min_lr_rate")
"""Arguments that say where a cosine ends: a rate, or a share of the first one."""
_STABLE = frozenset(
    ["num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"]
)


def _least(base: float, arguments: Mapping[str, Any]) -> float | None:
    """Returns the rate at which a Trainer's cosine ends; None if the arguments don't have it.

    It is said for the rate that the optimizer was made with, and scaled with a group's own.
    """
    special, first = arguments["lr_scheduler_kwargs"], arguments.get("learning_rate", base)
    if "min_lr_rate" in special or not first or "min_lr" not in special:
        return base * special["min_lr_rate"] if "min_lr_rate" in special else None
    return float(base * (special["min_lr"] / first))


def _stable(base: float, special: Mapping[str, Any], warm: int, steps: int) -> tuple[Piece, ...] | None:
    """Returns the schedule of Transformers that warms up, stays, and decays; None if others have no such schedule."""
    decay, least = special.get("num_decay_steps"), base * special.get("min_lr_ratio", 0.0)
    if decay is None or not special.keys() <= _STABLE:
        return None
    shapes = {"linear": 1.0, "cosine": 1 / (2 * special.get("num_cycles", 0.5))}
    falls = special.get("decay_type", "cosine")
    rises = special.get("warmup_type", "linear")
    if falls not in shapes or rises not in shapes:
        return None
    at = warm + special.get("num_stable_steps", steps - decay)
    pieces = [piece(rises, start=least, end=base, steps=warm)] if warm else []
    pieces += [piece("constant", warm, rate=base)] if at > warm else []
    pieces += (
        [piece(falls, max(at, warm), at, start=base, end=least, steps=decay * shapes[falls])] if decay else []
    )
    return (*pieces, piece("constant", max(at, warm) + decay if at >= warm else at + decay, rate=least))


def _warmup(arguments: Mapping[str, Any], count: int) -> int | None:
    """Returns the updates of a Trainer's warmup; None where it is a share of a number that is not given."""
    warm = arguments.get("warmup_steps") or arguments.get("warmup_ratio") or 0
    is_share = 0 < warm < 1 or not arguments.get("warmup_steps")
    if is_share and warm and count <= 0:
        return None
    return math.ceil(count * warm) if is_share else int(warm)


def _behind_warmup(base: float, arguments: Mapping[str, Any], warm: int, steps: int) -> Piece | None:
    """Returns what a Trainer's schedule does behind its warmup; None if others have no such schedule."""
    extra = arguments.get("lr_scheduler_kwargs") or {}
    match arguments.get("lr_scheduler_type"):
        case "constant_with_warmup":
            return piece("constant", warm, rate=base)
        case "linear":
            return piece("linear", warm, warm, start=base, end=0.0, steps=steps)
        case "cosine" | "cosine_with_min_lr" as kind if extra.keys() <= {"num_cycles", *_LEAST}:
            half = steps / (2 * extra.get("num_cycles", 0.5))
            end = 0.0 if kind == "cosine" else _least(base, arguments)
            return None if end is None else piece("cosine", warm, warm, start=base, end=end, steps=half)
        case "polynomial" if extra.keys() <= {"lr_end", "power"} and arguments.get("learning_rate", base):
            # Its end is said for the rate that the optimizer was made with, and scaled with a group's own.
            end = extra.get("lr_end", 1e-7) * base / arguments.get("learning_rate", base)
            power = extra.get("power", 1.0)
            return piece("polynomial", warm, warm, start=base, end=end, steps=steps, power=power)
        case "inverse_sqrt" if extra.keys() <= {"timescale"} and extra.get("timescale", 1) > 0:
            return piece("rsqrt", warm, warm, start=base, shift=extra.get("timescale") or warm or 10_000)
    return None


_WARM, _WHOLE, _SPECIAL = "num_warmup_steps", "num_training_steps", "scheduler_specific_kwargs"
_ARGUMENTS = {_WARM: "warmup_steps", _WHOLE: "max_steps"}
"""Parameters of Transformers' functions -> arguments of its Trainer."""


_NEEDS = {
    "constant": (),
    "constant_with_warmup": (_WARM,),
    "inverse_sqrt": (_WARM,),
    **dict.fromkeys(_OF_WHOLE, (_WARM, _WHOLE)),
}
"""Schedule -> the numbers of updates that it takes."""


def _called(kind: Any, state: Mapping[str, Any], base: float | None) -> Told:
    """Returns what a function of Transformers makes, for a group that begins with a rate."""
    if kind not in [*_NEEDS]:
        return f"Transformers' schedule {kind!r:.80} isn't one that others have"
    if why := fault({**state, "rate": base}, ["rate", *_NEEDS[kind]], _NEEDS[kind]):
        return why.replace("missing rate", "missing the rate that it multiplies")
    special = state.get(_SPECIAL) or {}
    others = {name: state[name] for name in state if name not in (*_ARGUMENTS, _SPECIAL)}
    others |= special if isinstance(special, Mapping) else {_SPECIAL: special}
    others = {name: value for name, value in others.items() if value is not None}
    if why := fault(others, others):
        return why
    arguments = {_ARGUMENTS[name]: state[name] for name in _NEEDS[kind]}
    arguments |= {"lr_scheduler_type": kind, "lr_scheduler_kwargs": others}
    return _transformers(0.0 if base is None else base, arguments)


_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "get_constant_schedule": ("constant", ()),
    "get_constant_schedule_with_warmup": ("constant_with_warmup", (_WARM,)),
    "get_linear_schedule_with_warmup": ("linear", (_WARM, _WHOLE)),
    "get_cosine_schedule_with_warmup": ("cosine", (_WARM, _WHOLE, "num_cycles")),
    "get_polynomial_decay_schedule_with_warmup": ("polynomial", (_WARM, _WHOLE, "lr_end", "power")),
    "get_inverse_sqrt_schedule": ("inverse_sqrt", (_WARM, "timescale")),
}
"""Function -> the kind of schedule that it makes, and its parameters between the optimizer and the last epoch."""
FUNCTIONS: dict[str, Function] = {
    **{
        name: Function(
            ("optimizer", *parameters, "last_epoch"),
            partial(_called, kind),
            beside=("optimizer", "last_epoch"),
        )
        for name, (kind, parameters) in _KINDS.items()
    },
    "get_scheduler": Function(
        ("name", "optimizer", _WARM, _WHOLE, _SPECIAL),
        lambda said, base: _called(said.get("name"), {k: v for k, v in said.items() if k != "name"}, base),
        beside=("optimizer",),
    ),
}
"""Source: huggingface/transformers src/transformers/optimization.py."""
