"""An optimizer without a step is one signature: it gives the name, and nothing else needs to know the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.open_state import open_state
from statekit.conversion.registry import decoded
from statekit.converters.layouts.keras import native as keras_native
from statekit.converters.layouts.keras.layout import LAYOUT as KERAS
from statekit.converters.layouts.optax.kinds import STRANGERS, Stranger
from statekit.converters.layouts.optax.optax_native import LAYOUT as OPTAX
from statekit.converters.layouts.pytorch import contents
from statekit.converters.layouts.pytorch.contents import Signature
from statekit.converters.layouts.pytorch.torch_optim import LAYOUT as TORCH
from statekit.errors import UsageError
from statekit.files.checkpoint import ATTRIBUTES, Checkpoint
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor, in_memory

CASES = Path(__file__).parent / "cases" / "foreign"


def tensor(*shape: int) -> Tensor:
    return in_memory(np.ones(shape, np.float32))


def whole(number: int) -> Tensor:
    return in_memory(np.asarray(number, np.int64))


def of_torch() -> TrainState:
    groups = [{"tempo": 0.5, "params": [0]}]
    tree = {
        "model": {"w": tensor(2, 3)},
        "optimizer": {"state": {0: {"tide": tensor(2, 3)}}, "param_groups": groups},
    }
    return decoded(TORCH, Checkpoint("torch", Path("run.pt"), tree), CheckpointRef())


def of_optax() -> TrainState:
    tree = {"params": {"w": tensor(2, 3)}, "opt_state": [{"count": whole(3), "tide": {"w": tensor(2, 3)}}]}
    return decoded(OPTAX, Checkpoint("orbax", Path("run"), tree), CheckpointRef())


def of_keras() -> TrainState:
    rows = {"0": whole(3), "1": in_memory(np.asarray(0.5, np.float32)), "2": tensor(2, 3), "3": tensor(2, 3)}
    variables: dict[str, Any] = {ATTRIBUTES: {"name": "moon"}, **rows}
    tree = {"w": {"vars": {"0": tensor(2, 3)}}, "optimizer": {"vars": variables}}
    return decoded(
        KERAS, Checkpoint("keras-h5", Path("run.weights.h5"), tree), CheckpointRef(optimizer="Moon")
    )


def test_a_signature_names_an_optimizer_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_torch().optimizer.kinds == (("torch_native", None),)
    known = (*contents.signatures(), Signature("Moon", slots=("tide",), options=("tempo",)))
    monkeypatch.setattr(contents, "signatures", lambda: known)
    assert of_torch().optimizer.kinds == (("torch_native", "Moon"),)


def test_a_signature_names_an_optimizer_of_optax(monkeypatch: pytest.MonkeyPatch) -> None:
    state = of_optax()
    assert state.optimizer.kinds == (("optax_native", None),) and [*state.slots["w"]] == ["tide"]
    monkeypatch.setitem(STRANGERS, frozenset({"count", "tide"}), Stranger("Moon", ("tide",)))
    assert of_optax().optimizer.kinds == (("optax_native", "Moon"),)


def test_a_signature_names_an_optimizer_of_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"Moon": {"name": "moon", "slots": [{"names": ["tide", "ebb"]}], "lists": {"tide": "_tides"}}}
    monkeypatch.setattr(keras_native, "_known", lambda: known)
    state = of_keras()
    assert state.optimizer.kinds == (("keras_native", "Moon"),)
    assert {path: [*slots] for path, slots in state.slots.items()} == {"w/0": ["tide", "ebb"]}


def test_a_user_gives_a_name_that_the_structure_may_have() -> None:
    source = CASES / "lion_pytorch" / "checkpoint.pt"
    with open_state(source, hints=CheckpointRef(optimizer="lion")) as opened:
        assert opened.groups[0].facts[-1].value == "lion"
    with pytest.raises(UsageError, match="radam"):
        open_state(source, hints=CheckpointRef(optimizer="radam"))
    tree = {"params": {"w": tensor(2, 3)}, "opt_state": [{"tide": {"w": tensor(2, 3)}}]}
    nameless = Checkpoint("orbax", Path("run"), tree)
    named = decoded(OPTAX, nameless, CheckpointRef(optimizer="moon"))
    assert named.optimizer.kinds == (("optax_native", "moon"),)
    with pytest.raises(UsageError, match="an optimizer that has no schema"):
        decoded(OPTAX, nameless, CheckpointRef(optimizer="adamw"))
