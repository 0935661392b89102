"""DeepSpeed's checkpoints for tests: any parameters, cut over any number of ranks as ZeRO does it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from statekit.tensors.tensor import Array

SLOTS = ("fp32", "exp_avg", "exp_avg_sq")
TAG = "global_step7"


@dataclass(frozen=True)
class Made:
    """A run, and how ZeRO is to cut it.

    Attributes:
        groups: For each group of the optimizer, by name the parameter's fp32, exp_avg, exp_avg_sq.
        ranks: How many.
        stage: ZeRO's.
        dtype: The model's, by PyTorch's name.
        said: Whether ranks say where parameters lie, as they do since DeepSpeed 0.8.
        sub_groups: How many parameters a sub-group of stage 3 holds at most.
        frozen: Parameters that aren't trained.
        client: What the user saved besides; `rank` in it is replaced by the rank's number.
    """

    groups: Sequence[Mapping[str, Mapping[str, Array]]]
    ranks: int = 2
    stage: int = 1
    dtype: str = "bfloat16"
    said: bool = True
    sub_groups: int = 100
    frozen: Mapping[str, Array] = field(default_factory=dict)
    client: Mapping[str, Any] = field(default_factory=dict)


def some_groups(*shapes: Sequence[tuple[int, ...]]) -> list[dict[str, dict[str, Array]]]:
    """Returns groups of parameters with these shapes, all values different."""
    random, number = np.random.default_rng(0), itertools.count()
    return [
        {
            f"layer.{next(number)}.w": {slot: random.normal(size=shape).astype(np.float32) for slot in SLOTS}
            for shape in group
        }
        for group in shapes
    ]


def write(made: Made, run: Path) -> Path:
    """Writes a run's folder and returns it."""
    import torch

    folder = run / TAG
    folder.mkdir(parents=True)
    (run / "latest").write_text(TAG)
    parts = _interleaved(made) if made.stage == 3 else _concatenated(made)
    for rank, part in enumerate(parts):
        torch.save({"optimizer_state_dict": part}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    names = [f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in range(made.ranks)]
    for rank, name in enumerate(names if made.stage == 3 else ["mp_rank_00_model_states.pt"]):
        torch.save(_model(made, rank), folder / name)
    return run


def _model(made: Made, rank: int) -> dict[str, Any]:
    import torch

    dtype = getattr(torch, made.dtype)
    whole = {
        name: torch.tensor(arrays["fp32"]).to(dtype)
        for group in made.groups
        for name, arrays in group.items()
    }
    whole |= {name: torch.tensor(value).to(dtype) for name, value in made.frozen.items()}
    if made.stage == 3:
        whole = {name: torch.empty(0, dtype=dtype) for name in whole}
    pieces = {name: torch.tensor(_piece(made, value, rank)).to(dtype) for name, value in made.frozen.items()}
    shapes = [
        {name: torch.Size(arrays["fp32"].shape) for name, arrays in group.items()} for group in made.groups
    ]
    return {
        "module": {**whole, "mean": torch.arange(3.0)},
        "buffer_names": ["mean"],
        "param_shapes": shapes,
        "frozen_param_shapes": {name: torch.Size(value.shape) for name, value in made.frozen.items()},
        "frozen_param_fragments": pieces,
        "shared_params": {},
        "global_steps": 7,
        "dp_world_size": made.ranks,
        "ds_version": "0.0.0",
        **{key: rank if value == "rank" else value for key, value in made.client.items()},
    }


def _options(number: int, params: Sequence[int]) -> dict[str, Any]:
    return {
        "lr": 0.1 / (number + 1), "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False,
        "maximize": False, "params": list(params),
    }  # fmt: skip


def _concatenated(made: Made) -> list[dict[str, Any]]:
    import torch

    owns: list[dict[str, Any]] = [
        {
            "zero_stage": made.stage,
            "partition_count": [made.ranks] * len(made.groups),
            "masters": [],
            "spans": [],
        }
        for _ in range(made.ranks)
    ]
    states: list[dict[int, Any]] = [{} for _ in range(made.ranks)]
    for number, group in enumerate(made.groups):
        size = sum(arrays["fp32"].size for arrays in group.values())
        length = -(-size // (2 * made.ranks)) * 2
        flat = {
            slot: np.concatenate(
                [*(arrays[slot].ravel() for arrays in group.values()), np.zeros(length * made.ranks - size)]
            )
            for slot in SLOTS
        }
        ends = list(itertools.accumulate(arrays["fp32"].size for arrays in group.values()))
        for rank in range(made.ranks):
            low, high = rank * length, (rank + 1) * length
            part = {slot: torch.tensor(value[low:high].astype(np.float32)) for slot, value in flat.items()}
            owns[rank]["masters"].append(part.pop("fp32")[: max(0, size - low)].clone())
            states[rank][number] = {"step": torch.tensor(7.0), **part}
            places = zip(group, [0, *ends], ends, strict=False)
            cut = {name: (max(a, low), min(b, high)) for name, a, b in places}
            owns[rank]["spans"].append(
                {name: {"start": a - low, "numel": b - a} for name, (a, b) in cut.items() if a < b}
            )
    return [
        {
            "zero_stage": part["zero_stage"],
            "partition_count": part["partition_count"],
            "single_partition_of_fp32_groups": part["masters"],
            "base_optimizer_state": {
                "state": state,
                "param_groups": [_options(i, [i]) for i in range(len(made.groups))],
            },
            **({"param_slice_mappings": part["spans"]} if made.said else {}),
        }
        for part, state in zip(owns, states, strict=True)
    ]


def _piece(made: Made, value: Array, rank: int) -> Array:
    length = -(-value.size // made.ranks)
    padded = np.concatenate([value.ravel(), np.zeros(length * made.ranks - value.size, value.dtype)])
    return padded[rank * length : (rank + 1) * length]


def _interleaved(made: Made) -> list[dict[str, Any]]:
    import torch

    subs: list[list[Mapping[str, Array]]] = []
    groups = []
    for number, group in enumerate(made.groups):
        owns = list(group.values())
        cuts = [owns[i : i + made.sub_groups] for i in range(0, len(owns), made.sub_groups)]
        groups.append(_options(number, range(len(subs), len(subs) + len(cuts))))
        subs += cuts
    parts = []
    for rank in range(made.ranks):
        flat = [
            {
                slot: torch.tensor(np.concatenate([_piece(made, arrays[slot], rank) for arrays in sub]))
                for slot in SLOTS
            }
            for sub in subs
        ]
        state = {
            i: {"step": torch.tensor(7.0), **{s: one[s] for s in SLOTS[1:]}} for i, one in enumerate(flat)
        }
        parts.append(
            {
                "zero_stage": 3,
                "partition_count": made.ranks,
                "fp32_flat_groups": [one["fp32"] for one in flat],
                "optimizer_state_dict": {"state": state, "param_groups": groups},
            }
        )
    return parts
