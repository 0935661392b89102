"""Two laws of printed lines that need no library: they are complete or say what is missing, and make the same slots."""

from __future__ import annotations

import ast
import builtins
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint_ref import TOLD
from test_resume import HOMES, state

from goldens import COMPACT
from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.convert import plan
from statekit.conversion.plan import Request
from statekit.conversion.resume import frameworks, of_plan, resume_lines
from statekit.conversion.resume import unsaid as sentence
from statekit.conversion.target import command_naming
from statekit.lines.printing import SavedRun, subscripts
from statekit.state.run import RunState, Schedule
from statekit.testing.printed_code import check_printed_lines, printed_refs
from statekit.verify.verification import Asked

PROGRAM = {
    "model", "params", "loss", "args", "dataset", "trainer", "accelerator", "engine", "net", "mx", "session",
    "lowering", "optimizer", "ScaledAdam", "get_parameter_groups_with_lrs", "Eden", "torch",
}  # fmt: skip
"""What a program has before the lines run: its model, and what its own code imports."""
LAMBDA = Schedule(
    "LambdaLR", {"base_lrs": [0.1], "lr_lambdas": [None]}, 3, "extra/torch/scheduler", ("no file has it",)
)
STEP = Schedule("StepLR", {"step_size": 2, "gamma": 0.1, "base_lrs": [0.1]}, 3, "extra/torch/scheduler")


def unsaid(lines: list[str]) -> Iterator[str]:
    """Yields lines with `...` that no comment explains, and names that neither program, lines nor comments have."""
    for line, before in zip(lines, ["", *lines], strict=False):
        explained = "#" in line or before.startswith("# ...") or ".load_optimizer(" in line  # by its keywords
        if "..." in line and not explained:
            yield line
    nodes = [*ast.walk(ast.parse("\n".join(lines)))]
    made = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    made |= {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            made |= {(name.asname or name.name).partition(".")[0] for name in node.names}
    commented = " ".join(line for line in lines if line.startswith("#"))
    for node in nodes:
        if not isinstance(node, ast.Name) or node.id in made | PROGRAM | {*dir(builtins)}:
            continue
        if f"{node.id}:" not in commented:
            yield node.id


@pytest.mark.sampled
@pytest.mark.parametrize(("layout", "container"), HOMES)
def test_a_line_is_complete_or_says_what_is_missing(layout: str, container: str) -> None:
    for schema, variants in registry.layout_card(layout).variants.items():
        for variant in [*variants, None]:
            for count, converted, schedules in (
                (1, True, ()), (2, False, ()), (1, False, (LAMBDA,)), (2, True, (STEP,)),
            ):  # fmt: skip
                run = RunState(schedules)
                saved = SavedRun(container, layout, Path("/run/out"), 3, run=run, converted=converted)
                for framework in (None, *frameworks()):
                    lines = resume_lines(saved, state(schema, variant, count), framework)
                    if framework or (layout not in ("t5x", "maxtext") and container != "megatron"):
                        assert [*unsaid(lines)] == [], lines


def test_an_undefined_name_and_a_silent_gap_are_noticed() -> None:
    assert [*unsaid(["optimizer = f(group_0, lr=...)"])] == ["optimizer = f(group_0, lr=...)", "f", "group_0"]
    assert [*unsaid(["# group_0: the run's", "optimizer = model(group_0)"])] == []


T5X = [
    bundle
    for system in ("t5x", "t2t", "mesh_tf")
    for bundle in sorted((COMPACT / system).glob("*/checkpoint"))
    if bundle.parent.name not in ("late_bf16_encoded_beta1", "adamw_2device_stacked_sharded")
]


@pytest.mark.parametrize("source", T5X, ids=[bundle.parent.name for bundle in T5X])
def test_t5x_makes_the_slots_that_were_written(source: Path, tmp_path: Path) -> None:
    """By the printed arguments over T5X' defaults.

    Source: google-research/t5x t5x/adafactor.py, `Adafactor.init_param_state`, `_choose_factored_dims`.
    """
    planned = plan(source, tmp_path / "out", to="t5x", layout="t5x")
    lines = resume_lines(of_plan(planned), planned.state)
    arguments: dict[str, Any] = {"min_dim_size_to_factor": 128, "factored": True}
    for line in lines:
        name, _, value = line.removeprefix("adafactor.Adafactor.").partition(" = ")
        if line.startswith("adafactor."):
            arguments[name] = ast.literal_eval(value)
    comments = " ".join(line for line in lines if line.startswith("#"))
    has_gin = source.parent.parent.name == "t5x"  # T5X' own run, whose gin says the rest
    assert "..." not in "\n".join(lines)
    written = {entry.name: entry.shape for entry in planned.entries}
    for name, shape in written.items():
        if not name.startswith("target/"):
            continue
        slots = f"state/param_states/{name.removeprefix('target/')}"
        if f"{slots}/v_row" not in written:
            continue  # another optimizer's
        factored = written[f"{slots}/v_row"] != (1,) and written[f"{slots}/v"] == (1,)
        has_momentum = written[f"{slots}/m"] == shape != (1,)
        assert has_momentum <= (has_gin or "beta1" in comments or arguments.get("beta1") is not None), name
        if "min_dim_size_to_factor" in comments or (has_gin and arguments["min_dim_size_to_factor"] == 128):
            continue  # asked for
        usual = (
            arguments["factored"] and len(shape) == 2 and min(shape) >= arguments["min_dim_size_to_factor"]
        )
        assert factored == usual or (len(shape) > 2 and (has_gin or "factor_map" in comments)), name


HOSTILE = (
    '"]; HOSTILE(); x["',
    "'); HOSTILE()\nHOSTILE()\n#",
    "$(HOSTILE)`HOSTILE`",
    "{HOSTILE}",
    "\u2028HOSTILE",
)
"""What a name would have to be, to run as code of Python or of a shell."""
IN_SHELL = ("--load ", "python3 ")
"""How lines begin that are words of a command."""
_QUOTED = re.compile(r"'[^']*'(?:\"'\"'[^']*')*")
"""Matches a word as `shlex.quote` has it."""


def runs(lines: list[str]) -> Iterator[str]:
    """Yields what in printed lines would run of a hostile name."""
    if any(line.startswith(IN_SHELL) for line in lines):
        bare = re.sub(r"'[^']*'|\"'\"", "", "\n".join(line for line in lines if not line.startswith("#")))
        yield from (
            line
            for line in [bare, *(x for x in lines if x.startswith("#") and "\n" in x)]
            if "HOSTILE" in line
        )
        return
    for node in ast.walk(ast.parse("\n".join(lines))):
        values = (getattr(node, name, None) for name in ("id", "attr", "arg", "name"))
        yield from (str(value) for value in values if "HOSTILE" in str(value))
    commands = (line.partition("  # or ")[2] for line in "\n".join(lines).split("\n"))
    yield from (command for command in commands if "HOSTILE" in _QUOTED.sub("", command))


@pytest.mark.parametrize("name", HOSTILE)
def test_no_path_and_no_class_runs_as_code(name: str) -> None:
    for layout, container in HOMES:
        schema, variants = next(iter(registry.layout_card(layout).variants.items()))
        place = Path("/run") / name / "checkpoint"
        for converted in (True, False):
            saved = SavedRun(container, layout, place, 3, converted=converted, folder=place, classes=name)
            for framework in (None, *frameworks()):
                assert [*runs(resume_lines(saved, state(schema, [*variants, None][0]), framework))] == []


@pytest.mark.parametrize("label", HOSTILE)
def test_no_label_of_a_partition_runs_as_code(label: str) -> None:
    """It became a key between quotation marks, and the end of a variable's name."""
    parts = {"a": "0", "b": label}
    inner = "opt_state/inner_states/{}/inner_state"
    names = [f"{inner.format(parts[path])}/0/{slot}/{path}" for path in parts for slot in ("mu", "nu")]
    names += [f"{inner.format(part)}/{i}/count" for part in parts.values() for i in (0, 2)]
    saved = SavedRun(
        "orbax", "optax", Path("/run"), None, tensors=(*names, "params/a", "params/b", "params/c"),
        empty=(f"{inner.format(label + '2')}",),
    )  # fmt: skip
    two = {"schema": "adamw", "variant": "optax", "counts": {"updates": 3, "schedule": 3}}
    groups = [{"paths": [path], "hyperparameters": {}, "known_from": {}} for path in parts]
    lines = resume_lines(saved, {**two, "groups": groups})
    assert any("optax.partition(" in line for line in lines)
    assert any("HOSTILE" in line for line in lines)
    assert [*runs(lines)] == []


def test_only_a_number_as_python_writes_it_is_an_index() -> None:
    assert subscripts("optimizers/10/007/٣") == '["optimizers"][10]["007"]["\\u0663"]'


REF = CheckpointRef(Path("/run/it's.pt"), **{name: value for name, value in TOLD.items() if name != "step"})
"""All that a user can say of a checkpoint; a step is told by its own path."""


@pytest.mark.sampled
@pytest.mark.parametrize(("layout", "container"), HOMES)
def test_each_call_that_a_layout_prints_opens_the_same_ref(layout: str, container: str) -> None:
    saved = SavedRun(container, layout, REF.place, None, ref=replace(REF, step=3), converted=False)
    for schema in registry.layout_card(layout).variants:
        for framework in (None, *frameworks()):
            lines = resume_lines(saved, state(schema, None), framework)
            refs = printed_refs("\n".join(lines))
            assert refs or framework is None, lines  # a system's own lines may open nothing by statekit
            assert {repr(ref) for ref in refs} <= {repr(REF)}, lines


def test_what_verbs_print_opens_the_same_ref_in_a_fresh_process(tmp_path: Path) -> None:
    """Python of each framework, the sentence of a layout without lines, a remedy of convert, a proof's own line."""
    ref = replace(REF, path=tmp_path / "it's.pt")
    saved = SavedRun("torch", "torch-optim", ref.place, None, ref=replace(ref, step=3), converted=False)
    lines = ["\n".join(resume_lines(saved, state("adamw", "torch"), framework)) for framework in frameworks()]
    asked = command_naming(Request(ref, tmp_path / "out.pt", to="torch", layout="statekit-torch"), "adam")
    proven = replace(ref, param_names=None, schedule=None)  # a certificate tells these
    # What is trusted each run decides by itself.
    proven = replace(proven, accept_damaged=False, follow_links=False, budget=None)
    check_printed_lines([
        *((ref, text) for text in (*lines, sentence(saved))),
        (replace(ref, layout=None), shlex.join(asked)),
        (proven, Asked(proven, tmp_path / "out.pt").command),
    ])  # fmt: skip


@pytest.mark.parametrize("name", [name for name in TOLD if name != "step"])
def test_a_line_that_lacks_a_field_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every = CheckpointRef.keywords
    monkeypatch.setattr(
        CheckpointRef,
        "keywords",
        lambda ref, *uses: {k: v for k, v in every(ref, *uses).items() if k != name},
    )
    saved = SavedRun("torch", "torch-optim", REF.place, None, ref=REF, converted=False)
    refs = printed_refs("\n".join(resume_lines(saved, state("adamw", "torch"), "torch")))
    assert refs and all(repr(ref) != repr(REF) for ref in refs)
