"""Two processes that hold parts of every parameter, and what they check; imported by both of them.

    python torch_sharding.py FOLDER

checks a sample of the cases, that checkpoints go round, and that parts are attested. All three are done by the same two
processes, since it takes longer to start them than to do it.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch_driving import XP, resume

import statekit.torch
from statekit.errors import NotFoundError, StateError
from statekit.testing.step_cases import Case, case
from statekit.torch.sharding import own_part
from statekit.verify.verdict import compare

CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("adafactor", "t5x", {}),
    ("adafactor", "hf", {"relative_step": False, "beta1": 0.9}),
    ("adafactor", "torch", {}),
    ("adafactor", "optax", {}),
    ("adafactor", "keras", {}),
    ("adafactor", "mesh_tf", {}),
    ("adafactor", "t2t_late", {}),
    ("scaled_adam", "gptsovits", {}),
    ("scaled_adam", "zip2025", {}),
    ("lans", "mxnet_fused", {}),
    ("lans", "mxnet_unfused", {}),
    ("lans", "apex_fused", {}),
    ("lamb", "optax", {}),
    ("lamb", "keras", {}),
    ("adamw", "torch", {}),
    ("adamw", "optax", {"nesterov": False}),
    ("adamw", "keras", {}),
    ("adamw", "gpt_neo", {}),
)

SAMPLE = [i for i, case in enumerate(CASES) if case[1] in ("t5x", "zip2025", "mxnet_unfused")]


def run_sharded(
    work: Callable[..., None], folder: Path, *arguments: Any, world: int = 2, start: str = "spawn"
) -> None:
    """Runs a function in processes that hold parts of everything: work(mesh, rank, folder, ...)."""
    begun = (work, folder, arguments, world)
    processes.start_processes(_begin, begun, nprocs=world, start_method=start)  # type: ignore[attr-defined, no-untyped-call]  # untyped in PyTorch


def _begin(
    rank: int, work: Callable[..., None], folder: Path, arguments: tuple[Any, ...], world: int
) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    try:
        work(dist.device_mesh.init_device_mesh("cpu", (world,)), rank, folder, *arguments)
        dist.barrier()
    except BaseException:
        dist.destroy_process_group()
        raise
    # All is checked, and both got here. Now and then a thread of PyTorch's own makes the C++ runtime abort such a
    # process as it is taken down (SIGABRT, "terminate called without an active exception"), so it leaves at once.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def in_turn(mesh: Any, rank: int, folder: Path, *works: tuple[Any, ...]) -> None:
    """Does several works one after the other, each given with its arguments."""
    for work, *arguments in works:
        work(mesh, rank, folder, *arguments)


def _placed(mesh: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def place(value: torch.Tensor) -> torch.Tensor:
        where = Shard(0) if value.dim() else Replicate()
        return distribute_tensor(value, mesh, [where])

    return place


def updates_stay_within_the_bound(
    mesh: Any, rank: int, folder: Path, cases: Sequence[int], updates: Sequence[int]
) -> None:
    place, faults = _placed(mesh), []
    for schema, variant, changes in (CASES[i] for i in cases):
        run = case(schema, variant, full=True, **changes)
        for update in updates:
            faults += [f"{schema} {variant} {row}" for row in judged_sharded(run, update, place)]
    if faults:
        raise AssertionError("\n".join(faults))


def judged_sharded(run: Case, update: int, place: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    """Names what leaves the bound after one update of sharded parameters."""
    before = run.before(update)
    sharded = resume(before, place=place)
    for path, param in sharded.params.items():
        param.grad = place(XP.asarray(run.grads[update][path]))
        assert type(param).__name__ == "Parameter" or hasattr(param, "device_mesh")
    sharded.optimizer.param_groups[0]["lr"] = 0.01
    sharded.optimizer.step()
    tensors = {(path, "param"): whole(param) for path, param in sharded.params.items()}
    for path, param in sharded.params.items():
        slots = sharded.optimizer.state[param]
        tensors |= {(path, name): whole(value) for name, value in slots.items()}
    group = sharded.optimizer.param_groups[0].get("slots", {})
    tensors |= {("groups/0", name): whole(value) for name, value in group.items()}
    bound = run.bound(update, "compiled", True, XP.sqrt_units)
    assert bound.keys() == tensors.keys()
    zero = {key: np.zeros_like(value) for key, value in tensors.items()}
    rows = [compare(update, *key, value, value, zero[key], bound[key]) for key, value in tensors.items()]
    return [f"{row.path} {row.tensor} {row.example}" for row in rows if row.outside]


def whole(value: torch.Tensor) -> Any:
    return XP.numpy(value.full_tensor() if hasattr(value, "full_tensor") else value)


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(9, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adafactor": {"beta1": 0.9, "min_dim_size_to_factor": 4},
    "ScaledAdam": {"clipping_scale": 1.5, "clipping_update_period": 2},
    "LANS": {"wd": 0.01},
    "LAMB": {"weight_decay_rate": 0.01},
    "AdamW": {"amsgrad": True},
}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, updates: int) -> None:
    for update in range(first, first + updates):
        torch.manual_seed(100 + update)
        optimizer.zero_grad()
        model(torch.randn(6, 9)).square().mean().backward()
        optimizer.step()


def checkpoints_go_round(mesh: Any, rank: int, folder: Path) -> None:
    """FSDP2: states through PyTorch's distributed functions, and whole files into sharded models."""
    from torch.distributed.checkpoint import state_dict as distributed
    from torch.distributed.fsdp import fully_shard

    def sharded() -> torch.nn.Sequential:
        model = network()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    for name, options in OPTIMIZERS.items():
        kind = getattr(statekit.torch, name)
        first, second = sharded(), sharded()
        one, other = (kind(model.named_parameters(), lr=0.05, **options) for model in (first, second))
        train(first, one, 0, 2)
        distributed.set_model_state_dict(second, distributed.get_model_state_dict(first))
        state = distributed.get_optimizer_state_dict(first, one)
        distributed.set_optimizer_state_dict(second, other, state)
        train(first, one, 2, 2)
        train(second, other, 2, 2)
        for left, right in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(whole_of(left), whole_of(right)), name
        third = sharded()
        statekit.torch.load_params(folder / f"{name}.pt", third)
        loaded = statekit.torch.load_optimizer(folder / f"{name}.pt", third.named_parameters())
        expected = torch.load(folder / f"{name}.pt", weights_only=True)
        for key, param in third.named_parameters():
            assert torch.equal(whole_of(param), expected["model"][key]), name
        for i, slots in enumerate(loaded.state.values()):
            for slot, value in slots.items():
                assert torch.equal(whole_of(value), expected["optimizer"]["state"][i][slot]), (name, slot)
        train(third, loaded, 2, 2)
        for key, param in third.named_parameters():
            torch.testing.assert_close(whole_of(param), expected["later"][key])


def whole_of(value: torch.Tensor) -> torch.Tensor:
    array: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return array.detach()


def parts_are_attested(mesh: Any, rank: int, folder: Path, flat: bool) -> None:
    """FSDP: each process compares its own parts with a file, and hears what the other found."""
    from torch.distributed.checkpoint import state_dict as distributed
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    whole_file = torch.load(folder / "run.pt", weights_only=True)
    model: torch.nn.Module = network()
    if flat:
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def names() -> list[str]:
        result = statekit.torch.attest(optimizer, model, folder / "run.pt")
        return [f"{one.name} @ {one.where[0]}" for one in result.findings]

    def a_step() -> tuple[int, list[str]]:
        with statekit.torch.attested_step(optimizer, model, folder / "run.pt") as step:
            optimizer.zero_grad()
            model(torch.ones(4, 9)).sum().backward()
            optimizer.step()
        assert step.result is not None
        return step.result.stepped, [f"{one.name} @ {one.where[0]}" for one in step.result.findings]

    assert "optimizer-empty" in names()[0]
    everything = distributed.StateDictOptions(full_state_dict=True)
    groups = [
        {**group, "params": [*whole_file["names"]]} for group in whole_file["optimizer"]["param_groups"]
    ]
    slots = dict(zip(whole_file["names"], whole_file["optimizer"]["state"].values(), strict=True))

    def load() -> None:
        distributed.set_model_state_dict(model, whole_file["model"], options=everything)
        by_name: Any = copy.deepcopy({"state": slots, "param_groups": groups})  # it would keep the counts
        distributed.set_optimizer_state_dict(model, optimizer, by_name, options=everything)

    load()
    assert names() == []
    assert a_step() == (1 if flat and rank == 0 else 4, [])  # each process steps what it has
    load()
    if rank == 1:
        own_part(optimizer.state[next(model.parameters())]["exp_avg"])[0].mul_(2)
    state, update = a_step()[1]
    assert state == "slot-differs @ slots/0/weight/m on rank 1"
    assert update.startswith("update-differs @ ")
    assert update.endswith("on rank 1")
    load()
    if rank == 1:
        own_part(optimizer.state[next(model.parameters())]["exp_avg"])[0].mul_(2)
    assert names() == ["slot-differs @ slots/0/weight/m on rank 1"]
    path = folder / ("run.pt" if rank == 0 else "not_there.pt")  # as a disk that only one of them sees
    expected: Any = StateError if rank == 0 else NotFoundError
    with pytest.raises(expected, match="not_there"):
        statekit.torch.attest(optimizer, model, path)


def main(folder: Path) -> None:
    """Trains what the two processes read, and has them check."""
    for name, options in OPTIMIZERS.items():
        model = network()
        optimizer = getattr(statekit.torch, name)(model.named_parameters(), lr=0.05, **options)
        train(model, optimizer, 0, 2)
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer, 2, 2)
        torch.save({**saved, "later": model.state_dict()}, folder / f"{name}.pt")
    model = network()
    adam = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, adam, 0, 2)
    saved = {"model": model.state_dict(), "optimizer": adam.state_dict()}
    torch.save({**saved, "names": [name for name, _ in model.named_parameters()]}, folder / "run.pt")
    run_sharded(
        in_turn, folder, (updates_stay_within_the_bound, SAMPLE, (1,)), (checkpoints_go_round,),
        (parts_are_attested, False), (parts_are_attested, True), start="fork",
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads don't outlive a fork
    main(Path(sys.argv[1]))
