"""How a universal checkpoint is written: the whole tensors of each parameter, in files of their own, for any ranks.

    <run>/latest_universal                              the name of the newest tag
    <run>/global_step4_universal/mp_rank_00_model_states.pt                  the model, client state; for ZeRO 1 and 2
                                 zero_pp_rank_0_mp_rank_00_model_states.pt   the same without the model; for ZeRO 3
                                 zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt
                                 zero/optimizer_state.pt                     the groups, loss scaler, count for ZeRO 3

DeepSpeed takes the weights from `zero/`, whatever the model's file says, and cuts them by its own configuration.
Source: deepspeedai/DeepSpeed deepspeed/runtime/engine.py, `_load_checkpoint`, `_get_all_ckpt_names`;
deepspeed/checkpoint/universal_checkpoint.py, `load_hp_checkpoint_state`; runtime/base_optimizer.py,
`load_hp_checkpoint_state_from_checkpoint_dir`; runtime/zero/stage3.py,
`load_hp_checkpoint_state_from_checkpoint_dir_stage3`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from statekit.budget import Account
from statekit.conversion.contracts import Encoded
from statekit.converters.containers.deepspeed.experts import is_of_expert
from statekit.converters.containers.deepspeed.files import (
    ENGINE,
    FIRST_STEPS,
    LATEST,
    MASTER,
    SLICES,
    TAKEN,
    UNIVERSAL,
)
from statekit.converters.containers.deepspeed.joins import INFO, SUB_PARAMS, Joins
from statekit.converters.containers.part_places import moved_to
from statekit.converters.containers.step_folders import is_file_name, step_prefix
from statekit.converters.formats.pytorch.writer import write_archive
from statekit.errors import Faults, UsageError
from statekit.files.stage import Stage
from statekit.tensors.digest import tensor_bytes
from statekit.tensors.tensor import Tensor, ties_of
from statekit.tensors.tree import Record, Tree, at, without

_MODELS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_FOLDER = "global_step{step}_universal"
_VERSION = "0.19.8"
"""The release of DeepSpeed whose form this is; it refuses a file that says none."""
_STEP, _PARTS, _ENGINE = "step", ("model", "optimizer"), "deepspeed"
_SCHEDULER = "lr_scheduler"
_SCALER, _CLASS = "loss_scaler", "class"
_SCALERS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
)
"""The objects of DeepSpeed that scale a loss: what they hold are numbers."""
_EXPERTS = (
    "DeepSpeed loads the experts right with ep_size 1; with more, each rank takes the first experts of a layer,"
    " whichever are its own."
)
_CONSTRUCTIBLE = (*_SCALERS, SUB_PARAMS)
_Stream: TypeAlias = Callable[[str, Tensor], Iterable[memoryview]]


def fitted_to_engine(encoded: Encoded) -> Encoded:
    """Returns a run with model, optimizer and schedule under DeepSpeed's keys, and with the counts of its engine.

    Args:
        encoded: As a layout made it: where the source had its parts.
    """
    if not isinstance(encoded.tree, Mapping):
        return encoded
    encoded = moved_to(encoded, {"model": "model", "optimizer": "optimizer", "scheduler": _SCHEDULER})
    if any(map(is_of_expert, at(encoded.tree, ("model",)) or ())) and _EXPERTS not in encoded.assumptions:
        encoded = replace(encoded, assumptions=(*encoded.assumptions, _EXPERTS))
    if isinstance(engine := encoded.tree.get(_ENGINE), Mapping):
        # The model's file is one, and DeepSpeed compares it with the count of slices: state_dict_factory.py.
        encoded = replace(encoded, tree={**encoded.tree, _ENGINE: {**engine, SLICES: 1}})
        return _counted(_without_scaler(encoded))
    assumed = (
        f"The source isn't a run of DeepSpeed: the engine's count is {encoded.step} steps, of which none was skipped;"
        " it takes its samples from its own batch size."
    )
    counts = {"global_steps": encoded.step, "skipped_steps": 0, "dp_world_size": 1, SLICES: 1}
    tree = {**encoded.tree, _ENGINE: {**counts, "ds_version": _VERSION}}
    return replace(encoded, tree=tree, assumptions=(*encoded.assumptions, assumed))


def _counted(encoded: Encoded) -> Encoded:
    """Returns a run whose engine counts as its optimizer does: all updates, and those that were skipped."""
    engine = encoded.tree[_ENGINE]
    steps, skipped = engine.get("global_steps"), engine.get("skipped_steps") or 0
    updates = None if type(steps) is not int else steps - skipped + (engine.get(FIRST_STEPS) or 0)
    if encoded.step in (updates, steps):
        return replace(encoded, step=steps)
    counted = {key: value for key, value in engine.items() if key != FIRST_STEPS}
    counted |= {"global_steps": encoded.step, "skipped_steps": 0}
    assumed = f"The engine's count is the optimizer's, {encoded.step}; the source's is {steps}."
    return replace(
        encoded, tree={**encoded.tree, _ENGINE: counted}, assumptions=(*encoded.assumptions, assumed)
    )


def _without_scaler(encoded: Encoded) -> Encoded:
    """Returns a run without a loss scaler that holds more than numbers, and says so."""
    scaler = encoded.tree[_ENGINE].get(_SCALER)
    if scaler is None or _scaler_of(scaler) is not None:
        return encoded
    why = "the loss scaler holds more than numbers; DeepSpeed begins with its configuration's"
    place = (_ENGINE, _SCALER)
    return replace(
        encoded,
        tree=without(encoded.tree, place),
        dropped={**encoded.dropped, f"extra/torch/{'/'.join(place)}": why},
    )


def _scaler_of(node: Any) -> Record | None:
    """Returns a loss scaler as DeepSpeed's object; None if it is no plain one."""
    if not isinstance(node, Mapping) or node.get(_CLASS) not in _SCALERS:
        return None
    state = {key: value for key, value in node.items() if key != _CLASS}
    numbers = all(value is None or isinstance(value, (bool, int, float)) for value in state.values())
    return Record(str(node[_CLASS]), (), state) if numbers else None


def write_universal(encoded: Encoded, stage: Stage) -> None:
    """Writes a tree of this container as a universal checkpoint, and its name beside it where the target is a run's.

    Raises:
        UsageError: The tree isn't one of this container's, or the target is named for another step.
    """
    tree = _checked(encoded.tree, stage)
    engine = dict(tree[_ENGINE])
    number = engine.get("global_steps")
    prefix = step_prefix(
        stage.target, number if type(number) is int and number >= 0 else encoded.step, _FOLDER
    )
    _write_models(tree, engine, prefix, stage)
    info = tree.get(INFO)
    joins = Joins(info if isinstance(info, Mapping) else {}, f"{stage.target}", Account())
    for name, record in tree["optimizer"]["state"].items():
        cut = joins.record(name, record[MASTER].shape)
        for key, value in record.items():
            place = f"optimizer/state/{name}/{key}"
            node = value if key == _STEP else {**cut, "param": value}
            _write(stage, f"{prefix}{UNIVERSAL}/{name}/{key}.pt", node, partial(_under, stage, place))
    _write_optimizer(tree["optimizer"], engine, prefix, stage)
    if prefix:
        with stage.file(LATEST[1]) as file:
            file.write(prefix.rstrip("/").encode())


def _checked(tree: Any, stage: Stage) -> dict[str, Any]:
    """Returns a tree that DeepSpeed's engine can take."""
    optimizer = tree.get("optimizer") if isinstance(tree, Mapping) else None
    if not isinstance(optimizer, Mapping) or not {"model", _ENGINE} <= tree.keys():
        raise UsageError(
            "A universal checkpoint holds a model and its optimizer by name, as the layout deepspeed writes them.",
            place=stage.target,
            found=", ".join(map(str, tree)) if isinstance(tree, Mapping) else type(tree).__name__,
            remedy="leave --layout out",
        )
    faults = Faults(_weight_faults(tree["model"], optimizer["state"]))
    faults += _key_faults(tree, optimizer)
    faults.check(UsageError, "A universal checkpoint can't hold this", place=stage.target)
    return dict(tree)


def _weight_faults(
    model: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the weights that the optimizer moves."""
    for name, record in state.items():
        param, master = model.get(name), record.get(MASTER)
        if param is None or master is None:
            yield f"has no {MASTER if master is None else 'place in the model'}", name
        elif param.shape != master.shape:
            yield f"is of shape {param.shape}, and its {MASTER} of {master.shape}", name
        if not is_file_name(name):
            yield "has a name that no folder can have", name


def _key_faults(tree: Mapping[str, Any], optimizer: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what is in the tree that DeepSpeed has no place for, and what groups say of other parameters."""
    for name, record in optimizer["state"].items():
        others = (key for key, value in record.items() if key != _STEP and not isinstance(value, Tensor))
        yield from (("is no tensor", f"{key} of {name}") for key in others)
    moved = {name for group in optimizer["param_groups"] for name in group["params"]}
    yield from (("is in no group, or has no state", name) for name in moved ^ optimizer["state"].keys())
    for number, group in enumerate(optimizer["param_groups"]):
        if {*map(is_of_expert, group["params"])} == {True, False}:
            yield (
                "has experts beside others, and DeepSpeed moves them in groups of their own",
                f"group {number}",
            )
    taken = ENGINE | TAKEN - {"optimizer"}
    yield from (("is a key of DeepSpeed's own", f"{key}") for key in tree.keys() & taken)


def _write_models(tree: Mapping[str, Any], engine: dict[str, Any], prefix: str, stage: Stage) -> None:
    """Writes what the engine reads first, under the names that it looks for in either stage; takes it from `engine`."""
    state, model = tree["optimizer"]["state"], tree["model"]
    of_model = {key: engine.pop(key) for key in [*engine] if key in ENGINE}
    rest = {
        **{key: part for key, part in tree.items() if key not in (*_PARTS, _ENGINE)},
        **of_model,
        "optimizer": None,
        "param_shapes": [
            {name: state[name][MASTER].shape for name in group["params"]}
            for group in tree["optimizer"]["param_groups"]
        ],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {
            name: owner for name, owner in ties_of(model, [*state]).items() if name not in state
        },
    }
    rest = {_SCHEDULER: None, "ds_version": _VERSION, **rest}

    def stream(name: str, tensor: Tensor) -> Iterable[memoryview]:
        top = name.partition("/")[0]
        below = "model" + name.removeprefix("module") if top == "module" else name
        return stage.stream(f"{_ENGINE}/{name}" if top in ENGINE else below, tensor)

    _write(stage, prefix + _MODELS[0], {"module": model, **rest}, stream)
    _write(stage, prefix + _MODELS[1], {"module": {}, **rest}, _again)


def _write_optimizer(optimizer: Mapping[str, Any], engine: dict[str, Any], prefix: str, stage: Stage) -> None:
    """Writes what all parameters share: the groups, the rest of the engine's state, and for ZeRO 3 the count."""
    if (scaler := _scaler_of(engine.get(_SCALER))) is not None:
        engine[_SCALER] = scaler
    groups = [{**group, "params": [i]} for i, group in enumerate(optimizer["param_groups"])]
    step = next((record[_STEP] for record in optimizer["state"].values() if _STEP in record), None)
    base = {"state": {} if step is None else {0: {_STEP: step}}, "param_groups": groups}
    tensors = {"optimizer_state_dict", "param_groups"}  # which lie elsewhere in the tree, too

    def stream(name: str, tensor: Tensor) -> Iterable[memoryview]:
        if name.partition("/")[0] in tensors:
            return _again(name, tensor)
        return stage.stream(f"{_ENGINE}/{name}", tensor)

    rest = {"ds_version": _VERSION, **engine, "optimizer_state_dict": base, "param_groups": groups}
    _write(stage, f"{prefix}{UNIVERSAL}/optimizer_state.pt", rest, stream)


def _write(stage: Stage, file: str, tree: Tree, stream: _Stream) -> None:
    with stage.file(file) as output:
        write_archive(tree, output, stream, classes=_CONSTRUCTIBLE)


def _under(stage: Stage, place: str, name: str, tensor: Tensor) -> Iterable[memoryview]:
    return stage.stream(place, tensor)


def _again(name: str, tensor: Tensor) -> Iterable[memoryview]:
    """Gives the bytes of a tensor that stands in another file too, which has the name in the tree."""
    return tensor_bytes(tensor)
