"""Goes on with a checkpoint in Megatron-Core itself, on recorded batches: run by a Python that has it, on a CPU.

    python megatron_driving.py ITERATION BATCHES OPTIONS.json SAVED

ITERATION is a folder of `torch_dist`. OPTIONS are the recorded arguments of the run, `rows` of its vocabulary, and
`rates` of each update from 1 on. Megatron-Core's own loader, clipping and optimizer go on, and it saves again at SAVED.
It prints {"<update>": loss} as JSON, last. Words for a GPU are substituted when modules are imported.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import re
import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file

_WORDS = (
    (r"torch\.cuda\.current_device\(\)", '"cpu"'),
    (r"(['\"])cuda\1", '"cpu"'),
    (r"\.cuda\(\)", ""),
    (r"torch\.cuda\.(\w+)Tensor\b", r"torch.\1Tensor"),
)
"""What modules say of a GPU, and what stands there instead."""


class OnCpu(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the modules of Megatron-Core with the words of a CPU."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Finds what another loader would, and takes its place."""
        if not name.startswith("megatron.core") or ".fsdp" in name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Runs a module's text."""
        spec = module.__spec__
        assert spec is not None and spec.origin is not None
        text = Path(spec.origin).read_text(encoding="utf-8")
        for pattern, word in _WORDS:
            text = re.sub(pattern, word, text)
        exec(compile(text, spec.origin, "exec"), module.__dict__)


def without_gpu() -> None:
    """Makes what Megatron-Core asks of a GPU's generator and stream do nothing: dropout is 0."""
    random = import_module("megatron.core.tensor_parallel.random")

    @contextlib.contextmanager
    def fork(self: Any, *names: str) -> Any:
        yield

    random.CudaRNGStatesTracker.fork = fork
    torch.cuda.synchronize = lambda *args: None


def model_of(options: dict[str, Any]) -> Any:
    """Returns the network, with the modules of the local specification."""
    gpt, specs, transformer = map(
        import_module,
        ("megatron.core.models.gpt", "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.transformer"),
    )
    dtype = torch.bfloat16 if options["bf16"] else torch.float32
    config = transformer.TransformerConfig(
        num_layers=options["layers"], hidden_size=options["hidden"], num_attention_heads=options["heads"],
        num_query_groups=options["groups"], kv_channels=options["kv"], ffn_hidden_size=options["ffn"],
        normalization="RMSNorm", layernorm_epsilon=options["rms_eps"], gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, add_qkv_bias=bool(options["bias"]),
        qk_layernorm=bool(options["qk_norm"]), hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=bool(options["bf16"]), attention_softmax_in_fp32=True,
        bias_activation_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        hetereogenous_dist_checkpoint=bool(options["nonhom"]),
    )  # fmt: skip
    spec = specs.get_gpt_layer_local_spec(qk_layernorm=bool(options["qk_norm"]), normalization="RMSNorm")
    return gpt.GPTModel(
        config, spec, options["rows"], options["L"], share_embeddings_and_output_weights=bool(options["tied"]),
        position_embedding_type="rope", rotary_base=options["rope_base"], parallel_output=True,
    ).to(dtype)  # fmt: skip


def begun(options: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the network, ready for gradients, and its optimizer."""
    distributed, optimizers = map(import_module, ("megatron.core.distributed", "megatron.core.optimizer"))
    model = model_of(options)
    whole = distributed.DistributedDataParallel(
        model.config,
        distributed.DistributedDataParallelConfig(use_distributed_optimizer=bool(options["dist_opt"])),
        model,
    )
    config = optimizers.OptimizerConfig(
        optimizer="adam", lr=options["lr"], min_lr=options["lr"] / 10, weight_decay=options["wd"],
        clip_grad=options["clip"], adam_beta1=options["b1"], adam_beta2=options["b2"], adam_eps=options["eps"],
        bf16=bool(options["bf16"]), params_dtype=model.config.params_dtype,
        use_distributed_optimizer=bool(options["dist_opt"]),
    )  # fmt: skip
    optimizer = optimizers.get_megatron_optimizer(config, [whole])
    if options["dist_opt"]:
        with_steps(optimizer)
    return whole, optimizer


def with_steps(optimizer: Any) -> None:
    """Gives a distributed optimizer the counts that its loader asks for and passes over where Apex is missing."""
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        slots = {slot: torch.zeros_like(param) for slot in ("exp_avg", "exp_avg_sq")}
        inner_of(optimizer).state[param] = {"step": torch.tensor(0.0), **slots}
    (distributed,) = optimizer.chained_optimizers
    load = distributed._set_main_param_and_optimizer_states

    def with_step(param: Any, tensors: dict[str, Any]) -> None:
        group, order = distributed.model_param_group_index_map[param]
        live = inner_of(optimizer).state[inner_of(optimizer).param_groups[group]["params"][order]]
        load(param, {**tensors, "step": live["step"]})

    distributed._set_main_param_and_optimizer_states = with_step


def inner_of(optimizer: Any) -> Any:
    """Returns torch's optimizer in Megatron-Core's."""
    return optimizer.chained_optimizers[0].optimizer


def main(place: Path, batches: Path, options: dict[str, Any], saved: Path) -> None:
    """Loads, trains to the end of the recorded batches, and saves."""
    parallel, checkpointing = map(
        import_module, ("megatron.core.parallel_state", "megatron.core.dist_checkpointing")
    )
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": options.get("port", "29517")}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel.initialize_model_parallel(1)
    without_gpu()
    torch.manual_seed(99)
    whole, optimizer = begun(options)
    form = checkpointing.load_content_metadata(str(place))

    def parts(is_loading: bool) -> dict[str, Any]:
        model = whole.module.sharded_state_dict(metadata=form)
        return {
            "model": model,
            "optimizer": optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=form),
        }

    state = checkpointing.load(parts(is_loading=True), str(place))
    whole.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for record in inner_of(optimizer).state.values():  # one tensor for all counts once for each parameter
        record["step"] = record["step"].clone()
    recorded, losses = load_file(batches), dict[str, float]()
    fields = ("tokens", "labels", "loss_mask")
    if "1/inputs" in recorded:
        fields = ("inputs", "targets", "targets_segmentation")
    updates = int(state["iteration"])
    for step in range(updates + 1, 1 + max(int(name.partition("/")[0]) for name in recorded)):
        tokens, labels, mask = (recorded[f"{step}/{name}"] for name in fields)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        causal = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
        each = whole(tokens.long(), positions, causal, labels=labels.long()).float()
        loss = (each * mask).sum() / mask.sum()
        losses[str(step)] = float(loss.detach())
        whole.zero_grad_buffer()
        optimizer.zero_grad()
        loss.backward()
        whole.finish_grad_sync()
        for group in optimizer.param_groups:
            group["lr"] = options["rates"][step - 1]
            group["weight_decay"] = options["wd"] * group["wd_mult"]
        optimizer.step()
    saved.mkdir(parents=True)
    checkpointing.save({**parts(is_loading=False), "iteration": step, "checkpoint_version": 3.0}, str(saved))
    print(json.dumps(losses))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.meta_path.insert(0, OnCpu())
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()), Path(sys.argv[4]))
