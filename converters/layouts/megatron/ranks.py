"""Files of Megatron-LM's format `torch` put together: what tensor-parallel ranks hold is joined, numbers get names.

    ranks  model      <name>: a rank's piece of a parameter; a layer's names count on
           optimizer  state/<number>/{step, exp_avg, exp_avg_sq}, param_groups; below `optimizer` beside masters
                      fp32_from_fp16_params/<group>: float32 masters of what has less
           buckets    or a distributed optimizer's slots of the rank's pieces, see buckets.py

Input: the ranks in the order of `mp_rank_`. Output: the form that torch_dist has, with a key for each layer: whole
tensors under flat keys, groups without parameters, and one count. Norms of a local spec have the names of torch_dist.
Source: NVIDIA/Megatron-LM megatron/training/checkpointing.py, `generate_state_dict`;
megatron/core/optimizer/optimizer.py, `Float16OptimizerWithFloat16Params.state_dict`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from statekit.converters.layouts.megatron.buckets import WHERE, gathered_slots, with_groups
from statekit.converters.layouts.megatron.groups import params_of_groups
from statekit.converters.layouts.megatron.slices import is_gated, joined, key_of
from statekit.errors import CorruptError, Faults, StateError, some
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree

RANKS, COMMON, SHARDED = "ranks", "common", "sharded"
_MASTERS = "fp32_from_fp16_params"
_COUNTED = "No file says how many tensor-parallel ranks the run had: those here are taken for all ({})."
_MISNUMBERED = "The optimizer's numbers don't fit the model's parameters"
_RANDOM = "Random states of ranks other than the first stay behind."
BUCKETS, _STATE = "buckets", "optimizer.state."
"""Where a rank has the buckets of a distributed optimizer; what the key of a slot begins with."""


def has_ranks(tree: Tree) -> bool:
    """Tells whether a tree is of files of the format `torch`, rank by rank."""
    return isinstance(tree, Mapping) and isinstance(tree.get(RANKS), Mapping)


def _check_slots_alike(slots: Sequence[Mapping[str, Any]], place: object) -> None:
    if apart := sorted({key for of_rank in slots for key in of_rank.keys() ^ slots[0].keys()}):
        raise CorruptError("Ranks hold different slots.", place=place, found=some(apart))


def without_ranks(
    tree: Mapping[str, Any], place: object, names: Sequence[str] | None = None
) -> tuple[dict[str, Any], dict[str, Tree], tuple[str, ...]]:
    """Returns what is cut by no rank, what ranks hold as one, and what stays behind.

    Args:
        tree: The checkpoint; `RANKS` holds the file of each rank.
        place: The checkpoint, for messages.
        names: The parameters in the model's order, where a user gives it.

    Raises:
        StateError: Numbers don't fit the model's parameters.
        CorruptError: Ranks hold other parameters, or their pieces don't fit.
        RefusedError: Nothing says how pieces join.
    """
    ranks = list(tree[RANKS].values())
    _check_alike(ranks, place)
    slots = [_by_name(rank, place, names) for rank in ranks]
    models = [_params(rank["model"]) for rank in ranks]
    gated = is_gated(models[0])
    sharded: dict[str, Tree] = {
        key_of(name): joined(name, name, [model[name] for model in models], gated, place)
        for name in models[0]
    }
    _check_slots_alike(slots, place)
    for key, (name, _) in slots[0].items():
        sharded[key_of(key)] = joined(key, name, [of_rank[key][1] for of_rank in slots], gated, place)
    optimizer, outer = _inner(ranks[0]["optimizer"]), ranks[0]["optimizer"]
    step = _step(optimizer, place)
    whole = {
        **({} if step is None else {"state": {"common_step": step}}),
        "param_groups": [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer["param_groups"]
        ],
    }
    if optimizer is not outer:
        rest = {key: part for key, part in outer.items() if key not in ("optimizer", _MASTERS)}
        whole = {**rest, "optimizer": whole}
    common = {**tree[COMMON], "optimizer": whole}
    return with_groups(common, {}) if BUCKETS in ranks[0] else common, sharded, _notes(tree)


def _notes(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns what stays behind, and what is assumed of the ranks: the container holds them to the arguments."""
    random = (_RANDOM,) if len(tree[RANKS]) > 1 and "rng_state" in tree[COMMON] else ()
    first = next(iter(tree[RANKS].values()))
    counted = (_COUNTED.format(", ".join(tree[RANKS])),) if tree[COMMON].get("args") is None else ()
    return (*random, *counted, *((WHERE,) if BUCKETS in first else ()))


def _params(model: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: part for name, part in model.items() if isinstance(part, Tensor)}


def _inner(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what has the groups: the optimizer, or the one beside masters."""
    inner = optimizer.get("optimizer", optimizer)
    return inner if isinstance(inner, Mapping) else {}


def _check_alike(ranks: Sequence[Mapping[str, Any]], place: object) -> None:
    """Refuses ranks that hold other parameters; the container has held them to one step."""
    if any([*_params(rank["model"])] != [*_params(ranks[0]["model"])] for rank in ranks):
        raise CorruptError(
            "The ranks of this run hold other parameters.",
            place=place,
            expected=f"files of one iteration, mp_rank_00 to mp_rank_{len(ranks) - 1:02d}",
        )


def _by_name(
    rank: Mapping[str, Any], place: object, order: Sequence[str] | None
) -> dict[str, tuple[str, Tensor]]:
    """Returns a rank's slots by the flat keys of torch_dist, each with its parameter."""
    model, optimizer = _params(rank["model"]), _inner(rank["optimizer"])
    groups, state = optimizer.get("param_groups"), {} if BUCKETS in rank else optimizer.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        raise StateError("The optimizer of a rank has no groups or no state.", place=place)
    if BUCKETS in rank:
        gathered = gathered_slots(model, rank[BUCKETS], place, order)
        return {
            f"{_STATE}{slot}.{name}": (name, t) for slot, of in gathered.items() for name, t in of.items()
        }
    names = params_of_groups(groups, {name: tensor.shape for name, tensor in model.items()}, place)
    faults, slots = Faults(_misplaced(groups, state)), dict[str, tuple[str, Tensor]]()
    faults.check(StateError, _MISNUMBERED, place=place)
    for group, named in zip(groups, names, strict=True):
        numbers = _numbers(group)
        if len(numbers) != len(named):
            faults.add(
                f"moves {len(numbers)} parameters, and the model has {len(named)} of its kind", "param_groups"
            )
            continue
        for number, name in zip(numbers, named, strict=True):
            for key, tensor in _tensors(state.get(number)):
                slots[f"{_STATE}{key}.{name}"] = name, tensor
    for name, tensor in _masters(rank["optimizer"], names, model):
        slots[f"{_STATE}fp32_param.{name}"] = name, tensor
    faults += [
        (f"has shape {tensor.shape}, and its parameter {model[name].shape}", key)
        for key, (name, tensor) in slots.items()
        if tensor.shape != model[name].shape
    ]
    faults.check(StateError, _MISNUMBERED, place=place)
    return slots


def _numbers(group: Mapping[str, Any]) -> Sequence[Any]:
    """Returns what a group calls its parameters."""
    numbers = group.get("params", [])
    return numbers if isinstance(numbers, list) else []


def _misplaced(groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """Yields numbers of parameters that are none, or stand twice, and slots of no group: none of them would be read."""
    numbers = [number for group in groups for number in _numbers(group)]
    odd = [number for number in numbers if type(number) is not int]
    yield from (("is no number of a parameter", f"param_groups/params/{number!r}") for number in odd)
    counts = Counter(number for number in numbers if type(number) is int)
    yield from (("stands twice", f"param_groups/params/{n}") for n, count in counts.items() if count > 1)
    yield from (("has slots, and stands in no group", f"state/{n}") for n in state if n not in counts)


def _tensors(record: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the slots of a parameter, without its count."""
    for key, part in record.items() if isinstance(record, Mapping) else ():
        if key != "step" and isinstance(part, Tensor):
            yield key, part


def _masters(
    optimizer: Mapping[str, Any], names: Sequence[Sequence[str]], model: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the float32 copies of parameters that have less, by name; others have none."""
    kept = optimizer.get(_MASTERS, ())
    for tensors, named in zip(kept if isinstance(kept, list) else (), names, strict=False):
        low = [name for name in named if model[name].dtype.itemsize < 4]
        yield from zip(low, tensors, strict=False)


def _step(optimizer: Mapping[str, Any], place: object) -> Any:
    """Returns the count of updates that all parameters have."""
    records = [record for record in optimizer.get("state", {}).values() if isinstance(record, Mapping)]
    steps = [record["step"] for record in records if "step" in record]
    counts = {float(step.read()) if isinstance(step, Tensor) else float(step) for step in steps}
    if len(counts) > 1:
        raise StateError(
            "Parameters have made other numbers of updates, and Megatron-Core keeps one for all.",
            place=place,
            found=", ".join(f"{count:g}" for count in sorted(counts)[:5]),
        )
    return steps[0] if steps else next((g["step"] for g in optimizer["param_groups"] if "step" in g), None)
