"""Every printed block of PyTorch runs: the run goes on bit for bit, and its next save loads again."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.resume import of_checkpoint, of_plan, resume_lines
from statekit.conversion.seal import seal
from statekit.errors import UnknownRuleError
from statekit.tensors.tree import to_json

pytestmark = pytest.mark.torch
UPDATES = 3
Groups = list[dict[str, Any]]


class Tower(torch.nn.Module):
    """Linear layers with batch normalisation, whose first may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x)))
        return result


NOISE = ("first.bias", "norm.running_mean")
"""Batch normalisation takes the bias away again: its gradients are rounding, of which Adam makes steps."""


def named(net: torch.nn.Module, *names: str) -> list[torch.nn.Parameter]:
    params = dict(net.named_parameters())
    return [params[name] for name in names]


ORDERED = ("first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight", "last.bias")
DECAYED, STILL = ("first.weight", "last.weight"), ("first.bias", "norm.weight", "norm.bias", "last.bias")
SHAPES: dict[str, tuple[Callable[[torch.nn.Module], Groups], tuple[str, ...]]] = {
    "one": (lambda net: [{"params": named(net, *ORDERED)}], ORDERED),
    "two": (
        lambda net: [{"params": named(net, *DECAYED)}, {"params": named(net, *STILL), "weight_decay": 0.0}],
        (*DECAYED, *STILL),
    ),
    "left out": (lambda net: [{"params": named(net, "last.weight", "last.bias")}], ORDERED[4:]),
    "other order": (lambda net: [{"params": named(net, *ORDERED[::-1])}], ORDERED[::-1]),
    "empty": (
        lambda net: [{"params": [], "lr": 1e-4}, {"params": named(net, *ORDERED), "lr": 0.02}],
        ORDERED,
    ),
}
RULES: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9)),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=0.1),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),
}
NATIVE = (
    "torch/torch-optim",
    "torch/torch-fqn",
    "torch/torch-fqn-flat",
    "dcp/torch-fqn",
    "dcp/torch-fqn-flat",
)
TARGETS = (
    "torch/torch-optim", "torch/torch-fqn", "torch/torch-fqn-flat", "torch/statekit-torch", "dcp/torch-optim",
    "dcp/torch-fqn", "dcp/torch-fqn-flat", "dcp/statekit-torch", "dcp-safetensors/torch-fqn-flat",
    "accelerate/torch-optim", "accelerate/statekit-torch", "statekit/statekit",
)  # fmt: skip
SAMPLE = (
    ("native", "torch/torch-optim", "two", "AdamW"),
    ("native", "torch/torch-optim", "left out", "Adam"),
    ("sealed", "torch/torch-optim", "other order", "AdamW"),
    ("sealed", "dcp/torch-fqn", "empty", "AdamW"),
    ("converted", "dcp/torch-optim", "empty", "AdamW"),
    ("converted", "torch/torch-optim", "two", "Adam"),
    ("converted", "accelerate/torch-optim", "left out", "Adafactor"),
)


def cells() -> Iterator[Any]:
    for how, homes in (("native", NATIVE), ("sealed", NATIVE), ("converted", TARGETS)):
        for home in homes:
            for shape in SHAPES:
                for rule in RULES:
                    cell = (how, home, shape, rule)
                    yield pytest.param(*cell, marks=() if cell in SAMPLE else pytest.mark.slow)


def updated(net: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    for number in range(first, first + UPDATES):
        torch.manual_seed(number)
        optimizer.zero_grad()
        net(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()


def written(net: torch.nn.Module, optimizer: torch.optim.Optimizer, home: str, path: Path) -> Path:
    """Saves a run by PyTorch's own means."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    parts: dict[str, Any] = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    if "fqn" in home:
        options = StateDictOptions(flatten_optimizer_state_dict="flat" in home)
        parts = dict(zip(parts, get_state_dict(net, optimizer, options=options), strict=True))
    if home.startswith("dcp"):
        state_dict_saver.save(parts, checkpoint_id=path, no_dist=True)
    else:
        torch.save(parts, path)
    return path


def printed(
    how: str, home: str, net: torch.nn.Module, optimizer: Any, order: tuple[str, ...], folder: Path
) -> list[str]:
    container, layout = home.split("/")
    hints = Hints(param_names=order)
    if how == "converted":
        source = written(net, optimizer, "torch/torch-optim", folder / "source.pt")
        planned = plan(source, folder / "out", to=container, layout=layout, hints=hints)
        convert(planned)
        return resume_lines(of_plan(planned), planned.state)
    path = written(net, optimizer, home, folder / "run")
    hints = hints if layout == "torch-optim" else Hints()
    if how == "sealed":
        seal(path)
    with open_state(path, hints=hints) as opened:
        return resume_lines(of_checkpoint(opened), to_json(opened.state.to_json()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(("how", "home", "shape", "rule"), [*cells()])
def test_the_printed_block_goes_on_and_saves(
    how: str, home: str, shape: str, rule: str, tmp_path: Path
) -> None:
    grouped, order = SHAPES[shape]
    net = Tower()
    optimizer = RULES[rule](grouped(net))
    updated(net, optimizer, 0)
    lines = printed(how, home, net, optimizer, order, tmp_path)
    assert "..." not in "\n".join(lines)
    fresh = Tower()
    for param in fresh.parameters():
        torch.nn.init.zeros_(param)
    scope: dict[str, Any] = {"model": fresh}
    if home.startswith("accelerate"):
        scope["accelerator"] = pytest.importorskip("accelerate").Accelerator(cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = compile("\n".join(lines), "to go on", "exec")
        if "statekit" in home and rule == "Adam":
            with pytest.raises(UnknownRuleError, match="weight decay in the gradient"):
                exec(code, scope)
            return
        exec(code, scope)
    ours = scope["optimizer"]
    updated(net, optimizer, UPDATES)
    updated(fresh, ours, UPDATES)
    exact = "statekit" not in home
    same_values(fresh, net, exact)
    again = Tower()
    again.load_state_dict(copy.deepcopy(fresh.state_dict()))
    saved = copy.deepcopy(getattr(ours, "optimizer", ours).state_dict())
    places = {param: name for name, param in fresh.named_parameters()}
    names = [[places[param] for param in group["params"]] for group in ours.param_groups]
    groups: list[dict[str, Any]] = [
        {
            "params": [*zip(paths, named(again, *paths), strict=True)]
            if "statekit" in home
            else named(again, *paths)
        }
        for paths in names
    ]
    inner = getattr(ours, "optimizer", ours)
    next_one = type(inner)(groups, lr=0.5, **({} if exact else {"variant": inner.param_groups[0]["variant"]}))
    next_one.load_state_dict(saved)
    updated(net, optimizer, 2 * UPDATES)
    updated(again, next_one, 2 * UPDATES)
    same_values(again, net, exact)


def same_values(mine: torch.nn.Module, theirs: torch.nn.Module, exact: bool) -> None:
    for (name, value), other in zip(mine.state_dict().items(), theirs.state_dict().values(), strict=True):
        if name in NOISE and not exact:
            continue
        assert torch.allclose(value, other, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6), name
