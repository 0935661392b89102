"""A run of Transformers' Trainer goes to Optax and back; run by itself, with PyTorch and JAX in one process.

    python hf_optax_driving.py FOLDER gpt2|t5 [RATE [UPDATES]]

After so many updates the run goes to Optax. The result goes to `FOLDER/result.json`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from trainer_driving import InOrder, documented_callback, optimizer_of

from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.resume import of_plan, resume_lines
from statekit.tensors.tree import nested

FIRST, LAST, END = 5, 25, 35
"""The update after which the run leaves PyTorch, that after which it comes back, and the last one."""
RATE = 0.05
"""Large, so that twenty updates move a weight near 1 by much more than float32's grid there, 1.2e-7."""
TOKENS = [[(3 * i + 2 * j * j + i * j) % 17 for j in range(8)] for i in range(64)]
DATA = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in TOKENS]
USUAL: dict[str, Any] = {
    "max_steps": END, "per_device_train_batch_size": 2, "report_to": "none", "learning_rate": RATE,
    "max_grad_norm": 0.0, "use_cpu": True, "logging_steps": 1, "save_steps": 5, "disable_tqdm": True,
}  # fmt: skip
DECAY = 0.1
OPTIONS: Mapping[str, dict[str, Any]] = {
    "gpt2": {"optim": "adamw_torch", "weight_decay": DECAY},
    "t5": {"optim": "adafactor"},
}


def rate(count: Any) -> Any:
    """Trainer's linear schedule."""
    return RATE * (END - count) / END


def by_hand(folder: Path, groups: list[list[str]], recorder: Recorder) -> dict[str, Any]:
    """Returns where optax.adamw ends from what Trainer saved, given to it as arrays: statekit has no part in it."""
    import jax.numpy as jnp
    import optax

    state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    names = [name for group in groups for name in group]
    mu, nu = (
        {name: jnp.asarray(state[i][slot].numpy()) for i, name in enumerate(names)}
        for slot in ("exp_avg", "exp_avg_sq")
    )
    schedule = optax.linear_schedule(RATE, 0.0, END)
    optimizer = optax.adamw(schedule, weight_decay=DECAY, mask={name: name in groups[0] for name in names})
    params = {name: jnp.asarray(recorder.weights[FIRST][name]) for name in names}
    adam, decay, schedule = optimizer.init(params)
    count = jnp.asarray(FIRST, jnp.int32)
    kept: Any = (adam._replace(count=count, mu=mu, nu=nu), decay, schedule._replace(count=count))
    for step in range(FIRST, LAST):
        grads = {name: jnp.asarray(recorder.grads[step][name]) for name in names}
        updates, kept = optimizer.update(grads, kept, params)
        params = optax.apply_updates(params, updates)
    return {name: np.asarray(value) for name, value in params.items()}


def corrections() -> dict[int, float]:
    """Returns by how much an update of Optax' AdamW may be off, as a part of it, through its bias correction.

    Optax makes 1 - beta^t in float32, which for beta2 is small in a run's first updates, and has few digits left;
    PyTorch makes it in float64. beta itself is rounded, its power to two units in the last place at most, and the
    difference is exact.
    """

    def part(beta: float, t: int) -> float:
        rounded = float(np.float32(beta))
        off = t * abs(rounded - beta) * beta ** (t - 1) + 2 * 2.0**-24
        return off / (1 - beta**t)

    return {step: part(0.9, step + 1) + part(0.999, step + 1) / 2 for step in range(FIRST, LAST)}


def bounds(recorder: Recorder) -> dict[str, float]:
    """Returns how far both may be apart in the end: by that correction, and by the grid of float32 at each update.

    A weight is rounded twice at an update in either library, once for its decay; what both round alike in the slots is
    less than eight units in the last place of an update.
    """
    allowed = {}
    for name, first in recorder.weights[FIRST].items():
        total = 0.0
        for step, part in corrections().items():
            before, after = recorder.weights[step][name], recorder.weights[step + 1][name]
            total += float(abs(after - before).max()) * (part + 8 * 2.0**-24)
            total += 2 * float(np.spacing(np.float32(abs(after).max())))
        allowed[name] = total / float(abs(recorder.weights[LAST][name] - first).max())
    return allowed


def model_of(kind: str) -> torch.nn.Module:
    """Returns a tiny model, the same each time."""
    torch.manual_seed(0)
    made: torch.nn.Module
    if kind == "gpt2":
        sizes = {"vocab_size": 17, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop))
    else:
        sizes = {"vocab_size": 17, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
        made = transformers.T5ForConditionalGeneration(
            transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
        )
    return made


class Recorder(transformers.TrainerCallback):  # type: ignore[misc]  # its base is untyped
    """Keeps the gradients of each update and the weights after it."""

    def __init__(self) -> None:
        self.grads: dict[int, dict[str, Any]] = {}
        self.weights: dict[int, dict[str, Any]] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        named = others["model"].named_parameters()
        self.grads[state.global_step] = {name: p.grad.numpy().copy() for name, p in named}

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.weights[state.global_step] = values(others["model"])


class StopAt(transformers.TrainerCallback):  # type: ignore[misc]  # its base is untyped
    """Stops a run before its end."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def values(model: torch.nn.Module) -> dict[str, Any]:
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def split(named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns tensors by name, the joint bias of queries, keys and values as three."""
    tensors: dict[str, Any] = {}
    for name, value in named.items():
        if name.endswith("c_attn.bias"):
            thirds = zip(("queries", "keys", "values"), np.split(value, 3), strict=True)
            tensors |= {f"{name} of {part}": third for part, third in thirds}
        else:
            tensors[name] = value
    return tensors


def arguments(kind: str, out: Path) -> Any:
    return transformers.TrainingArguments(**USUAL, **OPTIONS[kind], output_dir=str(out))


def resumed(kind: str, folder: Path, out: Path, stop: int) -> InOrder:
    """Goes on from a folder with its groups, as docs/huggingface.md says."""
    model = model_of(kind)
    optimizer = optimizer_of(folder, model, RATE)
    trainer = InOrder(model, arguments(kind, out), train_dataset=DATA, optimizers=(optimizer, None))
    trainer.add_callback(StopAt(stop))
    trainer.add_callback(documented_callback(trainer))
    trainer.train(resume_from_checkpoint=str(folder))
    return trainer


def through_optax(
    source: Path, work: Path, names: tuple[str, ...], recorder: Recorder, kind: str
) -> tuple[Path, Any]:
    """Converts, restores by the printed lines, updates, saves with Orbax; returns where, and the parameters."""
    import jax
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp

    def tree(flat: Mapping[str, Any]) -> Any:
        return nested({tuple(name.split(".")): jnp.asarray(value) for name, value in flat.items()})

    planned = plan(source, work / "orbax", to="orbax", layout="optax", hints=Hints(param_names=names))
    convert(planned)
    lines = "\n".join(resume_lines(of_plan(planned), planned.state))
    scope: dict[str, Any] = {
        "params": jax.tree.map(jnp.zeros_like, tree(recorder.weights[FIRST])),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(lines, "to go on", "exec"), scope)
    params, state = scope["state"]["params"], scope["state"]["opt_state"]
    for step in range(FIRST, LAST):
        updates, state = scope["optimizer"].update(tree(recorder.grads[step]), state, params)
        params = optax.apply_updates(params, updates)
    with ocp.StandardCheckpointer() as saver:
        saver.save(work / "saved", {"params": params, "opt_state": state})
    flat = {name: np.asarray(_leaf(params, name.split("."))) for name in recorder.weights[FIRST]}
    return work / "saved", {"params": flat, "lines": lines}


def _leaf(tree: Any, keys: list[str]) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


def main(work: Path, kind: str) -> None:
    """Runs one kind of model."""
    transformers.utils.logging.set_verbosity_error()
    recorder = Recorder()
    whole = InOrder(model_of(kind), arguments(kind, work / "whole"), train_dataset=DATA, callbacks=[recorder])
    whole.train()
    known = {id(p): name for name, p in whole.model.named_parameters()}
    groups = [[known[id(p)] for p in group["params"]] for group in whole.optimizer.param_groups]
    names = tuple(name for group in groups for name in group)
    saved, returned = through_optax(work / "whole" / f"checkpoint-{FIRST}", work, names, recorder, kind)
    moved = {
        name: float(abs(value - recorder.weights[FIRST][name]).max())
        for name, value in recorder.weights[LAST].items()
    }
    error = {
        name: float(abs(returned["params"][name] - value).max())
        for name, value in recorder.weights[LAST].items()
    }
    result: dict[str, Any] = {}
    if kind == "gpt2":
        alone = by_hand(work / "whole" / f"checkpoint-{FIRST}", groups, recorder)
        result["as_by_hand"] = all(np.array_equal(alone[n], returned["params"][n]) for n in names)
        allowed = bounds(recorder)
        result["of_bound"] = max(error[name] / moved[name] / allowed[name] for name in names)
    said: dict[str, Any] = {"learning_rate": rate(LAST)}
    if kind == "gpt2":
        decays = {name.replace(".", "/"): name in groups[0] for name in names}
        said |= {"weight_decay": DECAY, "exclude_from_weight_decay": {n: not d for n, d in decays.items()}}
    else:
        said |= {"multiply_by_parameter_scale": False, "clipping_threshold": 1.0, "weight_decay_rate": None}
    back = plan(saved, work / "back", to="hf-trainer", hints=Hints(said, assume_defaults=True))
    convert(back)
    half = (LAST + END) // 2
    resumed(kind, work / "back" / f"checkpoint-{LAST}", work / "out", half)
    end = resumed(kind, work / "out" / f"checkpoint-{half}", work / "out", END)
    log = [(one["loss"], one["learning_rate"]) for one in end.state.log_history if "loss" in one]
    expected = [(one["loss"], one["learning_rate"]) for one in whole.state.log_history if "loss" in one]
    last, whole_last = split(values(end.model)), split(recorder.weights[END])
    start, left = split(recorder.weights[FIRST]), split(recorder.weights[LAST])
    result |= {
        "lines": returned["lines"],
        "groups": [len(group) for group in groups],
        "optax": max(error[name] / moved[name] for name in error),
        "saved": sorted(path.name for path in (work / "out").iterdir()),
        "log": log,
        "expected": expected[LAST:],
        "weights": {
            name: float(abs(last[name] - value).max() / max(abs(left[name] - start[name]).max(), 1e-12))
            for name, value in whole_last.items()
        },
        "grads": {
            name: max(float(abs(split(grads)[name]).max()) for grads in recorder.grads.values())
            for name in whole_last
        },
    }
    (work / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    if len(sys.argv) > 3:
        RATE = USUAL["learning_rate"] = float(sys.argv[3])
    if len(sys.argv) > 4:
        FIRST, LAST, END = (int(sys.argv[4]) + more for more in (0, 20, 30))
        USUAL["max_steps"] = END
    main(Path(sys.argv[1]), sys.argv[2])
