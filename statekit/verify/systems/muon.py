"""Recordings of Muon, and of what moves the parameters that aren't Muon's.

What counts in `meta.json`: `extra.optimizers`, the groups of each optimizer one after the other, with what only its
constructor knows in `extra.constructor_only`; `extra.muon_params` where one class has two rules in one group. Those of
Optax are read as all of Optax are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from statekit.errors import NotFoundError
from statekit.state.constants import of_xla
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor
from statekit.verify.contract import Phase
from statekit.verify.systems.optax import Optax, by_update, every, excluded
from statekit.verify.systems.schema_named import BESIDE, checkpoint_of, described

VARIANTS = {
    "torch.optim.Muon": "torch",
    "muon.": "keller",
    "moonlight": "moonlight",
    "emerging_optimizers": "emerging",
}
"""Variant by how the name of its class begins."""
_OLD_NAMES = {"momentum_beta": "momentum", "use_nesterov": "nesterov"}
"""Arguments of Emerging-Optimizers 0.1.0 -> those of later releases."""
USE_MUON = "use_muon"
_OF_MUON = (
    "ns_coeffs", "ns_steps", "beta", "eps", "weight_decay", "mu_dtype", "nesterov", "adaptive", "preconditioning",
    "consistent_rms",
)  # fmt: skip
_OF_BASE_CLASS = (
    "clipnorm", "global_clipnorm", "clipvalue", "use_ema", "ema_momentum", "ema_overwrite_frequency",
    "loss_scale_factor", "gradient_accumulation_steps",
)  # fmt: skip
_OF_KERAS_MUON = (
    "momentum", "nesterov", "muon_a", "muon_b", "muon_c", "ns_steps", "rms_rate", "weight_decay",
)  # fmt: skip
_OF_ADAM = ("b1", "b2", "eps_root", "weight_decay")
"""What `optax.contrib.muon` takes for each of its two rules; names of the second begin with `adam_`."""


class Muon:
    """Reads recordings of Muon."""

    def describe(self, folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of `recording.json` for a `meta.json` of Muon."""
        if meta["optimizer"].startswith("optax"):
            return _of_optax(meta)
        groups = [group for entry in meta["extra"]["optimizers"] for group in _groups(entry, meta["extra"])]
        spec = {"groups": groups, "counts": {"slots": ["step"], "dtype": _count_dtype(groups)}}
        path = checkpoint_of(meta["checkpoint"]["files"])
        return described(meta, [(1, int(meta["steps"]), spec)], path, "op_by_op")

    def decode(self, tensors: Mapping[str, Tensor], step: int, phase: Phase) -> TrainState:
        """Returns the canonical state of one step."""
        if phase.hyperparameters.get("keras"):
            native = _renamed_slots(phase.hyperparameters)
            # The count and the rate stand beside them: the number of the step and the description say both.
            slots = {name: value for name, value in tensors.items() if not name.startswith("global/muon/")}
            tensors = {native.get(name, name): value for name, value in slots.items()}
        return Optax().decode(tensors, step, phase)

    def encode(self, state: TrainState, phase: Phase) -> dict[str, Tensor]:
        """Returns the tensors of a state under the trajectory's names, without the step."""
        keras = {native: name for name, native in _renamed_slots(phase.hyperparameters).items()}
        return {keras.get(name, name): value for name, value in Optax().encode(state, phase).items()}


def _of_optax(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `recording.json` for a `meta.json` of `optax.contrib.muon`, whose call has two rules."""
    hyperparameters, extra = meta["hyperparameters"], meta["extra"]
    wrapped = str(hyperparameters.get("wrapped", ""))
    norm = re.search(r"clip_by_global_norm\(([0-9.e-]+)\)", wrapped)
    limits = {"clipvalue": None, "global_norm_clip_threshold": float(norm[1]) if norm else None}
    mask = excluded(meta, hyperparameters["weight_decay_mask"])
    of_muon = {name: hyperparameters[name] for name in _OF_MUON}
    of_adam = {name: hyperparameters[f"adam_{name}"] for name in _OF_ADAM} | {
        name: hyperparameters[name] for name in ("eps", "mu_dtype", "nesterov")
    }
    own_adam = {"amsgrad": False, "exclude_from_weight_decay": None, **of_adam}
    muon_paths = list(extra["muon_params"])
    groups = [
        {"schema": "muon", **of_muon, "exclude_from_weight_decay": mask, "params": muon_paths},
        {
            "schema": "adamw",
            **own_adam,
            "params": [path for path in meta["params"] if path not in muon_paths],
        },
    ]
    spec = {"groups": [{**group, **limits, "variant": "optax"} for group in groups], "rules": _matrices(meta)}
    rates = [
        [rate, _adam_rate(hyperparameters, step, rate)] for step, rate in enumerate(meta["learning_rate"])
    ]
    recorded = described(
        {**meta, "learning_rate": rates},
        [(1, int(meta["steps"]), spec)],
        checkpoint_of(meta["checkpoint"]["files"]),
        of_xla(str(meta.get("versions", {}).get("backend", "cpu"))),
    )
    return by_update(recorded, every(wrapped))


_SLOTS_OF_ADAM = {"momentums": "momentum", "adam_velocities": "velocity"}
"""What Keras' Muon calls the slots of its Adam, and what Keras' Adam calls them."""


def of_keras(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `recording.json` for a `meta.json` of Keras' Muon, a class of two rules."""
    hyperparameters, extra = meta["hyperparameters"], meta["extra"]
    ratio = float(hyperparameters["adam_lr_ratio"])
    both = {name: hyperparameters[name] for name in _OF_BASE_CLASS} | {"exclude_from_weight_decay": None}
    of_muon = load_schema("muon").canonical("keras", {name: hyperparameters[name] for name in _OF_KERAS_MUON})
    decay = hyperparameters["adam_weight_decay"]
    of_adam = {
        "beta_1": hyperparameters["adam_beta_1"],
        "beta_2": hyperparameters["adam_beta_2"],
        "epsilon": hyperparameters["epsilon"],
        "amsgrad": False,
        # The decay goes by the whole rate, whatever share of it is Adam's.
        "weight_decay": None if decay is None else decay / ratio,
    }
    groups = [
        {"schema": "muon", **of_muon, "params": extra["muon_params"]},
        {"schema": "adamw", **of_adam, "params": extra["adam_params"]},
    ]
    spec = {"groups": [{**group, **both, "variant": "keras"} for group in groups], "keras": True}
    rates = [[rate, rate * ratio] for rate in meta["learning_rate"]]
    file = next(name for name in meta["checkpoint"]["files"] if name.endswith(".keras"))
    return described(
        {**meta, "system": "muon", "learning_rate": rates}, [(1, int(meta["steps"]), spec)], file, "op_by_op"
    )


def _renamed_slots(spec: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names of the slots of Keras' Muon that its Adam has, and what Keras' Adam calls them."""
    paths = [path for group in spec["groups"] if group["schema"] == "adamw" for path in group["params"]]
    slots = _SLOTS_OF_ADAM.items() if spec.get("keras") else ()
    return {f"slot/{path}/{name}": f"slot/{path}/{native}" for path in paths for name, native in slots}


def _matrices(meta: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the labels of the axes of parameters for which dimension numbers were given."""
    rules, numbers = {}, meta["extra"]["muon_params"]
    for path, (reduced, output) in numbers.items() if isinstance(numbers, Mapping) else ():
        axes = range(len(meta["params"][path]["shape"]))
        rules[path] = ["COLUMN" if i in reduced else "ROW" if i in output else "BATCH" for i in axes]
    return rules


def _adam_rate(options: Mapping[str, Any], step: int, rate: float) -> float:
    """Returns the rate of the parameters that aren't Muon's."""
    schedule = options.get("adam_learning_rate")
    if schedule is None or isinstance(schedule, float):
        return rate if schedule is None else schedule
    match = re.fullmatch(r"linear_schedule\((.+), (.+), (\d+)\)", schedule)
    if match is None:
        raise NotFoundError("A schedule isn't known.", expected="linear_schedule(...)", found=schedule)
    first, last, steps = float(match[1]), float(match[2]), int(match[3])
    return first + (last - first) * min(step, steps) / steps


def _count_dtype(groups: list[dict[str, Any]]) -> str:
    """Returns the dtype in which recorders wrote the counts of the other rule: Python's numbers as int64."""
    kinds = {(group["schema"], group["variant"]) for group in groups}
    return "float32" if ("adamw", "torch") in kinds else "int64"


def _groups(entry: Mapping[str, Any], extra: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the groups of one optimizer; a group that two rules move becomes one group for each rule."""
    path_of = {name: path for path, name in extra["fqn"].items()}
    variant = _variant(str(entry["class"]))
    only_said = _renamed(extra.get("constructor_only", {}) if variant == "emerging" else {})
    for group in entry["param_groups"]:
        paths = [path_of[name] for name in group["params"]]
        settings = {**_renamed(group), **only_said}
        if variant is None:
            rest = {name: value for name, value in settings.items() if name != "param_names"}
            yield {**rest, "schema": "adamw", "variant": "torch", "params": paths}
            continue
        muon_params = extra["muon_params"] if group.get(USE_MUON, True) else []
        for schema, is_mine in (("muon", True), ("adamw", False)):
            moved = [path for path in paths if (path in muon_params) == is_mine]
            if moved:
                yield {
                    **_taken(settings, schema, variant),
                    "schema": schema,
                    "variant": variant,
                    "params": moved,
                }


def _renamed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments under their names of today; what is said under an old one counts."""
    newer = {name: value for name, value in arguments.items() if name not in _OLD_NAMES}
    return newer | {_OLD_NAMES[name]: value for name, value in arguments.items() if name in _OLD_NAMES}


def _variant(called: str) -> str | None:
    """Returns the variant of Muon that a class is, None of PyTorch's AdamW."""
    variant = next((variant for start, variant in VARIANTS.items() if called.startswith(start)), None)
    if variant is None and called != "torch.optim.adamw.AdamW":
        raise NotFoundError("A recording is of an unknown class.", expected=", ".join(VARIANTS), found=called)
    return variant


def _taken(arguments: Mapping[str, Any], schema: str, variant: str) -> dict[str, Any]:
    """Returns the arguments that one of a class' two rules takes."""
    names = (*load_schema(schema).arguments(variant), *BESIDE)
    return {name: value for name, value in arguments.items() if name in names}
