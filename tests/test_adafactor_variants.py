"""The other Adafactors, one step at a time from their recorded states: HF, torch, Keras."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from goldens import GOLDEN
from statekit.backends import Backend, backend
from statekit.converters.containers.safetensors_file import open_safetensors
from statekit.optim import adafactor
from statekit.optim.factoring import by_shape
from statekit.optim.settings import form
from statekit.optim.steps import Scene
from statekit.schema import load_schema
from statekit.state import Group, Rule
from statekit.tensor import Array, Tensor
from statekit.verify.intervals import IntervalBackend
from statekit.verify.systems.aliased import canonical
from statekit.verify.verdict import Row, compare

SCHEMA = load_schema("adafactor")
CASES = {
    "hf_adafactor": {"*": "hf"},
    "torch_adafactor": {"adafactor_fo*": "torch"},
    "torch_formats": {"adafactor_zip": "torch"},
    "keras": {"adafactor*": "keras"},
}
BUNDLES = [
    pytest.param(folder, variant, id=f"{system}/{folder.name}")
    for system, patterns in CASES.items()
    for pattern, variant in patterns.items()
    for folder in sorted((GOLDEN / system).glob(pattern))
    if (folder / "meta.json").is_file()
]
BACKENDS = ["numpy", pytest.param("torch", marks=pytest.mark.torch)]


def rule_of(meta: Mapping[str, Any], variant: str, path: str, hyper: Mapping[str, Any]) -> Rule:
    """Returns how a variant factors a parameter, by its constants in the schema."""
    return Rule(
        by_shape(form("adafactor", variant), meta["params"][path]["shape"], hyper["factored"]), "given"
    )


def hyperparameters(meta: Mapping[str, Any], variant: str, path: str) -> tuple[int, dict[str, Any]]:
    """Returns the parameter's group and its hyperparameters, canonical."""
    extra, told = meta["extra"], dict(meta["hyperparameters"])
    number = 0
    for i, group in enumerate(extra.get("param_groups") or ()):
        if extra["fqn"].get(path, path) in group["params"]:
            number, told = i, {**told, **group}
    values = {**SCHEMA.settings(variant), **canonical(SCHEMA, variant, told)}
    if "eps" in told:
        values["epsilon1"], values["epsilon2"] = told["eps"]
    return number, values


def rate_of(meta: Mapping[str, Any], update: int, group: int) -> float:
    rate = meta["learning_rate"][update - 1]
    return float(rate[group] if isinstance(rate, list) else rate)


def rows(folder: Path, variant: str, xp: Backend, fault: Mapping[str, Any] | None = None) -> Iterator[Row]:
    """Steps every parameter of a bundle from each recorded state, and compares with the next one."""
    meta = json.loads((folder / "meta.json").read_text())
    states, grads = (
        open_safetensors(folder / "trajectory.safetensors"),
        open_safetensors(folder / "grads.safetensors"),
    )
    # torch's kernels contract products and sums.
    bounds = IntervalBackend(contracted=True)
    for update in range(1, int(meta["steps"]) + 1):
        for path in (p for p in meta["params"] if f"{update}/{p}" in grads.tensors):
            number, values = hyperparameters(meta, variant, path)
            rule = rule_of(meta, variant, path, values)
            rate = rate_of(meta, update, number)
            before, after = (_recorded(states.tensors, step, path, variant) for step in (update - 1, update))
            grad = grads.tensors[f"{update}/{path}"].read()
            ours = _step(xp, before, grad, rule, {**values, **(fault or {})}, rate, update - 1, path, variant)
            bound = _step(bounds, before, grad, rule, values, rate, update - 1, path, variant)
            for name, value in ours.items():
                recorded = after[name].reshape(xp.shape(value))
                old = before.get(name, np.zeros_like(recorded)).reshape(recorded.shape)
                yield compare(update, path, name, xp.numpy(value), recorded, old, bound[name])
    states.close()
    grads.close()


def _recorded(states: Mapping[str, Tensor], step: int, path: str, variant: str) -> dict[str, Array]:
    names = {"param": f"{step}/param/{path}"}
    for slot, spec in SCHEMA.slots.items():
        names[slot] = f"{step}/slot/{path}/{spec.aliases.get(variant)}"
    return {slot: states[name].read() for slot, name in names.items() if name in states}


def _step(
    xp: Backend, before: Mapping[str, Array], grad: Array, rule: Rule, values: Mapping[str, Any],
    rate: float, step: int, path: str, variant: str,
) -> dict[str, Any]:  # fmt: skip
    own = adafactor.settle(Group((path,), values), path, rule, variant)
    param = xp.asarray(before["param"])
    slots = adafactor.init(xp, param, own, variant)
    slots = {n: xp.asarray(before[n].reshape(xp.shape(s))) if n in before else s for n, s in slots.items()}

    def move(p: Any, g: Any, s: Any) -> Any:
        return adafactor.update(Scene(xp, variant, rate, step), p, g, s, own, None)

    after, moved = xp.compile(move)(param, xp.asarray(grad), slots)
    return {"param": after, **moved}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("folder", "variant"), BUNDLES)
def test_every_step_lies_in_the_bound(folder: Path, variant: str, name: str) -> None:
    compared = list(rows(folder, variant, backend(name)))
    assert len(compared) > 10
    assert [row for row in compared if row.outside] == []


@pytest.mark.parametrize(
    "fault",
    [
        {"epsilon1": 1e-3},
        {"epsilon2": 0.5},
        {"decay_rate": 0.5},
        {"clipping_threshold": 0.1},
    ],
    ids=["epsilon1", "epsilon2", "decay", "clipping"],
)
@pytest.mark.parametrize(("folder", "variant"), BUNDLES[:6:5])
def test_a_moved_hyperparameter_leaves_the_bound(
    folder: Path, variant: str, fault: Mapping[str, Any]
) -> None:
    _, values = hyperparameters(json.loads((folder / "meta.json").read_text()), variant, "")
    assert any(values[key] != value for key, value in fault.items())
    scaled = "epsilon2" not in fault or values["multiply_by_parameter_scale"]
    compared = list(rows(folder, variant, backend("numpy"), fault))
    assert any(row.outside for row in compared) == bool(scaled)
