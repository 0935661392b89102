"""The lines by which Optax goes on from a checkpoint of Orbax or Flax.

Source: google/orbax checkpoint/orbax/checkpoint/_src/checkpointers/standard_checkpointer.py,
`StandardCheckpointer.restore`; google/flax flax/training/checkpoints.py, `restore_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from statekit.converters.layouts.optax.construction import Call, construction
from statekit.lines.printing import (
    RATE,
    RULES,
    UNKNOWN,
    SavedRun,
    State,
    has_several,
    kind_of,
    missing_of,
    native_arguments,
    quoted,
)
from statekit.state.schema import load_schema

CLASSES: Mapping[tuple[str, str | None], str] = {
    ("adamw", "optax"): "optax.adamw",
    ("adafactor", "optax"): "optax.adafactor",
    ("lamb", "optax"): "optax.lamb",
}
_NOT_ARGUMENTS = ("clipvalue", "global_norm_clip_threshold", "exclude_from_weight_decay")
_ITEM = "default"
"""The item that Orbax' CheckpointManager and Checkpointer keep a tree in."""


def optax_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for an optimizer of Optax."""

    def call(group: Mapping[str, Any], code: Mapping[str, str]) -> str:
        alone = {**state, **kind_of(state, group), "groups": [group]}
        arguments = native_arguments(alone, _NOT_ARGUMENTS, open_rate="schedule")[0]
        return _call(CLASSES.get((alone["schema"], alone["variant"]), UNKNOWN), arguments, code)

    others = [] if has_several(state) else native_arguments(state, _NOT_ARGUMENTS)[1]
    name = CLASSES.get((state["schema"], state["variant"]), UNKNOWN)
    passed_over = [f"# not an argument of {name}: {', '.join(others)}"] if others else []
    schema = next((group["schema"] for group in state["groups"] if "schema" in group), state["schema"])
    mask = load_schema(schema).hyperparameters["exclude_from_weight_decay"]["native"]["optax"]["name"]
    return _tree_lines(saved, "import optax", [*passed_over, *_optimizer_lines(state, saved, call, mask)])


def own_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for an optimizer of statekit.jax."""

    def call(group: Mapping[str, Any], code: Mapping[str, str]) -> str:
        alone = {**state, **kind_of(state, group), "groups": [group]}
        rate = f"{RATE}={group['hyperparameters'].get(RATE) or UNKNOWN}"
        return _call(f"statekit.jax.{alone['schema']}", [rate, *_own_arguments(alone, group)], code)

    return _tree_lines(saved, "import statekit.jax", _optimizer_lines(state, saved, call, ""))


def _call(name: str, arguments: Sequence[str], code: Mapping[str, str]) -> str:
    kept = [argument for argument in arguments if argument.partition("=")[0] not in code]
    return f"{name}({', '.join([*kept, *(f'{name}={value}' for name, value in code.items())])})"


def _own_arguments(state: State, group: Mapping[str, Any]) -> Iterator[str]:
    """Yields what an optimizer of statekit.jax has to be told beside its learning rate."""
    variant, values = state["variant"], group["hyperparameters"]
    if variant is None:
        yield f"variant={UNKNOWN}"
        return
    yield f"variant={quoted(variant)}"
    usual = load_schema(state["schema"]).variant(variant)["defaults"]
    if values.get("factor_map"):
        yield f"factor_map={values['factor_map']!r}"
    for name, value in values.items():
        is_argument = name in usual and name not in (*RULES, RATE) and not isinstance(value, Mapping)
        if is_argument and value != usual[name]:
            yield f"{name}={value!r}"
    yield from (f"{name}={UNKNOWN}" for name in missing_of(state, group) if name != RATE)


def _optimizer_lines(state: State, saved: SavedRun, call: Call, mask: str) -> list[str]:
    """Returns the lines that make `optimizer`: a call, with a mask, or with parts.

    Args:
        state: The state.
        saved: Its checkpoint.
        call: Gives the call of the optimizer's class for a group.
        mask: The argument for the mask of weight decay; "" if there is none.
    """
    rates = saved.rates(state)
    groups = [
        {**group, "number": i, "label": str(i), **rates.in_optax(i)}
        for i, group in enumerate(state["groups"])
        if group["paths"]
    ]
    if not groups:
        return [f"optimizer = {call({'hyperparameters': {}}, {})}"]
    return construction(groups, saved.tensors, saved.empty, call, _reading(saved), mask)


def _reading(saved: SavedRun) -> list[str]:
    """Returns the lines that make `groups` as a checkpoint has them: from its manifest, or as statekit opens it."""
    if saved.is_converted:
        manifest = quoted(saved.manifest.absolute())
        read = f'groups = json.loads(pathlib.Path({manifest}).read_text())["state"]["groups"]'
        return ["import json", "import pathlib", read]
    group = '{"paths": group.paths, "hyperparameters": dict(group.hyperparameters)}'
    return [
        "import statekit",
        f"with statekit.open({quoted(saved.path.absolute())}) as opened:",
        f"    groups = [{group} for group in opened.groups]",
    ]


def _tree_lines(saved: SavedRun, module: str, optimizer: Sequence[str]) -> list[str]:
    """Returns the lines that restore parameters and the state of an optimizer that some lines make."""
    target = 'target = {"params": params, "opt_state": optimizer.init(params)}'
    if saved.container == "flax":
        return [
            module,
            "from flax.training import checkpoints",
            *optimizer,
            target,
            f"state = checkpoints.restore_checkpoint({quoted(saved.path.absolute())}, target)",
        ]
    item = orbax_item(saved)
    return [
        module,
        "import orbax.checkpoint as ocp",
        *optimizer,
        target,
        f"state = ocp.StandardCheckpointer().restore({quoted(item)}, target)",
    ]


def orbax_item(saved: SavedRun) -> Path:
    """Returns the item `default` of a step in Orbax, or the step itself where it is there and has none."""
    path = saved.step_path("{step}").absolute()
    return path if path.is_dir() and not (path / _ITEM).is_dir() else path / _ITEM
