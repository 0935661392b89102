"""Every optimizer of torch.optim, and of pytorch_optimizer where it is there: recognised, or refused by its name."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import recognised_table
import torch
from zoo import answers

from statekit.cli.main import main
from statekit.tensors.tree import walk
from statekit.torch import attest, load_optimizer

pytestmark = pytest.mark.torch
SHAPES = {"mixed": ((4, 3), (3,), (3, 4), (4,)), "square": ((4, 4), (4,), (2, 3, 4))}
NAMES = {
    "Adam": "torch Adam or AdamW", "AdamW": "torch Adam or AdamW", "SGD": "torch SGD without momentum",
    "Muon": "muon",
}  # fmt: skip
RECOGNISED = {"Adam", "AdamW", "Adafactor"}
CI_DRAWS = 10
TARGETS = {"again.pt": [], "optax": ["--to", "orbax", "--layout", "optax"], "neutral": ["--to", "statekit"]}
Make = Callable[[list[torch.nn.Parameter]], Any]


def of_torch() -> list[str]:
    every = vars(torch.optim).items()
    kinds = [n for n, c in every if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)]
    return sorted({*kinds} - {"Optimizer", "SparseAdam"})


def of_library() -> list[str]:
    if find_spec("pytorch_optimizer") is None:
        return []
    pytorch_optimizer: Any = import_module("pytorch_optimizer")
    kinds: list[str] = []
    for name in sorted(pytorch_optimizer.get_supported_optimizers()):
        kind = pytorch_optimizer.load_optimizer(name)
        kinds += [] if kind.__module__.startswith("torch.") else [kind.__name__]
    return kinds


def grads(params: list[torch.nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator) * 0.1


def given(kind: type) -> dict[str, Any]:
    return {"lr": 0.01} if "lr" in inspect.signature(kind).parameters else {}


def trained(kind: type, shapes: tuple[tuple[int, ...], ...]) -> tuple[list[torch.nn.Parameter], Any]:
    """Returns parameters and the optimizer that has moved them three times."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    if kind.__name__ in ("Muon", "SpectralSphere"):
        params = [param for param in params if param.dim() == 2]
    optimizer = kind(params, **given(kind))

    def closure() -> torch.Tensor:
        grads(params, 0)
        return torch.tensor(1.0)

    for number in range(3):
        grads(params, number)
        if kind.__name__ == "LBFGS":
            optimizer.step(closure)
        else:
            optimizer.step()
    return params, optimizer


def saved(kind: type, shape: str, path: Path) -> tuple[dict[str, torch.nn.Parameter], Any]:
    params, optimizer = trained(kind, SHAPES[shape])
    named = {f"w{i}": param for i, param in enumerate(params)}
    weights = {name: param.detach() for name, param in named.items()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, path)
    return named, optimizer


def assert_same(left: Any, right: Any) -> None:
    """Holds two trees against each other: tensors by every bit, the rest by what it is."""
    leaves, others = dict(walk(left)), dict(walk(right))
    assert leaves.keys() == others.keys()
    for path, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            torch.testing.assert_close(leaf, others[path], rtol=0, atol=0, equal_nan=True)
        else:
            assert leaf == others[path], path


def check(name: str, kind: type, shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sends a state through every verb."""
    path = tmp_path / "run.pt"
    named, optimizer = saved(kind, shape, path)
    is_torchs = kind.__module__.startswith("torch.")
    goes_on = kind.__name__ in RECOGNISED and is_torchs
    given_answers = answers(path, TARGETS, tmp_path, capsys)
    carried = 0
    for target, done in given_answers.converted.items():
        if kind is torch.optim.Adafactor and target == "optax":
            # It clamps means below 1.2e-7, its default epsilon, which no other rule does: another update.
            assert done.code == 3
            assert "epsilon1_place is clamp in the source" in done.text
        elif goes_on:
            assert done.code == 0, done.text
            assert given_answers.verified[target].code == 0
        elif target == "optax":
            assert done.code in (2, 3)  # no layout of Optax holds it, or its rule is another
            assert name in done.text
        else:
            assert done.code == 0 or (done.code == 3 and name in done.text)
            carried += done.code == 0
    if goes_on:
        assert attest(optimizer, named.items(), path).passed
        copies = {key: torch.nn.Parameter(param.detach().clone()) for key, param in named.items()}
        resumed: Any = load_optimizer(path, copies.items())
        for number in range(3, 6):
            for params, one in ((list(named.values()), optimizer), (list(copies.values()), resumed)):
                grads(params, number)
                one.step()
        for key, param in named.items():
            torch.testing.assert_close(copies[key], param, rtol=1e-5, atol=1e-7)
    else:
        assert name in given_answers.shown
        assert carried == 2 or not is_torchs
        if (tmp_path / "again.pt").exists():  # objects lie in no torch file: refused by the name above
            again, before = torch.load(tmp_path / "again.pt")["optimizer"], optimizer.state_dict()
            assert again["state"].keys() == before["state"].keys()
            kind(trained(kind, SHAPES[shape])[0], **given(kind)).load_state_dict(again)
            assert_same(again["state"], before["state"])


class Projector:
    """What an optimizer may keep beside tensors."""


@pytest.mark.parametrize("kept", [Projector(), torch.float64], ids=["object", "dtype"])
def test_an_optimizer_that_keeps_objects_is_refused_by_its_name(
    kept: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Conda and Kron of pytorch_optimizer 4.1.0. Seen red: the user's slip (exit 2), for a type of values too."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    for slots in optimizer.state.values():
        slots["kept"] = kept
    source, again = tmp_path / "run.pt", tmp_path / "again.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    code, shown = main(["convert", f"{source}", f"{again}"]), capsys.readouterr()
    if isinstance(kept, torch.dtype):
        assert code == 0
        assert_same(
            torch.load(again, weights_only=True)["optimizer"]["state"], optimizer.state_dict()["state"]
        )
        return
    assert code == 3 and "an optimizer of PyTorch keeps what a torch file can't hold" in shown.err
    assert main(["convert", f"{source}", f"{tmp_path / 'kept'}", "--to", "statekit"]) == 0


@pytest.mark.parametrize(("kind", "shape"), random.Random(0).sample(
    [(kind, shape) for kind in of_torch() for shape in SHAPES], CI_DRAWS
))  # fmt: skip
def test_a_drawn_optimizer_is_recognised_or_refused_by_its_name(
    kind: str, shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(NAMES.get(kind, f"torch {kind}"), getattr(torch.optim, kind), shape, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", of_torch())
def test_each_optimizer_of_torch_is_recognised_or_refused_by_its_name(
    kind: str, shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(NAMES.get(kind, f"torch {kind}"), getattr(torch.optim, kind), shape, tmp_path, capsys)


OTHER_CALLS = {
    "AdaHessian", "SophiaH", "AdamMini", "AdaLOMO", "LOMO", "AliG", "BSAM", "DeMo", "DistributedMuon", "LoRARite",
    "AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon", "Ranger21",
}  # fmt: skip
"""Those that aren't made by their parameters and a rate alone, or need closures, second derivatives or processes."""


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [one for one in of_library() if one not in OTHER_CALLS])
def test_each_optimizer_of_pytorch_optimizer_is_refused_by_its_name(
    kind: str, shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(kind, getattr(import_module("pytorch_optimizer"), kind), shape, tmp_path, capsys)


def with_common_entry(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": {**state["state"], "total_step": 3, "current_step": 54}}


def with_common_table(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": {**state["state"], "ema": {"short": 0.0, "long": 0.0}}}


WRAPPERS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "an entry of no parameter": (with_common_entry, "an optimizer that isn't known"),
    "a table of no parameter": (with_common_table, "an optimizer that isn't known"),
    "a wrapper of Magma": (lambda state: {"base": state, "magma_state": {(0, 0): {}}, "tau": 2.0}, "Magma"),
    "a wrapper of another": (lambda state: {"inner": state, "slow": {"w0": torch.ones(1)}}, "isn't known"),
    "tensors beside the state": (lambda state: {**state, "slow": {0: torch.ones(1)}}, "isn't known"),
}
"""What a state_dict of Adam becomes where more than Adam moves the weights -> what statekit calls it.

The first is what SPAM adds, the second what EmoNavi adds, the third Magma's form, all as pytorch_optimizer 4.1.0
saves them."""


@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_wraps_adam_is_never_called_adam(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params, optimizer = trained(torch.optim.AdamW, SHAPES["mixed"])
    wrap, name = WRAPPERS[kind]
    model = {f"w{i}": param.detach() for i, param in enumerate(params)}
    torch.save({"model": model, "optimizer": wrap(optimizer.state_dict())}, tmp_path / "run.pt")
    for target in ("out.pt", "out.statekit"):
        assert main(["convert", str(tmp_path / "run.pt"), str(tmp_path / target)]) == 3
        assert name in " ".join(capsys.readouterr().err.split())


def test_a_table_of_no_parameter_is_no_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As EmoNavi of pytorch_optimizer 4.1.0 saves it. Seen red: doctor found `undecodable`."""
    params, optimizer = trained(torch.optim.AdamW, SHAPES["mixed"])
    state = with_common_table(optimizer.state_dict())
    for record in state["state"].values():
        record.pop("step", None)
    options = [
        "eps",
        "fixed_decay",
        "foreach",
        "shadow_weight",
        "use_shadow",
        "weight_decay",
        "weight_decouple",
    ]
    group = {**dict.fromkeys(options), "lr": 0.1, "betas": (0.9, 0.999), "step": 3, "params": [0, 1, 2, 3]}
    model = {f"w{i}": param.detach() for i, param in enumerate(params)}
    torch.save({"model": model, "optimizer": {**state, "param_groups": [group]}}, tmp_path / "run.pt")
    done = answers(tmp_path / "run.pt", {"out.pt": []}, tmp_path, capsys)
    assert "EmoNavi of pytorch_optimizer" in done.shown
    assert done.converted["out.pt"].code == 3
    assert "EmoNavi of pytorch_optimizer" in done.converted["out.pt"].text


def test_the_page_has_every_signature() -> None:
    assert recognised_table.PAGE.read_text(encoding="utf-8") == recognised_table.text()
