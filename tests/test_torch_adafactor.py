"""statekit.torch.Adafactor: the text's own step, behind PyTorch's interface for optimizers."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from statekit.arrays.backend import backend
from statekit.errors import StateError, UnknownRuleError, UsageError
from statekit.optim import adafactor
from statekit.optim.run import move_group, settled_group, steps_for
from statekit.optim.steps import Scene
from statekit.state.train_state import Axis, Group, Rule
from statekit.torch import Adafactor

pytestmark = pytest.mark.torch

SHAPES = {"wide": (9, 16), "tall": (16, 9), "square": (8, 8), "small": (3, 20), "scale": (11,), "gate": ()}
ROW, COLUMN, BATCH, NONE = Axis.ROW, Axis.COLUMN, Axis.BATCH, Axis.NONE
RULES = {
    "wide": (ROW, COLUMN),
    "tall": (COLUMN, ROW),
    "square": (ROW, COLUMN),
    "small": (NONE, NONE),
    "scale": (NONE,),
    "gate": (),
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"beta1": 0.9},
    "momentum_bf16": {"beta1": 0.9, "dtype_momentum": "bfloat16"},
    "absolute": {"multiply_by_parameter_scale": False, "clipping_threshold": None},
    "scale_by_name": {"multiply_by_parameter_scale": [("wide|tall", False), (".*", True)]},
    "decayed": {"weight_decay_rate": 0.01},
    "decayed_by_lr": {"weight_decay_rate": 0.01, "weight_decay_rate_lr_exponent": 2.0},
    "limited": {"global_norm_clip_threshold": 0.5, "max_parameter_scale": 0.2},
    "constants": {"decay_rate": 0.7, "epsilon1": 1e-6, "epsilon2": 0.5, "step_offset": 0},
}

Named = dict[str, torch.nn.Parameter]


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0, **shapes: tuple[int, ...]) -> Named:
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype))
        for name, shape in (shapes or SHAPES).items()
    }


def give_grads(named: Named, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for param in named.values():
        param.grad = torch.randn(param.shape, generator=random).to(param.dtype)


def train(optimizer: torch.optim.Optimizer, named: Named, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        give_grads(named, seed=100 + step)
        optimizer.step()


def values(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, torch.Tensor]:
    """Returns copies of every parameter and slot, by name."""
    tensors = {name: param.detach().clone() for name, param in named.items()}
    for name, param in named.items():
        tensors |= {f"{name} {slot}": value.clone() for slot, value in optimizer.state[param].items()}
    return tensors


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor.nan_to_num(), right[name].nan_to_num()), name
        assert torch.equal(tensor.isnan(), right[name].isnan()), name


def make(named: Named, **options: Any) -> Adafactor:
    return Adafactor(named.items(), **{"lr": 0.05, "min_dim_size_to_factor": 8, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_step_is_the_texts_step_bit_for_bit(options: dict[str, Any], dtype: torch.dtype) -> None:
    named, xp = parameters(dtype), backend("torch")
    optimizer = make(named, foreach=False, **options)
    scale = {name: name not in ("wide", "tall") for name in named}
    known = {**adafactor.defaults(), **options}
    if options.get("multiply_by_parameter_scale"):
        known["multiply_by_parameter_scale"] = scale
    group = Group(tuple(named), known)
    rules = {name: Rule(axes, "given") for name, axes in RULES.items()}
    params: dict[str, Any] = {name: param.detach().clone() for name, param in named.items()}
    steps = steps_for("adafactor", "t5x")
    configs = settled_group(steps, group, rules, "t5x")
    slots: Any = {name: steps.init(xp, params[name], config, "t5x") for name, config in configs.items()}
    addresses = [param.data_ptr() for param in named.values()]
    for step in range(4):
        give_grads(named, seed=100 + step)
        grads = {name: param.grad for name, param in named.items()}
        scene = Scene(xp, "t5x", 0.05, step)
        params, slots, _ = move_group(steps, scene, group, configs, params, grads, slots, {})
        optimizer.step()
        expected = dict(params) | {
            f"{n} {slot}": v for n, tensors in slots.items() for slot, v in tensors.items()
        }
        assert_same(values(optimizer, named), expected)
    assert addresses == [param.data_ptr() for param in named.values()]
    assert optimizer.param_groups[0]["step"] == 4


def test_parameters_of_any_rank_follow_their_rules() -> None:
    named = parameters(scanned=(10, 3, 16), heads=(12, 4, 6), norm=(10, 3), table=(16, 16))
    factor_map = [
        ("scanned", ["ROW", "BATCH", "COLUMN"]),
        ("heads", ["row", "col", "col"]),
        ("norm", ["NONE", "BATCH"]),
        ("table", ["COLUMN", "ROW"]),  # a matrix without BATCH goes by its size
    ]
    optimizer = make(named, factor_map=factor_map)
    shapes = {
        name: {slot: tuple(value.shape) for slot, value in optimizer.state[param].items()}
        for name, param in named.items()
    }
    assert shapes == {
        "scanned": {"v_row": (10, 3), "v_col": (3, 16)},
        "heads": {"v_row": (12,), "v_col": (4, 6)},
        "norm": {"v": (10, 3)},
        "table": {"v_row": (16,), "v_col": (16,)},
    }
    train(optimizer, named, 1)
    grad = torch.randn(named["table"].shape, generator=torch.Generator().manual_seed(0))
    named["table"].grad, optimizer.param_groups[0]["step"] = grad, 0
    optimizer.step()
    torch.testing.assert_close(optimizer.state[named["table"]]["v_row"], (grad * grad).mean(1))


def test_every_parameter_without_a_rule_is_named() -> None:
    named = parameters(conv=(3, 3, 8, 8), scanned=(2, 8, 8), plain=(8, 8))
    with pytest.raises(UsageError) as caught:
        make(named)
    assert "conv" in str(caught.value)
    assert "scanned" in str(caught.value)
    assert "plain" not in str(caught.value)
    assert "factor_map" in caught.value.remedy
    assert set(make(named, factored=False).state[named["conv"]]) == {"v"}
    by_name = {"conv": ["NONE"] * 4, "scanned": ["BATCH", "ROW", "COLUMN"]}
    assert set(make(named, factor_map=by_name).state[named["scanned"]]) == {"v_row", "v_col"}


@pytest.mark.parametrize(
    ("factor_map", "message"),
    [
        ([("scanned", ["BATCH", "ROW", "COLUMN"])], "found by no regex"),
        ([(".*", ["BATCH", "ROW"])], "a factor rule for 2 axes"),
        ([(".*", "HEURISTIC")], "no factor rule"),
        ([(".*", ["BATCH", "ROW", "DIAGONAL"])], "unknown label"),
        ([("(", ["BATCH"])], "regex that can't be read"),
        ("ROW", "isn't a list of pairs"),
    ],
)
def test_a_factor_map_that_cant_be_is_refused(factor_map: Any, message: str) -> None:
    named = parameters(scanned=(2, 8, 8), other=(4, 4, 4))
    with pytest.raises(UsageError, match=message):
        make(named, factor_map=factor_map)


def test_regexes_may_be_written_for_t5xs_paths() -> None:
    param = torch.nn.Parameter(torch.ones(2, 8, 8))
    optimizer = Adafactor(
        {**parameters(), "encoder.mlp.wi": param}.items(),
        factor_map=[("encoder/mlp/wi$", ["BATCH", "ROW", "COLUMN"]), (".*", "HEURISTIC")],
    )
    assert set(optimizer.state[param]) == {"v_row", "v_col"}


def test_names_are_needed() -> None:
    model = torch.nn.Linear(3, 2)
    with pytest.raises(UsageError, match="named_parameters"):
        Adafactor(model.parameters())  # type: ignore[arg-type]  # the fault
    with pytest.raises(UsageError, match="named_parameters"):
        Adafactor([{"params": model.parameters()}])


def test_parameters_that_cant_be_optimized_are_all_named() -> None:
    with pytest.raises(UsageError) as caught:
        Adafactor(
            [
                ("a.b", torch.zeros(2)),
                ("a/b", torch.zeros(2)),
                ("complex", torch.zeros(2, dtype=torch.complex64)),
                ("whole", torch.zeros(2, dtype=torch.int32)),
                ("sparse", torch.zeros(2, 2).to_sparse()),
            ]
        )
    text = str(caught.value)
    assert "has the name of another parameter, a.b @ a/b" in text
    assert all(f"@ {name}" in text for name in ("complex", "whole", "sparse"))


@pytest.mark.parametrize(
    "options",
    [
        {"beta1": 1.0},
        {"decay_rate": "0.8"},
        {"clipping_threshold": 0.0},
        {"dtype_momentum": "float31"},
        {"dtype_momentum": "parameter"},
        {"lr": -1.0},
        {"lr": torch.ones(2)},
        {"step_offset": -1},
    ],
    ids=str,
)
def test_values_that_cant_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        make(parameters(), **options)


@pytest.mark.parametrize("name", ["weight_decay", "eps", "scale_parameter", "beta2_decay"])
def test_an_option_under_another_optimizers_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"another optimizer's name for .* @ {name}"):
        Adafactor([{"params": list(parameters().items()), name: 0.1}])


def test_no_learning_rate_is_assumed() -> None:
    first, second = parameters(), parameters(other=(4,))
    groups: list[dict[str, Any]] = [{"params": first.items(), "lr": 1.0}, {"params": second.items()}]
    optimizer = Adafactor(groups)
    named = {**first, **second}
    give_grads(named, seed=0)
    before = values(optimizer, named)
    with pytest.raises(UnknownRuleError, match="no learning rate: set lr @ group 1"):
        optimizer.step()
    assert_same(values(optimizer, named), before)
    assert [group["step"] for group in optimizer.param_groups] == [0, 0]
    optimizer.param_groups[1]["lr"] = 0.5
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


def test_an_offset_beyond_the_count_is_refused_before_it_spoils_the_state() -> None:
    named = parameters()
    optimizer = make(named, step_offset=1)
    before = values(optimizer, named)
    give_grads(named, seed=0)
    with pytest.raises(UsageError, match="offset lies beyond"):
        optimizer.step()
    assert_same(values(optimizer, named), before)


def test_a_tensor_may_be_the_learning_rate() -> None:
    left, right = parameters(), parameters()
    train(make(left, lr=0.05), left, 2)
    train(make(right, lr=torch.tensor(0.05)), right, 2)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_ordinary_schedulers_set_the_rate() -> None:
    named, other = parameters(), parameters()
    optimizer, plain = make(named, lr=1.0), make(other)
    schedule: Callable[[int], float] = lambda step: max(step, 2) ** -0.5  # noqa: E731  # typed in one line
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for step in range(5):
        train(optimizer, named, 1, step)
        scheduler.step()
        plain.param_groups[0]["lr"] = schedule(step)
        train(plain, other, 1, step)
    assert_same(values(optimizer, named), values(plain, other))


def test_closure_missing_and_needless_gradients() -> None:
    named = parameters(moved=(8, 9), still=(8, 9), frozen=(4,), empty=(0, 9))
    named["frozen"].requires_grad_(False)
    optimizer = make(named)
    before = values(optimizer, named)

    def closure() -> float:
        optimizer.zero_grad()
        total = named["moved"].square().sum() + named["empty"].sum()
        total.backward()  # type: ignore[no-untyped-call]  # PyTorch's is untyped
        return total.item()

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first
    after = values(optimizer, named)
    for name in before:
        assert torch.equal(before[name], after[name]) == (not name.startswith("moved")), name
    named["moved"].grad = None
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 3  # T5X counts every update


def test_sparse_gradients_are_refused_before_anything_moves() -> None:
    named = {**parameters(), **parameters(table=(5, 4))}
    optimizer = make(named)
    give_grads(named, seed=0)
    before = values(optimizer, named)
    index = torch.zeros(1, 1, dtype=torch.int64)
    named["table"].grad = torch.sparse_coo_tensor(index, torch.ones(1, 4), (5, 4), check_invariants=True)
    with pytest.raises(UsageError, match=r"sparse(.|\n)*@ table"):
        optimizer.step()
    assert_same(values(optimizer, named), before)


def test_nan_is_skipped_where_asked() -> None:
    named = parameters()
    optimizer = make(named, skip_nan_updates=True, beta1=0.9)
    give_grads(named, seed=0)
    assert named["wide"].grad is not None
    named["wide"].grad[0, 0] = float("nan")
    before = values(optimizer, named)
    optimizer.step()
    after = values(optimizer, named)
    assert torch.equal(before["wide"], after["wide"])
    assert not any(tensor.isnan().any() for tensor in after.values())
    assert not torch.equal(before["tall"], after["tall"])


def test_copies_and_pickles_go_on_alike() -> None:
    named = parameters()
    optimizer = make(named, beta1=0.9)
    train(optimizer, named, 2)
    twin, unpickled = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    train(optimizer, named, 2, 2)
    for other in (twin, unpickled):
        copies = dict(zip(named, other.param_groups[0]["params"], strict=True))
        train(other, copies, 2, 2)
        assert_same(values(other, copies), values(optimizer, named))


def loss(named: Named) -> torch.Tensor:
    return torch.stack([param.square().sum() for param in named.values()]).sum()


def test_a_gradient_scaler_drives_it() -> None:
    named, plain = parameters(), parameters()
    optimizer, other = make(named), make(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(loss(named)).backward()  # type: ignore[no-untyped-call]  # PyTorch's is untyped
    scaler.step(optimizer)
    scaler.update()
    loss(plain).backward()  # type: ignore[no-untyped-call]  # PyTorch's is untyped
    other.step()
    assert_same(values(optimizer, named), values(other, plain))
    for param in named.values():
        param.grad = torch.full_like(param, float("inf"))
    scaler.step(optimizer)
    assert optimizer.param_groups[0]["step"] == 1


def test_a_group_added_later_counts_for_itself() -> None:
    named, late = parameters(), parameters(late=(8, 8))
    optimizer = make(named)
    train(optimizer, named, 2)
    with pytest.raises(UsageError, match="no factor rule"):
        optimizer.add_param_group({"params": [("cube", torch.zeros(2, 2, 2))]})
    with pytest.raises(UsageError, match="another parameter, wide @ wide"):
        optimizer.add_param_group({"params": [("wide", torch.zeros(2))]})
    with pytest.raises(UsageError, match="another name of a parameter"):
        optimizer.add_param_group({"params": [("tied", named["wide"])]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": late.items(), "beta1": 0.5})
    train(optimizer, {**named, **late}, 1)
    assert [group["step"] for group in optimizer.param_groups] == [3, 1]
    alone = parameters(late=(8, 8))
    give_grads(alone, 0)
    alone["late"].grad = late["late"].grad
    make(alone, beta1=0.5).step()
    assert torch.equal(alone["late"], late["late"])


def test_a_step_runs_on_the_device_of_its_parameters() -> None:
    named = {n: torch.nn.Parameter(torch.empty(p.shape, device="meta")) for n, p in parameters().items()}
    optimizer = make(named, beta1=0.9, global_norm_clip_threshold=1.0)
    for param in named.values():
        param.grad = torch.empty_like(param)
    optimizer.step()
    assert {v.device.type for slots in optimizer.state.values() for v in slots.values()} == {"meta"}


# --- state dicts ---


def through_a_file(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_goes_through_a_file_exactly(dtype: torch.dtype) -> None:
    named = parameters(dtype)
    optimizer = make(named, beta1=0.9, weight_decay_rate=0.01)
    train(optimizer, named, 3)
    twin = {name: torch.nn.Parameter(param.detach().clone()) for name, param in reversed(named.items())}
    other = Adafactor(twin.items())
    other.load_state_dict(through_a_file(optimizer))
    assert {v.dtype for slots in other.state.values() for v in slots.values()} == {torch.float32}
    assert_same(values(other, twin), values(optimizer, named))
    same = ("lr", "step", "beta1", "weight_decay_rate", "min_dim_size_to_factor", "rules")
    assert all(other.param_groups[0][key] == optimizer.param_groups[0][key] for key in same)
    train(optimizer, named, 2, 3)
    for step in (3, 4):
        give_grads(named, seed=100 + step)
        for name, param in twin.items():
            param.grad = named[name].grad
        other.step()
    assert_same(values(other, twin), values(optimizer, named))


def test_what_is_loaded_is_a_copy() -> None:
    named, twin = parameters(), parameters()
    optimizer, other = make(named), make(twin)
    train(optimizer, named, 1)
    other.load_state_dict(optimizer.state_dict())
    before = values(optimizer, named)
    train(other, twin, 1)
    assert_same(values(optimizer, named), before)
    assert optimizer.param_groups[0]["rules"] is not other.param_groups[0]["rules"]


def test_groups_are_found_by_their_parameters() -> None:
    first, second = parameters(), parameters(seed=1, a=(8, 8), b=(8, 8))
    saved = Adafactor(
        [{"params": first.items(), "lr": 0.1}, {"params": second.items(), "lr": 0.2, "beta1": 0.5}],
        min_dim_size_to_factor=8,
    )
    train(saved, {**first, **second}, 2)
    ours = {name: torch.nn.Parameter(p.detach().clone()) for name, p in {**first, **second}.items()}
    other = Adafactor(
        [
            {"params": [("b", ours["b"]), ("a", ours["a"])]},
            {"params": [(name, ours[name]) for name in sorted(first)]},
        ]
    )
    other.load_state_dict(through_a_file(saved))
    assert [(group["lr"], group["beta1"]) for group in other.param_groups] == [(0.2, 0.5), (0.1, None)]
    assert_same(values(other, ours), values(saved, {**first, **second}))
    assert not torch.equal(other.state[ours["a"]]["v_row"], other.state[ours["b"]]["v_row"])


def test_everything_that_doesnt_fit_is_named() -> None:
    named = parameters()
    state = make(named).state_dict()
    changed = {name: param for name, param in named.items() if name != "tall"}
    changed |= parameters(extra=(3,), wide=(9, 17), scale=(12,))
    optimizer = make(changed)
    before = values(optimizer, changed)
    with pytest.raises(StateError) as caught:
        optimizer.load_state_dict(state)
    text = str(caught.value)
    assert "isn't in the state @ extra" in text
    assert "is in the state, but not in the optimizer @ tall" in text
    assert "slot v_col has shape (16,) in the state, expected (17,) @ wide" in text
    assert "slot v has shape (11,) in the state, expected (12,) @ scale" in text
    assert "square" not in text
    assert_same(values(optimizer, changed), before)


def test_other_groupings_are_refused() -> None:
    first, second = parameters(), parameters(a=(8, 8), b=(8, 8))
    both = {**first, **second}
    one, two = make(both), Adafactor([{"params": first.items()}, {"params": second.items()}])
    with pytest.raises(StateError, match=r"holds parameters of the groups \[0, 1\]"):
        one.load_state_dict(two.state_dict())
    with pytest.raises(StateError, match=r"shares the state's group 0 with group 0"):
        two.load_state_dict(one.state_dict())


def test_another_optimizers_state_is_refused() -> None:
    named = parameters()
    with pytest.raises(StateError, match=r"isn't a state of statekit.torch.Adafactor"):
        make(named).load_state_dict(torch.optim.Adam(named.values()).state_dict())
    state = make(named).state_dict()
    state["state"][0] = {"v": torch.zeros(9, 16, dtype=torch.float64)}
    del state["state"][1]
    state["param_groups"][0]["rules"]["square"] = {"axes": ["ROW"], "known_from": "file"}
    with pytest.raises(StateError) as caught:
        make(named).load_state_dict(state)
    for fault in (
        "has slot v in the state, but no use",
        "no slots in the state @ tall",
        "in the state 1 @ square",
    ):
        assert fault in str(caught.value)


def test_slots_that_would_be_narrowed_are_refused_and_narrow_ones_widened() -> None:
    named = parameters(scale=(11,))
    state = make(named).state_dict()
    state["state"][0]["v"] = torch.full((11,), 0.5, dtype=torch.float64)
    with pytest.raises(StateError, match="wouldn't fit float32"):
        make(named).load_state_dict(state)
    state["state"][0]["v"] = state["state"][0]["v"].to(torch.bfloat16)
    optimizer = make(named)
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[named["scale"]]["v"], torch.full((11,), 0.5))


def test_what_a_state_leaves_unknown_stays() -> None:
    named = parameters()
    state = make(named, lr=None).state_dict()
    del state["param_groups"][0]["epsilon2"]
    optimizer = make(named, lr=0.25, epsilon2=0.5)
    optimizer.load_state_dict(state)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["epsilon2"]) == (0.25, 0.5)


def test_loading_runs_the_hooks() -> None:
    named, twin = parameters(), parameters()
    optimizer, other = make(named, lr=0.5), make(twin)
    seen: list[torch.optim.Optimizer] = []

    def before(loading: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": 0.125} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    other.register_load_state_dict_pre_hook(before)
    other.register_load_state_dict_post_hook(seen.append)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.125
    assert seen == [other]


def test_groups_may_be_empty_and_names_may_lie_beside_the_parameters() -> None:
    named = parameters()
    groups: list[dict[str, Any]] = [
        {"params": list(named.values()), "param_names": list(named)},
        {"params": []},
    ]
    optimizer = Adafactor(groups, lr=0.05, min_dim_size_to_factor=8)
    train(optimizer, named, 1)
    twin = parameters()
    other = make(twin)
    other.load_state_dict(optimizer.state_dict())
    assert [group["step"] for group in other.param_groups] == [1]
    optimizer.load_state_dict(other.state_dict())
    assert [group["param_names"] for group in optimizer.param_groups] == [list(named), []]


def test_a_state_with_unusable_names_or_rules_is_refused() -> None:
    named = parameters(a=(8, 8), b=(8, 8))
    state = make(named).state_dict()
    state["param_groups"][0]["param_names"] = ["a", "a"]
    with pytest.raises(StateError) as caught:
        make(named).load_state_dict(state)
    assert "stands in the state twice @ a" in str(caught.value)
    assert "isn't in the state @ b" in str(caught.value)
    state = copy.deepcopy(make(named).state_dict())
    state["param_groups"][0]["rules"] = {"a": {"axes": ["DIAGONAL", "ROW"], "known_from": "file"}}
    with pytest.raises(StateError) as caught:
        make(named).load_state_dict(state)
    assert "has no factor rule in the state @ a" in str(caught.value)
    assert "has no factor rule in the state @ b" in str(caught.value)


def test_pytorchs_distributed_checkpoints_take_it() -> None:
    from torch.distributed.checkpoint import state_dict as distributed

    models = [torch.nn.Sequential(torch.nn.Linear(9, 8), torch.nn.Linear(8, 9)) for _ in range(2)]
    one, other = (Adafactor(m.named_parameters(), lr=0.1, min_dim_size_to_factor=8) for m in models)
    for param in models[0].parameters():
        param.grad = torch.ones_like(param)
    one.step()
    state = distributed.get_optimizer_state_dict(models[0], one)
    distributed.set_optimizer_state_dict(models[1], other, state)
    for left, right in zip(one.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(left[slot], right[slot]) for slot in left)
    assert other.param_groups[0]["step"] == 1
