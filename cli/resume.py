"""How to go on from the result of a conversion: the lines to write, and what the next update will use."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from statekit.conversion.plan import Plan
from statekit.optim.adafactor import defaults, next_decay
from statekit.optim.adafactor_forms import Hyperparameters
from statekit.state.schema import load_schema

T5X_LAYOUT, ORBAX, FLAX = "t5x", "orbax", "flax"
_RULES = ("factor_map", "logical_factor_rules")


def resume_lines(plan: Plan) -> list[str]:
    """Returns the lines that go on from a conversion's result: gin for T5X, Python of JAX or PyTorch for all else."""
    groups, target = plan.state["groups"], plan.request.target
    if plan.target.layout == T5X_LAYOUT:
        offsets = {group["hyperparameters"].get("step_offset") or 0 for group in groups}
        return [
            f"utils.RestoreCheckpointConfig.path = {json.dumps(str(_step_folder(plan, target)))}",
            'utils.RestoreCheckpointConfig.mode = "specific"',
            *(f"adafactor.Adafactor.step_offset = {offset}" for offset in offsets if offset),
        ]
    if plan.target.container in (ORBAX, FLAX):
        return _jax_lines(plan, target)
    missing = dict.fromkeys(name for group in groups for name in _missing(plan.state, group))
    name = json.dumps(str(target))
    return [
        "import statekit.torch",
        f"statekit.torch.load_params({name}, model)",
        f"optimizer = statekit.torch.load_optimizer({', '.join([name, 'model.named_parameters()', *missing])})",
    ]


def _jax_lines(plan: Plan, target: Path) -> list[str]:
    lines = ['target = {"params": params, "opt_state": optimizer.init(params)}']
    if plan.target.container == FLAX:
        folder = json.dumps(str(target.absolute()))
        lines = [
            "from flax.training import checkpoints",
            *lines,
            f"state = checkpoints.restore_checkpoint({folder}, target)",
        ]
    else:
        step = str(plan.target.step)
        folder = json.dumps(str((target if target.name == step else target / step).absolute() / "default"))
        lines = [
            "import orbax.checkpoint as ocp",
            *lines,
            f"state = ocp.StandardCheckpointer().restore({folder}, target)",
        ]
    if plan.target.layout != "statekit-jax":
        return lines
    arguments = dict.fromkeys(a for group in plan.state["groups"] for a in _arguments(plan.state, group))
    call = f"statekit.jax.{plan.state['schema']}({', '.join(('learning_rate=...', *arguments))})"
    return ["import statekit.jax", f"optimizer = {call}", *lines]


def _arguments(state: Mapping[str, Any], group: Mapping[str, Any]) -> Iterator[str]:
    """Yields what an optimizer of statekit.jax has to be told beside its learning rate."""
    variant = state["variant"]
    if variant is None:
        yield "variant=..."
        return
    yield f"variant={json.dumps(variant)}"
    usual = load_schema(state["schema"]).variant(variant)["defaults"]
    for name, value in group["hyperparameters"].items():
        told = name in usual and name not in (*_RULES, "learning_rate") and not isinstance(value, Mapping)
        if told and value != usual[name]:
            yield f"{name}={value!r}"
    yield from (name for name in _missing(state, group) if name != "lr=...")


def _missing(state: Mapping[str, Any], group: Mapping[str, Any]) -> Iterator[str]:
    """Yields arguments for what a step needs and nobody has said."""
    known = group["hyperparameters"]
    if known.get("learning_rate") is None:
        yield "lr=..."
    if state["schema"] == "adafactor" and state["variant"]:
        needed = {field.name for field in fields(Hyperparameters)}
        for name in defaults(state["variant"]):
            if name in needed and name not in known:
                yield f"{name}=..."


def _step_folder(plan: Plan, target: Path) -> Path:
    folder = f"checkpoint_{plan.target.step}"
    return (target if target.name == folder else target / folder).absolute()


def next_update(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what the next update of each group will use, as far as the state says.

    Args:
        state: A state without its tensors, as `TrainState.to_json` gives it.

    Returns:
        For each group: its parameters; `learning_rate` (None where whoever steps must give it); `update`, the number
        of updates done; `schedule`, the argument of a learning-rate schedule; and for Adafactor `step_offset` and
        `decay`, the second moment's.
    """
    counts = state["counts"]
    rows = []
    for group in state["groups"]:
        known = group["hyperparameters"]
        row: dict[str, Any] = {
            "parameters": len(group["paths"]),
            "learning_rate": known.get("learning_rate"),
            "update": counts["updates"],
            "schedule": counts["schedule"],
        }
        if state["schema"] == "adafactor":
            row["step_offset"] = known.get("step_offset")
            row["decay"] = _decay(state["variant"], counts["updates"], known)
        rows.append(row)
    return rows


def _decay(variant: str | None, updates: int, known: Mapping[str, Any]) -> float | None:
    offset, rate = known.get("step_offset"), known.get("decay_rate")
    if variant != "t5x" or offset is None or rate is None or updates < offset:
        return None
    return next_decay(updates, offset, rate)
