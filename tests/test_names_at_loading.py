"""Names from where they are: what a checkpoint only numbers, the caller's model knows, and names may differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import statekit.jax
from statekit.errors import StateError, UsageError
from statekit.torch import load_optimizer, load_params

pytestmark = pytest.mark.torch


class Net(torch.nn.Module):
    """Layers of one shape whose order isn't that of the alphabet."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        for name, size in (sizes or {"z": 3, "a": 3, "m": 3}).items():
            self.add_module(name, torch.nn.Linear(size, size))


def moved(net: torch.nn.Module, optimizer: torch.optim.Optimizer, updates: int = 3) -> None:
    generator = torch.Generator().manual_seed(updates)
    for _ in range(updates):
        for param in net.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def trained(**sizes: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net(**sizes)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    moved(net, optimizer)
    return net, optimizer


def sorted_folder(folder: Path, net: Net, optimizer: torch.optim.Optimizer) -> Path:
    """Saves weights where names are sorted, and the optimizer that numbers its parameters beside them."""
    folder.mkdir()
    save_file(net.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return folder


def alone(folder: Path, net: Net, optimizer: torch.optim.Optimizer) -> Path:
    folder.mkdir()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return folder / "optimizer.pt"


def copy_of(net: Net, **sizes: int) -> Net:
    other = Net(**sizes)
    other.load_state_dict(net.state_dict())
    return other


Saved = Callable[[Path, Net, torch.optim.Optimizer], Path]


@pytest.mark.parametrize("saved", [sorted_folder, alone], ids=["sorted weights", "no weights"])
def test_the_models_order_tells_what_the_checkpoint_numbers(saved: Saved, tmp_path: Path) -> None:
    net, original = trained()
    path, other = saved(tmp_path / "run", net, original), copy_of(net)
    resumed = load_optimizer(path, other.named_parameters())
    moved(net, original)
    moved(other, resumed)
    for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_weights_alone_come_from_where_the_order_is_unknown(tmp_path: Path) -> None:
    net, original = trained()
    other = Net()
    load_params(sorted_folder(tmp_path / "run", net, original), other)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), net.parameters(), strict=True))


def test_weights_come_from_where_nothing_tells_which_parameters_an_optimizer_moves(tmp_path: Path) -> None:
    net, other = Net(), Net()
    named = dict(net.named_parameters())
    some = torch.optim.AdamW([named[name] for name in ("z.weight", "m.weight", "m.bias")])
    moved(net, some)
    torch.save({"model": net.state_dict(), "optimizer": some.state_dict()}, tmp_path / "run.pt")
    with pytest.raises(StateError, match="which parameters"):
        load_optimizer(tmp_path / "run.pt", net.named_parameters())
    load_params(tmp_path / "run.pt", other)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), net.parameters(), strict=True))


def test_weights_that_arent_there_are_not_made_up(tmp_path: Path) -> None:
    net, original = trained()
    with pytest.raises(StateError, match="no weights"):
        load_params(alone(tmp_path / "run", net, original), Net())


def test_shapes_that_stand_in_several_groups_stay_refused(tmp_path: Path) -> None:
    net = Net()
    first, *others = net.parameters()
    groups: list[dict[str, Any]] = [{"params": others}, {"params": [first], "weight_decay": 0.0}]
    original = torch.optim.AdamW(groups, lr=0.01)
    moved(net, original)
    for saved in (sorted_folder, alone):
        path = saved(tmp_path / saved.__name__, net, original)
        with pytest.raises(StateError, match=r"stands in groups(.|\n)*param_names"):
            load_optimizer(path, net.named_parameters())


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = alone(tmp_path / "run", *trained())
    with pytest.raises(StateError, match="shape"):
        load_optimizer(path, Net(z=3, a=4, m=3).named_parameters())


def test_param_names_outweigh_the_models_order(tmp_path: Path) -> None:
    net, original = trained()
    path = sorted_folder(tmp_path / "run", net, original)
    names = [name for name, _ in net.named_parameters()]
    backwards = dict(reversed(list(copy_of(net, m=3, a=3, z=3).named_parameters())))
    resumed = load_optimizer(path, backwards.items(), param_names=names)
    for name, param in net.named_parameters():
        assert torch.equal(resumed.state[backwards[name]]["m"], original.state[param]["exp_avg"])
    params = {n: jnp.asarray(p.detach().numpy()) for n, p in net.named_parameters()}
    _, state = statekit.jax.load_optimizer(path, params, param_names=names)
    for name, param in net.named_parameters():
        momentum = np.asarray(slots_of(state)[name]["m"])
        assert np.array_equal(momentum, original.state[param]["exp_avg"].numpy())


def slots_of(state: Any) -> Any:
    """Returns slots by leaf."""
    return {name: {"m": value} for name, value in state.m.items()}


def named_file(folder: Path, net: Net, optimizer: torch.optim.Optimizer) -> Path:
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, folder / "run.pt")
    return folder / "run.pt"


OTHER = {
    f"{mine}.{kind}": f"{theirs}.{kind}"
    for mine, theirs in (("q", "z"), ("z", "a"))
    for kind in ("weight", "bias")
}


def test_names_may_differ_in_torch(tmp_path: Path) -> None:
    net, original = trained()
    path, other = named_file(tmp_path, net, original), Net(q=3, z=3, m=3)
    load_params(path, other, names=OTHER)
    resumed = load_optimizer(path, other.named_parameters(), names=OTHER)
    assert resumed.param_groups[0]["param_names"] == [name for name, _ in other.named_parameters()]
    moved(net, original)
    moved(other, resumed)
    for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_names_of_modules_may_differ_where_the_optimizer_alone_was_saved(tmp_path: Path) -> None:
    net = Net()
    original = torch.optim.AdamW(net.named_parameters(), lr=0.01)
    moved(net, original)
    other = Net(q=3, z=3, m=3)
    names = {"q": "z", "z": "a", "m.bias": "m.bias"}
    resumed = load_optimizer(alone(tmp_path / "run", net, original), other.named_parameters(), names=names)
    for (name, mine), theirs in zip(other.named_parameters(), net.parameters(), strict=True):
        assert torch.equal(resumed.state[mine]["m"], original.state[theirs]["exp_avg"]), name


def test_names_may_differ_in_jax(tmp_path: Path) -> None:
    net, original = trained()
    path = named_file(tmp_path, net, original)
    params_of = dict(net.named_parameters())
    theirs = {
        f"{key}.{kind}": OTHER.get(f"{key}.{kind}", f"{key}.{kind}")
        for key in "qzm"
        for kind in ("weight", "bias")
    }
    blank = {name: jnp.zeros(params_of[there].shape) for name, there in theirs.items()}
    params = statekit.jax.load_params(path, blank, names=OTHER)
    _, state = statekit.jax.load_optimizer(path, blank, names=OTHER)
    for name, there in theirs.items():
        assert np.array_equal(params[name], params_of[there].detach().numpy())
        momentum = slots_of(state)[name]["m"]
        assert np.array_equal(momentum, original.state[params_of[there]]["exp_avg"].numpy())


def test_no_value_is_narrowed_in_jax(tmp_path: Path) -> None:
    net, original = trained()
    path = named_file(tmp_path, net, original)
    low = {name: jnp.zeros(param.shape, jnp.bfloat16) for name, param in net.named_parameters()}
    with pytest.raises(StateError, match="is float32 and would be narrowed to the model's bfloat16"):
        statekit.jax.load_params(path, low)


@pytest.mark.parametrize(
    ("names", "match"),
    [({"q.weight": "nowhere"}, "nowhere"), ({"a.weight": "z.weight"}, "two parameters")],
)
def test_names_that_dont_fit_are_refused(names: dict[str, str], match: str, tmp_path: Path) -> None:
    net, original = trained()
    with pytest.raises(UsageError, match=match):
        load_optimizer(named_file(tmp_path, net, original), net.named_parameters(), names=names)
