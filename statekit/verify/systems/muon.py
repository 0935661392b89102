"""Recordings of Muon, and of what moves the parameters that aren't Muon's.

What counts in `meta.json`: `extra.optimizers`, the groups of each optimizer one after the other, with what only its
constructor knows in `extra.constructor_only`; `extra.muon_params` where one class has two rules in one group. Those of
Optax are read as all of Optax are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from statekit.errors import NotFoundError
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor
from statekit.verify.contract import Phase
from statekit.verify.systems.optax import Optax
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


class Muon:
    """Reads recordings of Muon."""

    def describe(self, folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of `recording.json` for a `meta.json` of Muon."""
        if meta["optimizer"].startswith("optax"):
            return Optax().describe(folder, meta)
        groups = [group for entry in meta["extra"]["optimizers"] for group in _groups(entry, meta["extra"])]
        spec = {"groups": groups, "counts": {"slots": ["step"], "dtype": _count_dtype(groups)}}
        path = checkpoint_of(meta["checkpoint"]["files"])
        return described(meta, [(1, int(meta["steps"]), spec)], path, "op_by_op")

    def decode(self, tensors: Mapping[str, Tensor], step: int, phase: Phase) -> TrainState:
        """Returns the canonical state of one step."""
        return Optax().decode(tensors, step, phase)

    def encode(self, state: TrainState, phase: Phase) -> dict[str, Tensor]:
        """Returns the tensors of a state under the trajectory's names, without the step."""
        return Optax().encode(state, phase)


def _count_dtype(groups: list[dict[str, Any]]) -> str:
    """Returns the dtype in which recorders wrote the counts of the other rule: Python's numbers as int64."""
    kinds = {(group["schema"], group["variant"]) for group in groups}
    return "float32" if ("adamw", "torch") in kinds else "int64"


def _groups(entry: Mapping[str, Any], extra: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the groups of one optimizer, those that two rules move as one for each."""
    path_of = {name: path for path, name in extra["fqn"].items()}
    variant = _variant(str(entry["class"]))
    only_said = _renamed(extra.get("constructor_only", {}) if variant == "emerging" else {})
    for group in entry["param_groups"]:
        paths = [path_of[name] for name in group["params"]]
        said = {**_renamed(group), **only_said}
        if variant is None:
            rest = {name: value for name, value in said.items() if name != "param_names"}
            yield {**rest, "schema": "adamw", "variant": "torch", "params": paths}
            continue
        mine = extra["muon_params"] if group.get(USE_MUON, True) else []
        for schema, is_mine in (("muon", True), ("adamw", False)):
            moved = [path for path in paths if (path in mine) == is_mine]
            if moved:
                yield {**_taken(said, schema, variant), "schema": schema, "variant": variant, "params": moved}


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
