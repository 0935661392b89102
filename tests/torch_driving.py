"""Drives the optimizers of statekit.torch over recordings, as somebody would who has a model and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from goldens import GOLDEN
from replaying import first_state, present, stepped
from statekit.arrays.backend import backend
from statekit.arrays.intervals import IntervalBackend
from statekit.conversion.registry import layout
from statekit.optim.run import load, mover, store
from statekit.optim.steps import USUAL
from statekit.state.constants import variant_constants
from statekit.state.schema import load_schema
from statekit.state.train_state import Group, TrainState
from statekit.tensors.tensor import Array
from statekit.torch.from_checkpoint import OPTIMIZERS
from statekit.verify.recording import Recording, Trajectory, open_recording
from statekit.verify.replay import Subject, free_run
from statekit.verify.stepping import named
from statekit.verify.verdict import Row, compare

XP, NUMPY = backend("torch"), backend("numpy")
LEFT_OUT = ("learning_rate", "lr", "logical_factor_rules", "factor_map")
Tensors = dict[tuple[str, str], Array]
Place = Callable[[torch.Tensor], torch.Tensor]


def recordings() -> dict[str, Path]:
    """Every recording that can be replayed, by `<system>/<case>`."""
    folders = (meta.parent for meta in sorted(GOLDEN.glob("*/*/meta.json")))
    return {f"{folder.parent.name}/{folder.name}": folder for folder in folders if stepped(folder)}


@dataclass
class Run:
    """Parameters by path, and their optimizer."""

    params: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer

    def update(self, recording: Recording, update: int) -> None:
        """Makes one recorded update, with its learning rate and whatever hyperparameters hold for it."""
        grads, rate = recording.gradients(update), recording.rate(update)
        for path, param in self.params.items():
            param.grad = XP.asarray(grads[path].read()) if path in grads else None
        said = recording.state(update - 1, recording.trajectories[0], update).optimizer.groups
        for i, (group, now) in enumerate(zip(self.optimizer.param_groups, said, strict=True)):
            group["lr"] = rate[i] if isinstance(rate, tuple) else rate
            for name in ("step_offset", "rescale_grad"):
                if name in group and name in now.hyperparameters:
                    group[name] = now.hyperparameters[name]
        self.optimizer.step()

    def tensors(self) -> Tensors:
        """Returns all values, under the names that replay gives them."""
        params = {path: XP.numpy(param) for path, param in self.params.items()}
        slots = {
            path: {name: XP.numpy(value) for name, value in self.optimizer.state[param].items()}
            for path, param in self.params.items()
            if param in self.optimizer.state
        }
        shared = [
            {name: XP.numpy(value) for name, value in group.get("slots", {}).items()}
            for group in self.optimizer.param_groups
        ]
        return named(params, slots, shared)


def begin(
    state: TrainState,
    foreach: bool = True,
    place: Place = lambda value: value,
    by_rules: bool = False,
) -> Run:
    """Makes an optimizer for a state's parameters with its hyperparameters; the state's slots aren't looked at.

    Args:
        state: The state.
        foreach: As the optimizers take it.
        place: Where parameters shall live.
        by_rules: Whether rules are settled as they stand in the state, as loading does, or given as a factor map.
    """
    params = {path: torch.nn.Parameter(place(XP.asarray(t.read()))) for path, t in state.params.items()}
    factor_map = {path: [axis.value for axis in rule.axes] for path, rule in state.rules.items()}
    groups = []
    for group in state.optimizer.groups:
        settings = {key: value for key, value in group.hyperparameters.items() if key not in LEFT_OUT}
        for name in ("lr_mult", "wd_mult"):
            if name in settings:
                settings[name] = {
                    path: value for path, value in settings[name].items() if path in group.paths
                }
        if settings.get("parameter_encoding"):  # recorded as the object's name
            settings["parameter_encoding"] = "eighth_power"
        if by_rules:
            settings["rules"] = {
                path: state.rules[path].to_json() for path in group.paths if path in state.rules
            }
        elif factor_map:
            settings["factor_map"] = factor_map
        groups.append({"params": [(path, params[path]) for path in group.paths], **settings})
    schema, variant = state.optimizer.schema, str(state.optimizer.variant)
    optimizer = OPTIMIZERS[schema](groups, variant=variant, foreach=foreach)
    for made in optimizer.param_groups:
        made["step"] = state.counts.updates
    return Run(params, optimizer)


def resume(state: TrainState, foreach: bool = True, place: Place = lambda value: value) -> Run:
    """Makes an optimizer as `begin` does, and loads the state into it in the form of its files."""
    run = begin(state, foreach, place, by_rules=True)
    run.optimizer.load_state_dict(layout("statekit-torch").encode(state).tree["optimizer"])
    return run


def driven(recording: Recording, foreach: bool) -> Tensors:
    """Drives a recording from its first parameters and fresh slots to its end."""
    run, resumed = begin(first_state(recording), foreach), recording.trajectories[0].resumed
    for update in range(recording.first + 1, recording.last + 1):
        run.update(recording, update)
        if resumed is not None and resumed.step == update:
            with torch.no_grad():
                for param in run.params.values():
                    param.copy_(param.to(getattr(torch, resumed.dtype)))
    return run.tensors()


def replayed(recording: Recording) -> Tensors:
    """Returns where replay's free run ends, in PyTorch, with the roundings that the original usually makes."""
    optimizer = Subject(recording, "init").state().optimizer
    dtype = variant_constants(optimizer.schema, str(optimizer.variant)).get("compute_dtype", "")
    usual = tuple(replace(t, execution=USUAL.get(dtype, "compiled")) for t in recording.trajectories)
    *_, last = free_run(Subject(replace(recording, trajectories=usual), "init"), XP)
    return read(last)


def read(state: TrainState) -> Tensors:
    shared = [group.slots for group in state.optimizer.groups]
    return {key: tensor.read() for key, tensor in named(state.params, state.slots, shared).items()}


def verdict(recording: Recording, trajectory: Trajectory, update: int) -> Iterator[Row]:
    """Judges one update of the default path, from the recorded state before it."""
    before = recording.state(update - 1, trajectory, update)
    run = resume(before)
    run.update(recording, update)
    bounds = IntervalBackend(True, sqrt_units=max(trajectory.sqrt_units, XP.sqrt_units))
    grads = {path: bounds.asarray(tensor.read()) for path, tensor in recording.gradients(update).items()}
    live = mover(bounds, before)(load(bounds, before), grads, recording.rate(update))
    interval, got, old = named(live.params, live.slots, live.shared), run.tensors(), read(before)
    for key, recorded in read(recording.outcome(update, trajectory)).items():
        yield compare(update, *key, got[key], recorded, old[key], interval[key])


def differing(left: Mapping[Any, Array], right: Mapping[Any, Array]) -> list[Any]:
    """Names what isn't equal bit for bit."""
    assert left.keys() == right.keys()
    return [
        key
        for key, value in left.items()
        if value.dtype != right[key].dtype or not np.array_equal(value, right[key], equal_nan=True)
    ]


def defaults(schema: str, variant: str) -> dict[str, Any]:
    """Returns what a class has for a variant if nobody says otherwise."""
    return {
        name: value
        for name, value in load_schema(schema).variant(variant)["defaults"].items()
        if name not in LEFT_OUT
    }


_CHOICE = {
    "torch_adafactor/adafactor_bf16": "adafactor",
    "hf_adafactor/fixedlr_scale_beta1_wd": "adafactor",
    "keras/adamw_ema_schedule_clip": "adamw",
    "torch_adafactor/adamw_foreach_amsgrad": "adamw",
    "torch_formats/adamw_legacy": "adamw",
    "scaled_adam/zipformer2025_groups_clipping": "scaled_adam",
    "scaled_adam/zipformer202407_clipping": "scaled_adam",
    "scaled_adam/pt7_two_groups_eden": "scaled_adam",
    "mxnet_lans/fused_bounds_clip_rescale": "lans",
    "mxnet_lans/updater_unfused_fp16_legacy": "lans",
    "optax_adafactor/lamb_pytree_noocdbt": "lamb",
}
RECORDED = {name: _CHOICE[name] for name in present(*_CHOICE)}
"""Recordings whose states hold what is special in each family, with their schemas."""


def recorded_state(name: str) -> TrainState:
    """Returns the last state of a recording, with canonical hyperparameters and numbers as learning rates."""
    with open_recording(GOLDEN / name) as recording:
        state = recording.state(recording.last, recording.trajectories[0], recording.last)
        state = store(NUMPY, load(NUMPY, state), state)  # the file is closed from here on
    groups = tuple(map(partial(_canonical, state.optimizer.schema), state.optimizer.groups))
    return replace(state, optimizer=replace(state.optimizer, groups=groups))


def _canonical(schema: str, group: Group) -> Group:
    known = {
        name: 0.25 if name == "learning_rate" else value
        for name, value in group.hyperparameters.items()
        if name in load_schema(schema).hyperparameters
    }
    return replace(group, hyperparameters=known, known_from=dict.fromkeys(known, "file"))
