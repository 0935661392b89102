"""What statekit wrote before stays readable: each target opens, is what its manifest says, and means what it meant.

`tests/written/<commit>.tar.xz` holds small targets as `convert` wrote them at that commit, for each container, layout
and optimizer that could be written: of `statekit.testing.layouts.made_state`, of a T5X recording, and of a Keras model.
`index.json` in it has, by target, what the statekit of that commit read out of it. They are our own output, hence no
recordings: nothing here says that a value is right, only that it is still there.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from statekit.conversion import registry
from statekit.conversion.open_state import OpenState, open_state
from statekit.errors import StatekitError
from statekit.state.schema import WEIGHTS
from statekit.tensors.digest import tensor_digest
from statekit.tensors.tensor import Tensor

ARCHIVE = Path(__file__).parent / "written" / "b103f67.tar.xz"


def _index() -> dict[str, Any]:
    with tarfile.open(ARCHIVE) as archive:
        index = archive.extractfile("index.json")
        assert index is not None
        return dict(json.load(index))


INDEX = _index()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def described(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": tensor.dtype.name, "blake3": tensor_digest(tensor)}


def meaning(opened: OpenState) -> dict[str, Any]:
    """Returns what a checkpoint means, every value as its digest."""
    state, manifest = opened.state, opened.checkpoint.manifest
    return {
        "container": opened.checkpoint.container,
        "layout": opened.layout,
        "schema": state.optimizer.schema,
        "variant": state.optimizer.variant,
        "updates": state.counts.updates,
        "tensors": {name: entry["blake3"] for name, entry in manifest["tensors"].items()} if manifest else {},
        "params": {path: described(tensor) for path, tensor in state.params.items()},
        "slots": {path: {n: described(t) for n, t in slots.items()} for path, slots in state.slots.items()},
    }


def check(place: Path, before: Mapping[str, Any]) -> None:
    """Asserts that a target is what its manifest says, and holds what it held; hyperparameters may be more.

    Some folders didn't find their manifest then, so that no digests of theirs were known.
    """
    with open_state(place) as opened:
        now, groups, checkpoint = meaning(opened), opened.state.optimizer.groups, opened.checkpoint
        assert now == {**{key: before[key] for key in now}, "tensors": before["tensors"] or now["tensors"]}
        values = {name: tensor_digest(checkpoint.tensors[name]) for name in now["tensors"]}
        assert values == now["tensors"]
    for group, was in zip(groups, before["groups"], strict=True):
        assert list(group.paths) == was["paths"]
        known = {name: group.hyperparameters[name] for name in was["hyperparameters"]}
        assert json.loads(json.dumps(known)) == was["hyperparameters"]


@pytest.mark.parametrize("place", INDEX)
def test_a_target_still_means_what_it_meant(place: str, written: Path) -> None:
    check(written / place, INDEX[place])


def test_every_container_and_layout_that_can_be_written_is_there() -> None:
    writable = {
        (container, name)
        for name in registry.layout_names()
        for container in registry.layout(name).containers
        if registry.container(container).target_kind
    }
    before = {(place.split("/")[0], place.split("/")[1]) for place in INDEX}
    assert before <= writable
    later = {pair for pair in writable if registry.layout(pair[1]).variants.keys() == {WEIGHTS}}
    later |= {("megatron", "megatron-float16"), ("megatron", "megatron-distributed")}  # layouts since then
    later |= {
        pair
        for pair in writable
        if pair[1] in ("keras-model-h5", "maxtext", "mxnet-native", "optax-native", "tf2-keras2")
    }
    later |= {("deepspeed", "deepspeed")}  # which was only read
    later |= {pair for pair in writable if pair[1].startswith(("bitsandbytes-", "torchao-"))}
    assert writable - before - later == {("keras", "statekit-keras")}  # needs the config of a model of Keras


def test_a_changed_value_is_noticed(written: Path, tmp_path: Path) -> None:
    place = "statekit/statekit/adamw/target.statekit"
    shutil.copytree(written / place, tmp_path / "copy")
    check(tmp_path / "copy", INDEX[place])
    shard = next((tmp_path / "copy").glob("*.safetensors"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises((AssertionError, StatekitError)):
        check(tmp_path / "copy", INDEX[place])
    with pytest.raises(AssertionError):
        check(written / place, {**INDEX[place], "updates": INDEX[place]["updates"] + 1})
