"""Several optimizers of torch, saved side by side, are one state, and go on together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats import values
from statekit.cli.main import DONE, main
from statekit.conversion import registry
from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.inspection import inspect
from statekit.conversion.open_state import open_state
from statekit.conversion.prepared import encoded_in
from statekit.conversion.resume import of_checkpoint, resume_lines
from statekit.errors import InexactError, StateError, UsageError
from statekit.lines.rates import RatesOf
from statekit.state.run import run_of
from statekit.state.stored_params import MASTER
from statekit.tensors.tensor import DTYPES, Cast

pytestmark = pytest.mark.torch
MATRICES, VECTORS = {"a.weight": (6, 5), "c.weight": (4, 6)}, {"a.bias": (6,), "c.bias": (4,)}
SHAPES = {**MATRICES, **VECTORS}
SAVED, ALL = 3, 6


class Run:
    """Adafactor for matrices and AdamW for vectors, both of torch, each for its own parameters."""

    def __init__(self, first: str = "Adafactor", named: bool = False) -> None:
        import torch

        random = np.random.default_rng(3)
        self.params = {
            name: torch.nn.Parameter(torch.from_numpy(random.normal(size=shape).astype(np.float32)))
            for name, shape in SHAPES.items()
        }
        self.grads = [
            {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
            for _ in range(ALL)
        ]

        def of(names: Mapping[str, Any]) -> list[Any]:
            return [(name, self.params[name]) if named else self.params[name] for name in names]

        self.optimizers = [
            getattr(torch.optim, first)(of(MATRICES), lr=0.02),
            torch.optim.AdamW(of(VECTORS), lr=0.003, betas=(0.8, 0.95)),
        ]
        self.step(0, SAVED)

    def step(self, first: int, last: int) -> None:
        import torch

        for grads in self.grads[first:last]:
            for name, param in self.params.items():
                param.grad = torch.from_numpy(grads[name].copy())
            for optimizer in self.optimizers:
                optimizer.step()

    def save(self, form: str, file: Path) -> Path:
        import torch

        model = {name: param.data for name, param in self.params.items()}
        first, second = (optimizer.state_dict() for optimizer in self.optimizers)
        torch.save(
            {
                "list": {"model": model, "optimizers": [first, second], "epoch": 7},
                "named": {"model": model, "optimizers": {"matrices": first, "vectors": second}, "epoch": 7},
                "lightning": {"state_dict": model, "optimizer_states": [first, second], "epoch": 7},
                "keys": {
                    "model": model,
                    "optimizer_matrices": first,
                    "optimizer_vectors": second,
                    "epoch": 7,
                },
            }[form],
            file,
        )
        return file


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("form", ["list", "named", "lightning", "keys"])
def test_they_are_the_groups_of_one_state(form: str, named: bool, tmp_path: Path) -> None:
    """Of Lightning's two the first was taken for all, and of others none: "weights alone; no optimizer"."""
    file = Run(named=named).save(form, tmp_path / "run.pt")
    with open_state(file) as opened:
        assert opened.state.optimizer.kinds == (("adafactor", "torch"), ("adamw", "torch"))
        assert [{*group.paths} for group in opened.groups] == [
            {"a/weight", "c/weight"},
            {"a/bias", "c/bias"},
        ]
        assert opened.counts.updates == SAVED and not opened.counts.behind
        assert opened.groups[1].hyperparameters["beta1"] == 0.8
        assert {path: {*tensors} for path, tensors in opened.slots.items()} == {
            "a/weight": {"v_row", "v_col"},
            "c/weight": {"v_row", "v_col"},
            "a/bias": {"m", "v"},
            "c/bias": {"m", "v"},
        }
        assert opened.state.extra["torch"] == {"epoch": 7}
        assert any("has 2 optimizers" in note for note in opened.state.assumptions)


@pytest.mark.parametrize("form", ["list", "named", "lightning", "keys"])
def test_they_are_written_as_torch_loads_them(form: str, tmp_path: Path) -> None:
    """By way of the neutral folder, back under the keys that they came from; the updates after it are the same bits."""
    import torch

    run = Run()
    neutral = convert(plan(run.save(form, tmp_path / "run.pt"), tmp_path / "run.statekit")).target
    back = convert(plan(neutral, tmp_path / "back.pt", layout="torch-optim")).target
    saved, loaded = torch.load(tmp_path / "run.pt"), torch.load(back, weights_only=True)
    assert saved.keys() == loaded.keys() - {"statekit"}
    several = {"list": "optimizers", "named": "optimizers", "lightning": "optimizer_states"}
    states: Any = [loaded[key] for key in loaded if key.startswith("optimizer_")]
    if form in several:
        states = [*loaded[several[form]].values()] if form == "named" else loaded[several[form]]
    again = Run()
    for name, value in loaded["state_dict" if form == "lightning" else "model"].items():
        again.params[name].data.copy_(value)
    for optimizer, state in zip(again.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    for one in (run, again):
        one.step(SAVED, ALL)
    for name, param in run.params.items():
        assert torch.equal(param, again.params[name]), name


@pytest.mark.parametrize("first", ["Adafactor", "AdamW", "RMSprop"])
@pytest.mark.parametrize("form", ["list", "named", "lightning", "keys"])
def test_accelerate_loads_each_from_a_file_of_its_own(first: str, form: str, tmp_path: Path) -> None:
    """They were written for statekit's own optimizer, and the lines of a folder of Accelerate's made a single one."""
    import torch

    accelerate = pytest.importorskip("accelerate")
    run = Run(first)
    neutral = convert(plan(run.save(form, tmp_path / "run.pt"), tmp_path / "run.statekit")).target
    folder = convert(plan(neutral, tmp_path / "state", to="accelerate", layout="torch-optim")).target
    assert all((folder / name).is_file() for name in ("optimizer.bin", "optimizer_1.bin"))
    with open_state(neutral) as before, open_state(folder) as after:
        assert before.state.optimizer.kinds == after.state.optimizer.kinds
        assert {p: values(tensors) for p, tensors in before.slots.items()} == {
            p: values(tensors) for p, tensors in after.slots.items()
        }
        lines = resume_lines(of_checkpoint(after), after.state.to_json())
    again, model = Run(first), torch.nn.Module()
    for name, param in again.params.items():
        module, leaf = name.split(".")
        if module not in dict(model.named_children()):
            model.add_module(module, torch.nn.Module())
        model.get_submodule(module).register_parameter(leaf, param)
    scope = {"model": model, "accelerator": accelerate.Accelerator(cpu=True)}
    exec("\n".join(lines).replace("= ...", f"= torch.optim.{first}(groups)"), scope)
    again.optimizers = scope["optimizers"]
    for side in (run, again):
        side.step(SAVED, ALL)
    assert all(torch.equal(param, again.params[name]) for name, param in run.params.items())
    scope["accelerator"].save_state(str(tmp_path / "next"))
    with open_state(tmp_path / "next") as opened:
        assert opened.counts.updates == ALL and len(opened.groups) == 2


@pytest.mark.parametrize(
    ("form", "files"),
    [
        ("named", ("optimizer_matrices.pt", "optimizer_vectors.pt")),
        ("list", ("optimizer.pt", "optimizer_1.pt")),
        ("lightning", ("optimizer.pt", "optimizer_1.pt")),
    ],
)
def test_files_beside_a_model_are_one_for_each(form: str, files: tuple[str, str], tmp_path: Path) -> None:
    """The lines loaded a file optimizer.pt that a folder with both has not."""
    import torch

    run = Run()
    folder = convert(plan(run.save(form, tmp_path / "run.pt"), tmp_path / "next", to="safetensors")).target
    back = convert(plan(folder, tmp_path / "back", to="safetensors")).target
    again = Run()
    for place in (folder, back):
        states = [torch.load(str(place / file), weights_only=True) for file in files]
        for optimizer, state in zip(again.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        with open_state(place) as opened:
            lines = resume_lines(of_checkpoint(opened), opened.state.to_json())
        assert all(any(file in line for line in lines) for file in files), lines
        assert sum("torch.optim." in line for line in lines) == 2, lines
    run.step(SAVED, ALL)
    again.step(SAVED, ALL)
    assert all(torch.equal(param, again.params[name]) for name, param in run.params.items())
    with pytest.raises(UsageError, match="no place for an optimizer"):
        plan(folder, tmp_path / "alone.safetensors", layout="torch-optim")


@pytest.mark.parametrize("where", ["file", "neutral", "statekit-torch"])
def test_they_go_on_as_torch_does(where: str, tmp_path: Path) -> None:
    import torch

    import statekit.torch as st

    run = Run()
    source = run.save("list", tmp_path / "run.pt")
    if where != "file":
        to = {"neutral": ("statekit", None), "statekit-torch": ("torch", "statekit-torch")}[where]
        convert(plan(source, tmp_path / "there", to=to[0], layout=to[1]))
        with open_state(source) as before, open_state(tmp_path / "there") as after:
            assert {p: values(tensors) for p, tensors in before.slots.items()} == {
                p: values(tensors) for p, tensors in after.slots.items()
            }
        source = tmp_path / "there"
    params = {name: torch.nn.Parameter(param.data.clone()) for name, param in run.params.items()}
    optimizer = st.load_optimizer(source, params.items())
    assert isinstance(optimizer, st.Partition)
    run.step(SAVED, ALL)
    for grads in run.grads[SAVED:]:
        for name, param in params.items():
            param.grad = torch.from_numpy(grads[name].copy())
        optimizer.step()
    for name, theirs in run.params.items():
        largest = float(theirs.detach().abs().max())
        # a few roundings of the parameter and of the step in each update
        torch.testing.assert_close(params[name], theirs, rtol=0, atol=16 * (ALL - SAVED) * 2**-24 * largest)


def test_equal_shapes_in_both_are_asked_for(tmp_path: Path) -> None:
    import torch

    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(params[:1]), torch.optim.Adafactor(params[1:])]
    for param in params:
        param.grad = torch.ones(3)
    for optimizer in optimizers:
        optimizer.step()
    file = tmp_path / "run.pt"
    model = {"a": params[0].data, "b": params[1].data}
    torch.save({"model": model, "optimizers": [one.state_dict() for one in optimizers]}, file)
    with pytest.raises(StateError, match=r"stands in groups \[0, 1\]"):
        open_state(file)
    with open_state(file, hints=Hints(param_names=("b", "a"))) as opened:
        assert [group.paths for group in opened.groups] == [("b",), ("a",)]


def test_muon_and_what_moves_the_rest_are_two_optimizers(tmp_path: Path) -> None:
    """Today's usual pair. It was "weights alone; no optimizer"."""
    file = Run("Muon").save("keys", tmp_path / "run.pt")
    listed = {one.tensor.name: {slot.name for slot in one.slots} for one in inspect(file).parameters}
    assert listed["a/weight"] == {"m"}
    with open_state(file) as opened:
        assert opened.state.optimizer.kinds == (("muon", "torch"), ("adamw", "torch"))
    with open_state(file, hints=Hints(optimizer_key="optimizer_vectors")) as opened:
        assert opened.state.optimizer.kinds == (("adamw", "torch"),)


def test_what_a_target_changes_is_said_of_each(tmp_path: Path) -> None:
    file = Run().save("list", tmp_path / "run.pt")
    with pytest.raises(InexactError, match="adafactor's "):
        plan(file, tmp_path / "out", to="orbax", layout="optax")


@pytest.mark.parametrize("form", ["list", "named", "lightning", "keys"])
def test_two_of_one_rule_stay_two(form: str, tmp_path: Path) -> None:
    """As of a generator and a discriminator: they came back as one optimizer, with lines that couldn't load it."""
    import torch

    file = Run("AdamW").save(form, tmp_path / "run.pt")
    with open_state(file) as opened:
        lines = resume_lines(of_checkpoint(opened), opened.state.to_json())
        assert opened.state.optimizer.kinds == (("adamw", "torch"),)
    calls = [line for line in lines if "torch.optim.AdamW(" in line]
    assert len(calls) == (0 if form == "lightning" else 2), lines
    neutral = convert(plan(file, tmp_path / "run.statekit")).target
    back = torch.load(convert(plan(neutral, tmp_path / "back.pt", layout="torch-optim")).target)
    before = torch.load(file)
    assert before.keys() == back.keys() - {"statekit"}
    for key in before.keys() - {"model", "state_dict", "epoch"}:
        assert type(before[key]) is type(back[key])
    joined = convert(plan(neutral, tmp_path / "run.dcp", to="dcp", layout="torch-optim")).target
    with open_state(joined) as opened:
        assert len(opened.groups) == 2


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_what_each_schedule_moves_is_told_by_the_rates_that_it_set_out_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The schedule of one optimizer was printed for both, and moved the other's parameters at its own rate."""
    import torch

    run = Run("AdamW")
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizers[1], 2, 0.5)
    for _ in range(SAVED):
        schedule.step()
    run.save("list", tmp_path / "run.pt")
    whole = torch.load(tmp_path / "run.pt")
    torch.save({**whole, "scheduler": schedule.state_dict()}, tmp_path / "one.pt")
    with open_state(tmp_path / "one.pt") as opened:
        [one] = run_of(opened.state.extra).schedules
        assert one.groups == (1,)
        rates = RatesOf((one,), opened.state.to_json())
        assert rates.of(0) == "" and rates.next(0) == 0.02
        assert rates.next(1) == pytest.approx(0.003 * 0.5)
    assert main(["inspect", str(tmp_path / "one.pt")]) == DONE
    seen = capsys.readouterr().out
    assert "2 optimizers: of group 0, of group 1" in seen and "schedule StepLR of group 1 at step 3" in seen
    assert main(["resume", str(tmp_path / "one.pt")]) == DONE
    seen = capsys.readouterr().out
    assert "learning rate 0.02; no schedule moves it" in seen
    assert "learning rate 0.0015; StepLR goes on at step 3" in seen
    for optimizer in whole["optimizers"]:  # nothing says any more which of them it is
        optimizer["param_groups"][0].pop("initial_lr", None)
    torch.save({**whole, "scheduler": schedule.state_dict()}, tmp_path / "none.pt")
    with open_state(tmp_path / "none.pt") as opened:
        lines = resume_lines(of_checkpoint(opened), opened.state.to_json(), "torch")
        assert lines[-1].endswith("StepLR moves 1 of the 2 groups, and nothing tells which")


def test_a_container_that_holds_one_says_where_the_layout_holds_both(tmp_path: Path) -> None:
    """It named the layout that it refused as one to choose."""
    file = Run().save("list", tmp_path / "run.pt")
    with pytest.raises(UsageError, match=r"torch-optim in torch(.|\n)*found: torch-optim in dcp, which"):
        plan(file, tmp_path / "out", to="dcp", layout="torch-optim")


def test_rounded_params_that_masters_replace_are_said_of_optimizers_side_by_side(tmp_path: Path) -> None:
    """They were said only where the optimizers are joined to one, which a PyTorch file doesn't take."""
    with open_state(Run(first="AdamW").save("list", tmp_path / "run.pt")) as opened:
        state = opened.state
        rounded = {path: Cast(tensor, DTYPES["bfloat16"]) for path, tensor in state.params.items()}
        slots = {path: {**state.slots[path], MASTER: tensor} for path, tensor in state.params.items()}
        encoded, _ = encoded_in(registry.layout("torch-optim"), replace(state, params=rounded, slots=slots))
    forms = [encoded, encoded.by_name, encoded.side_by_side]
    for form in (one for one in forms if one is not None):
        assert {f"low_precision/{path}" for path in state.params} <= form.dropped.keys()
    assert encoded.side_by_side is not None


@pytest.mark.parametrize("at", range(3))
def test_what_is_no_optimizer_in_their_list_keeps_its_place(at: int, tmp_path: Path) -> None:
    """Between the two it took the place of the first, and the second was lost without a word."""
    import torch

    file = Run("AdamW").save("list", tmp_path / "run.pt")
    saved = torch.load(file)
    saved["optimizers"].insert(at, {"of": "neither"})
    torch.save(saved, file)
    back = torch.load(convert(plan(file, tmp_path / "back.pt", layout="torch-optim")).target)
    assert [{*one} for one in back["optimizers"]] == [{*one} for one in saved["optimizers"]]
    assert back["optimizers"][at] == {"of": "neither"}
    for before, after in zip(saved["optimizers"], back["optimizers"], strict=True):
        assert before.get("state", {}).keys() == after.get("state", {}).keys()
