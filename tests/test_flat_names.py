"""A flat file whose names show an optimizer's state is read as a run, or nobody calls it weights without a word."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state

Names = Callable[[tuple[str, ...]], str]
SHAPES = {("dense", "kernel"): (8, 6), ("dense", "bias"): (6,), ("out", "kernel"): (6, 4)}
DONE = 3


def leaves() -> dict[tuple[str, ...], np.ndarray]:
    """Returns parameters and an AdamW state by their keys, as Flax has them."""
    drawn = np.random.default_rng(0)
    tree: dict[tuple[str, ...], Any] = {
        ("params", *path): drawn.normal(size=shape) for path, shape in SHAPES.items()
    }
    for name in ("mu", "nu"):
        tree |= {("opt_state", "0", name, *path): drawn.normal(size=s) ** 2 for path, s in SHAPES.items()}
    values = {keys: value.astype(np.float32) for keys, value in tree.items()}
    return {**values, ("opt_state", "0", "count"): np.asarray(DONE, np.int32)}


def keystr(keys: tuple[str, ...]) -> str:
    fields = {"mu", "nu", "count"}
    return "".join(f"[{k}]" if k.isdecimal() else f".{k}" if k in fields else f"['{k}']" for k in keys)


WHOLE: dict[str, Names] = {"slashes": "/".join, "dots": ".".join, "keystr": keystr}


def _msgpack(tree: Mapping[str, np.ndarray], path: Path) -> None:
    from flax import serialization

    path.write_bytes(serialization.msgpack_serialize(dict(tree)))


WRITERS: dict[str, Callable[[Any, Path], object]] = {
    "run.safetensors": save_file,
    "run.npz": lambda tree, path: np.savez(path, **tree),
    "run.msgpack": _msgpack,
}


@pytest.mark.jax
@pytest.mark.parametrize("file", WRITERS)
@pytest.mark.parametrize("names", WHOLE)
def test_a_flat_file_of_a_run_is_read_as_a_run(names: str, file: str, tmp_path: Path) -> None:
    tree = leaves()
    WRITERS[file]({WHOLE[names](keys): value for keys, value in tree.items()}, tmp_path / file)
    with open_state(CheckpointRef(tmp_path / file)) as opened:
        state = opened.state
        assert opened.layout == "optax" and state.counts.updates == DONE
        for path in SHAPES:
            read = state.slots["/".join(path)]
            np.testing.assert_array_equal(read["m"].read(), tree["opt_state", "0", "mu", *path])
            np.testing.assert_array_equal(read["v"].read(), tree["opt_state", "0", "nu", *path])


TORCH = {"mu": "exp_avg", "nu": "exp_avg_sq"}
ODD: dict[str, Names] = {
    "the optimizer's keys alone": lambda keys: "/".join(keys[1:]),
    "slots behind their parameters": lambda keys: "/".join((*keys[3:], *keys[2:3]) or keys[1:]),
    "PyTorch's names behind them": lambda keys: ".".join((*keys[3:], TORCH.get(keys[2], keys[2]))),
}
"""Names that no program is known to write, and that are an optimizer's all the same."""


@pytest.mark.parametrize("names", ODD)
def test_weights_whose_names_are_an_optimizers_are_never_called_bitwise_without_a_word(
    names: str, tmp_path: Path
) -> None:
    tree = leaves()
    flat = {
        ODD[names](keys) if keys[0] == "opt_state" else "/".join(keys[1:]): value
        for keys, value in tree.items()
    }
    save_file(flat, tmp_path / "run.safetensors")
    made = plan(CheckpointRef(tmp_path / "run.safetensors"), tmp_path / "out", to="statekit")
    assert "unknown: whether" in made.headline and "are parts of an optimizer" in made.headline
    convert(made)


def test_a_model_whose_module_is_called_mu_is_weights(tmp_path: Path) -> None:
    """The heads of an encoder are called so, and have no other average beside them."""
    flat = {f"{name}/kernel": np.ones((3, 2), np.float32) for name in ("mu", "logvar", "encoder")}
    save_file(flat, tmp_path / "run.safetensors")
    made = plan(CheckpointRef(tmp_path / "run.safetensors"), tmp_path / "out", to="statekit")
    assert made.headline == "BITWISE"
    convert(made)
