"""The lines to go on from a conversion's result: every target has its own, and where its library is here, they run."""

from __future__ import annotations

import ast
import copy
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from goldens import COMPACT, GOLDEN
from statekit.cli.main import DONE, main
from statekit.conversion import registry
from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.resume import of_plan, resume_lines
from statekit.files.manifest import FILE
from statekit.lines.printing import Printing, SavedRun, quoted
from statekit.schemas import __path__ as schemas
from statekit.state.run import RunState, Schedule
from statekit.state.schedules.call_text import parse_call

HOMES = [
    (layout, container)
    for layout in registry.layout_names()
    for container in registry.layout_card(layout).containers
]


def state(schema: str, variant: str | None, groups: int = 1) -> dict[str, Any]:
    known = {"learning_rate": 0.1}
    group = {"paths": ["a"], "hyperparameters": known, "known_from": {}}
    return {
        "schema": schema,
        "variant": variant,
        "counts": {"updates": 3, "schedule": 3},
        "groups": [group] * groups,
    }


@pytest.mark.parametrize(("layout", "container"), HOMES)
def test_every_layout_has_lines_in_every_container_that_it_is_at_home_in(layout: str, container: str) -> None:
    for schema, variants in registry.layout_card(layout).variants.items():
        for variant in variants:
            for groups in (1, 2):
                place = SavedRun(container, layout, Path("/run/out"), 3)
                lines = resume_lines(place, state(schema, variant, groups))
                assert lines and any("/run" in line for line in lines)
                assert not any("$" in line or "None(" in line for line in lines), lines
                if (
                    layout not in ("t5x", "maxtext") and container != "megatron"
                ):  # gin, and words of a command line
                    compile("\n".join(lines), "to go on", "exec")


def test_where_nobody_has_said_how_to_go_on_another_way_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There stood a heading and nothing below it."""
    source, target = COMPACT / "t5x" / "momentum_f32" / "checkpoint", tmp_path / "state.statekit"
    assert main(["convert", str(source), str(target), "--layout", "t5x"]) == DONE
    way = f"statekit resume {target} --framework torch"
    assert way in " ".join(capsys.readouterr().out.split())
    assert main(["resume", str(target)]) == DONE
    assert way in " ".join(capsys.readouterr().out.split())
    assert main([*way.split()[1:]]) == DONE
    assert "load_optimizer" in capsys.readouterr().out


def test_every_layout_of_ours_prints_lines_and_another_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in registry.layout_names():
        assert isinstance(registry.layout(name), Printing), name

    class Theirs:
        containers = ("torch",)

        def lines(self, state: dict[str, Any], ref: Any) -> list[str]:
            return [f"go_on({str(ref.path)!r}, {state['counts']['updates']})"]

    class Silent:
        containers = ("torch",)

    monkeypatch.setattr(registry, "layout_names", lambda: ["theirs", "silent"])
    monkeypatch.setattr(registry, "layout", {"theirs": Theirs(), "silent": Silent()}.get)
    place = SavedRun("torch", "theirs", Path("a.pt"), None)
    assert resume_lines(place, state("adamw", "torch")) == ["go_on('a.pt', 3)"]
    assert resume_lines(replace(place, layout="silent"), state("adamw", "torch")) == []


@pytest.mark.parametrize(
    "container", ["torch", "dcp", "hf-trainer", "mxnet", "tf-bundle", "keras-h5", "orbax"]
)
def test_no_target_is_told_anothers_lines(container: str) -> None:
    """At b103f67 all but T5X, Orbax and Flax were told to load PyTorch's."""
    lines_of = {"hf-trainer": "trainer.train(", "mxnet": "trainer.load_states(", "keras-h5": "load_weights("}
    layout = {"mxnet": "mxnet-adam", "tf-bundle": "tf2-keras", "keras-h5": "keras", "orbax": "optax"}
    place = SavedRun(container, layout.get(container, "torch-optim"), Path("out"), 3)
    lines = "\n".join(resume_lines(place, state("adamw", "torch")))
    assert "statekit.torch" not in lines
    assert lines_of.get(container, "") in lines


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    net(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


def split(net: torch.nn.Module, groups: int) -> list[dict[str, Any]]:
    params = list(net.parameters())
    if groups == 1:
        return [{"params": params}]
    return [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0}]


TORCH = [
    (lay, con)
    for lay, con in HOMES
    if con in ("torch", "dcp", "dcp-safetensors", "accelerate")
    and lay.startswith("torch-")
    and lay != "torch-weights"
]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("layout", "container"), TORCH)
def test_pytorch_goes_on_by_its_own_lines(layout: str, container: str, groups: int, tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(split(net, groups), lr=0.01, betas=(0.8, 0.9))
    for seed in range(3):
        step(net, optimizer, seed)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    names = [name for name, _ in net.named_parameters()]
    order = names if groups == 1 else [*names[::2], *names[1::2]]
    (tmp_path / "names").write_text("\n".join(order))
    options = ["--param-names", str(tmp_path / "names")]
    target = tmp_path / "out"
    assert (
        main(
            ["convert", str(tmp_path / "a.pt"), str(target), "--to", container, "--layout", layout, *options]
        )
        == DONE
    )
    source, fresh = net, model()
    parts = {f"group_{i}": group["params"] for i, group in enumerate(split(fresh, groups))}
    scope: dict[str, Any] = {"model": fresh, **parts}
    if container == "accelerate":
        scope["accelerator"] = pytest.importorskip("accelerate").Accelerator(cpu=True)
    exec(compile("\n".join(lines_of(target, layout, container, optimizer)), "to go on", "exec"), scope)
    for seed in range(3, 6):
        step(source, optimizer, seed)
        step(fresh, scope["optimizer"], seed)
    for mine, theirs in zip(fresh.state_dict().values(), source.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def lines_of(target: Path, layout: str, container: str, optimizer: torch.optim.Optimizer) -> list[str]:
    count = len(optimizer.param_groups)
    return resume_lines(SavedRun(container, layout, target, 3), state("adamw", "torch", count))


def test_a_step_that_was_not_taken_would_be_noticed(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    step(net, optimizer, 0)
    other = copy.deepcopy(net)
    step(net, optimizer, 1)
    step(other, torch.optim.AdamW(other.parameters(), lr=0.01), 1)
    assert not torch.equal(next(net.parameters()), next(other.parameters()))


def test_a_path_cannot_become_code() -> None:
    path = Path('/run"); import os; ("') / "$(touch x)" / "a\nrm b" / "iter_0000003"
    for layout, container in HOMES:
        for schema, variants in registry.layout_card(layout).variants.items():
            lines = resume_lines(
                SavedRun(container, layout, path, 3), state(schema, next(iter(variants), None))
            )
            if container == "megatron":
                line, *comments = lines
                assert all(comment.startswith("# ") for comment in comments)
                assert line.startswith(f"--load {shlex.quote(str(path.parent))} --ckpt-format torch_dist ")
                assert all(
                    re.fullmatch(r"--[a-z0-9_-]+", word)
                    for word in shlex.split(line)[3:]
                    if word not in ("torch_dist", "3")
                )
            elif layout == "maxtext":
                words = [word for line in lines for word in shlex.split(line, comments=True)]
                assert words[:4] == ["python3", "-m", "maxtext.trainers.pre_train.train", "config.yml"]
                assert all(re.match(r"[a-z0-9_]+=", word) for word in words[4:])
            elif layout != "t5x":
                tree = ast.parse("\n".join(lines))
                modules = {
                    name.name
                    for node in ast.walk(tree)
                    if isinstance(node, ast.Import)
                    for name in node.names
                }
                assert "os" not in modules


def test_megatron_lm_is_told_what_it_can_load(tmp_path: Path) -> None:
    """With a schedule that it can't have, Megatron-Core's own calls; these very lines went on in 0.16.1."""
    known = state("adamw", "torch")
    schedule = Schedule("OptimizerParamScheduler", {}, 15, "extra/megatron_common/opt_param_scheduler")
    other = Schedule("StepLR", {}, 3, "extra/torch/scheduler")
    place = SavedRun("megatron", "megatron-distributed", tmp_path, 3, converted=True)
    flags = (
        "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --use-checkpoint-opt_param-scheduler"
    )
    for schedules in ((), (schedule,)):
        line, *comments = resume_lines(replace(place, run=RunState(schedules)), known)
        assert "--clip-grad" in comments[0] and "mean over loss_mask" in comments[1]
        assert ("counts samples" in comments[-1]) is bool(schedules)
        assert line == f"--load {tmp_path} --ckpt-format torch_dist {flags} --ckpt-step 3"
    rate = {"dtype": "float32", "value": 0.1}
    group = {"paths": ["a"], "hyperparameters": {"learning_rate": rate}, "known_from": {}}
    assert resume_lines(place, {**known, "groups": [group]})  # a rate that is a tensor
    lines = resume_lines(replace(place, run=RunState((other,))), known)
    ast.parse("\n".join(lines))
    assert any("dist_checkpointing.load" in line for line in lines) and not any("--load" in x for x in lines)
    line, *_ = resume_lines(replace(place, layout="megatron", converted=False), known)
    assert line == f"--load {tmp_path} --ckpt-format torch_dist --ckpt-step 3"


def test_files_that_keep_their_names_are_named(tmp_path: Path) -> None:
    place = SavedRun("mxnet", "mxnet-lans", tmp_path, 3, ("0100.params", "0100.states", "statekit.json"))
    lines = resume_lines(place, state("lans", "mxnet_fused"))
    assert lines[0] == f'net.load_parameters("{tmp_path}/0100.params")'
    assert f'"{tmp_path}/0100.states"' in lines[2]


def test_momentum_is_never_left_off_because_nobody_told_its_decay(tmp_path: Path) -> None:
    """T5X stores no beta1; its slot m shows that momentum was on."""
    source = GOLDEN / "t5x" / "momentum_f32" / "checkpoint"
    planned = plan(source, tmp_path / "run", to="orbax", layout="optax")
    assert "beta1" not in planned.state["groups"][0]["hyperparameters"]
    convert(planned)
    assert "momentum=..." in "\n".join(resume_lines(of_plan(planned), planned.state))


def manifest_of(target: Path) -> dict[str, Any]:
    if target.is_dir():
        record: dict[str, Any] = json.loads((target / FILE).read_text())
        return record
    with open_state(target) as opened:
        assert opened.checkpoint.manifest is not None
        return dict(opened.checkpoint.manifest)


@pytest.mark.parametrize(
    ("case", "target", "words"),
    [
        ("t5x/momentum_f32/checkpoint", "run-optax-orbax", '"/path/to/checkpoint/4/default"'),
        (
            "t5x/momentum_f32/checkpoint",
            "run-t5x",
            'RestoreCheckpointConfig.path = "/path/to/checkpoint/checkpoint_4"',
        ),
        ("t5x/momentum_f32/checkpoint", "run.pt", 'load_optimizer("/path/to/checkpoint", '),
        (
            "mxnet_lans/fused_bounds_clip_rescale/checkpoint",
            "run-mxnet",
            'load_states("/path/to/checkpoint/trainer.states")',
        ),
        ("keras/adafactor_default/checkpoint/model.keras", "run.keras", 'load_model("/path/to/checkpoint")'),
    ],
)
def test_a_manifest_says_how_to_go_on_wherever_its_checkpoint_lies(
    case: str, target: str, words: str, tmp_path: Path
) -> None:
    source = GOLDEN / case
    if not source.exists():
        pytest.skip("in the whole set only")
    manifests = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        planned = plan(source, tmp_path / folder / target)
        convert(planned)
        manifests.append(manifest_of(tmp_path / folder / target))
    first, second = manifests
    assert first["resume"] == second["resume"]
    assert words in "\n".join(first["resume"])
    schema = json.loads((Path(schemas[0]) / "statekit-manifest.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(first)
    assert not jsonschema.Draft202012Validator(schema).is_valid({**first, "resume": "a line"})


@pytest.mark.parametrize("framework", [None, "torch", "jax", "tensorflow"])
def test_the_verb_prints_them_for_a_checkpoint(
    framework: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    source = GOLDEN / "t5x" / "momentum_f32" / "checkpoint"
    options = ["--framework", framework] if framework else []
    assert main(["resume", str(source), *options, "--json"]) == DONE
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["format", "container", "layout", "next_update", "lines"]
    step = source / "checkpoint_4"
    last = {
        None: 'utils.RestoreCheckpointConfig.mode = "specific"',
        "torch": f'load_optimizer("{step}", model.named_parameters(), lr=..., beta1=...)',
        "jax": f'load_optimizer("{step}", params, learning_rate=..., beta1=...)',
        "tensorflow": f'load_optimizer("{step}", model.trainable_variables, learning_rate=..., beta1=...)',
    }
    assert printed["lines"][-1].endswith(last[framework])
    assert main(["resume", str(source), *options]) == DONE
    shown = capsys.readouterr().out
    assert "\n".join(printed["lines"]) in shown
    assert "The next update will use:" in shown


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("mxnet_lans/fused_bounds_clip_rescale/checkpoint", "trainer.load_states("),
        ("scaled_adam/zipformer2025_basic/checkpoint/checkpoint-6.pt", "ScaledAdam("),
        ("t2t/late_beta1_scaled_extlr/checkpoint", "tf.compat.v1.train.Saver().restore(session, "),
        ("torch_formats/adamw_trainer/checkpoint/checkpoint-4", "trainer.train(resume_from_checkpoint="),
        ("torch_formats/adamw_deepspeed_bf16_zero1/checkpoint/global_step4", 'tag="global_step4"'),
        ("optax_adafactor/adafactor_orbax_v1/checkpoint/ckpt", "ocp.StandardCheckpointer().restore("),
    ],
)
def test_recorded_checkpoints_are_told_their_own(
    case: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(GOLDEN / case)]) == DONE, capsys.readouterr().err
    assert words in capsys.readouterr().out


def test_what_trainer_wrote_itself_needs_no_optimizer_of_its_own() -> None:
    native = resume_lines(
        SavedRun("hf-trainer", "torch-optim", Path("/run/checkpoint-3"), None), state("adamw", "torch")
    )
    assert native == ['trainer.train(resume_from_checkpoint="/run/checkpoint-3")']
    written = resume_lines(SavedRun("hf-trainer", "torch-optim", Path("/run"), 3), state("adamw", "torch"))
    assert written[-1] == native[0] and any("optimizers=(optimizer, None)" in line for line in written)


def saved(folder: Path, optimizer: torch.optim.Optimizer, net: torch.nn.Module, **others: Any) -> Path:
    """Saves a run, whose groups name their parameters."""
    named = {id(param): name for name, param in net.named_parameters()}
    state = optimizer.state_dict()
    for stored, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        stored["param_names"] = [named[id(param)] for param in group["params"]]
    torch.save({"model": net.state_dict(), "optimizer": state, **others}, folder / "a.pt")
    return folder / "a.pt"


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(("layout", "container"), TORCH)
def test_slots_go_to_their_own_parameters_whatever_order_the_program_has_them_in(
    layout: str, container: str, tmp_path: Path
) -> None:
    """Groups were `model.parameters()` before: slots of equal shape went to others without a word."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(reversed([*net.parameters()]), lr=0.01)
    step(net, optimizer, 0)
    planned = plan(saved(tmp_path, optimizer, net), tmp_path / "out", to=container, layout=layout)
    convert(planned)
    scope: dict[str, Any] = {"model": copy.deepcopy(net)}
    if container == "accelerate":
        scope["accelerator"] = pytest.importorskip("accelerate").Accelerator(cpu=True)
    exec(compile("\n".join(resume_lines(of_plan(planned), planned.state)), "to go on", "exec"), scope)
    slots = scope["optimizer"].state
    for mine, theirs in zip(scope["model"].parameters(), net.parameters(), strict=True):
        assert torch.equal(slots[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])


@pytest.mark.torch
def test_a_schedule_is_made_before_the_state_that_it_would_change_is_loaded(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    for seed in range(3):
        step(net, optimizer, seed)
        schedule.step()
    source = saved(tmp_path, optimizer, net, scheduler=schedule.state_dict())
    for layout in ("torch-optim", "statekit-torch"):
        planned = plan(source, tmp_path / f"{layout}.pt", layout=layout)
        convert(planned)
        lines = resume_lines(of_plan(planned), planned.state)
        assert any(
            "torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)" in line for line in lines
        )
        scope: dict[str, Any] = {"model": model()}
        exec(compile("\n".join(lines), "to go on", "exec"), scope)
        assert scope["optimizer"].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert scope["scheduler"].state_dict() == schedule.state_dict()


def test_an_optimizer_that_makes_its_own_rate_is_asked_for_none() -> None:
    hf = state("adafactor", "hf")
    hf["groups"][0]["hyperparameters"] = {"learning_rate": None, "relative_step": True}
    lines = "\n".join(resume_lines(SavedRun("torch", "statekit-torch", Path("/run/out"), 3), hf))
    assert "lr=" not in lines and "load_optimizer(" in lines


@pytest.mark.torch
def test_what_lightning_wrote_goes_on_in_lightning(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer, 0)
    parts = {"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    torch.save(parts, tmp_path / "a.ckpt")
    order = Hints(param_names=tuple(name for name, _ in net.named_parameters()))
    planned = plan(tmp_path / "a.ckpt", tmp_path / "b.ckpt", to="torch", layout="torch-optim", hints=order)
    [line] = resume_lines(of_plan(planned), planned.state)
    assert line == f'trainer.fit(model, ckpt_path="{tmp_path / "b.ckpt"}")'


@pytest.mark.torch
def test_t5x_is_told_the_arguments_without_which_it_would_make_another_run(tmp_path: Path) -> None:
    """Gin's defaults multiply by the parameter's scale, and factor nothing below 128."""
    from transformers.optimization import Adafactor

    net = model()
    fixed = {"lr": 0.01, "scale_parameter": False, "relative_step": False}
    optimizer = Adafactor(net.parameters(), beta1=0.9, **fixed)
    step(net, optimizer, 0)
    planned = plan(saved(tmp_path, optimizer, net), tmp_path / "out", to="t5x", layout="t5x")
    assert resume_lines(of_plan(planned), planned.state)[2:] == [
        "adafactor.Adafactor.multiply_by_parameter_scale = False",
        "adafactor.Adafactor.beta1 = 0.9",
        "adafactor.Adafactor.min_dim_size_to_factor = 0",
    ]


def test_a_class_that_mxnets_states_name_is_there_before_they_are_loaded(tmp_path: Path) -> None:
    """`Trainer.save_states` pickles it as `__main__.Schedule`: the same lines load what they saved."""
    hints = Hints(schedule=parse_call("CosineDecay(0.1, 9)"))
    source = COMPACT / "mxnet_lans/fused_bounds_clip_rescale/checkpoint"
    planned = plan(source, tmp_path / "run-mxnet", hints=hints)
    lines = resume_lines(of_plan(planned), planned.state)
    code = "\n".join(lines)
    assert code.index("class Schedule(") < code.index("trainer.load_states(") < code.index("lr_scheduler = ")


@pytest.mark.parametrize(
    "path",
    ["\U0001f600.pt", "a\\ud83d\\ude00", "\udcff\ud83d", 'a"b\\', "a\nb\x7f\u2028", "\u00e9\U00020000{x}"],
)
def test_a_printed_path_is_that_path_in_python(path: str) -> None:
    """Seen red: a character above U+FFFF was printed as JSON's two halves: no such file."""
    assert ast.literal_eval(quoted(path)) == path
