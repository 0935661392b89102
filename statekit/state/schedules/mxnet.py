"""The schedules of MXNet, by the objects that its optimizers are pickled with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from statekit.state.rates import Piece, Rates, Told, piece
from statekit.state.schedules.function import says
from statekit.tensors.typed import Finite, Name, Natural, Positive, fits


def mxnet_rates(kind: str, state: Mapping[str, Any]) -> Told:
    """Returns what a schedule of MXNet does: it is asked for update n with n updates done before and this one.

    Source: apache/mxnet python/mxnet/lr_scheduler.py.
    """
    warm = state.get("warmup_steps", 0)
    knows = kind in _MXNET and says(state, _STATES[kind]) and fits(warm, Natural)
    if not knows or (warm > 1 and not says(state, _WARMUP)):
        return f"MXNet's {kind} isn't one that others have, or its state doesn't say all of it"
    return Rates((*_mxnet_warmup(state, warm), *_MXNET[kind](state, max(warm - 1, 0), warm - 1)))


def _mxnet_warmup(state: Mapping[str, Any], warm: int) -> list[Piece]:
    if warm < 2:  # the first update is number 1
        return []
    start, end = state["warmup_begin_lr"], state["warmup_final_lr"]
    if state["warmup_mode"] == "constant":
        return [piece("constant", rate=start)]
    return [piece("linear", 0, -1, start=start, end=end, steps=warm)]


_MXNET: Mapping[str, Callable[[Mapping[str, Any], int, int], list[Piece]]] = {
    "FactorScheduler": lambda s, begins, origin: [
        piece(
            "step",
            begins,
            s["count"],
            start=s["base_lr"],
            factor=s["factor"],
            every=s["step"],
            floor=s["stop_factor_lr"],
        )
    ],
    "MultiFactorScheduler": lambda s, begins, origin: [
        piece(
            "multistep",
            begins,
            start=s["base_lr"],
            factor=s["factor"],
            at=list(s["step"][s["cur_step_ind"] :]),
        )
    ],
    "PolyScheduler": lambda s, begins, origin: [
        piece(
            "polynomial",
            begins,
            origin,
            start=s["base_lr_orig"],
            end=s["final_lr"],
            steps=s["max_steps"],
            power=s["power"],
        )
    ],
    "CosineScheduler": lambda s, begins, origin: [
        piece("cosine", begins, origin, start=s["base_lr_orig"], end=s["final_lr"], steps=s["max_steps"]),
        piece("constant", origin + s["max_steps"], rate=s["final_lr"]),
    ],
}
_WARMUP = {"warmup_begin_lr": Finite, "warmup_final_lr": Finite, "warmup_mode": Name}
_STATES: Mapping[str, Mapping[str, Any]] = {
    "FactorScheduler": {
        "count": int, "base_lr": Finite, "factor": Finite, "step": Positive, "stop_factor_lr": Finite,
    },
    "MultiFactorScheduler": {
        "base_lr": Finite, "factor": Finite, "step": Sequence[Natural], "cur_step_ind": Natural,
    },
    "PolyScheduler": {"base_lr_orig": Finite, "final_lr": Finite, "max_steps": Positive, "power": Finite},
    "CosineScheduler": {"base_lr_orig": Finite, "final_lr": Finite, "max_steps": Positive},
}  # fmt: skip
"""What a schedule's state says of its arguments."""
