"""The lines by which Optax goes on from a checkpoint of Orbax or Flax.

Source: google/orbax checkpoint/orbax/checkpoint/_src/checkpointers/standard_checkpointer.py,
`StandardCheckpointer.restore`; google/flax flax/training/checkpoints.py, `restore_checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from statekit.converters.layouts.optax.construction import Call, construction
from statekit.converters.layouts.optax.nnx import by_function, nnx_of, optimizer_place, restoring
from statekit.converters.layouts.optax.recognition import OF_MUON, STORED_SCALE, TAKEN
from statekit.files.tree import Place
from statekit.lines.printing import (
    RATE,
    RULES,
    UNKNOWN,
    SavedRun,
    State,
    given_options,
    has_several,
    kind_of,
    missing_of,
    native_arguments,
    own_call,
    paths_of,
    quoted,
)
from statekit.state.evidence import OPTIMIZER
from statekit.state.schema import load_schema

CLASSES: Mapping[tuple[str, str | None], str] = {
    ("adamw", "optax"): "optax.adamw",
    ("adafactor", "optax"): "optax.adafactor",
    ("lamb", "optax"): "optax.lamb",
    ("muon", "optax"): "optax.contrib.muon",
}
_CONTRIBUTED = ("adopt", "acprop")
_PROGRAMS = ("adam_pax",)
"""Optimizers that aren't in Optax."""
_DECAYING = ("adamw", "nadamw", "adamaxw", "acprop", "lamb", "adafactor")
"""Those that take a weight decay; the others take the schema's other arguments alone."""
_SAID_BY_NAME = {"nadam": "nesterov", "nadamw": "nesterov", "amsgrad": "amsgrad"}
"""By optimizer, the argument of another one that its name says."""
_OF_ITS_STATE = {"rmsprop": ("centered=True", "bias_correction=True")}
"""By optimizer, the arguments without which it keeps another state."""
_LACKING = {"rmsprop": ("b1", "b2")}
"""By optimizer, the arguments of AdamW that it doesn't take."""
_CLIP = "global_norm_clip_threshold"
_MASK = "exclude_from_weight_decay"
_NOT_ARGUMENTS = ("clipvalue", _CLIP, _MASK)
_NO_DECAY = "weight_decay=0.0"
_PARAMS, _STATE = "params", "opt_state"
_RANDOM = re.compile(r"(?i)rng|key|seed")
"""In the name of a leaf that is a random state, which is no number."""
_METADATA = "_METADATA"
"""The file in every item of Orbax that is a tree of arrays."""
_ITEM = "default"
"""The item that Orbax' CheckpointManager and Checkpointer keep a tree in."""


def optax_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for an optimizer of Optax."""
    schema = next((group["schema"] for group in state["groups"] if "schema" in group), state["schema"])
    mask = load_schema(schema).hyperparameters[_MASK]["native"]["optax"]["name"]

    def call(group: Mapping[str, Any], code: Mapping[str, str]) -> str:
        alone = {**state, **kind_of(state, group), "groups": [_without_scale(group)]}
        arguments = native_arguments(alone, _NOT_ARGUMENTS, open_rate="schedule")[0]
        if mask and _MASK not in group["hyperparameters"] and not saved.is_converted:
            arguments.append(f"{mask}={UNKNOWN}")  # a masked link is there, and its mask in no file
        fact = _optimizer_fact(group)
        if fact is not None and _is_open(fact):
            names = dict.fromkeys([fact["value"], *fact["others"]])
            fitting = _or([name for name in names if name is not None])
            return f"{UNKNOWN}  # {fitting}: the file fits each, and --optimizer names the run's"
        if fact is not None and fact["value"] not in (*_PROGRAMS, OF_MUON):
            return _call(_code(fact["value"]), [*_arguments_of(fact["value"], arguments)], code)
        name = CLASSES.get((alone["schema"], alone["variant"]), own_call(alone))
        if name == "optax.adamw" and _NO_DECAY in arguments and _is_short(saved):
            name, arguments = "optax.adam", [argument for argument in arguments if argument != _NO_DECAY]
        return _call(name, arguments, code)

    others = [] if has_several(state) else native_arguments(state, _NOT_ARGUMENTS)[1]
    others = [argument for argument in others if not argument.startswith(_CLIP)]
    name = CLASSES.get((state["schema"], state["variant"]), UNKNOWN)
    passed_over = [f"# not an argument of {name}: {', '.join(others)}"] if others else []
    passed_over += _taken_lines(state)
    optimizer = _optimizer_lines(state, saved, call, mask)
    lines = _tree_lines(saved, "import optax", [*passed_over, *optimizer], paths_of(state))
    return [*lines, *_given_lines(state, saved, lines), *_clip_lines(state, optimizer)]


def _given_lines(state: State, saved: SavedRun, lines: Sequence[str]) -> list[str]:
    """Returns the lines that keep what the user gave, where inject_hyperparams has the file's values restored.

    Source: google-deepmind/optax optax/tree_utils/_state_utils.py, `tree_set`.
    """
    if saved.is_converted or has_several(state) or not any("inject_hyperparams(" in line for line in lines):
        return []
    stored = {name.rpartition("/")[2] for name in saved.tensors if "/hyperparams/" in name}
    given = {
        name: value
        for group in state["groups"]
        for name, value in given_options(state, group, *_NOT_ARGUMENTS).items()
        if name in stored
    }
    if not given:
        return []
    values = ", ".join(f"{name}={value!r}" for name, value in given.items())
    place = f'state["{_STATE}"]'
    if not any(line.startswith("state = ") for line in lines):
        return [
            f"# the restored state has the file's values: optax.tree_utils.tree_set(opt_state, {values}) has yours"
        ]
    return [
        f"{place} = optax.tree_utils.tree_set({place}, {values})  # you gave it; the file's were restored"
    ]


def _optimizer_fact(group: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns what a group's file or the user says of which optimizer it is; None if nothing is said."""
    return next((fact for fact in group.get("facts", ()) if fact["name"] == OPTIMIZER), None)


def _is_open(fact: Mapping[str, Any]) -> bool:
    """Tells whether nobody said which of several optimizers it is, and none of them is the usual one."""
    return fact["value"] is None or (
        bool(fact.get("others")) and fact["value"] not in (*TAKEN.values(), OF_MUON)
    )


def _code(name: str) -> str:
    """Returns an optimizer's function in Optax."""
    return f"optax.contrib.{name}" if name in _CONTRIBUTED else f"optax.{name}"


def _or(names: Sequence[str]) -> str:
    codes = [name if name in _PROGRAMS else _code(name) for name in names]
    return f"{', '.join(codes[:-1])} or {codes[-1]}" if len(codes) > 1 else "".join(codes)


def _taken_lines(state: State) -> list[str]:
    """Returns a comment on each optimizer that a structure is taken for, though others would look the same."""
    facts = [fact for group in state["groups"] if (fact := _optimizer_fact(group)) and fact.get("others")]
    pairs = {fact["value"]: fact["others"] for fact in facts if not _is_open(fact)}
    return [
        f"# taken for {_code(name)}; {_or(others)} would look the same: --optimizer names the run's"
        for name, others in pairs.items()
    ]


def _arguments_of(name: str, arguments: Sequence[str]) -> Iterator[str]:
    """Yields those arguments of AdamW's like that an optimizer of some name takes."""
    yield from _OF_ITS_STATE.get(name, ())
    for argument in arguments:
        key = argument.partition("=")[0]
        if key in _LACKING.get(name, ()):
            continue
        is_rate = key == RATE and name == "scale_by_adam"
        is_decay = key == "weight_decay" and name not in _DECAYING
        if not (is_rate or is_decay or key == _SAID_BY_NAME.get(name)):
            yield argument


def _without_scale(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a group with the rate that the run was given: a link of its own multiplies it by what its state has."""
    scale = next((fact["value"] for fact in group.get("facts", ()) if fact["name"] == STORED_SCALE), None)
    rate = group["hyperparameters"].get(RATE)
    if not scale or not isinstance(rate, (int, float)):
        return group
    given = float(f"{rate / scale:.7g}")
    return {**group, "hyperparameters": {**group["hyperparameters"], RATE: given}}


def _is_short(saved: SavedRun) -> bool:
    """Tells whether one link stands behind every Adam, as behind optax.adam; two stand behind optax.adamw.

    Orbax restores a tuple only into one of its length.
    """
    names = [*saved.tensors, *saved.empty]
    chains = {name.partition("/0/mu/")[0] for name in saved.tensors if "/0/mu/" in name}
    links = [
        {name[len(chain) + 1 :].partition("/")[0] for name in names if name.startswith(f"{chain}/")}
        for chain in chains
    ]
    return bool(links) and all(link == {"0", "1"} for link in links)


def _clip_lines(state: State, optimizer: Sequence[str]) -> list[str]:
    """Returns the lines that put the run's clipping before an optimizer whose file has no link for it."""
    norms = {group["hyperparameters"].get(_CLIP) for group in state["groups"]}
    if norms <= {None, 0} or any("optax.chain(" in line for line in optimizer):
        return []
    norm = repr(norms.pop()) if len(norms) == 1 else UNKNOWN
    return [
        f"optimizer = optax.chain(optax.clip_by_global_norm({norm}), optimizer)  # as the run clipped its gradients",
        'state["opt_state"] = (optax.EmptyState(), state["opt_state"])',
    ]


def own_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for an optimizer of statekit.jax."""

    def call(group: Mapping[str, Any], code: Mapping[str, str]) -> str:
        alone = {**state, **kind_of(state, group), "groups": [group]}
        rate = f"{RATE}={group['hyperparameters'].get(RATE) or UNKNOWN}"
        return _call(f"statekit.jax.{alone['schema']}", [rate, *_own_arguments(alone, group)], code)

    return _tree_lines(
        saved, "import statekit.jax", _optimizer_lines(state, saved, call, ""), paths_of(state)
    )


def _call(name: str, arguments: Sequence[str], code: Mapping[str, str]) -> str:
    if name.startswith(UNKNOWN):
        return name
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
    """Returns the lines that make `optimizer`: a call, with a mask, or with parts."""
    rates = saved.rates(state)
    groups = [
        {**group, "number": i, "label": str(i), **rates.in_optax(i)}
        for i, group in enumerate(state["groups"])
        if group["paths"]
    ]
    if not groups:
        return [f"optimizer = {call({'hyperparameters': {}}, {})}"]
    above = place_above(saved)
    names, empty = ([name.removeprefix(above) for name in names] for names in (saved.tensors, saved.empty))
    if (nnx := nnx_of(saved, paths_of(state))) is not None:  # `wrt` says what is moved, instead of a mask
        names = [name for name in names if not name.startswith(f"{nnx.model}/")]
    return construction(groups, names, empty, call, _reading(saved), mask)


def _reading(saved: SavedRun) -> list[str]:
    """Returns the lines that read `groups`, from a checkpoint's manifest or through statekit."""
    if saved.is_converted:
        manifest = quoted(saved.manifest.absolute())
        read = f'groups = json.loads(pathlib.Path({manifest}).read_text())["state"]["groups"]'
        return ["import json", "import pathlib", read]
    group = '{"paths": group.paths, "hyperparameters": dict(group.hyperparameters)}'
    return [
        "import statekit",
        f"with statekit.open({saved.code(path=saved.path.absolute())}) as opened:",
        f"    groups = [{group} for group in opened.groups]",
    ]


def native_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for an optimizer that has no schema: the program's own."""
    return _tree_lines(saved, "import optax", [f"optimizer = {own_call(state)}"], paths_of(state))


def _tree_lines(saved: SavedRun, module: str, optimizer: Sequence[str], paths: Collection[str]) -> list[str]:
    """Returns the lines that restore parameters, and the state of an optimizer that some lines make."""
    above = place_above(saved)
    if saved.container == "flax":
        target, _ = _target(saved, above, paths, open_value="None")
        return [
            module,
            "from flax.training import checkpoints",
            *optimizer,
            target,
            f"state = checkpoints.restore_checkpoint({quoted(saved.path.absolute())}, target)",
        ]
    items = orbax_items(saved)
    imports = [module, "import orbax.checkpoint as ocp"]
    if (nnx := nnx_of(saved, paths)) is not None:
        imports.append("from flax import nnx")
        return [*imports, *by_function(optimizer), *restoring(saved, nnx, items)]
    lines = [*imports, *optimizer]
    if _STATE in items and _PARAMS in items:
        restore = "ocp.StandardCheckpointer().restore"
        return [
            *lines,
            'target = {"params": params, "opt_state": optimizer.init(params)}',
            f'items = {{name: {quoted(items[_STATE].parent)} + "/" + name for name in target}}',
            f"state = {{name: {restore}(items[name], value) for name, value in target.items()}}",
        ]
    item = items.get(above.removesuffix("/")) or next(iter(items.values()))
    target, left = _target(saved, above, paths)
    if not left:
        return [*lines, target, f"state = ocp.StandardCheckpointer().restore({quoted(item)}, target)"]
    return [
        *lines,
        f"# left in the file: {', '.join(left)}; with a value of yours in target it is restored too",
        target,
        "read = ocp.checkpoint_utils.construct_restore_args(target)",
        "read = ocp.args.PyTreeRestore(target, restore_args=read, partial_restore=True)",
        f"state = ocp.PyTreeCheckpointer().restore({quoted(item)}, args=read)",
    ]


def place_above(saved: SavedRun) -> str:
    """Returns what stands before `opt_state` in a checkpoint's names: an item of Orbax, with a slash, or nothing."""
    place, keys = optimizer_place(saved.tensors)
    if keys == {_STATE, "step"}:
        return place
    mark = f"/{_STATE}/"
    names = (name.partition(mark)[0] for name in saved.tensors if mark in name)
    return next((f"{name}/" for name in names if f"/{name}/".count(mark) == 0), "")


def _names_by_key(saved: SavedRun, above: str) -> dict[str, set[str]]:
    """Returns for each key of a file's tree the names of the tensors below it."""
    names: dict[str, set[str]] = {}
    for name in saved.tensors:
        if name.startswith(above):
            key, _, below = name.removeprefix(above).partition("/")
            names.setdefault(key, set()).add(below)
    return names


def _target(
    saved: SavedRun, above: str, paths: Collection[str], open_value: str = ""
) -> tuple[str, list[str]]:
    """Returns the line that makes the tree to restore into, and the keys of the file that it hasn't."""
    shapes = _names_by_key(saved, above)
    params, state = _own_keys(shapes, paths)
    code = {params: "params", state: "optimizer.init(params)"}
    if code.keys() == shapes.keys() == {"0", "1"}:
        return f"target = ({code['0']}, {code['1']})", []
    averages = [top for top, below in shapes.items() if below == shapes.get(params)]
    numbers = [top for top, below in shapes.items() if below == {""} and not _RANDOM.search(top)]
    code |= dict.fromkeys([top for top in averages if top not in code], "params")
    code |= dict.fromkeys(numbers, open_value or "0")
    left = [top for top in shapes if top not in code]
    if open_value:
        code |= dict.fromkeys(left, open_value)
    pairs = ", ".join(f"{quoted(key)}: {value}" for key, value in code.items())
    return f"target = {{{pairs}}}", [] if open_value else left


def _own_keys(shapes: Mapping[str, set[str]], paths: Collection[str]) -> tuple[str, str]:
    """Returns the keys of parameters and of the optimizer's state in a file's tree: the usual ones, or its own."""
    ends = tuple(f"/{path}" for path in paths)
    moved = [top for top, below in shapes.items() if any(name.endswith(ends) for name in below)]
    state = next((top for top in moved if top != _PARAMS), _STATE)
    params = next((top for top, below in shapes.items() if below and {*paths} <= below), _PARAMS)
    return _PARAMS if _PARAMS in shapes else params, _STATE if _STATE in shapes else state


def orbax_items(saved: SavedRun) -> dict[str, Place]:
    """Returns the items of a step in Orbax: the folder of each by its name, or of the only one by `""`."""
    step = saved.step_path("{step}").absolute()
    written = [Path(file).parent for file in saved.files if Path(file).name == _METADATA]
    names = list(saved.items) or [folder.name for folder in written]
    if not names:
        is_item = step.is_dir() and not (step / _ITEM).is_dir()
        return {"": step if is_item else step / _ITEM}
    if len(names) == 1:
        return {"": step if names[0] in ("", step.name) else step / names[0]}
    return {name: step / name for name in names}


def orbax_item(saved: SavedRun) -> Place:
    """Returns the first item of a step in Orbax."""
    return next(iter(orbax_items(saved).values()))
