"""The slices of a model put together: those of tensor-parallel ranks are joined, those of pipeline stages united.

Input: what each slice holds, in the order of `mp_rank_`: the tensor-parallel ranks of the first stage, then those of
the next. Output: the same of the whole model. A pipeline's weights lie apart, in a file for each layer. Source:
deepspeedai/DeepSpeed deepspeed/checkpoint/reshape_meg_2d.py, `meg_2d_parallel_map`; ds_to_universal.py,
`_group_per_tp_shapes`; runtime/pipe/module.py, `save_state_dict`, `_build`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statekit.converters.containers.deepspeed.files import MASTER
from statekit.converters.containers.deepspeed.joins import INFO, Joins
from statekit.converters.containers.deepspeed.zero import Part
from statekit.converters.formats.pytorch.one_step import (
    check_one_step,
    check_slots,
    named_by,
    options,
    unlike,
)
from statekit.errors import CorruptError, RefusedError
from statekit.files.checkpoint import Finding
from statekit.tensors.boxes import Agreed, Cut
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree
from statekit.tensors.views import cast

_TIED = "tied_modules."
"""How the names of what several layers of a pipeline share begin; a name of the user's follows."""


@dataclass(frozen=True)
class Sliced:
    """What a slice of the model holds, or all of it.

    Attributes:
        model: Parameters and buffers by name.
        state: The optimizer's state by name, the float32 weight among it.
        groups: The optimizer's groups.
        names: The parameters of each group.
        engine: What the engine keeps beside the optimizer.
        ranks: What each rank holds of it, under ZeRO.
    """

    model: Mapping[str, Tree]
    state: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    names: Sequence[Sequence[str]]
    engine: Mapping[str, Tree]
    ranks: Sequence[Part] = ()

    @property
    def optimizer(self) -> dict[str, Tree]:
        """The optimizer by name, as trees of PyTorch's libraries have it."""
        pairs = zip(self.groups, self.names, strict=True)
        return {
            "state": {name: dict(slots) for name, slots in self.state.items()},
            "param_groups": [{**group, "params": list(names)} for group, names in pairs],
        }


def joined_slices(
    slices: Sequence[Sliced], stages: int, buffers: set[str], joins: Joins, findings: list[Finding]
) -> Sliced:
    """Returns the whole model of its slices.

    Args:
        slices: What they hold, stage by stage.
        stages: How many stages a pipeline has, 1 without one.
        buffers: Names of tensors that aren't parameters: each rank has them whole.
        joins: How pieces join.
        findings: Where what is odd is noted.

    Raises:
        CorruptError: The slices don't fit each other, or are of several steps.
        RefusedError: Nothing says how they join.
    """
    if stages < 1 or len(slices) % stages:
        raise CorruptError(
            "A pipeline's stages don't have the same number of ranks.",
            place=joins.place,
            expected=f"a multiple of {stages} stages",
            found=f"{len(slices)} slices of the model",
        )
    ranks = len(slices) // stages
    of_stages = [slices[i : i + ranks] for i in range(0, len(slices), ranks)]
    findings += _check_ranks([[part for rank in stage for part in rank.ranks] for stage in of_stages])
    parts = [_of_ranks(stage, buffers, joins) for stage in of_stages]
    return parts[0] if len(parts) == 1 else _of_stages(parts, joins)


def _check_ranks(of_stages: Sequence[Sequence[Part]]) -> list[Finding]:
    """Refuses a rank that is of another step than the others.

    Returns:
        Numbers that aren't counts, and that ranks have each for themselves.
    """
    for of_stage in of_stages:
        check_one_step([(part.place, {**part.engine, "param_groups": part.options}) for part in of_stage])
    parts = [part for of_stage in of_stages for part in of_stage]
    vectors = range(max((len(part.masters) for part in parts), default=0))
    names = dict.fromkeys(name for number in vectors for name in check_slots([*_slots_of(parts, number)]))
    why = "isn't the same on all ranks: each parameter has that of the first rank that holds a piece of it"
    return [Finding(f"{name} {why}", parts[0].place) for name in names]


def _slots_of(parts: Sequence[Part], number: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the slots that ranks have of a flat vector; a rank without an element of it may have none."""
    for part in parts:
        if number < len(part.masters) and (part.state[number] or part.masters[number].shape != (0,)):
            yield part.place, part.state[number]


def _of_ranks(slices: Sequence[Sliced], buffers: set[str], joins: Joins) -> Sliced:
    """Returns one stage of what its tensor-parallel ranks hold."""
    first = slices[0]
    for other in slices[1:]:
        if [list(names) for names in other.names] != [list(names) for names in first.names]:
            raise CorruptError("Tensor-parallel ranks hold other parameters.", place=joins.place)
    state = {name: _slots(name, [rank.state[name] for rank in slices], joins) for name in first.state}
    model = {
        name: tensor if name in buffers else joins.whole(name, [rank.model[name] for rank in slices])
        for name, tensor in first.model.items()
        if all(name in rank.model for rank in slices) or name in buffers
    }
    return Sliced(model, state, first.groups, first.names, first.engine, first.ranks)


def _slots(name: str, records: Sequence[Mapping[str, Any]], joins: Joins) -> dict[str, Any]:
    """Returns the slots of a parameter of what tensor-parallel ranks hold."""
    check_slots([(f"{name} on rank {i} in {joins.place}", record) for i, record in enumerate(records)])
    slots = dict[str, Any]()
    for key, value in records[0].items():
        pieces = [piece for record in records if isinstance(piece := record.get(key), Tensor)]
        if not isinstance(value, Tensor) or not value.shape:
            slots[key] = value
        elif len(pieces) == len(records):
            slots[key] = joins.whole(name, pieces)
        else:
            raise CorruptError("Ranks hold different slots.", place=f"{key} of {name} in {joins.place}")
    return slots


def _check_groups(parts: Sequence[Sliced], joins: Joins) -> None:
    """Refuses stages whose groups have other options: a state has the options of each group once."""
    first, *others = ([*map(options, part.groups)] for part in parts)
    if unlike_paths := [path for other in others for path in unlike(first, other)]:
        raise RefusedError(
            "The optimizers of a pipeline's stages have different groups, and nothing says which are the same.",
            place=joins.place,
            found=f"{', '.join(f'{len(part.groups)} groups' for part in parts)}; other {named_by(unlike_paths[0])}",
            remedy="make a universal checkpoint: ds_to_universal.py",
        )


def _of_stages(parts: Sequence[Sliced], joins: Joins) -> Sliced:
    """Returns a pipeline's model of its stages, which may share parameters."""
    _check_groups(parts, joins)
    model, state = dict[str, Tree](), dict[str, dict[str, Any]]()
    for part in parts:
        model |= {name: tensor for name, tensor in part.model.items() if name not in model}
        for name, slots in part.state.items():
            if name not in state:
                state[name] = dict(slots)
            elif not joins.is_of_stages(name):
                owner = next(other for other in parts if name in other.state)
                check_slots(
                    [(f"{name} in {other.ranks[0].place}", other.state[name]) for other in (owner, part)]
                )
                state[name] = {key: _shared(value, slots[key], name) for key, value in state[name].items()}
    names = [
        list(dict.fromkeys(name for part in parts for name in part.names[number]))
        for number in range(len(parts[0].groups))
    ]
    return Sliced(model, state, parts[0].groups, names, parts[0].engine)


def _shared(value: Any, other: Any, name: str) -> Any:
    """Returns what two stages hold of a parameter that they share."""
    both = isinstance(value, Tensor) and isinstance(other, Tensor) and value.shape == other.shape
    return Agreed((value, other), name) if both and value.shape else value


def pipeline_model(
    layers: Mapping[tuple[int, int], Mapping[str, Tensor]], state: Mapping[str, Any], joins: Joins
) -> dict[str, Tensor]:
    """Returns a pipeline's weights by the names that its optimizer knows.

    What layers share lies in the file of each, and has one name. Buffers are named by their layer.
    """
    tied = {name.removeprefix(_TIED).partition(".")[2]: name for name in state if name.startswith(_TIED)}
    model = dict[str, Tensor]()
    for number in dict.fromkeys(layer for layer, _ in sorted(layers)):
        of_ranks = [file for (layer, _), file in sorted(layers.items()) if layer == number]
        for key, tensor in of_ranks[0].items():
            name = f"{number}.{key}"
            name = name if name in state else tied.get(key, name)
            pieces = [file[key] for file in of_ranks if key in file]
            model.setdefault(name, joins.whole(name, pieces) if name in state else tensor)
    return model


def stage_modules(
    layers: Mapping[tuple[int, int], Mapping[str, Tensor]], counts: Sequence[int], buffers: set[str]
) -> list[dict[str, Tensor]]:
    """Returns the weights of each slice: a stage has the next layers, until its optimizer has no more parameters.

    Args:
        layers: By layer and tensor-parallel rank, what its file holds.
        counts: How many parameters each slice's optimizer moves, stage by stage.
        buffers: Names of tensors that aren't parameters.
    """
    modules = [dict[str, Tensor]() for _ in counts]
    ranks = max(rank for _, rank in layers) + 1
    for rank in range(ranks):
        stage, left = rank, counts[rank] if rank < len(counts) else 0
        for number in sorted(layer for layer, of_rank in layers if of_rank == rank):
            weights = {f"{number}.{key}": tensor for key, tensor in layers[number, rank].items()}
            moved = sum(name not in buffers for name in weights)
            if moved > left and stage + ranks < len(counts):
                stage += ranks
                left = counts[stage]
            left -= moved
            modules[min(stage, len(modules) - 1)] |= weights
    return modules


def rounded_weights(state: Mapping[str, Mapping[str, Any]], model: Mapping[str, Tree]) -> dict[str, Tree]:
    """Returns a model whose parameters are the optimizer's weights, in the dtype that the model has them in.

    DeepSpeed takes them from there when it loads a universal checkpoint, however the model was cut.
    Source: deepspeed/runtime/engine.py, `_load_checkpoint`.
    """
    weights = dict(model)
    for name, slots in state.items():
        tensor, master = model.get(name), slots[MASTER]
        if not isinstance(tensor, Tensor) or tensor.shape != master.shape:
            weights[name] = master if not isinstance(tensor, Tensor) else cast(master, tensor.dtype)
    return weights


def findings_of(whole: Sliced, joins: Joins, ranks: int) -> list[Finding]:
    """Returns what joining left out or made up: the padding of a vocabulary, and means of what ranks hold."""
    padding, mean = "without the rows that pad the vocabulary", f"the mean of what {ranks} ranks hold"
    notes = {name: padding for name, slots in whole.state.items() if isinstance(slots.get(MASTER), Cut)}
    notes |= {name: mean for name in whole.state if ranks > 1 and joins.is_averaged(name)}
    return [Finding(f"is {why}, as {INFO} has it", f"{name} in {joins.place}") for name, why in notes.items()]
