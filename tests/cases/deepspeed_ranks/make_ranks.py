"""Records runs of DeepSpeed on a CPU with gloo: of experts, of pipelines, of ZeRO's rarer orders, of groups.

    run() { for rank in $(seq 0 $(($1 - 1))); do python make_ranks.py $rank $@ & done; wait; }
    run 4 1 bf16 experts experts_zero1_bf16
    run 2 0 fp32 experts experts_zero0
    run 4 1 bf16 tied pipeline_zero1_bf16
    run 2 0 fp32 pipeline pipeline_zero0
    run 2 2 bf16 round_robin round_robin_zero2_bf16
    run 2 3 fp32 sub_groups sub_groups_zero3
    run 1 0 fp32 groups groups_zero0
    run 1 0 bf16 groups groups_zero0_bf16

Made with deepspeed 0.19.8 and torch 2.13.0. Writes the checkpoint, and beside it what the engine holds of each
parameter, gathered over the engine's own groups of processes: FOLDER.engine<rank>.safetensors. `engine.safetensors` is
these together.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from torch import Tensor, nn

RANK, RANKS, STAGE = (int(number) for number in sys.argv[1:4])
DTYPE, KIND, FOLDER = sys.argv[4:]
ZERO: dict[str, dict[str, Any]] = {
    "round_robin": {"round_robin_gradients": True}, "sub_groups": {"sub_group_size": 24},
}  # fmt: skip
SLOTS = ("exp_avg", "exp_avg_sq")
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "betas": (0.9, 0.98), "eps": 1e-8}


class Experts(nn.Module):
    """Two layers of experts: four with biases, and two without."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 8)
        self.moe = MoE(8, expert=nn.Linear(8, 8), num_experts=4, ep_size=2, k=1)
        self.moe2 = MoE(8, expert=nn.Linear(8, 8, bias=False), num_experts=2, ep_size=2, k=1)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss, with the layers' own terms."""
        hidden, first, _ = self.moe(self.inp(inputs))
        hidden, second, _ = self.moe2(hidden)
        loss = nn.functional.cross_entropy(self.head(hidden), targets)
        total: Tensor = loss + 0.01 * (first + second)
        return total


class Plain(nn.Module):
    """Matrices and vectors in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 7), nn.LayerNorm(7), nn.Linear(7, 6, bias=False)
        self.head = nn.Linear(6, 4)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss."""
        hidden = self.b(torch.relu(self.norm(self.a(inputs))))
        return nn.functional.cross_entropy(self.head(hidden), targets)

    def in_groups(self) -> list[dict[str, Any]]:
        """Returns vectors, then matrices in another order than the module's."""
        vectors = [param for param in self.parameters() if param.ndim == 1]
        matrices = [param for param in self.parameters() if param.ndim > 1]
        return [{"params": vectors, "weight_decay": 0.0}, {"params": matrices[::-1], "weight_decay": 0.1}]


class Embedding(nn.Module):
    """What the first and the last stage share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns what the first stage makes of a batch."""
        hidden: Tensor = self.embed(inputs)
        return hidden


def logits(module: Embedding, hidden: Tensor) -> Tensor:
    """Returns what the last stage makes of it."""
    return hidden @ module.embed.weight


def pipeline() -> PipelineModule:
    """Returns six layers in two stages."""
    first, last = LayerSpec(nn.Linear, 4, 8, bias=False), LayerSpec(nn.Linear, 8, 4)
    if KIND == "tied":
        first = TiedLayerSpec("emb", Embedding, tied_weight_attr="embed.weight")
        last = TiedLayerSpec("emb", Embedding, forward_fn=logits, tied_weight_attr="embed.weight")
    norm = LayerSpec(nn.LayerNorm if KIND == "tied" else nn.BatchNorm1d, 8)
    layers = [first, LayerSpec(nn.Linear, 8, 8), nn.functional.relu, LayerSpec(nn.Linear, 8, 8), norm, last]
    return PipelineModule(
        layers=layers,
        num_stages=2,
        loss_fn=nn.CrossEntropyLoss(),
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yields inputs and targets."""
    generator = torch.Generator().manual_seed(RANK if KIND == "experts" else 0)
    while True:
        inputs = torch.randn(8, 4, generator=generator)
        yield inputs.bfloat16() if DTYPE == "bf16" else inputs, torch.randint(4, (8,), generator=generator)


def whole(optimizer: Any, number: int, flat: Tensor) -> Tensor:
    """Returns a group's flat vector, gathered over the processes that share it."""
    sharers = optimizer.real_dp_process_group[number]
    parts = [torch.zeros_like(flat) for _ in range(torch.distributed.get_world_size(sharers))]
    torch.distributed.all_gather(parts, flat.contiguous(), group=sharers)
    return torch.cat(parts)


def kept_by_zero(optimizer: Any) -> dict[Tensor, dict[str, Tensor]]:
    """Returns by parameter what ZeRO keeps of it."""
    by_param = {}
    for number, params in enumerate(optimizer.round_robin_bit16_groups):
        flat = optimizer.single_partition_of_fp32_groups[number]
        slots = optimizer.optimizer.state[flat]
        vectors = {"fp32": whole(optimizer, number, flat.detach())}
        vectors |= {slot: whole(optimizer, number, slots[slot]) for slot in SLOTS}
        start = 0
        for param in params:
            stop = start + param.numel()
            by_param[param] = {
                key: vector[start:stop].view(param.shape).clone() for key, vector in vectors.items()
            }
            start = stop
    return by_param


def kept_by_wrapper(wrapper: Any) -> dict[Tensor, dict[str, Tensor]]:
    """Returns by parameter what the wrapper of a run without ZeRO keeps below float32."""
    return {
        param: {"fp32": master.detach(), **wrapper.optimizer.state[master]}
        for params, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        for param, master in zip(params, masters, strict=True)
    }


def kept_by_stage_3(module: nn.Module) -> dict[Tensor, dict[str, Tensor]]:
    """Returns by parameter what stage 3 keeps of it."""
    by_param: dict[Tensor, dict[str, Tensor]] = {}
    for param in module.parameters():
        vectors = {"fp32": safe_get_full_fp32_param(param)}
        vectors |= {slot: safe_get_full_optimizer_state(param, slot) for slot in SLOTS}
        by_param[param] = {
            key: vector.reshape(vars(param)["ds_shape"]).clone() for key, vector in vectors.items()
        }
    return by_param


def name_in_whole(name: str, modules: dict[str, Any]) -> str:
    """Returns the name that a rank's parameter has in the whole model."""
    path, mark, rest = name.partition(".deepspeed_moe.experts.deepspeed_experts.")
    if not mark:
        return name
    layer, (number, _, leaf) = modules[path], rest.partition(".")
    rank = groups._get_expert_parallel_rank(layer.expert_group_name)
    return f"{path}{mark}{rank * layer.num_local_experts + int(number)}.{leaf}"


os.environ |= {
    "RANK": str(RANK), "LOCAL_RANK": str(RANK), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29617", "DS_ACCELERATOR": "cpu",
}  # fmt: skip
torch.set_num_threads(1)
deepspeed.init_distributed("gloo")
torch.manual_seed(RANK)
plain = KIND in ("round_robin", "sub_groups", "groups")
network: Any = Plain() if plain else Experts() if KIND == "experts" else pipeline()
params: Any = network.in_groups() if plain else list(network.parameters())
if KIND == "experts":
    params = split_params_into_different_moe_groups_for_optimizer(
        {"params": params, "name": "all", **OPTIONS}
    )
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": STAGE, **ZERO.get(KIND, {})},
    "bf16": {"enabled": DTYPE == "bf16"},
}
engine, *_ = deepspeed.initialize(
    model=network, optimizer=torch.optim.AdamW(params, **OPTIONS), config=config
)
data = batches()
for _ in range(3):
    if plain or KIND == "experts":
        engine.backward(engine(*next(data)))
        engine.step()
    else:
        engine.train_batch(data)
engine.save_checkpoint(FOLDER)
by_param = kept_by_stage_3(network) if STAGE == 3 else kept_by_zero(engine.optimizer) if STAGE else None
if hasattr(engine.optimizer, "fp32_groups"):
    by_param = kept_by_wrapper(engine.optimizer)
modules, arrays = dict(network.named_modules()), {}
for name, param in network.named_parameters():
    slots = by_param[param] if by_param else {"fp32": param.detach(), **engine.optimizer.state[param]}
    for key in ("fp32", *SLOTS):
        arrays[f"{name_in_whole(name, modules)}|{key}"] = slots[key].clone()
save_file(arrays, f"{FOLDER}.engine{RANK}.safetensors")
