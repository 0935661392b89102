"""Recordings of Optax that a stranger makes replay: chains with a decay, and arguments left at their defaults."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from statekit.arrays.backend import backend
from statekit.errors import UnknownRuleError
from statekit.verify.recording import open_recording
from statekit.verify.replay import Subject, replay

pytestmark = pytest.mark.jax
SHAPES = {"wide/kernel": (6, 5), "bias": (5,)}
STEPS, KEPT, RATE = 6, 3, 0.01


def chain_of_adam() -> Any:
    import optax

    decay = optax.add_decayed_weights(0.1)
    return optax.chain(optax.scale_by_adam(b2=0.95), decay, optax.scale_by_learning_rate(RATE))


def chain_of_adafactor() -> Any:
    import optax

    core = optax.scale_by_factored_rms(min_dim_size_to_factor=4)
    decay = optax.add_decayed_weights(0.1)
    return optax.chain(core, optax.clip_by_block_rms(1.0), decay, optax.scale_by_learning_rate(RATE))


def masked_decay() -> Any:
    import optax

    decay = optax.add_decayed_weights(0.1, {"wide": {"kernel": True}, "bias": False})
    return optax.chain(optax.scale_by_adam(), decay, optax.scale(-RATE))


def injected() -> Any:
    import optax

    return optax.inject_hyperparams(optax.nadamw)(learning_rate=RATE)


def accumulated() -> Any:
    import optax

    return optax.MultiSteps(optax.adafactor(RATE, min_dim_size_to_factor=4), 3).gradient_transformation()


FACTORED = {
    "factored": True,
    "decay_rate": 0.8,
    "step_offset": 0,
    "min_dim_size_to_factor": 4,
    "epsilon": 1e-30,
}
CASES: dict[str, tuple[Callable[[], Any], str, Mapping[str, Any]]] = {
    "adam": (
        chain_of_adam,
        "optax.chain(scale_by_adam, add_decayed_weights, scale_by_learning_rate)",
        {"scale_by_adam": {"b2": 0.95}, "add_decayed_weights": 0.1, "scale_by_learning_rate": RATE},
    ),
    "adafactor": (
        chain_of_adafactor,
        "optax.chain(scale_by_factored_rms, clip_by_block_rms, add_decayed_weights, scale_by_learning_rate)",
        {
            "scale_by_factored_rms": FACTORED,
            "clip_by_block_rms": 1.0,
            "add_decayed_weights": 0.1,
            "scale_by_learning_rate": RATE,
        },
    ),
    "masked decay": (
        masked_decay,
        "optax.chain(scale_by_adam, add_decayed_weights, scale)",
        {
            "scale_by_adam": {},
            "add_decayed_weights": {"weight_decay": 0.1, "mask": "ndim > 1"},
            "scale": -RATE,
        },
    ),
    "injected": (injected, "optax.inject_hyperparams(nadamw)", {"learning_rate": RATE}),
    "accumulated": (
        accumulated,
        "optax.MultiSteps(adafactor, 3)",
        {"learning_rate": RATE, "min_dim_size_to_factor": 4},
    ),
    "accumulated, by keyword": (
        accumulated,
        "optax.MultiSteps(adafactor, every_k_schedule=3)",
        {"learning_rate": RATE, "min_dim_size_to_factor": 4},
    ),
}


def recorded(folder: Path, case: str) -> Path:
    """Runs Optax, and writes what it did as a recording has it."""
    import jax
    import optax
    import orbax.checkpoint as ocp

    from statekit.jax.live import live_tree
    from statekit.tensors.tree import nested, walk

    make, name, hyperparameters = CASES[case]
    tx, random = make(), np.random.default_rng(0)
    params: Any = nested(
        {
            tuple(path.split("/")): random.normal(size=shape).astype(np.float32)
            for path, shape in SHAPES.items()
        }
    )
    state, update = tx.init(params), jax.jit(tx.update)
    tensors: dict[str, Any] = {}
    grads: dict[str, Any] = {}

    def keep(step: int) -> None:
        for keys, leaf in walk(live_tree(params)):
            tensors[f"{step}/param/{'/'.join(map(str, keys))}"] = np.array(leaf.read())
        for keys, leaf in walk(live_tree(state)):
            if not hasattr(leaf, "read"):
                continue
            names = list(map(str, keys))
            path = next((p for i in range(len(names)) if (p := "/".join(names[i:])) in SHAPES), None)
            field = ".".join(names[: len(names) - len(path.split("/"))] if path else names)
            tensors[f"{step}/slot/{path}/{field}" if path else f"{step}/global/{field}"] = np.array(
                leaf.read()
            )

    keep(0)
    for step in range(1, STEPS + 1):
        grad = {path: random.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}
        grads |= {f"{step}/{path}": value for path, value in grad.items()}
        updates, state = update(
            nested({tuple(path.split("/")): g for path, g in grad.items()}), state, params
        )
        params = optax.apply_updates(params, updates)
        keep(step)
        if step == KEPT:
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(folder / "checkpoint" / "ckpt", {"params": params, "opt_state": state})
    save_file(tensors, folder / "trajectory.safetensors")
    save_file(grads, folder / "grads.safetensors")
    files = [
        f"{file.relative_to(folder)}" for file in sorted((folder / "checkpoint").rglob("*")) if file.is_file()
    ]
    meta = {
        "system": "optax_adafactor",
        "source": f"optax=={optax.__version__}",
        "versions": {"optax": optax.__version__, "jax": jax.__version__, "numpy": np.__version__},
        "optimizer": name,
        "hyperparameters": hyperparameters,
        "steps": STEPS,
        "checkpoint_step": KEPT,
        "checkpoint": {"format": "orbax StandardCheckpointer", "files": files},
        "params": {path: {"shape": list(shape), "dtype": "float32"} for path, shape in SHAPES.items()},
        "learning_rate": [RATE] * STEPS,
        "extra": {"update_under": "jax.jit on CPU"},
        "notes": "",
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_recording_of_a_stranger_replays(case: str, tmp_path: Path) -> None:
    with open_recording(recorded(tmp_path, case)) as recording:
        result = replay(Subject(recording), backend("numpy"))
    assert result.start == "checkpoint" and result.passed


def test_a_decay_that_stands_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = recorded(tmp_path, "adam")
    meta = json.loads((folder / "meta.json").read_text())
    meta["optimizer"] = "optax.chain(add_decayed_weights, scale_by_adam, scale_by_learning_rate)"
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UnknownRuleError, match="adds decayed weights"), open_recording(folder):
        pass
