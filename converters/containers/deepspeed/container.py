"""Container `deepspeed`: checkpoints of DeepSpeed with ZeRO 1, 2 and 3, and universal ones, which it writes.

It puts whole parameters together, when they are read, of what the ranks hold. Input: a step's folder, or a run's.
Output: the tree of other PyTorch checkpoints:

    model               parameters and buffers by name, in the model's own dtype
    optimizer           state by name: what the optimizer keeps, and `fp32`, the weight that it moves; param_groups
    lr_scheduler, ...   client state, as it was given to save_checkpoint
    deepspeed           what the engine keeps besides: steps, loss scaler, configuration

Under ZeRO-3 the model isn't stored: its parameters are the float32 weights, rounded to the model's dtype.
Source: deepspeedai/DeepSpeed deepspeed/runtime/engine.py, `_save_checkpoint`, `_save_zero_checkpoint`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from statekit.budget import Budget
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.containers.deepspeed.experts import check_experts, check_names, own_experts, spread
from statekit.converters.containers.deepspeed.files import (
    ENGINE,
    FIRST_STEPS,
    MASTER,
    SLICES,
    TAKEN,
    Slice,
    Tag,
    complete,
    locate,
    open_file,
    require,
)
from statekit.converters.containers.deepspeed.joins import INFO, Joins
from statekit.converters.containers.deepspeed.slices import (
    Sliced,
    findings_of,
    joined_slices,
    pipeline_model,
    rounded_weights,
    stage_modules,
)
from statekit.converters.containers.deepspeed.universal import universal_state
from statekit.converters.containers.deepspeed.universal_writer import fitted_to_engine, write_universal
from statekit.converters.containers.deepspeed.zero import Part, Shapes, by_group, joined, part_of
from statekit.converters.formats.pytorch.one_step import check_one_step
from statekit.converters.formats.pytorch.reader import named
from statekit.errors import CorruptError, FormatError, NotFoundError, RefusedError, StatekitError, some
from statekit.files.checkpoint import STEPS, Checkpoint, Finding
from statekit.files.source import Files, opening, read_small
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.tensors.tensor import Cast, Shape, Tensor
from statekit.tensors.tree import Record, Tree, holds_records, loose_json, to_json
from statekit.tensors.views import Concatenated, Segment

_OPTIMIZER_TAKEN = {
    "base_optimizer_state", "optimizer_state_dict", "single_partition_of_fp32_groups", "fp32_flat_groups",
    "param_slice_mappings", "param_groups",
}  # fmt: skip
_ALIKE = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", SLICES)
_ALIKE_IN_SLICE = ("param_shapes", "frozen_param_shapes", "shared_params", "buffer_names")
"""What the engine writes alike into every file of the model."""
_SHARED = "shared_params"
_STAGE = "zero_stage"


@dataclass(frozen=True)
class DeepSpeedFolder:
    """Folders of DeepSpeed."""

    name: str = "deepspeed"
    title: str = "DeepSpeed: global_step<step> folders of ZeRO 1, 2 and 3, and universal checkpoints"
    suffixes: tuple[str, ...] = ()
    target_kind: Literal["file", "folder"] | None = "folder"
    entries: tuple[str, ...] = ("latest_universal",)
    other_names: tuple[str, ...] = ("deepspeed-universal",)

    def detect(self, path: Place) -> Evidence | None:
        """Looks at file names, and at the name in `latest`."""
        try:
            folder = locate(path)
        except (CorruptError, RefusedError) as error:  # it is one, and opening it says why not
            return Evidence(20, error.subject)
        except (StatekitError, OSError):
            return None
        if folder is None:
            return None
        model = next(iter(folder.tag.slices[0].models.values()), folder.tag.path)
        return Evidence(20, f"{folder.tag.path} has {model.name}")

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Parses the pickles of all ranks, and says where each parameter's values are."""
        findings: list[Finding] = []
        with opening(path, budget) as files:
            folder = locate(path, step, files)
            if folder is None:
                raise NotFoundError(
                    "The folder has no checkpoint of DeepSpeed.", place=path, remedy="check the path"
                )
            tree = named(_tree(folder.tag, files, findings))
        number = tree["deepspeed"].get("global_steps")
        meta = {
            "zero_stage": tree["deepspeed"].get(_STAGE),
            "universal": folder.tag.universal,
            "ranks": sum(len(slice_.optimizers) for slice_ in folder.tag.slices),
            STEPS: list(folder.steps),
        }
        number = number if type(number) is int and number >= 0 else None
        return Checkpoint(
            self.name, folder.tag.path, tree, meta, number, findings=tuple(findings), on_close=files.close
        )

    def fitted(self, encoded: Encoded) -> Encoded:
        """Returns a run with its parts where DeepSpeed has them, and with what its engine asks for."""
        return fitted_to_engine(encoded)

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes a universal checkpoint, which DeepSpeed cuts by its own configuration when it loads it."""
        write_universal(fitted_to_engine(encoded), stage)


def _tree(tag: Tag, files: Files, findings: list[Finding]) -> dict[str, Tree]:
    models = [
        [_model_file(path, bool(tag.layers), files, findings) for _, path in sorted(slice_.models.items())]
        for slice_ in tag.slices
    ]
    _check_engines(tag, models)
    first, place = models[0][0], f"{tag.path}"
    trainers = beside_tag(tag.path.parent, files)
    joins = Joins(require(first.get(INFO) or {}, dict, "patterns", place), place, files.account)
    layers = {key: _tensors(open_file(path, files, findings), path) for key, path in tag.layers.items()}
    if tag.universal:
        buffers = {*_buffer_names(first, place)}
        whole = _universal(tag, models, buffers, files, findings)
    else:
        whole = _joined(tag, models, layers, joins, files, findings)
    if layers:
        model = pipeline_model(layers, whole.state, joins)
        if lost := [name for name in whole.state if name not in model]:
            raise CorruptError(
                "The optimizer moves what no file of a layer has.", place=place, found=some(lost)
            )
        whole = replace(whole, model=rounded_weights(whole.state, model))
    return {
        **trainers,
        **_client_state(first),
        "model": dict(whole.model),
        "optimizer": whole.optimizer,
        "deepspeed": {
            **_engine_state(first),
            **{key: _plain(value) for key, value in whole.engine.items()},
            _STAGE: _stage(whole.engine.get(_STAGE)),
            **_apart([model for of_slice in models for model in of_slice]),
        },
    }


def _check_engines(tag: Tag, models: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Refuses a model's file that has made other steps than the first, or has another model than its slice's first.

    ZeRO-3 has a file for each rank, and the first alone says what parameters share.
    Source: deepspeedai/DeepSpeed deepspeed/runtime/engine.py, `_get_shared_params`.
    """
    for slice_, of_slice in zip(tag.slices, models, strict=True):
        of_ranks = [{key: model.get(key) for key in _ALIKE_IN_SLICE} for model in of_slice]
        shared = of_ranks[0][_SHARED]
        of_ranks = [{**of_rank, _SHARED: of_rank[_SHARED] or shared} for of_rank in of_ranks]
        places = [path for _, path in sorted(slice_.models.items())]
        check_one_step([*zip(places, of_ranks, strict=True)])
    paths = [path for slice_ in tag.slices for _, path in sorted(slice_.models.items())]
    of_engines = [{key: model.get(key) for key in _ALIKE} for of_slice in models for model in of_slice]
    check_one_step([*zip(paths, of_engines, strict=True)])


def _joined(
    tag: Tag,
    models: list[list[dict[str, Any]]],
    layers: Mapping[tuple[int, int], Mapping[str, Tensor]],
    joins: Joins,
    files: Files,
    findings: list[Finding],
) -> Sliced:
    """Returns what all slices of the model hold together."""
    first = models[0][0]
    _check_slices(first, tag)
    stages = _stages(first, tag)
    if len(tag.slices) > max(stages, 1):
        joins.check()
    buffers = {name for of_slice in models for name in _buffer_names(of_slice[0], joins.place)}
    if layers and first.get("param_shapes") is None:  # without ZeRO nothing names a stage's parameters
        counts = [_moved(of_slice[0], joins.place) for of_slice in models]
        for of_slice, module in zip(models, stage_modules(layers, counts, buffers), strict=True):
            of_slice[0]["module"] = module
    slices = [
        part for pair in zip(tag.slices, models, strict=True) for part in _sliced(tag, *pair, files, findings)
    ]
    stages = len(slices) if tag.experts.weights else stages
    whole = joined_slices(slices, stages, buffers, joins, findings)
    findings += findings_of(whole, joins, len(slices) // stages)
    return whole


def _moved(model: Mapping[str, Any], place: str) -> int:
    """Returns how many parameters the optimizer of a run without ZeRO moves."""
    wrapper = require(model.get("optimizer"), dict, "an optimizer", place)
    optimizer = require(wrapper.get("optimizer_state_dict", wrapper), dict, "an optimizer", place)
    groups = require(optimizer.get("param_groups"), list, "param_groups", place)
    lists = [require(group, dict, "a group", place).get("params") for group in groups]
    return sum(len(require(numbers, (list, tuple), "a list", place)) for numbers in lists)


def _check_slices(first: Mapping[str, Any], tag: Tag) -> None:
    """Refuses a folder that has fewer slices of the model than the run had: the last ones leave no gap in the names.

    Source: deepspeedai/DeepSpeed deepspeed/runtime/engine.py, `_save_checkpoint`.
    """
    count = first.get(SLICES)
    if type(count) is int and count > len(tag.slices):
        raise CorruptError(
            "A DeepSpeed checkpoint lacks a slice of the model.",
            place=tag.path,
            expected=f"files of {count} slices, as {SLICES} says",
            found=f"those of {len(tag.slices)}",
            remedy="copy what every machine of the run wrote into one folder",
        )


def _stages(first: Mapping[str, Any], tag: Tag) -> int:
    """Returns how many stages a pipeline has: as its file says, or as its files of layers have ranks."""
    degrees = first.get("checkpoint_parallel_dimensions")
    stages = degrees.get("pp_degree") if isinstance(degrees, Mapping) else None
    if type(stages) is int:
        return stages
    return len(tag.slices) // len({rank for _, rank in tag.layers}) if tag.layers else 1


def _sliced(
    tag: Tag, slice_: Slice, models: list[dict[str, Any]], files: Files, findings: list[Finding]
) -> list[Sliced]:
    """Returns what a slice of the model holds; without ZeRO, what each rank with other experts holds of it."""
    first, place = models[0], f"{next(iter(slice_.models.values()))}"
    check_experts(tag.experts, first, f"{tag.path}")
    experts = {
        key: _tensors(open_file(path, files, findings), path) for key, path in tag.experts.weights.items()
    }
    for key, weights in experts.items():
        check_names(key[1], weights, tag.experts.weights[key])
    if first.get("param_shapes") is None and isinstance(first.get("optimizer"), dict):
        whole = [_unsharded(first, place, not tag.layers and len(tag.slices) == 1)] if not experts else None
        return whole or _unsharded_experts(tag, first, experts, files, findings)
    of_files = _shapes(first.get("param_shapes"), place)
    shapes, state, engine, parts = _ranked(tag, slice_, first, of_files, files, findings)
    groups = parts[0].groups
    _check_groups(groups, shapes, place)
    for of_expert in experts.values():
        first["module"] |= of_expert
    model = {} if tag.layers else _model(models, state, shapes, _stage(engine.get(_STAGE)), place)
    return [Sliced(model, state, groups, [list(group) for group in shapes], engine, parts)]


def _unsharded_experts(
    tag: Tag,
    first: Mapping[str, Any],
    experts: Mapping[tuple[int, int], Mapping[str, Tensor]],
    files: Files,
    findings: list[Finding],
) -> list[Sliced]:
    """Returns what each rank of a run without ZeRO holds: all other parameters, and its own experts."""
    if not tag.experts.optimizers:
        raise CorruptError(
            "A DeepSpeed checkpoint lacks the optimizers of experts.",
            place=tag.path,
            expected="expp_rank_<r>_mp_rank_00_optim_states.pt",
            remedy="copy what every machine of the run wrote into one folder",
        )
    ranks = max(tag.experts.optimizers) + 1
    paths, slices = complete(tag.experts.optimizers, ranks, "optimizers of experts"), []
    for rank, path in enumerate(paths):
        tree = require(open_file(path, files, findings), dict, "a dict with optimizer", path)
        optimizer = require(tree.get("optimizer"), dict, "an optimizer", path)
        module = {**first["module"], **own_experts(experts, rank, ranks, f"{tag.path}")}
        slices.append(_unsharded({**first, "module": module, "optimizer": optimizer}, f"{path}"))
    check_one_step(
        [(part.place, {"param_groups": part.options}) for slice_ in slices for part in slice_.ranks]
    )
    return slices


def _universal(
    tag: Tag, models: list[list[dict[str, Any]]], buffers: set[str], files: Files, findings: list[Finding]
) -> Sliced:
    """Returns what a universal checkpoint holds, in which each parameter is whole, however many slices wrote it."""
    place, first = f"{tag.path}", models[0][0]
    shapes = _united([_shapes(of_slice[0].get("param_shapes"), place) for of_slice in models])
    state, groups, engine = universal_state(tag.path, shapes, len(models) > 1, files, findings)
    _check_groups(groups, shapes, place)
    names = [list(group) for group in shapes]
    if len(models) == 1 and all(
        state[name][MASTER].shape == s for group in shapes for name, s in group.items()
    ):
        return Sliced(
            _model(models[0], state, shapes, _stage(engine.get(_STAGE)), place), state, groups, names, engine
        )
    moved = {name: tensor for name, tensor in first["module"].items() if name in state or name in buffers}
    if lost := [name for name in first["module"] if name not in moved]:
        findings.append(Finding(f"aren't read, as ranks hold pieces of them: {', '.join(lost[:5])}", place))
    return Sliced(rounded_weights(state, moved), state, groups, names, engine)


def _united(of_slices: Sequence[Shapes]) -> Shapes:
    """Returns the parameters of all slices by group, with the shapes that one of their ranks has."""
    return [
        {name: shape for shapes in of_slices for name, shape in shapes[number].items()}
        for number in range(min(map(len, of_slices)))
    ]


def _check_groups(groups: Sequence[Any], shapes: Shapes, place: str) -> None:
    if len(groups) != len(shapes):
        raise CorruptError(
            "The optimizer has other groups than the model.",
            place=place,
            expected=len(shapes),
            found=len(groups),
        )


def _unsharded(first: Mapping[str, Any], place: str, is_whole: bool = False) -> Sliced:
    """Returns what a run without ZeRO holds, whose optimizer lies in the model's file and only numbers its parameters.

    Args:
        first: What the model's file holds.
        place: For messages.
        is_whole: Whether it is all of the model: then parameters in another order than the model's keep their numbers,
            and a layout finds their names.

    A model of lower precision has masters in a wrapper, which makes a first step with gradients of zero: the
    optimizer's count is one ahead of the run's.
    Source: deepspeedai/DeepSpeed deepspeed/runtime/fp16/unfused_optimizer.py, `initialize_optimizer_states`.
    """
    wrapper = first["optimizer"]
    optimizer = require(wrapper.get("optimizer_state_dict", wrapper), dict, "an optimizer", place)
    groups = require(optimizer.get("param_groups"), list, "param_groups", place)
    records = require(optimizer.get("state"), dict, "state", place)
    module, names = first["module"], _parameter_names(first)
    numbers, masters = _numbered(groups, wrapper, records, place)
    weights = dict(zip(numbers, masters or [module[name] for name in names], strict=False))
    in_order = _fits_in_order(names, numbers, module, weights, records)
    numbered = is_whole and len({*numbers}) == len(numbers) and len(masters) in (0, len(numbers))
    if not in_order and not numbered:
        raise FormatError(
            "The optimizer of a run without ZeRO only numbers its parameters, and they aren't those of the model in its"
            " order.",
            place=place,
            expected=f"{len(names)} parameters",
            found=f"{len(numbers)} in {len(groups)} groups",
            remedy="make a universal checkpoint, or save the run with ZeRO 1, which names them",
        )
    name_of: dict[Any, Any] = dict(zip(numbers, names if in_order else numbers, strict=True))
    weights = weights if in_order or masters else {}
    ahead = {FIRST_STEPS: 1} if masters else {}
    return Sliced(
        dict(module),
        {name_of[i]: {**records.get(i, {}), **({MASTER: weights[i]} if weights else {})} for i in numbers},
        groups,
        [[name_of[i] for i in group["params"]] for group in groups],
        {_STAGE: 0, **ahead},
        [Part((), (), groups, None, {}, place)],
    )


def _numbered(
    groups: Sequence[Any], wrapper: Mapping[str, Any], records: Mapping[Any, Any], place: str
) -> tuple[list[int], list[Tensor]]:
    """Returns the numbers of the parameters in all groups, and the wrapper's weights in the same order."""
    lists = [require(group, dict, "a group", place).get("params") for group in groups]
    lists += require(wrapper.get("fp32_groups") or [], (list, tuple), "groups of weights", place)
    whose = [require(items, (list, tuple), "a list", place) for items in lists]
    numbers = [
        require(i, int, "a parameter's number", place) for items in whose[: len(groups)] for i in items
    ]
    masters = [require(item, Tensor, "a weight", place) for items in whose[len(groups) :] for item in items]
    for slots in records.values():
        require(slots, dict, "a parameter's slots", place)
    return numbers, masters


def _parameter_names(first: Mapping[str, Any]) -> list[str]:
    """Returns the names of a module's parameters in its order: without buffers, tied names and what is kept beside."""
    others = {*(first.get(_SHARED) or {}), *(first.get("buffer_names") or ())}
    return [name for name in first["module"] if name not in others and not _is_extra(name)]


def _is_extra(name: str) -> bool:
    """Tells whether it is what a module keeps beside its parameters and buffers, of any form.

    Source: pytorch/pytorch torch/nn/modules/module.py, `_EXTRA_STATE_KEY_SUFFIX`.
    """
    return name.rpartition(".")[2] == "_extra_state"


def _engine_state(first: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in first.items() if key in ENGINE}


def _client_state(first: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in first.items() if key not in ENGINE | TAKEN and value is not None}


def _fits_in_order(
    names: Sequence[str],
    numbers: Sequence[Any],
    module: Mapping[str, Any],
    weights: Mapping[Any, Any],
    records: Mapping[Any, Any],
) -> bool:
    """Tells whether numbered weights and their slots have the shapes of a module's parameters, in its order."""
    slots = {
        i: [slot for slot in records.get(i, {}).values() if isinstance(slot, Tensor) and slot.shape]
        for i in numbers
    }
    return len(numbers) == len(names) == len(weights) and all(
        weights[i].shape == module[name].shape == tensor.shape
        for i, name in zip(numbers, names, strict=True)
        for tensor in slots[i] or [weights[i]]
    )


def _model_file(path: Place, has_layers: bool, files: Files, findings: list[Finding]) -> dict[str, Any]:
    tree = require(open_file(path, files, findings), dict, "a dict with module", path)
    module = {} if has_layers and tree.get("module") is None else tree.get("module")
    for key in ("frozen_param_shapes", "frozen_param_fragments", _SHARED):
        require(tree.get(key) or {}, dict, f"{key} by name", path)
    for name in (*_buffer_names(tree, path), *(tree.get(_SHARED) or {}).values()):
        require(name, str, "names of tensors", path)
    return {**{str(key): value for key, value in tree.items()}, "module": _tensors(module, path)}


def _buffer_names(model: Mapping[str, Any], place: object) -> Sequence[Any]:
    names: Sequence[Any] = require(model.get("buffer_names") or [], (list, tuple), "names of buffers", place)
    return names


def _tensors(node: Any, path: Place) -> dict[str, Tensor]:
    """Returns a model's tensors by name."""
    for name, tensor in require(node, dict, "the state of a model", path).items():
        if not isinstance(tensor, Tensor):
            raise FormatError("A model holds something else than tensors.", place=f"{name} in {path}")
    return {str(name): tensor for name, tensor in node.items()}


def _shapes(node: Any, place: str) -> Shapes:
    if isinstance(node, dict):  # an early DeepSpeed, with one group
        node = [node]
    return [
        {
            str(name): _shape(shape, place)
            for name, shape in require(group, dict, "shapes by name", place).items()
        }
        for group in require(node, list, "param_shapes", place)
    ]


def _shape(node: Any, place: str) -> Shape:
    if not isinstance(node, (tuple, list)) or any(type(n) is not int or n < 0 for n in node):
        raise FormatError("A parameter's shape is invalid.", place=place, found=str(node)[:80])
    return tuple(node)


def _ranked(
    tag: Tag, slice_: Slice, model: Mapping[str, Any], shapes: Shapes, files: Files, findings: list[Finding]
) -> tuple[Shapes, dict[str, dict[str, Any]], dict[str, Tree], list[Part]]:
    """Returns the whole model's parameters, their state by name, what the engine keeps beside, and the ranks' parts."""
    if not slice_.optimizers:
        raise FormatError(
            "A DeepSpeed checkpoint has no optimizer's state.",
            place=tag.path,
            expected="zero_pp_rank_<n>_mp_rank_00_optim_states.pt",
            remedy="copy the files of all ranks; without ZeRO, convert the model's file with --from torch",
        )
    ranks = model.get("dp_world_size")
    paths = complete(slice_.optimizers, ranks if type(ranks) is int else len(slice_.optimizers), "optimizer")
    trees = [open_file(path, files, findings) for path in paths]
    parts = [part_of(tree, f"{path}") for tree, path in zip(trees, paths, strict=True)]
    optimizer = trees[0]["optimizer_state_dict"]
    engine = {str(key): value for key, value in optimizer.items() if key not in _OPTIMIZER_TAKEN}
    stage = _stage(optimizer.get(_STAGE))
    counts = optimizer.get("partition_count")
    if tag.experts.weights:
        by_rank = spread(shapes, counts, len(parts), model.get("ds_config"), f"{tag.path}")
        return by_rank.whole, by_rank.joined(parts, stage), engine, parts
    for count in counts if isinstance(counts, list) else ():
        complete(slice_.optimizers, count if type(count) is int else len(parts), "optimizer")
    return by_group(shapes, parts[0]), joined(parts, shapes, stage), engine, parts


def _stage(node: Any) -> int:
    """Returns ZeRO's stage, which is a number or an enumeration's member."""
    value = node.args[0] if isinstance(node, Record) and len(node.args) == 1 else node
    return value if type(value) is int else 0


def _plain(node: Any) -> Tree:
    """Returns what an object of DeepSpeed's holds, such as a loss scaler, with the name of its class."""
    if isinstance(node, Record) and isinstance(node.state, Mapping):
        return {"class": node.name, **node.state}
    return node


def _model(
    models: list[dict[str, Any]], state: Mapping[str, Any], shapes: Shapes, stage: int, place: str
) -> dict[str, Tree]:
    """Returns the model's tensors; those that ranks hold in parts are put together."""
    first = models[0]
    others = {*_buffer_names(first, place), *filter(_is_extra, first["module"])}
    shape_of = {name: shape for group in shapes for name, shape in group.items()}
    frozen = first.get("frozen_param_shapes") or {}
    shared = first.get(_SHARED) or {}
    weights: dict[str, Tree] = {}
    for name, tensor in first["module"].items():
        owner = shared.get(name, name)
        if owner in shape_of:
            weights[name] = _weight(tensor, state[owner][MASTER], shape_of[owner], f"{name} in {place}")
        elif owner in frozen and tensor.shape == (0,):
            weights[name] = _frozen(models, owner, _shape(frozen[owner], place), place)
        elif stage == 3 and tensor.shape == (0,) and name not in others:
            raise CorruptError(
                "Nothing says what ranks hold of a parameter, which ZeRO 3 cut.",
                place=f"{name} in {place}",
                expected="it in param_shapes, frozen_param_shapes or shared_params",
            )
        else:
            weights[name] = tensor
    lost = [name for name in shape_of if name not in weights]
    if lost:
        raise CorruptError(
            "The optimizer moves what the model hasn't.", place=place, found=", ".join(lost[:5])
        )
    return weights


def _weight(tensor: Tensor, master: Tensor, shape: Shape, place: str) -> Tensor:
    if tensor.shape == shape:
        return tensor
    if tensor.shape != (0,):  # that is what ZeRO-3 leaves of a parameter
        raise CorruptError(
            "A parameter has another shape than it had.", place=place, expected=shape, found=tensor.shape
        )
    return master if tensor.dtype == master.dtype else Cast(master, tensor.dtype)


def _frozen(models: list[dict[str, Any]], name: str, shape: Shape, place: str) -> Tensor:
    """Returns a parameter that isn't trained, of which each rank keeps a part."""
    fragments = [(model.get("frozen_param_fragments") or {}).get(name) for model in models]
    parts = [part for part in fragments if isinstance(part, Tensor) and len(part.shape) == 1]
    length, count = -(-math.prod(shape) // len(models)), math.prod(shape)
    left = [min(length, max(0, count - rank * length)) for rank in range(len(models))]
    if len(parts) != len(models) or any(part.shape[0] < n for part, n in zip(parts, left, strict=True)):
        raise CorruptError("The ranks' parts don't make up a frozen parameter.", place=f"{name} in {place}")
    pieces = tuple(Segment(part, 0, n) for part, n in zip(parts, left, strict=True) if n)
    return Concatenated(pieces or (Segment(parts[0], 0, 0),), shape)  # a parameter may have no elements


def _apart(models: list[dict[str, Any]]) -> dict[str, Tree]:
    """Returns what other ranks say otherwise than the first, beside the model."""
    views = [{k: to_json(v) for k, v in model.items() if k not in TAKEN} for model in models]
    apart = {
        rank: {key: models[rank][key] for key, view in view_here.items() if view != views[0].get(key)}
        for rank, view_here in enumerate(views)
    }
    kept: dict[int, Tree] = {rank: others for rank, others in apart.items() if others}
    return {"ranks": kept} if kept else {}


CONTAINER = DeepSpeedFolder()


_SCHEDULER, _STATE = "scheduler.pt", "trainer_state.json"


def beside_tag(folder: Place, files: Files) -> dict[str, Tree]:
    """Returns the parts by key, as a folder of Trainer has them; none where Trainer wrote nothing.

    Args:
        folder: The folder around the tag's.
        files: The checkpoint's open files.

    Raises:
        FormatError: A part can't be trusted.
    """
    if not (folder / _STATE).is_file():
        return {}
    state = loose_json(read_small(folder / _STATE, files), folder / _STATE, files.account)
    if not isinstance(state, dict):
        raise FormatError("A state isn't a JSON object.", place=folder / _STATE, found=type(state).__name__)
    parts: dict[str, Tree] = {"trainer_state": state}
    if (folder / _SCHEDULER).is_file():
        scheduler = open_file(folder / _SCHEDULER, files, [])
        parts |= {} if holds_records(scheduler) else {"scheduler": scheduler}
    return parts
