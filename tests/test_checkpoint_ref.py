"""What a user says about a checkpoint reaches every verb and framework, and the code that is printed."""

from __future__ import annotations

import ast
import inspect as python
import json
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import click
import pytest
import torch

import statekit
import statekit.torch
from goldens import COMPACT
from statekit.cli.arguments import checkpoint_options, ref_options, sides_options
from statekit.cli.main import main
from statekit.cli.main import statekit as commands
from statekit.conversion.checkpoint_ref import OPTIONS, CheckpointRef, RefOptions, option
from statekit.conversion.contracts import Hints
from statekit.dropin import options as dropin
from statekit.errors import UsageError
from statekit.service.options import FORMS
from statekit.testing.printed_code import check_printed_code
from statekit.testing.verbs import check_passed_on

pytestmark = pytest.mark.torch

TOLD: dict[str, Any] = {
    "container": "torch",
    "layout": "torch-optim",
    "step": 3,
    "hparams": {"beta1": 0.9, "factor_map": {"a b": ["ROW", None]}, "flag": True, "nothing": None},
    "optimizer": "adam",
    "variant": "adafactor/hf,adamw/torch",
    "param_names": ("0.weight", "it's"),
    "names_from": "config",
    "schedule": "chain([constant_schedule(0.1), cosine(1e-3, decay_steps=-5)], boundaries=[3], x={'a': 1})",
    "model_key": "gen/ema",
    "optimizer_key": "opt_g",
    "assume_defaults": True,
    "accept_damaged": True,
    "follow_links": True,
    "budget": 2**30,
}
REF = CheckpointRef("run/it's.pt", **TOLD)


def test_the_values_cover_every_field() -> None:
    assert TOLD.keys() == {known.name for known in OPTIONS}


def test_code_in_either_spelling_reopens_the_same_ref_in_a_fresh_process() -> None:
    check_printed_code(REF)


@pytest.mark.parametrize("name", list(TOLD))
def test_code_that_lacks_a_field_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every = CheckpointRef.options

    def lacking(ref: CheckpointRef, *uses: Any) -> dict[str, Any]:
        return {key: value for key, value in every(ref, *uses).items() if key != name}

    monkeypatch.setattr(CheckpointRef, "options", lacking)
    with pytest.raises(AssertionError, match=name):
        check_printed_code(REF, fresh=False)


@pytest.mark.parametrize("name", list(TOLD))
def test_each_field_alone_is_printed_and_read(name: str) -> None:
    check_printed_code(CheckpointRef("a", **{name: TOLD[name]}), fresh=False)


VERBS = {
    "check": "{path}", "cold-start": "{path}", "convert": "{path} {other}", "diff": "{path} {other}",
    "doctor": "{path}", "inspect": "{path}", "replay": "{bundle} --checkpoint {path}", "resume": "{path}",
    "seal": "{path}", "verify": "{path} {other}",
}  # fmt: skip
"""Verb -> its arguments, of which `{path}` is the checkpoint."""
BUNDLE = COMPACT / "t5x" / "momentum_f32"


def words_of(verb: str, folder: Path) -> tuple[CheckpointRef, list[str]]:
    """Returns what a verb is told, all that it takes, and the words that tell it."""
    command: Any = commands.get_command(click.Context(commands), verb)
    flags = {flag for param in command.params for flag in param.opts}
    # Replay's are of our side, convert's of the target.
    excluded = {"replay": "hparams", "convert": "layout"}.get(verb)
    options = [known.name for known in OPTIONS if known.flag in flags and known.name != excluded]
    (folder / "it's.pt").write_bytes(b"anything")
    ref = CheckpointRef(folder / "it's.pt", **{name: TOLD[name] for name in options})
    places = {"path": str(ref.path), "other": str(folder / "other"), "bundle": str(BUNDLE)}
    arguments = [word.format(**places) for word in VERBS[verb].split()]
    return ref, [verb, *arguments, *ref.words()]


def test_the_verbs_are_all_that_take_a_checkpoint() -> None:
    options = {}
    for verb in commands.list_commands(click.Context(commands)):
        command: Any = commands.get_command(click.Context(commands), verb)
        options[verb] = {flag for param in command.params for flag in param.opts}
    assert {verb for verb, flags in options.items() if "--follow-links" in flags} == {*VERBS}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_hands_on_all_that_it_is_told(verb: str, tmp_path: Path) -> None:
    ref, words = words_of(verb, tmp_path)
    check_passed_on(ref, lambda: main(words))


@pytest.mark.parametrize("name", ["variant", "model_key", "budget"])
def test_a_verb_that_loses_an_option_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, words = words_of("inspect", tmp_path)
    lossy = CheckpointRef.at
    monkeypatch.setattr(
        CheckpointRef, "at", lambda self, *a, **k: replace(lossy(self, *a, **k), **{name: None})
    )
    monkeypatch.setattr("statekit.cli.arguments.ref_of_words", lambda path, words: ref.at(path))
    with pytest.raises(AssertionError, match=name):
        check_passed_on(ref, lambda: main(words))


@pytest.mark.slow
def test_a_function_of_python_hands_on_all_that_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "it's.pt").write_bytes(b"anything")
    ref = CheckpointRef(tmp_path / "it's.pt", **TOLD)
    model = torch.nn.Linear(2, 2)
    functions: list[Any] = [
        statekit.open, statekit.inspect, lambda ref: statekit.plan(ref, tmp_path / "out"),
        lambda ref: statekit.diff(ref, tmp_path / "other"), lambda ref: statekit.replay(BUNDLE, checkpoint=ref),
        lambda ref: statekit.torch.load_params(ref, model),
        lambda ref: statekit.torch.load_optimizer(ref, model.named_parameters()),
        lambda ref: statekit.torch.attest(torch.optim.Adam(model.parameters()), model.named_parameters(), ref),
    ]  # fmt: skip
    for function in functions:
        check_passed_on(ref, lambda function=function: function(ref))  # type: ignore[misc]


def test_keywords_of_python_are_the_fields() -> None:
    assert get_type_hints(RefOptions).keys() == TOLD.keys()
    assert {part.name for part in fields(CheckpointRef)} == {*TOLD, "path", "files", "model"}


ADDED = """
import importlib.util, json, pathlib, sys, typing
import statekit.conversion
name, folder = "statekit.conversion.checkpoint_ref", pathlib.Path(sys.argv[1])
source = pathlib.Path(statekit.conversion.__file__).with_name("checkpoint_ref.py").read_text(encoding="utf-8")
field = '    colour: str | None = _option("--colour", "text", "meaning", "Its colour.", metavar="NAME")\\n'
places = {"    files: Mapping": field, "    model_key: str | None\\n    opt": "    colour: str | None\\n"}
for before, line in places.items():
    assert source.count(before) == 1, before
    source = source.replace(before, line + before)
edited = folder / "checkpoint_ref.py"
edited.write_text(source, encoding="utf-8")
spec = importlib.util.spec_from_file_location(name, edited)
module = importlib.util.module_from_spec(spec)
sys.modules[name] = statekit.conversion.checkpoint_ref = module
spec.loader.exec_module(module)
import click
from statekit.cli.main import statekit as commands
from statekit.service.options import FORMS
context = click.Context(commands)
ref = module.CheckpointRef.given("a", colour="red")
print(json.dumps({
    "verbs": [verb for verb in commands.list_commands(context)
              if any("--colour" in param.opts for param in commands.get_command(context, verb).params)],
    "service": [kind for kind, form in FORMS.items() if "colour" in typing.get_type_hints(form)],
    "code": [ref.code(), ref.code(spelling="shell")],
    "stored": ref.stored()["colour"],
}))
"""
"""Adds an option to `CheckpointRef`, and prints where it has arrived."""


def test_a_new_option_of_convert_touches_the_ref_alone(tmp_path: Path) -> None:
    """As docs/architecture.md promises under "An option of convert"."""
    command = [sys.executable, "-c", ADDED, str(tmp_path)]
    seen = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert {*seen["verbs"]} == {*VERBS} - {"check", "seal"}  # which need to know what the bytes are, no more
    assert {*seen["service"]} >= {"inspect", "doctor", "diff", "verify", "convert"}
    assert seen["code"] == ["'a', colour='red'", "a --colour red"]
    assert seen["stored"] == "red"
    root = Path(statekit.__file__).parent
    declaring = [
        path.name
        for top in (root, root.parent / "cli")
        for path in sorted(top.rglob("*.py"))
        if "optimizer_key: " in (text := path.read_text(encoding="utf-8"))
        and any(
            isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "optimizer_key"
            for node in ast.walk(ast.parse(text))
        )
    ]
    assert declaring == ["checkpoint_ref.py"]
    for verb in (statekit.torch.load_optimizer, statekit.torch.attest, statekit.plan, statekit.open):
        assert not python.signature(verb).parameters.keys() & {"model_key", "optimizer_key", "schedule"}


def test_every_field_is_an_option_of_the_command_line() -> None:
    def flags(decorate: Any) -> set[str]:
        command: Any = decorate(lambda **options: None)
        return {flag for param in command.__click_params__ for flag in param.opts}

    every = {known.flag for known in OPTIONS}
    assert flags(checkpoint_options) >= every
    assert flags(ref_options("checkpoint", without=["layout"])) == every - {"--layout"}
    sides = {f"--{side}-{flag[2:]}" for side in ("left", "right") for flag in every}
    assert flags(sides_options) == every | sides


def test_the_service_takes_every_field_but_links_and_what_it_knows_itself() -> None:
    for kind in ("inspect", "doctor", "diff", "verify", "convert", "thin"):
        missing = TOLD.keys() - get_type_hints(FORMS[kind]).keys()
        assert missing - {"layout"} == {"follow_links", "container"}, kind


def test_hyperparameters_and_options_of_loading_have_no_name_in_common() -> None:
    each = [
        get_type_hints(kind).keys()
        for name, kind in vars(dropin).items()
        if name.endswith("Options") and isinstance(kind, type) and hasattr(kind, "__total__")
    ]
    assert set().union(*each) <= get_type_hints(dropin.Overrides).keys()
    assert not get_type_hints(dropin.Overrides).keys() & TOLD.keys()


def test_options_go_before_those_of_a_ref() -> None:
    ref = CheckpointRef.given(REF, variant="torch", step=None)
    assert (ref.variant, ref.step, ref.model_key) == ("torch", 3, "gen/ema")
    with pytest.raises(UsageError, match="did you mean model_key"):
        CheckpointRef.given("a", modelkey="gen")


def test_a_manifest_says_what_the_user_does_not() -> None:
    stored = {"options": {"hparams": {"beta1": 0.5, "optimizer": "lamb"}, "variant": "tf1", "model_key": "m"}}
    ref = CheckpointRef("a", variant="hf", hparams={"beta2": 0.9}).over(stored)
    assert (ref.variant, ref.model_key, ref.optimizer) == ("hf", "m", "lamb")
    assert ref.hparams == {"beta1": 0.5, "beta2": 0.9}
    assert ref.over(None) == ref


def test_the_older_spelling_of_an_optimizer_is_the_same() -> None:
    assert CheckpointRef("a", hparams={"optimizer": "adam"}) == CheckpointRef("a", optimizer="adam")
    assert CheckpointRef("a", optimizer="adam").stored() == {
        "hparams": {"optimizer": "adam"},
        "variant": None,
    }


def test_hints_of_third_parties_are_refs() -> None:
    hints = Hints({"beta1": 0.9}, "hf", ["w"], None, names_from="config")
    assert isinstance(hints, CheckpointRef)
    assert (hints.hyperparameters, hints.variant, hints.param_names) == ({"beta1": 0.9}, "hf", ("w",))
    assert replace(hints, hyperparameters={"beta1": 0.5}).hparams == {"beta1": 0.5}  # type: ignore[call-arg]
    assert pickle.loads(pickle.dumps(REF)) == REF


NAMES = ("1.weight", "0.weight", "0.bias", "1.bias")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module, torch.optim.Optimizer]:
    """A model whose optimizer has its parameters in another order, saved twice: alone, and as one of a GAN's two."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    params = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([params[name] for name in NAMES], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, folder / "ord.pt")
    other = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    gan = {"gen": saved["model"], "opt_g": saved["optimizer"], "disc": {"w": torch.zeros(2)}}
    torch.save({**gan, "opt_d": other.state_dict()}, folder / "gan.pt")
    (folder / "names.txt").write_text("\n".join(NAMES))
    return folder, model, optimizer


GAN = ("--model-key", "gen", "--optimizer-key", "opt_g")


@pytest.mark.parametrize(("file", "words"), [("ord.pt", ()), ("gan.pt", GAN)])
@pytest.mark.parametrize("framework", [("--framework", "torch"), ()])
def test_printed_lines_give_each_parameter_its_own_moments(
    run: tuple[Path, torch.nn.Module, torch.optim.Optimizer],
    file: str,
    words: tuple[str, ...],
    framework: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, model, optimizer = run
    monkeypatch.chdir(folder)
    assert main(["resume", file, *words, "--param-names", "names.txt", *framework, "--json"]) == 0
    scope: dict[str, Any] = {"model": model}
    exec("\n".join(json.loads(capsys.readouterr().out)["lines"]), scope)
    for name, param in model.named_parameters():
        state = scope["optimizer"].state[param]
        moment = state["m"] if framework else state["exp_avg"]
        assert torch.equal(moment, optimizer.state[param]["exp_avg"]), name


@pytest.mark.parametrize("framework", [("--framework", "torch"), ()])
def test_printed_lines_keep_what_was_given_over_the_file(
    run: tuple[Path, torch.nn.Module, torch.optim.Optimizer],
    framework: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`load_state_dict` puts the file's options back."""
    folder, model, _ = run
    monkeypatch.chdir(folder)
    given = ("--param-names", "names.txt", "--hparams", "beta1=0.8", "--hparams", "learning_rate=0.5")
    assert main(["resume", "ord.pt", *given, *framework, "--json"]) == 0
    scope: dict[str, Any] = {"model": model}
    exec("\n".join(json.loads(capsys.readouterr().out)["lines"]), scope)
    [group] = scope["optimizer"].param_groups
    assert (group["beta1"] if framework else group["betas"][0]) == 0.8
    assert group["lr"] == 0.5


@pytest.mark.parametrize(
    ("bundle", "given", "line"),
    [
        ("mxnet_lans/fused_bounds_clip_rescale", "beta1=0.7", "trainer.optimizer.beta1 = 0.7"),
        ("mxnet_lans/fused_bounds_clip_rescale", "learning_rate=0.5", "trainer.set_learning_rate(0.5)"),
        ("scaled_adam/zipformer2025_bf16", "eps=1e-07", "group.update({'eps': 1e-07})"),
        ("scaled_adam/zipformer2025_bf16", "lr=0.5", "include_names=True), lr=0.5)"),
    ],
)
def test_lines_of_other_systems_keep_what_was_given(
    bundle: str, given: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = COMPACT / bundle / "checkpoint"
    assert main(["resume", str(source), "--hparams", given]) == 0
    assert line in capsys.readouterr().out


def test_lines_of_a_graph_say_which_option_names_its_variant(capsys: pytest.CaptureFixture[str]) -> None:
    source = str(COMPACT / "t2t/late_beta1_scaled_extlr/checkpoint")
    assert main(["resume", source]) == 0
    assert "nothing here says its variant, which --variant names" in capsys.readouterr().out
    assert main(["resume", source, "--variant", "t2t_late"]) == 0
    assert "has these arguments: " in capsys.readouterr().out


def test_a_checkpoint_of_a_gan_is_loaded_and_attested(
    run: tuple[Path, torch.nn.Module, torch.optim.Optimizer],
) -> None:
    folder, model, optimizer = run
    ref = CheckpointRef(folder / "gan.pt", model_key="gen", optimizer_key="opt_g", param_names=NAMES)
    statekit.torch.load_params(ref, model)
    assert statekit.torch.attest(optimizer, model.named_parameters(), ref).passed
    words: Any = {"model_key": "gen", "optimizer_key": "opt_g", "param_names": NAMES}
    assert statekit.torch.attest(
        optimizer, model.named_parameters(), folder / "gan.pt", accept_damaged=True, **words
    ).passed
    with pytest.raises(UsageError, match="did you mean model_key"):
        statekit.torch.load_params(ref, model, modelkey="gen")  # type: ignore[call-arg]


def test_a_hint_goes_to_the_side_it_belongs_to(
    run: tuple[Path, torch.nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    folder, _, _ = run
    words = [str(folder / "gan.pt"), *GAN, "--param-names", str(folder / "names.txt")]
    target = tmp_path / "out.pt"
    assert (
        main(["convert", *words[:1], str(target), "--layout", "statekit-torch", *words[1:], "--verify"]) == 0
    )
    left = [f"--left-{word[2:]}" if word.startswith("--") else word for word in words[1:]]
    assert main(["diff", words[0], str(target), *left]) in (0, 1)


def test_without_a_verb_the_help_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert "Commands:\n" in shown and "\\n" not in shown


def test_an_option_knows_its_words() -> None:
    assert option("hparams").words({"a": [1, None]}) == ["--hparams", "a=[1, null]"]
    assert subprocess.run([sys.executable, "-c", "import statekit; statekit.CheckpointRef"], check=True)
