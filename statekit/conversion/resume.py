"""How a run goes on from a checkpoint: the target's own calls, and what its next update will use.

The calls of each layout in each container are data, `converters/resume.json`; here their values are filled in.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from itertools import accumulate
from pathlib import Path
from string import Template
from typing import Any

from statekit.conversion import registry
from statekit.conversion.contracts import Constructing
from statekit.conversion.open_state import OpenState
from statekit.conversion.plan import Plan
from statekit.conversion.rates.code import MATH
from statekit.conversion.rates.lines import RatesOf, ScheduleLines, schedule_lines
from statekit.errors import StateError
from statekit.files.manifest import FILE
from statekit.files.source import listing
from statekit.optim.adafactor_forms import AdafactorHyperparameters
from statekit.state.options import stored_rate
from statekit.state.run import MEGATRON, RunState, Schedule, run_of
from statekit.state.schema import WEIGHTS, load_schema
from statekit.state.train_state import next_decay
from statekit.tensors.tree import empty_names

_RULES = ("factor_map", "logical_factor_rules")
_RATE, _DEFAULT = "learning_rate", "default"
_UNKNOWN = "..."
_UNSCHEDULED: Mapping[str, Any] = {"schedule": None, "unscheduled": ""}
_NEVER_IN_T5X = ("multiply_by_parameter_scale", "decay_rate", "clipping_threshold", "epsilon1")
_ANYWHERE = Path("/path/to")
_STATE = ("/state/", "/state.")
"""What stands between an optimizer's place and a parameter's, in its forms by index or name, and flat."""
State = Mapping[str, Any]
"""A state without its tensors, as `TrainState.to_json` gives it."""


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is, and what it is.

    Attributes:
        container: Its container.
        layout: Its layout.
        path: The checkpoint, or a run's folder that holds it.
        step: Its step, where `path` may be the run's folder.
        files: Names of its files, where they are known.
        tensors: Names of its tensors, where they are known.
        empty: Names of its leaves that hold nothing.
        by_path: Whether its parameters lie by their paths, as nothing said where the system itself has them.
        run: What is known of the run.
        converted: Whether statekit wrote it; None where its step or a manifest in its folder tells.
        folder: The folder that `files` are named in, where `path` is one of them.
        map_name: The map that made its model; "" without one.
        model_class: The class of the model that an earlier map made; "" where none is known.
        map_knows: What that was said, or had beside the source, of the model.
        loss_scale: How many times as large the loss is from there on, as its moments were rescaled for; None if not.
        state_only: Whether it holds an optimizer's state without parameters.
    """

    container: str
    layout: str
    path: Path
    step: int | None
    files: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    by_path: bool = False
    run: RunState = field(default_factory=RunState)
    converted: bool | None = None
    folder: Path | None = None
    map_name: str = ""
    map_knows: frozenset[str] = frozenset()
    model_class: str = ""
    loss_scale: float | None = None
    state_only: bool = False


def of_plan(plan: Plan, files: Iterable[str] = ()) -> Place:
    """Returns where a conversion writes."""
    target = plan.target
    names = tuple(entry.name for entry in plan.entries)
    by_path = _by_path(target.container, target.layout, plan.source.container, plan.options)
    return Place(
        target.container,
        target.layout,
        plan.request.target,
        target.step,
        tuple(files),
        names,
        plan.empty,
        by_path,
        plan.run,
        map_name=_map_name(plan.options),
        map_knows=_map_knows(plan.options),
        model_class=_model_class(plan.options),
        loss_scale=_loss_scale(plan.options),
        state_only=_is_state_only(plan.options),
    )


def in_manifest(plan: Plan, files: Iterable[str]) -> Place:
    """Returns where a conversion's manifest says that its target lies: `/path/to/checkpoint`.

    A manifest says the same wherever its checkpoint is written and moved to; only a name that means a step stays.
    """
    place = of_plan(plan, files)
    named = _entries().get((place.layout, place.container), {}).get("step")
    is_step = named is not None and place.path.name == named.format(step=place.step)
    return replace(place, path=_ANYWHERE / (place.path.name if is_step else "checkpoint"))


def of_checkpoint(opened: OpenState) -> Place:
    """Returns where an opened checkpoint is: its path is the step's own."""
    path = opened.checkpoint.path
    parts = opened.checkpoint.parts
    folder = parts[0].parent if parts else path
    beside = parts or listing(path)
    files = tuple(part.relative_to(folder).as_posix() for part in beside if part.is_relative_to(folder))
    container, layout = opened.checkpoint.container, opened.layout
    manifest = opened.checkpoint.manifest
    by_path = manifest is not None and _by_path(
        container, layout, manifest["source"]["container"], manifest["options"]
    )
    names = tuple(opened.checkpoint.tensors)
    empty = tuple(empty_names(opened.checkpoint.tree))
    run = run_of(opened.state.extra)
    converted = manifest is not None
    options = manifest["options"] if manifest is not None else {}
    return Place(
        container,
        layout,
        path,
        None,
        files,
        names,
        empty,
        by_path,
        run,
        converted,
        folder,
        _map_name(options),
        _map_knows(options),
        _model_class(options),
        _loss_scale(options),
        _is_state_only(options),
    )


def _is_state_only(options: Mapping[str, Any]) -> bool:
    """Tells whether a target holds no parameters, by what was asked for."""
    changes = options.get("changes")
    return isinstance(changes, Mapping) and changes.get("state_only") is True


def _loss_scale(options: Mapping[str, Any]) -> float | None:
    """Returns how many times as large a target's loss is, by what was asked for; None if nobody said."""
    changes = options.get("changes")
    said = changes.get("loss_scale") if isinstance(changes, Mapping) else None
    return float(said) if isinstance(said, (int, float)) else None


def _loss_said(place: Place) -> list[str]:
    """Returns a line about the loss whose moments a target holds, where it is another than its model's usual one."""
    if place.loss_scale is not None:
        return [f"# the loss is {place.loss_scale!r} times the source's from here on, as its moments are"]
    names = place.map_name.split(":")
    known: Mapping[str, str] = _data()["losses"]
    before, after = (
        next((what for what in known if name.startswith(f"{what}-")), None) for name in (names[0], names[-1])
    )
    if before is None or after is None or known[before] == known[after]:
        return []
    return [
        f"# the moments are of the source's loss, usually {known[before]}; here it is usually {known[after]}",
        "# train on the source's, or convert with --loss-scale where the two differ by a constant",
    ]


def _map_name(options: Mapping[str, Any]) -> str:
    """Returns the map that made a target's model, by what was asked for; "" without one."""
    names = [one["name"] for one in options.get("maps", ()) if isinstance(one, Mapping) and "name" in one]
    return str(names[-1]) if names else ""


def _model_class(options: Mapping[str, Any]) -> str:
    """Returns the class of the model that an earlier map made; "" where none is known."""
    name = options.get("model_class")
    return name if isinstance(name, str) else ""


def _map_knows(options: Mapping[str, Any]) -> frozenset[str]:
    """Returns the settings that maps were told of a target's model, or had beside the source."""
    maps = [one for one in options.get("maps", ()) if isinstance(one, Mapping)]
    said = [
        *(one.get("config", {}) for one in maps),
        *(b for one in maps for b in one.get("beside", {}).values()),
    ]
    return frozenset(key for one in said for key in one)


def _by_path(container: str, layout: str, source: str | None, options: Mapping[str, Any]) -> bool:
    """Tells whether nothing said where a target's own system has the parameters: neither source nor a model's file."""
    entry = _entries().get((layout, container), {})
    return "by_path" in entry and source not in entry["places_in"] and "like" not in options


def frameworks() -> list[str]:
    """Returns the names of the frameworks in which an optimizer of statekit goes on from any checkpoint."""
    return list(_data()["frameworks"])


def needs_weights(layout: str, container: str) -> str | None:
    """Returns why a target has no form of an optimizer's state without its parameters; None if it has one."""
    if _data()["alone_in"].get(layout) == container:
        return None
    known: Mapping[str, str] = _data()["whole"]
    return known.get(container, known.get(layout, "its files are loaded with them"))


def resume_lines(place: Place, state: State, framework: str | None = None) -> list[str]:
    """Returns the lines that go on from a checkpoint in its own system; none if nobody has said them.

    Args:
        place: Where it is.
        state: What it holds.
        framework: Go on with an optimizer of statekit in this framework instead.
    """
    entry = _entries().get((place.layout, place.container), {})
    values = _values(place, entry, state)
    if framework in _data()["alone"] and _has_several(state):
        raise StateError(
            f"The run has several optimizers, and {_data()['alone'][framework]}.",
            place=place.path,
            found=" and ".join(state["schema"].split("+")),
            remedy=f"go on in another framework: {', '.join(n for n in frameworks() if n not in _data()['alone'])}",
        )
    said = _data()["frameworks"][framework] if framework else _native_lines(place, entry, values, state)
    lines = [Template(line) for line in said]
    written = [
        one
        for line in lines
        if all(values[name] is not None for name in line.get_identifiers())
        for one in line.substitute({name: values[name] for name in line.get_identifiers()}).split("\n")
    ]
    lines_once = [
        line for i, line in enumerate(written) if not (line.startswith("import ") and line in written[:i])
    ]
    return [*lines_once, *(_loss_said(place) if lines_once and state["schema"] != WEIGHTS else ())]


def _native_lines(
    place: Place, entry: Mapping[str, Any], values: Mapping[str, str | None], state: State
) -> Iterable[str]:
    """Returns the lines of a checkpoint's own system, which may have others for parts in other places."""
    if place.state_only:
        return list(_data()["state_only"])
    if place.by_path:
        return list(entry["by_path"])
    for placed in entry.get("placed", ()):
        if all(values[name] == keys for name, keys in placed["where"].items()):
            return list(placed["lines"])
    if "several" in entry and (_has_several(state) or len(_keys_of_optimizers(place.tensors)) > 1):
        return list(entry["several"])
    return list(entry.get("lines", ()))


def unsaid(place: Place) -> str:
    """Returns a sentence for those who ask how to go on from where nobody has said it."""
    first, *others = frameworks()
    return (
        f"Nobody has told statekit how layout {place.layout} goes on from container {place.container}. "
        f"Its own optimizers do: statekit resume {shlex.quote(str(place.path))} --framework {first} "
        f"(or {', '.join(others)})"
    )


@cache
def _data() -> dict[str, Any]:
    text = resources.files("statekit.converters").joinpath("resume.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


@cache
def _entries() -> dict[tuple[str, str], Mapping[str, Any]]:
    return {
        (layout, container): entry
        for entry in _data()["resume"]
        for layout in entry["layouts"]
        for container in entry["containers"]
    }


def _values(place: Place, entry: Mapping[str, Any], state: State) -> dict[str, str | None]:
    """Returns what may stand in a line, each as it is written there; None leaves the line out."""
    groups, schema = state["groups"], state["schema"]
    path = _step_path(place, entry.get("step"))
    constructor = _data()["constructors"].get(schema, {}).get(state["variant"])
    arguments, others = ([], []) if _has_several(state) else _native_arguments(state)
    offsets = {group["hyperparameters"].get("step_offset") or 0 for group in groups}
    rates = {repr(group["hyperparameters"].get(_RATE)) for group in groups}
    by_suffix = {Path(file).suffix: Path(file).name for file in place.files}
    array = next((file for file in place.files if file.endswith(".npy")), None)
    arrays_in = None if array is None else array[: array.rfind("/") + 1]
    converted = _is_converted(place)
    schedule = _schedule(place, state)
    call = schedule.call
    paths = [path for group in groups for path in group["paths"]]
    megatron = _megatron_schedule(place, state)
    return {
        "path": _quoted(path),
        "folder": _quoted(place.folder or path),
        "absolute": _quoted(path.absolute()),
        "item": _quoted(_item(path.absolute())),
        "run": _quoted(path.parent),
        "run_argument": shlex.quote(str(path.parent)),
        "name": _quoted(path.name),
        "schema": schema,
        "constructor": constructor,
        "module": _module(constructor),
        "arguments": ", ".join(arguments),
        "gin": "\n".join(_gin(arguments)) or None if any(map(_says_arguments, groups)) else None,
        "converted": "" if converted else None,
        "manifest": _quoted(_manifest(place).absolute()),
        "by_name": "\n".join(_data()["by_name"]) if converted else None,
        "said": "".join(f", {one}" for one in arguments if _UNKNOWN not in one),
        "model_keys": _model_keys(place.tensors, paths) or '["model"]',
        "optimizer_keys": _optimizer_keys(place.tensors) or '["optimizer"]',
        "scheduler": call,
        "math": "import math" if call and MATH in call else None,
        "new_schedule": None if call else schedule.torch or schedule.comment,
        "new_scheduled": "" if schedule.torch and not call else None,
        **_schedules_in_keras(
            schedule, arguments, _missing_arguments(state, None), _missing_arguments(state, _RATE)
        ),
        "mxnet_schedule": schedule.mxnet or (None if schedule.is_in_mxnet else schedule.comment),
        "mxnet_scheduled": "" if schedule.mxnet else None,
        **_several(place, state, schedule, converted),
        "eden": schedule.icefall,
        "eden_state": "" if schedule.icefall else None,
        "other_schedule": None if schedule.icefall or call else schedule.torch or schedule.comment,
        "any_schedule": schedule.torch or schedule.comment,
        "jax_schedule": schedule.jax or schedule.comment,
        "missing_jax": f", {_RATE}=schedule{_missing_arguments(state, None)}"
        if schedule.jax
        else _missing_arguments(state, _RATE),
        "scheduler_keys": schedule.place and _subscripts(schedule.place),
        **_model_lines(place, path, paths, rates == {"None"} and schedule.torch is None),
        "scheduled": "" if call else None,
        "unscheduled": None if call else "",
        "own_rate": "" if any(group["hyperparameters"].get("relative_step") for group in groups) else None,
        **_trainers(place, schedule),
        "optimizer": "\n".join(_construction(place, state, schedule.optax)),
        "not_arguments": f"not an argument of {constructor}: {', '.join(others)}" if others else None,
        "groups": "groups" if converted else _groups(groups),
        "missing": (missing := _missing_arguments(state, None if schedule.torch and not call else "lr")),
        "missing_in_trainer": missing.replace(f"lr={_UNKNOWN}", "lr=args.learning_rate"),
        "step_offset": f"{max(offsets)}" if len(offsets) == 1 and max(offsets) else None,
        "rate": rates.pop() if len(rates) == 1 and rates != {"None"} else _UNKNOWN,
        "objects": "model=model" if any(name.startswith("model/") for name in place.tensors) else "model",
        "params_file": None if arrays_in is not None else by_suffix.get(".params", "net.params"),
        "params_folder": arrays_in,
        "each_array": None if arrays_in is None else "",
        "states_file": by_suffix.get(".states", "trainer.states"),
        "optimized": None if schema == WEIGHTS else "",
        **_weights(place, path),
        "flags": entry.get("flags", {}).get(place.layout),
        "megatron_schedule": megatron,
        "without_schedule": None if megatron is not None else "",
        "mxnet_name": {"adamw": "adam"}.get(schema, schema),
    }


def _schedule(place: Place, state: State) -> ScheduleLines:
    schedules = place.run.schedules
    if not schedules:
        return ScheduleLines()
    return schedule_lines(schedules, state, _data()["schedules"], _sides(place, state))


def _model_lines(place: Place, step: Path, paths: Iterable[str], no_rate: bool) -> dict[str, str | None]:
    """Returns what may stand in a line about the model that a map made, and its library builds from the folder.

    Args:
        place: Where it is.
        step: The step's own folder.
        paths: Its parameters.
        no_rate: Whether nobody knows the learning rate.
    """
    pretrained = None
    if place.map_name or place.model_class:
        from statekit.maps.model_map import pretrained_class, pretrained_of

        of_map = pretrained_of(place.map_name) if place.map_name else None
        pretrained = of_map or pretrained_class(place.model_class)
    if pretrained is None:
        return dict.fromkeys(
            (
                "model_class",
                "model_folder",
                "after_loading",
                "assumed",
                "remark",
                "trainers_rate",
                "pretrained",
            )
        )
    run = step.parent if (step.parent / pretrained.main).is_file() else step
    after = [line for path, line in pretrained.after_loading.items() if path in paths]
    return {
        "model_class": pretrained.class_name,
        "model_folder": _quoted(run if place.step is None else place.path),
        "after_loading": "\n".join(after) or None,
        "assumed": ", ".join(pretrained.assumed(place.map_knows) if place.map_name else ()) or None,
        "remark": pretrained.remark or None,
        "pretrained": "",
        "trainers_rate": "" if no_rate else None,
    }


def _trainers(place: Place, schedule: ScheduleLines) -> dict[str, str | None]:
    """Returns what may stand in a line about the schedule that Transformers' Trainer goes on by."""
    states = [part.value for part in place.run.parts if part.place.endswith("/trainer_state")]
    by_trainer = any(isinstance(one, Mapping) and one.get("train_batch_size") != 0 for one in states)
    if schedule.is_lambda and by_trainer:  # whose arguments make it again; 0 is what a conversion writes
        return {"trainer_schedule": None if schedule.torch else schedule.comment, "own_scheduler": "None"}
    if schedule.call:
        imports = "import math\nimport torch" if MATH in schedule.call else "import torch"
        return {"trainer_schedule": imports, "own_scheduler": schedule.call}
    if schedule.torch:
        return {"trainer_schedule": schedule.torch, "own_scheduler": "scheduler"}
    said = (
        schedule.comment or "# nothing tells the run's schedule: args makes the rates after the next update's"
    )
    return {"trainer_schedule": said, "own_scheduler": "None"}


def _megatron_schedule(place: Place, state: State) -> str | None:
    """Returns the flag by which Megatron-LM takes the schedule that a converted file has; None where it has none."""
    known = [group["hyperparameters"] for group in state["groups"]]
    decays = [group["weight_decay_rate"] for group in known if group.get("weight_decay_rate")]
    values = ([group.get(_RATE) for group in known], decays)
    plain = all(type(one) in (int, float) for of_all in values for one in of_all)
    made = not place.run.schedules and plain and all(len(set(of_all)) <= 1 for of_all in values)
    if not _is_converted(place):
        return ""
    has_one = made or any(one.kind == MEGATRON for one in place.run.schedules)
    return " --use-checkpoint-opt_param-scheduler" if has_one else None


def _schedules_in_keras(
    schedule: ScheduleLines, arguments: Sequence[str], missing: str, missing_rate: str
) -> dict[str, str | None]:
    """Returns what may stand in a line about a schedule of Keras.

    Args:
        schedule: What lines say of the run's schedule.
        arguments: Those of the optimizer's class.
        missing: Those of `load_optimizer` that nobody said, but for the rate.
        missing_rate: The same with the rate.
    """
    lines, before = schedule.keras, schedule.is_in_keras
    scheduled = [f"{_RATE}=schedule" if one.startswith(f"{_RATE}=") else one for one in arguments]
    return {
        "keras_before": lines or schedule.comment if before else None,
        "keras_after": None if before else lines or schedule.comment,
        "keras_scheduled": "" if lines and not before else None,
        "keras_arguments": ", ".join(scheduled if lines and before else arguments),
        "keras_schedule": lines or schedule.comment,
        "missing_keras": f", {_RATE}=schedule{missing}" if lines else missing_rate,
    }


def _several(place: Place, state: State, schedule: ScheduleLines, converted: bool) -> dict[str, str | None]:
    """Returns what may stand in a line about several optimizers of PyTorch, each with groups of its own."""
    sides, modules, calls = _sides(place, state), list[str](), list[str]()
    for numbers in sides:
        kind = _kind(state, state["groups"][numbers[0]])
        alone = {**state, **kind, "groups": [state["groups"][i] for i in numbers]}
        constructor = str(_data()["constructors"].get(kind["schema"], {}).get(kind["variant"]))
        groups = ", ".join(f"groups[{i}]" if converted else f'{{"params": group_{i}}}' for i in numbers)
        modules += [f"import {module}"] if (module := _module(constructor)) else []
        calls.append(f"{constructor}({', '.join([f'[{groups}]', *_native_arguments(alone)[0]])})")
    keys = _keys_of_optimizers(place.tensors)
    states = keys if len(keys) == len(sides) else [f'["optimizers"][{i}]' for i in range(len(sides))]
    made = schedule.calls
    return {
        "modules": "\n".join(dict.fromkeys(modules)) or None,
        "optimizers": _listed("optimizers", calls),
        "optimizer_states": ", ".join(f"checkpoint{key}" for key in states),
        "schedulers": _listed("schedulers", made.values()) if made else None,
        "scheduler_states": ", ".join(f"checkpoint{_subscripts(one)}" for one in made) if made else None,
        "scheduled_each": "" if made else None,
        "schedule_of_each": None if made else schedule.torch_each or schedule.comment,
    }


def _listed(name: str, items: Iterable[str]) -> str:
    return "\n".join([f"{name} = [", *(f"    {item}," for item in items), "]"])


def _sides(place: Place, state: State) -> list[list[int]]:
    """Returns the numbers of the groups of each optimizer: as they lie side by side, or of each kind."""
    groups = state["groups"]
    ends = list(accumulate(place.run.optimizers))
    if ends and ends[-1] == len(groups) and len(ends) == len(_keys_of_optimizers(place.tensors)):
        return [list(range(end - count, end)) for end, count in zip(ends, place.run.optimizers, strict=True)]
    kinds = [_kind(state, group) for group in groups]
    first = {kinds.index(kind): kind for kind in kinds}
    return [[i for i, one in enumerate(kinds) if one == kind] for kind in first.values()]


def _has_several(state: State) -> bool:
    return any("schema" in group for group in state["groups"])


def _missing_arguments(state: State, rate: str | None) -> str:
    """Returns the arguments of `load_optimizer` for what a step needs and nobody has said.

    Args:
        state: The state.
        rate: What the learning rate is called there; None where a schedule gives it.
    """
    pairs = dict.fromkeys(
        (_kind(state, group)["schema"], name)
        for group in state["groups"]
        for name in _missing(state, group)
        if name != _RATE or rate is not None
    )
    if not _has_several(state):
        names = dict.fromkeys(rate if name == _RATE else name for _, name in pairs)
        return "".join(f", {name}={_UNKNOWN}" for name in names)
    rates = ", ".join(f'"{schema}": {_UNKNOWN}' for schema, name in pairs if name == _RATE)
    others = ", ".join(f'"{schema}/{name}": {_UNKNOWN}' for schema, name in pairs if name != _RATE)
    return f", {rate}={{{rates}}}" * bool(rates) + f", hparams={{{others}}}" * bool(others)


def _kind(state: State, group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns schema and variant of a group."""
    whose = group if "schema" in group else state
    return {"schema": whose["schema"], "variant": whose["variant"]}


def _weights(place: Place, path: Path) -> dict[str, str | None]:
    """Returns what may stand in a line about weights: where in a file of PyTorch, and in which file of a folder."""
    tops = {name.partition("/")[0] for name in place.tensors}
    key = tops.pop() if len(tops) == 1 and any("/" in name for name in place.tensors) else None
    sharded = any(file.endswith(".index.json") for file in place.files)
    file = path if path.suffix == ".safetensors" else path / "model.safetensors"
    return {
        "weights": "checkpoint" if key is None else f'checkpoint["{_quoted(key)}"]',
        "weights_key": _quoted(key or "model"),
        "weights_file": _quoted(file),
        "one_file": None if sharded else "",
        "many_files": "" if sharded else None,
    }


def _construction(place: Place, state: State, schedules: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines that make `optimizer`.

    Args:
        place: Where the checkpoint is.
        state: What it holds.
        schedules: Each group's schedule in Optax, as `ScheduleLines` has it; empty for a run without one.
    """

    def call(group: Mapping[str, Any], code: Mapping[str, str]) -> str:
        alone = {**state, **_kind(state, group), "groups": [group]}
        if place.layout in _data()["own_constructors"]:
            callee = f"{_data()['own_constructors'][place.layout]}.{alone['schema']}"
            arguments = [f"{_RATE}={group['hyperparameters'].get(_RATE) or _UNKNOWN}"]
            arguments += _jax_arguments(alone, group)
        else:
            named = _data()["constructors"].get(alone["schema"], {}).get(alone["variant"])
            callee, arguments = str(named), _native_arguments(alone)[0]
        said = [one for one in arguments if one.partition("=")[0] not in code]
        return f"{callee}({', '.join([*said, *(f'{name}={value}' for name, value in code.items())])})"

    layout = registry.layout(place.layout) if place.layout in registry.layout_names() else None
    numbered = [
        {**group, "number": i, "label": str(i), **(schedules[i] if schedules else _UNSCHEDULED)}
        for i, group in enumerate(state["groups"])
    ]
    groups = [group for group in numbered if group["paths"]]
    if not isinstance(layout, Constructing) or not groups:
        return [f"optimizer = {call({'hyperparameters': {}}, {})}"]
    return layout.construction(state["schema"], groups, place.tensors, place.empty, call, _reading(place))


def _reading(place: Place) -> list[str]:
    """Returns the lines that make `groups` as a checkpoint has them: from its manifest, or as statekit opens it."""
    if _is_converted(place):
        manifest = _quoted(_manifest(place).absolute())
        read = f'groups = json.loads(pathlib.Path("{manifest}").read_text())["state"]["groups"]'
        return ["import json", "import pathlib", read]
    each = '{"paths": group.paths, "hyperparameters": dict(group.hyperparameters)} for group in opened.groups'
    return [
        "import statekit",
        f'with statekit.open("{_quoted(place.path.absolute())}") as opened:',
        f"    groups = [{each}]",
    ]


def _says_arguments(group: Mapping[str, Any]) -> bool:
    """Tells whether anybody said what T5X' own files never say; where nobody did, the run's own gin has it."""
    return any(group["known_from"].get(name) in ("file", "given") for name in _NEVER_IN_T5X)


def _gin(arguments: Iterable[str]) -> Iterator[str]:
    """Yields the lines of gin that give T5X' Adafactor its arguments; its rate comes with each update."""
    for name, _, value in (argument.partition("=") for argument in arguments):
        if name not in (_RATE, "step_offset"):
            yield f"adafactor.Adafactor.{name} = {value}"


def _is_converted(place: Place) -> bool:
    return (
        place.step is not None or _manifest(place).is_file() if place.converted is None else place.converted
    )


def _manifest(place: Place) -> Path:
    """Returns where the manifest lies: in the target's folder, which holds a step's, or is one."""
    beside = [place.path, *place.path.parents[:2]] if place.step is None else [place.path]
    return next((folder / FILE for folder in beside if (folder / FILE).is_file()), place.path / FILE)


def _item(path: Path) -> Path:
    """Returns the item `default` of a step in Orbax, or the step itself where it is there and has none."""
    return path if path.is_dir() and not (path / _DEFAULT).is_dir() else path / _DEFAULT


def _module(constructor: str | None) -> str | None:
    """Returns what has to be imported for a class besides torch, if anything."""
    module = (constructor or "").rpartition(".")[0]
    return None if not module or module.partition(".")[0] == "torch" else module


def _step_path(place: Place, named: str | None) -> Path:
    """Returns the step's own folder or file, which may be the checkpoint itself or lie in it."""
    if named is None or place.step is None:
        return place.path
    name = named.format(step=place.step)
    return place.path if place.path.name == name else place.path / name


def _quoted(path: object) -> str:
    """Returns a path as it stands between double quotes in Python and gin."""
    return json.dumps(str(path))[1:-1]


def _groups(groups: list[Mapping[str, Any]]) -> str:
    if len(groups) == 1:
        return "model.parameters()"
    counts = ", ".join(f'{{"params": group_{i}}}' for i in range(len(groups)))
    return f"[{counts}]"


def _native_arguments(state: State) -> tuple[list[str], list[str]]:
    """Returns arguments of a variant's own class that aren't its defaults, and settings that it doesn't take.

    Where groups differ in one, or it isn't known and the variant has no default, it is left open.
    """
    if state["variant"] is None:
        return [_UNKNOWN], []
    schema = load_schema(state["schema"])
    usual = schema.native(state["variant"], schema.settings(state["variant"]))
    groups = [schema.native(state["variant"], _said(group)) for group in state["groups"]]
    outside = _data()["not_arguments"].get(state["variant"], ())
    arguments: list[str] = []
    others: list[str] = []
    for name in usual:
        values = {json.dumps(group.get(name, usual[name]), default=str) for group in groups}
        value = groups[0].get(name, usual[name]) if groups else usual[name]
        argument = f"{name}={value!r}" if len(values) == 1 else f"{name}={_UNKNOWN}"
        if name in (_RATE, "lr"):
            known = len(values) == 1 and any(_RATE in group["hyperparameters"] for group in state["groups"])
            rate = _data()["open_rate"].get(state["variant"], _UNKNOWN)
            arguments.append(argument if known and value is not None else f"{name}={rate}")
        elif len(values) > 1 or value != usual[name]:
            (others if name in outside else arguments).append(argument)
    return arguments + _needed(state), others


def _said(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group["hyperparameters"].items() if name not in _RULES}


def _needed(state: State) -> list[str]:
    """Returns the arguments whose value nobody has said, although the slots show that they were used."""
    schema = load_schema(state["schema"])
    used = {name for group in state["groups"] for name in _missing(state, group) if name != _RATE}
    native = schema.native(state["variant"], dict.fromkeys(used))
    return [f"{name}={_UNKNOWN}" for name in native]


def _jax_arguments(state: State, group: Mapping[str, Any]) -> Iterator[str]:
    """Yields what an optimizer of statekit.jax has to be told beside its learning rate."""
    variant = state["variant"]
    if variant is None:
        yield f"variant={_UNKNOWN}"
        return
    yield f"variant={json.dumps(variant)}"
    usual = load_schema(state["schema"]).variant(variant)["defaults"]
    if group["hyperparameters"].get("factor_map"):
        yield f"factor_map={group['hyperparameters']['factor_map']!r}"
    for name, value in group["hyperparameters"].items():
        said = name in usual and name not in (*_RULES, _RATE) and not isinstance(value, Mapping)
        if said and value != usual[name]:
            yield f"{name}={value!r}"
    yield from (f"{name}={_UNKNOWN}" for name in _missing(state, group) if name != _RATE)


def _missing(state: State, group: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of what a step needs and nobody has said."""
    known, kind = group["hyperparameters"], _kind(state, group)
    if known.get(_RATE) is None and not known.get("relative_step"):
        yield _RATE
    if kind["schema"] == "adafactor" and kind["variant"]:
        needed = {field.name for field in fields(AdafactorHyperparameters)}
        for name in load_schema(kind["schema"]).variant(kind["variant"])["defaults"]:
            if name in needed and name not in known:
                yield name


def next_update(state: State, schedules: Sequence[Schedule] = ()) -> list[dict[str, Any]]:
    """Returns what the next update of each group will use, as far as the state says.

    Args:
        state: The state.
        schedules: What is known of the run's schedules.

    Returns:
        For each group: its parameters; `learning_rate` (None where whoever steps must give it); `update`, the number
        of updates done; `schedule`, the argument of a learning-rate schedule; and for Adafactor `step_offset` and
        `decay`, the second moment's.
    """
    counts = state["counts"]
    rows = []
    for number, group in enumerate(state["groups"]):
        known, kind = group["hyperparameters"], _kind(state, group)
        row: dict[str, Any] = {
            **({"schema": kind["schema"]} if "schema" in group else {}),
            "parameters": len(group["paths"]),
            "learning_rate": RatesOf(schedules, state).next(number) if schedules else stored_rate(known),
            "update": counts["updates"],
            "schedule": counts["schedule"],
        }
        if kind["schema"] == "adafactor":
            row["step_offset"] = known.get("step_offset")
            row["decay"] = _decay(kind["variant"], counts["updates"], known)
        rows.append(row)
    return rows


def _decay(variant: str | None, updates: int, known: Mapping[str, Any]) -> float | None:
    offset, rate = known.get("step_offset"), known.get("decay_rate")
    if variant != "t5x" or offset is None or rate is None or updates < offset:
        return None
    return next_decay(updates, offset, rate)


def _model_keys(tensors: Iterable[str], paths: Sequence[str]) -> str | None:
    """Returns the keys of a file's model, as `["model"]`; None where no tensor's name tells.

    Args:
        tensors: Names of the file's tensors.
        paths: Some of its parameters.
    """
    ends = tuple("/" + path.replace("/", ".") for path in paths)
    places = (name.removesuffix(end) for name in tensors for end in ends if name.endswith(end))
    return next((_subscripts(place) for place in places if "/state" not in place), None)


def _optimizer_keys(tensors: Iterable[str]) -> str | None:
    """Returns the keys of a file's optimizer, as `["optimizer"]`; None where no tensor's name tells.

    Args:
        tensors: Names of the file's tensors.
    """
    return next(iter(_keys_of_optimizers(tensors)), None)


def _keys_of_optimizers(tensors: Iterable[str]) -> list[str]:
    """Returns the keys of each of a file's optimizers, as `["optimizers"][0]`, in its order.

    Args:
        tensors: Names of the file's tensors.
    """
    places = (name.partition(mark)[0] for name in tensors for mark in _STATE if mark in name)
    return [_subscripts(place) for place in dict.fromkeys(places)]


def _subscripts(place: str) -> str:
    """Returns keys joined by `/` as Python's subscripts: `["optimizer"][0]`."""
    return "".join(f"[{key if key.isdecimal() else json.dumps(key)}]" for key in place.split("/"))
