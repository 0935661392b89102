"""Goes on with a universal checkpoint in DeepSpeed itself, on recorded gradients: on a CPU, with gloo.

    python deepspeed_driving.py RUN BUNDLE GROUPS.json STAGE RANKS SAVED

Loads RUN by DeepSpeed's own loader under another ZeRO stage and number of ranks, moves the parameters of BUNDLE to its
last update, and saves at SAVED. GROUPS has the paths and the weight decay of each group. Prints the largest difference
from the recorded trajectory after loading and after each update, as JSON, last.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

KEYS = {"param/{}": None, "slot/{}/exp_avg": "exp_avg", "slot/{}/exp_avg_sq": "exp_avg_sq"}
"""Where the trajectory has a parameter and its slots."""


class Network(torch.nn.Module):
    """Parameters by path, whose gradients are those that the network is called with."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for path, shape in shapes.items():
            module: torch.nn.Module = self
            *names, leaf = path.split("/")
            for name in names:
                if not hasattr(module, name):
                    module.add_module(name, Part())
                module = getattr(module, name)
            module.register_parameter(leaf, torch.nn.Parameter(torch.randn(shape)))

    def forward(self, grads: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns a loss whose gradients these are."""
        total = torch.zeros(())
        for name, module in self.named_modules():
            if module._parameters:
                of_module = {leaf: grads[f"{name}.{leaf}".replace(".", "/")] for leaf in module._parameters}
                total = total + module(of_module)
        return total


class Part(torch.nn.Module):
    """A module with parameters of its own, which ZeRO 3 gathers when it is called."""

    def forward(self, grads: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns a loss whose gradients these are."""
        products = [
            (param.float() * grads[name]).sum()
            for name, param in self._parameters.items()
            if param is not None
        ]
        return torch.stack(products).sum()


def work(
    rank: int,
    run: str,
    bundle: str,
    groups: list[dict[str, Any]],
    stage: int,
    ranks: int,
    saved: str,
    port: int,
) -> None:
    """Does the work of a rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}  # fmt: skip
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    deepspeed = import_module("deepspeed")
    master_of, slot_of = (
        getattr(deepspeed.utils, f"safe_get_full_{what}") for what in ("fp32_param", "optimizer_state")
    )
    deepspeed.init_distributed("gloo")
    meta = json.loads(Path(bundle, "meta.json").read_text(encoding="utf-8"))
    states, grads = (load_file(Path(bundle, f"{part}.safetensors")) for part in ("trajectory", "grads"))
    begins, ends = meta["checkpoint_step"], meta["steps"]
    torch.manual_seed(7)
    model = Network({path: tuple(states[f"{begins}/param/{path}"].shape) for path in meta["params"]})
    named = {name.replace(".", "/"): param for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        [{"params": [named[path] for path in group["paths"]]} for group in groups], lr=0.5
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": "bf16" in bundle},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": True},
    }  # fmt: skip
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.load_checkpoint(run, load_lr_scheduler_states=False)
    for slots in optimizer.state.values():  # one tensor for all of a rank's parameters under ZeRO 3
        slots["step"] = slots["step"].clone()
    for live, group in zip(
        optimizer.param_groups, groups, strict=True
    ):  # ZeRO 3 gives all those of the first
        live["weight_decay"] = group["weight_decay"]

    def apart(step: int) -> float:
        differences = [0.0]
        for path, param in named.items():
            for key, slot in KEYS.items():
                ours = slot_of(param, slot) if slot else master_of(param)
                if (recorded := states.get(f"{step}/{key.format(path)}")) is not None:
                    differences.append(float((ours.detach() - recorded.float()).abs().max()))
        return max(differences)

    seen = [apart(begins)]
    for step in range(begins + 1, ends + 1):
        engine.backward(engine({path: grads[f"{step}/{path}"].float() for path in named}))
        engine.step()
        seen.append(apart(step))
    engine.save_checkpoint(saved)
    if rank == 0:
        print(json.dumps(seen), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    place, recording, names, of_stage, count, target = sys.argv[1:7]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    said = (place, recording, json.loads(Path(names).read_text()), int(of_stage), int(count), target, number)
    import_module("torch.multiprocessing").spawn(work, said, nprocs=int(count))
