"""The five optimizers of statekit.torch: what everybody who knows torch.optim expects of one."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch_driving import LEFT_OUT, XP, Run, defaults, differing, resume

import statekit.torch
from statekit.errors import StateError, UnknownRuleError, UsageError
from statekit.optim.run import STEPPED
from statekit.state.options import taken
from statekit.state.schema import load_schema
from statekit.testing.step_cases import RATE, UNSAID, case
from statekit.torch import LANS, Adafactor, AdamW, ScaledAdam
from statekit.torch.from_checkpoint import OPTIMIZERS
from statekit.torch.groups import rules_of
from statekit.torch.slots import expected_slots, first_group_slots
from statekit.torch.state_matching import taken_over
from statekit.verify.verdict import compare

pytestmark = pytest.mark.torch

KINDS: dict[str, dict[str, Any]] = {
    "adafactor": {"beta1": 0.9, "min_dim_size_to_factor": 4},
    "scaled_adam": {"clipping_scale": 1.5, "clipping_update_period": 2, "size_update_period": 2},
    "lans": {"wd": 0.01, "lr_mult": {"wide": 0.5}},
    "lamb": {"weight_decay_rate": 0.01, "exclude_from_weight_decay": ["bias"]},
    "adamw": {"amsgrad": True},
}
EVERY = [pytest.param(schema, id=schema) for schema in KINDS]
VARIANTS = [
    pytest.param(schema, variant, id=f"{schema}-{variant}")
    for schema in STEPPED
    if schema in KINDS
    for variant in load_schema(schema).stepped
]
SHAPES = {"wide": (5, 8), "tall": (8, 5), "twin": (8, 5), "bias": (8,), "gate": ()}

Named = dict[str, torch.nn.Parameter]


def parameters(**shapes: tuple[int, ...]) -> Named:
    random = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=random))
        for name, shape in (shapes or SHAPES).items()
    }


def give_grads(named: Named, seed: int) -> None:
    for i, param in enumerate(named.values()):
        random = torch.Generator().manual_seed(1000 * seed + i)
        param.grad = torch.randn(param.shape, generator=random).to(param.dtype)


def train(optimizer: torch.optim.Optimizer, named: Named, first: int, updates: int) -> None:
    for update in range(first, first + updates):
        give_grads(named, update)
        optimizer.step()


def make(schema: str, named: Named, **options: Any) -> Any:
    settings = {**KINDS[schema], **options}
    if "lr_mult" in settings and "wide" not in named:
        del settings["lr_mult"]
    return OPTIMIZERS[schema](named.items(), **{"lr": 0.05, **settings})


def fast(schema: str, named: Named, **options: Any) -> Any:
    """Makes an optimizer of which a fast path follows every option."""
    return make(schema, named, **({"amsgrad": False} if schema == "adamw" else {}), **options)


def tensors(optimizer: torch.optim.Optimizer, named: Named) -> Any:
    return {k: v.copy() for k, v in Run(named, optimizer).tensors().items()}


# --- options ---


@pytest.mark.parametrize(("schema", "variant"), VARIANTS)
def test_what_nobody_says_is_as_the_variant_has_it(schema: str, variant: str) -> None:
    needed = dict(UNSAID.get((schema, variant), {}))
    optimizer = OPTIMIZERS[schema](parameters().items(), variant=variant, **needed)
    settings = {"lr": None, "step": 0, "schema": schema, "variant": variant, "foreach": True}
    map_of_t5x = {"factor_map": None} if variant == "t5x" else {}
    assert optimizer.defaults == settings | defaults(schema, variant) | needed | map_of_t5x
    known = load_schema(schema).hyperparameters.keys() - {"lr"}
    group = {name: value for name, value in optimizer.param_groups[0].items() if name in known}
    assert group == defaults(schema, variant) | needed


@pytest.mark.parametrize("schema", EVERY)
def test_every_option_is_explained(schema: str) -> None:
    arguments = [*inspect.signature(OPTIMIZERS[schema].__init__).parameters]
    assert arguments == ["self", "params", "lr", "variant", "foreach", "options"]
    offered = {
        name
        for variant in load_schema(schema).stepped
        for name in load_schema(schema).variant(variant)["defaults"]
        if name not in ("learning_rate", "lr", "logical_factor_rules")
    }
    text = inspect.cleandoc(OPTIMIZERS[schema].__doc__ or "")  # as Python 3.13 keeps it
    missing = [name for name in (*arguments[1:-1], *offered) if f"\n    {name}: " not in text]
    assert missing == [] and "{options}" not in text


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        ("adamw", {"epsilon_root": 1e-8}, "isn't an option of variant torch @ epsilon_root"),
        ("adamw", {"beta1": 1.0}, "@ beta1"),
        ("adafactor", {"relative_step": True}, "isn't an option of variant t5x @ relative_step"),
        ("scaled_adam", {"size_update_period": 0}, "@ size_update_period"),
        ("lans", {"wd_mult": {"nowhere": 0.0}}, "isn't a parameter of the group"),
        (
            "lamb",
            {"variant": "keras", "exclude_from_weight_decay": {"bias": True}},
            "expected a list of regexes",
        ),
        (
            "lamb",
            {"exclude_from_weight_decay": {"bias": True}},
            "has no true or false for it @ 4 places: wide, tall, twin",
        ),
    ],
)
def test_what_cant_be_is_refused(schema: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        OPTIMIZERS[schema](parameters().items(), **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(("schema", "name"), [("adamw", "b1"), ("adamw", "mu_dtype"), ("lans", "eps")])
def test_an_option_under_another_optimizers_name_is_refused(schema: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"another optimizer's name for .* @ {name}"):
        OPTIMIZERS[schema]([{"params": list(parameters().items()), name: 0.1}])


def test_variants_that_cant_be_are_refused() -> None:
    with pytest.raises(StateError, match=r"can't step(.|\n)*adamw, variant nowhere"):
        AdamW(parameters().items(), variant="nowhere")
    with pytest.raises(StateError, match="can't step"):
        LANS(parameters().items(), variant="raf")
    with pytest.raises(UsageError, match="in all groups"):
        AdamW([{"params": list(parameters().items()), "variant": "optax"}])


def test_weight_decay_is_kept_from_parameters_by_name() -> None:
    for variant, excluded in (
        ("optax", ["bi.s$"]),
        ("optax", {n: n == "bias" for n in SHAPES}),
        ("gpt_neo", ["bias"]),
    ):
        named = parameters()
        optimizer = AdamW(
            named.items(), lr=0.05, variant=variant, weight_decay_rate=0.5, exclude_from_weight_decay=excluded
        )
        for param in named.values():
            param.grad = torch.zeros_like(param)
        before = {name: param.detach().clone() for name, param in named.items()}
        optimizer.step()
        assert [n for n, p in named.items() if torch.equal(p, before[n])] == ["bias"]


# --- the step ---


@pytest.mark.sampled
@pytest.mark.parametrize(("schema", "variant"), VARIANTS)
def test_moved_together_every_variant_stays_within_the_bound(schema: str, variant: str) -> None:
    trial = case(schema, variant, full=True)
    for update in (0, 2):
        before = trial.before(update)
        run = resume(before)
        for path, param in run.params.items():
            param.grad = XP.asarray(trial.grads[update][path])
        run.optimizer.param_groups[0]["lr"] = RATE
        run.optimizer.step()
        bound = trial.bound(update, "compiled", True, XP.sqrt_units)
        tensors_now = run.tensors()
        assert tensors_now.keys() == bound.keys()
        rows = [compare(update, *key, value, value, value, bound[key]) for key, value in tensors_now.items()]
        assert [(row.path, row.tensor, row.example) for row in rows if row.outside] == []


@pytest.mark.parametrize("schema", EVERY)
def test_no_learning_rate_is_assumed(schema: str) -> None:
    named = parameters()
    optimizer = make(schema, named, lr=None)
    give_grads(named, 0)
    before = tensors(optimizer, named)
    with pytest.raises(UnknownRuleError, match="no learning rate: set lr @ group 0"):
        optimizer.step()
    assert differing(before, tensors(optimizer, named)) == []
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1


@pytest.mark.parametrize(
    ("variant", "options"),
    [("t2t_late", {}), ("mesh_tf", {}), ("hf", {}), ("fairseq", {"warmup_init": True})],
)
def test_some_adafactors_have_a_rate_of_their_own(variant: str, options: dict[str, Any]) -> None:
    named = parameters()
    before = {name: param.detach().clone() for name, param in named.items()}
    train(Adafactor(named.items(), variant=variant, **options), named, 0, 1)
    assert not any(torch.equal(before[name], param) for name, param in named.items())
    if variant == "hf":
        with pytest.raises(UnknownRuleError, match="no learning rate"):
            train(Adafactor(named.items(), variant=variant, relative_step=False), named, 0, 1)


@pytest.mark.parametrize("schema", EVERY)
def test_schedulers_set_each_groups_rate(schema: str) -> None:
    def two_groups(named: Named) -> Any:
        pairs = list(named.items())
        groups: list[dict[str, Any]] = [{"params": pairs[:2], "lr": 0.1}, {"params": pairs[2:], "lr": 0.2}]
        options = {key: value for key, value in KINDS[schema].items() if key != "lr_mult"}
        return OPTIMIZERS[schema](groups, **options)

    named, other = parameters(), parameters()
    optimizer, plain = two_groups(named), two_groups(other)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda t: 1 / (t + 1), lambda t: 2.0**-t])
    for update in range(3):
        for group, rate in zip(plain.param_groups, (0.1 / (update + 1), 0.2 * 2.0**-update), strict=True):
            group["lr"] = rate
        train(optimizer, named, update, 1)
        train(plain, other, update, 1)
        scheduler.step()
    assert differing(tensors(optimizer, named), tensors(plain, other)) == []


@pytest.mark.parametrize("schema", EVERY)
def test_a_closure_is_called_with_gradients_on(schema: str) -> None:
    named = parameters()
    optimizer = make(schema, named)

    def closure() -> float:
        optimizer.zero_grad()
        total = torch.stack([param.square().sum() for param in named.values()]).sum()
        total.backward()  # type: ignore[no-untyped-call]  # PyTorch's is untyped
        return total.item()

    losses = [optimizer.step(closure) for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("schema", EVERY)
def test_step_hooks_run(schema: str) -> None:
    named = parameters()
    optimizer, seen = make(schema, named), list[str]()
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(optimizer, named, 0, 1)
    assert seen == ["before", "after"]


@pytest.mark.parametrize("schema", EVERY)
def test_a_gradient_scaler_drives_it(schema: str) -> None:
    named, plain = parameters(), parameters()
    optimizer, other = make(schema, named), make(schema, plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for params, step in ((named, lambda: scaler.step(optimizer)), (plain, other.step)):
        loss = torch.stack([param.square().sum() for param in params.values()]).sum()
        (scaler.scale(loss) if params is named else loss).backward()  # type: ignore[no-untyped-call]  # PyTorch's is untyped
        step()
    scaler.update()
    assert differing(tensors(optimizer, named), tensors(other, plain)) == []
    for param in named.values():
        param.grad = torch.full_like(param, float("inf"))
    scaler.step(optimizer)
    assert optimizer.param_groups[0]["step"] == 1


@pytest.mark.filterwarnings(
    "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"
)  # torch._dynamo.guards
@pytest.mark.parametrize("schema", EVERY)
def test_a_compiled_step_is_the_same_step(schema: str) -> None:
    named, plain = parameters(), parameters()
    optimizer, other = make(schema, named), make(schema, plain)
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    for update in range(3):
        give_grads(named, update)
        compiled()  # type: ignore[no-untyped-call]  # PyTorch's is untyped
    train(other, plain, 0, 3)
    assert differing(tensors(optimizer, named), tensors(other, plain)) == []
    torch.compiler.reset()


@pytest.mark.parametrize("schema", EVERY)
def test_a_group_added_later_counts_for_itself(schema: str) -> None:
    named, late = parameters(), parameters(late=(8, 5))
    optimizer = make(schema, named)
    train(optimizer, named, 0, 2)
    options: dict[str, Any] = {"lr_mult": {}} if schema == "lans" else {}
    optimizer.add_param_group({"params": late.items(), **options})
    train(optimizer, {**named, **late}, 2, 1)
    assert [group["step"] for group in optimizer.param_groups] == [3, 1]
    alone = parameters(late=(8, 5))
    alone["late"].grad = late["late"].grad
    make(schema, alone).step()
    assert torch.equal(alone["late"], late["late"])


@pytest.mark.parametrize("schema", EVERY)
def test_sparse_gradients_are_refused_before_anything_moves(schema: str) -> None:
    named = {**parameters(), **parameters(table=(5, 4))}
    optimizer = make(schema, named)
    give_grads(named, 0)
    before = tensors(optimizer, named)
    index = torch.zeros(1, 1, dtype=torch.int64)
    named["table"].grad = torch.sparse_coo_tensor(index, torch.ones(1, 4), (5, 4), check_invariants=True)
    with pytest.raises(UsageError, match=r"sparse(.|\n)*@ table"):
        optimizer.step()
    assert differing(before, tensors(optimizer, named)) == []


@pytest.mark.parametrize("schema", EVERY)
def test_a_parameter_whose_memory_changes_between_updates_moves_as_before(schema: str) -> None:
    """As `module.to(memory_format=...)` and whoever sets `param.data` do."""
    named, plain = parameters(), parameters()
    optimizer, other = fast(schema, named), fast(schema, plain)
    train(optimizer, named, 0, 1)
    train(other, plain, 0, 1)
    for param in named.values():
        param.data = param.data.t().contiguous().t() if param.dim() == 2 else param.data
    train(optimizer, named, 1, 2)
    train(other, plain, 1, 2)
    for name in named:
        torch.testing.assert_close(named[name], plain[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("schema", EVERY)
def test_a_parameter_that_was_resized_is_refused_by_name(schema: str) -> None:
    named = parameters()
    optimizer = fast(schema, named)
    train(optimizer, named, 0, 1)
    named["tall"].data = torch.ones(9, 5)
    give_grads(named, 1)
    before = {name: param.clone() for name, param in named.items()}
    with pytest.raises(StateError, match=r"has shape (.|\n)*tall"):
        optimizer.step()
    assert all(torch.equal(before[name], param) for name, param in named.items())


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have their parameter's dtype")
@pytest.mark.parametrize("schema", EVERY)
def test_gradients_of_another_dtype_are_taken_as_the_text_takes_them(schema: str) -> None:
    named, plain = parameters(), parameters()
    optimizer, other = fast(schema, named), fast(schema, plain, foreach=False)
    for param in (*named.values(), *plain.values()):
        param.grad_dtype = torch.bfloat16
    for update in range(2):
        for params, one in ((named, optimizer), (plain, other)):
            for i, param in enumerate(params.values()):
                random = torch.Generator().manual_seed(1000 * update + i)
                param.grad = torch.randn(param.shape, generator=random).to(torch.bfloat16)
            one.step()
    assert differing(tensors(optimizer, named), tensors(other, plain)) == []


@pytest.mark.parametrize(
    ("schema", "variant"),
    [("adafactor", "keras"), ("adamw", "gpt_neo"), ("adamw", "keras"), ("adamw", "optax"), ("lamb", "keras")],
)
def test_where_a_group_has_no_gradient_there_is_nothing_to_clip(schema: str, variant: str) -> None:
    named = parameters(a=(3,), b=(3,))
    groups = [{"params": [pair]} for pair in named.items()]
    maker: Any = OPTIMIZERS[schema]
    optimizer = maker(groups, lr=RATE, variant=variant, global_norm_clip_threshold=1.0)
    named["a"].grad, idle = torch.ones(3), named["b"].clone()
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]
    assert torch.equal(named["b"], idle)


@pytest.mark.parametrize("schema", EVERY)
def test_a_value_changed_in_a_group_holds_from_then_on(schema: str) -> None:
    name, value = {
        "adafactor": ("clipping_threshold", 0.01),
        "scaled_adam": ("betas", (0.5, 0.6)),
        "lans": ("lr_mult", {"wide": 3.0}),
        "lamb": ("epsilon", 0.5),
        "adamw": ("weight_decay_rate", 0.5),
    }[schema]
    named, other = parameters(), parameters()
    optimizer, changed = make(schema, named), make(schema, other, **{name: value})
    train(changed, other, 0, 1)
    give_grads(named, 0)
    optimizer.param_groups[0][name] = copy.deepcopy(value)
    optimizer.step()
    assert differing(tensors(optimizer, named), tensors(changed, other)) == []
    if isinstance(value, dict):  # in place, too
        optimizer.param_groups[0][name]["wide"] = 0.0
        before = named["wide"].detach().clone()
        train(optimizer, named, 1, 1)
        assert torch.equal(before, named["wide"])


@pytest.mark.parametrize("schema", EVERY)
def test_devices_arent_mixed(schema: str) -> None:
    here, there = parameters(a=(8, 5), b=(8, 5)), parameters(c=(8, 5))
    there = {name: torch.nn.Parameter(param.to("meta")) for name, param in there.items()}
    alone = parameters(a=(8, 5), b=(8, 5))
    options: dict[str, Any] = {"clipping_scale": None} if schema == "scaled_adam" else {}
    optimizer, other = make(schema, {**here, **there}, **options), make(schema, alone, **options)
    for update in range(2):
        for param in there.values():
            param.grad = torch.empty_like(param)
        give_grads(here, update)
        optimizer.step()
    train(other, alone, 0, 2)
    assert differing(tensors(optimizer, here), tensors(other, alone)) == []


# --- counts ---


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(
    ("schema", "variant"),
    [("adamw", "torch"), ("lans", "mxnet_fused"), ("adafactor", "hf"), ("adafactor", "torch")],
)
def test_a_parameter_without_a_gradient_falls_behind_where_the_variant_counts_so(
    schema: str, variant: str, foreach: bool
) -> None:
    options: dict[str, Any] = {"variant": variant, "foreach": foreach, "lr": 0.05}
    if variant == "hf":
        options["relative_step"] = False
    named, alone = parameters(), parameters()
    optimizer = OPTIMIZERS[schema](named.items(), **options)
    other = OPTIMIZERS[schema](alone.items(), **options)
    for update in range(4):
        give_grads(named, update)
        give_grads(alone, update)
        if update in (0, 2):
            named["tall"].grad = None
        else:
            for name in alone:
                if name != "tall":
                    alone[name].grad = None
            other.step()
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 4
    assert optimizer.param_groups[0]["behind"] == {"tall": 2}
    assert torch.equal(named["tall"], alone["tall"])
    twin = {name: torch.nn.Parameter(param.detach().clone()) for name, param in named.items()}
    resumed = OPTIMIZERS[schema](twin.items(), **options)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["behind"] == {"tall": 2}


def test_where_all_count_together_nothing_falls_behind() -> None:
    named = parameters()
    optimizer = AdamW(named.items(), lr=0.05, variant="optax")
    give_grads(named, 0)
    named["tall"].grad = None
    optimizer.step()
    assert "behind" not in optimizer.param_groups[0]


def test_scaled_adam_moves_what_has_no_gradient() -> None:
    named = parameters()
    optimizer = make("scaled_adam", named)
    train(optimizer, named, 0, 2)
    before = named["tall"].detach().clone()
    give_grads(named, 2)
    named["tall"].grad = None
    optimizer.step()
    assert not torch.equal(before, named["tall"])


# --- low precision ---


@pytest.mark.parametrize(
    ("schema", "variant"), [("adamw", "mesh_tf"), ("lamb", "keras"), ("lans", "mxnet_fused")]
)
def test_low_precision_that_isnt_reproduced_is_named(schema: str, variant: str) -> None:
    named = {name: torch.nn.Parameter(param.detach().bfloat16()) for name, param in parameters().items()}
    optimizer = OPTIMIZERS[schema](named.items(), lr=0.05, variant=variant)
    give_grads(named, 0)
    with pytest.raises(UnknownRuleError, match=r"bfloat16(.|\n)*float32(.|\n)*@ 5 places: wide"):
        optimizer.step()


@pytest.mark.parametrize("variant", ["t5x", "hf", "torch"])
def test_low_precision_of_adafactor_is_stepped(variant: str) -> None:
    named = {name: torch.nn.Parameter(param.detach().bfloat16()) for name, param in parameters().items()}
    optimizer = Adafactor(named.items(), lr=0.05, variant=variant)
    train(optimizer, named, 0, 2)
    assert all(param.dtype is torch.bfloat16 and param.isfinite().all() for param in named.values())


def test_masters_follow_weights_that_are_loaded_before_the_first_update() -> None:
    named = {name: torch.nn.Parameter(param.detach().half()) for name, param in parameters().items()}
    optimizer = LANS(named.items(), lr=0.05, multi_precision=True)
    loaded = {name: torch.nn.Parameter(param.detach() * 3) for name, param in named.items()}
    other = LANS(loaded.items(), lr=0.05, multi_precision=True)
    with torch.no_grad():
        for name, param in named.items():
            param.copy_(loaded[name])
    train(optimizer, named, 0, 2)
    train(other, loaded, 0, 2)
    assert differing(tensors(optimizer, named), tensors(other, loaded)) == []
    digits = optimizer.state[named["wide"]]["master"]
    assert not torch.equal(digits.half().float(), digits)


# --- copies and states ---


@pytest.mark.parametrize("schema", EVERY)
def test_copies_and_pickles_go_on_alike(schema: str) -> None:
    named = parameters()
    optimizer = make(schema, named)
    train(optimizer, named, 0, 3)
    twin, unpickled = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    train(optimizer, named, 3, 2)
    for other in (twin, unpickled):
        copies = dict(zip(named, other.param_groups[0]["params"], strict=True))
        train(other, copies, 3, 2)
        assert differing(tensors(other, copies), tensors(optimizer, named)) == []


def layers(count: int) -> Named:
    """Returns equal small parameters, whose slots share their memory."""
    return parameters(**{f"layer_{i}": (6, 4) for i in range(count)})


def sharing(optimizer: torch.optim.Optimizer) -> dict[str, bool]:
    """Returns whether each of the first parameter's slots shares a memory with the last one's, by name."""
    first, *_, last = (optimizer.state[param] for param in optimizer.param_groups[0]["params"])
    return {
        name: slot.untyped_storage().data_ptr() == last[name].untyped_storage().data_ptr()
        for name, slot in first.items()
    }


@pytest.mark.parametrize("schema", EVERY)
def test_equal_slots_share_a_memory_and_what_leaves_the_optimizer_does_not(schema: str) -> None:
    named = layers(3)
    optimizer = make(schema, named)
    train(optimizer, named, 0, 1)
    twin, unpickled, loaded = (
        copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), make(schema, layers(3))
    )  # fmt: skip
    loaded.load_state_dict(optimizer.state_dict())
    for other in (optimizer, twin, unpickled, loaded):
        assert all(sharing(other).values())
    for slots in optimizer.state_dict()["state"].values():
        for slot in slots.values():
            assert slot.untyped_storage().nbytes() == slot.numel() * slot.itemsize


@pytest.mark.parametrize("schema", EVERY)
def test_it_does_not_matter_whether_slots_share_a_memory_or_gradients_are_missing(schema: str) -> None:
    named, others = layers(5), layers(5)
    together, apart = make(schema, named), make(schema, others)
    for slots in apart.state.values():
        slots.update({name: slot.clone() for name, slot in slots.items()})
    assert not any(sharing(apart).values())
    for update in range(4):
        for optimizer, params in ((together, named), (apart, others)):
            give_grads(params, update)
            params[f"layer_{update}"].grad = None
            optimizer.step()
    assert differing(tensors(together, named), tensors(apart, others)) == []


def through_a_file(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("schema", EVERY)
def test_a_state_dict_goes_through_a_file_exactly(schema: str) -> None:
    named = parameters()
    optimizer = make(schema, named)
    train(optimizer, named, 0, 3)
    twin = {name: torch.nn.Parameter(named[name].detach().clone()) for name in reversed(named)}
    other = OPTIMIZERS[schema](twin.items())
    other.load_state_dict(through_a_file(optimizer))
    assert differing(tensors(other, twin), tensors(optimizer, named)) == []
    hyper = [name for name in defaults(schema, optimizer.defaults["variant"]) if name not in LEFT_OUT]
    assert all(other.param_groups[0][key] == optimizer.param_groups[0][key] for key in ("lr", "step", *hyper))
    train(optimizer, named, 3, 2)
    for update in (3, 4):
        give_grads(named, update)
        for name, param in twin.items():
            param.grad = named[name].grad
        other.step()
    # Sums over a group run in its order, which is another here.
    order = tensors(optimizer, named)
    for key, value in tensors(other, twin).items():
        torch.testing.assert_close(torch.from_numpy(value), torch.from_numpy(order[key]))


def test_states_of_other_classes_and_variants_are_refused() -> None:
    named = parameters()
    state = make("adamw", named).state_dict()
    with pytest.raises(StateError, match=r"isn't a state of statekit.torch.LAMB"):
        make("lamb", named).load_state_dict(state)
    with pytest.raises(StateError, match="is of variant torch, the optimizer of optax"):
        AdamW(named.items(), variant="optax").load_state_dict(state)


def deciding() -> list[tuple[str, str, str, str]]:
    """Returns every option that a slot exists by: schema, variant, option, slot."""
    return [
        (schema, variant, name, slot)
        for schema in OPTIMIZERS
        for name, spec in load_schema(schema).hyperparameters.items()
        for slot in spec.get("decides", {}).get("existence", ())
        for variant in load_schema(schema).stepped
        if name in taken(schema, variant)
    ]


@pytest.mark.parametrize(("schema", "variant", "name", "slot"), deciding())
def test_a_slot_tells_that_the_option_is_on_of_which_nobody_says_anything(
    schema: str, variant: str, name: str, slot: str
) -> None:
    low = name == "multi_precision"
    param = torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.float16 if low else torch.float32))
    group = OPTIMIZERS[schema]([("w", param)], variant=variant).param_groups[0]
    del group[name]
    rule, there = rules_of(group).get("w"), torch.zeros(4, 3)
    stored: list[dict[str, Any]] = [{}, {slot: there}]
    without, with_it = (
        {**expected_slots(group, "w", param, rule, one), **first_group_slots(group, one)} for one in stored
    )
    assert slot in with_it and slot not in without


def test_states_that_lack_a_groups_slots_are_refused() -> None:
    named = parameters()
    optimizer = make("scaled_adam", named)
    train(optimizer, named, 0, 2)
    state = copy.deepcopy(optimizer.state_dict())
    del state["param_groups"][0]["slots"]["model_norms"]
    with pytest.raises(StateError, match="no slot model_norms in the state @ group 0"):
        ScaledAdam(named.items()).load_state_dict(state)
    short = copy.deepcopy(optimizer.state_dict())
    short["param_groups"][0]["clipping_update_period"] = 3
    with pytest.raises(
        StateError, match=r"model_norms has shape \(2,\) in the state, expected \(3,\) @ group 0"
    ):
        ScaledAdam(named.items()).load_state_dict(short)


def test_slots_that_were_never_born_begin_where_parameters_count_apart() -> None:
    named = parameters()
    optimizer = make("adamw", named)
    give_grads(named, 0)
    named["gate"].grad = None
    optimizer.step()
    state = optimizer.state_dict()
    del state["state"][list(named).index("gate")]
    twin = parameters()
    other = make("adamw", twin)
    train(other, twin, 0, 1)
    other.load_state_dict(state)
    assert not any(slot.any() for slot in other.state[twin["gate"]].values())
    del state["state"][0]
    with pytest.raises(StateError, match="has no slots in the state @ wide"):
        other.load_state_dict(state)


def test_memory_that_ends_while_a_state_is_loaded_leaves_the_optimizer_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = {name: torch.nn.Parameter(torch.ones(2, 3)) for name in ("a", "b")}
    trained, other = (ScaledAdam(named.items(), lr=rate) for rate in (0.1, 0.2))
    for param in named.values():
        param.grad = torch.ones(2, 3)
    trained.step()
    before, calls = str(other.state_dict()), [taken_over]

    def fail(*arguments: Any) -> Any:
        if not calls:
            raise MemoryError
        return calls.pop()(*arguments)

    monkeypatch.setattr("statekit.torch.optimizer.taken_over", fail)
    with pytest.raises(MemoryError):
        other.load_state_dict(trained.state_dict())
    monkeypatch.undo()
    assert str(other.state_dict()) == before
    other.load_state_dict(trained.state_dict())
    assert str(other.state_dict()) == str(trained.state_dict()) != before


def test_slots_of_a_group_follow_its_parameters_to_another_device() -> None:
    with torch.device("meta"):
        optimizer = ScaledAdam({"w": torch.nn.Parameter(torch.ones(2, 3))}.items(), clipping_scale=2.0)
    (group,) = optimizer.param_groups
    assert group["slots"]
    group["slots"] = {name: torch.empty_like(slot, device="cpu") for name, slot in group["slots"].items()}
    optimizer._plan_of(0, group)
    assert {slot.device.type for slot in group["slots"].values()} == {"meta"}


@pytest.mark.parametrize(
    "name", ["adafactor.Adafactor", "adamw.AdamW", "lamb.LAMB", "lans.LANS", "scaled_adam.ScaledAdam"]
)
def test_pickles_that_name_a_class_by_its_module_of_0_2_0_are_read(name: str) -> None:
    module, class_name = name.split(".")
    assert pickle.loads(f"cstatekit.torch.{module}\n{class_name}\n.".encode()) is getattr(
        statekit.torch, class_name
    )
