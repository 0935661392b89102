"""A verdict names its weakest fact: what facts there are, how they are asked for, and what that may not stop."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from converted_today import FIGURES, counted

from goldens import COMPACT, GOLDEN
from statekit.attestation.attest import facts_as_live
from statekit.attestation.attestation import Attestation
from statekit.cli.main import main
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.dropin.matching import require_resumable
from statekit.errors import InexactError, UnknownRuleError, UsageError
from statekit.state.evidence import Fact, beyond, fits_several, headline, taken_for, weakest
from statekit.state.facts import facts_of, with_optimizer
from statekit.state.schedules.call_text import parse_call
from statekit.state.schema import is_native
from statekit.state.train_state import TrainState
from statekit.testing.layouts import made_state
from statekit.verify.verification import verify

ADAM_LIKE = fits_several(("adamw", "radam"), "the fields of Adam's state")


def of_optax(*facts: Fact) -> TrainState:
    """Returns a state of Optax' AdamW with facts that its layout noticed."""
    return made_state("adamw", "optax").with_facts(lambda known: facts)


def saved(state: TrainState, folder: Path) -> Path:
    """Writes a state into a folder of statekit."""
    from samples import state_writer

    return state_writer("statekit", "statekit", lambda: state)(folder)


def test_an_absent_hyperparameter_is_unknown_and_a_default_is_named_with_its_owner() -> None:
    state = made_state("adamw", "optax")
    (group,) = state.optimizer.groups
    group = replace(
        group, hyperparameters={"beta1": 0.9, "weight_decay_rate": 1e-4}, known_from={"beta1": "file"}
    )
    facts = {f.name: f for f in facts_of(replace(state, optimizer=replace(state.optimizer, groups=(group,))))}
    assert (facts["beta1"].source, facts["weight_decay_rate"].source) == ("file", "assumed")
    assert facts["weight_decay_rate"].because == "the default of optax.adamw"
    assert (facts["beta2"].source, facts["learning_rate"].source) == ("unknown", "unknown")


def test_a_headline_is_one_line_and_names_the_weakest_fact() -> None:
    usual = [Fact(name, 0.5, "assumed", "the default of optax.adamw") for name in ("a", "b", "c", "d", "e")]
    decay = Fact("weight_decay_rate", 0.1, "assumed", "the default of optax.adamw")
    line = headline("BITWISE", [*usual, decay, Fact("lr"), Fact("known", 1, "file")])
    assert line == (
        "BITWISE, if weight_decay_rate=0.1, a=0.5, b=0.5 and 3 more (the defaults of optax.adamw; nothing in the file"
        " says them); unknown: lr"
    )
    taken = taken_for("adamw", ("nadamw", "adamaxw"), "decay behind Adam")
    assert headline("BITWISE", [taken]).endswith("nadamw or adamaxw would look the same)")
    assert weakest([Fact("known", 1, "given"), Fact("shown", 1, "inferred", "a slot")]) == []


def test_facts_of_a_layout_come_back_from_the_neutral_folder(tmp_path: Path) -> None:
    facts = (ADAM_LIKE, beyond("gradients are scaled by a schedule before Adam"))
    with open_state(saved(of_optax(*facts), tmp_path)) as opened:
        assert opened.state.optimizer.groups[0].facts == facts


def test_a_state_that_fits_several_optimizers_is_asked_for_across_frameworks_alone(tmp_path: Path) -> None:
    source = saved(of_optax(ADAM_LIKE), tmp_path)
    assert plan(source, tmp_path / "kept", to="statekit").target.layout == "statekit"
    with pytest.raises(UnknownRuleError, match="one of adamw, radam") as refused:
        plan(source, tmp_path / "x.pt")
    assert f"statekit convert {source} {tmp_path / 'x.pt'} --optimizer adamw" in str(refused.value)
    convert(plan(source, tmp_path / "x.pt", hints=CheckpointRef(optimizer="adamw")))
    with pytest.raises(InexactError, match="radam, of which statekit has no steps"):
        plan(source, tmp_path / "y.pt", hints=CheckpointRef(optimizer="radam"))
    with pytest.raises(UsageError, match="adamw, radam"):
        plan(source, tmp_path / "y.pt", hints=CheckpointRef(optimizer="lion"))


def test_the_remedy_is_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(of_optax(ADAM_LIKE), tmp_path)
    words = ["convert", str(source), str(tmp_path / "x.pt"), "--rename", "^a=b", "--slot-policy", "reset:m"]
    more = ["--loss-scale", "0.5", "--dry-run"]
    assert main([*words, *more]) == 3
    remedy = " ".join(capsys.readouterr().err.split()).partition("name it: ")[2]
    assert all(word in shlex.split(remedy) for word in (*words, *more, "--optimizer", "adamw"))


def test_an_attestation_names_what_only_the_live_run_says() -> None:
    live = made_state("adamw", "optax")
    (group,) = live.optimizer.groups
    known = {name: value for name, value in group.hyperparameters.items() if name != "weight_decay_rate"}
    silent = replace(group, hyperparameters=known, known_from=dict.fromkeys(known, "file"))
    right = replace(live, optimizer=replace(live.optimizer, groups=(silent,)))
    facts = tuple(facts_as_live(right, live))
    value = group.hyperparameters["weight_decay_rate"]
    result = Attestation("run", 5, (), (), (), 1, 1, 1, facts=facts)
    assert result.headline.startswith(
        f"The live run is the checkpoint's, after 5 updates, if weight_decay_rate={value}"
    )
    assert result.headline in str(result) and result.to_json()["headline"] == result.headline


def test_an_option_that_is_off_is_called_so() -> None:
    off = Fact("clipping_threshold", None, "assumed", "the default of t5x.adafactor")
    assert headline("BITWISE", [off]).startswith("BITWISE, if no clipping_threshold (the default of")


def test_the_old_spelling_names_the_optimizer_too() -> None:
    assert CheckpointRef(hparams={"optimizer": "adamw", "b1": 0.9}).optimizer == "adamw"


def test_what_a_run_does_besides_is_refused_elsewhere_by_its_sentence(tmp_path: Path) -> None:
    source = saved(of_optax(beyond("an average of slow weights stands around it")), tmp_path)
    with pytest.raises(InexactError, match="an average of slow weights stands around it"):
        plan(source, tmp_path / "x.pt")


@pytest.mark.parametrize("fact", [ADAM_LIKE, beyond("an average of slow weights stands around it")])
def test_no_optimizer_of_ours_steps_what_nobody_told_it(fact: Fact) -> None:
    with pytest.raises((UnknownRuleError, InexactError)):
        require_resumable(of_optax(fact), "here", "statekit.jax", {"adamw": "adamw"})
    require_resumable(
        with_optimizer(of_optax(ADAM_LIKE), "adamw"), "here", "statekit.jax", {"adamw": "adamw"}
    )


def test_an_optimizer_without_candidates_is_its_schema() -> None:
    state = of_optax()
    assert with_optimizer(state, "adamw").optimizer.groups[0].facts[0].source == "given"
    with pytest.raises(UsageError, match="adamw"):
        with_optimizer(state, "lion")


# What a target would fill in


def test_a_layout_that_stores_values_asks_for_them_by_name(tmp_path: Path) -> None:
    source = GOLDEN / "t5x" / "noscale_wd_noclip" / "checkpoint"
    with pytest.raises(UnknownRuleError) as refused:
        plan(source, tmp_path / "x.pt", layout="torch-optim")
    assert {"learning_rate", "decay_rate", "epsilon1"} <= {*str(refused.value.expected).split(", ")}
    assert "--assume-defaults" in refused.value.remedy


def test_documented_defaults_never_stand_for_what_has_none(tmp_path: Path) -> None:
    source, said = of_optax_file(tmp_path), CheckpointRef(assume_defaults=True)
    with pytest.raises(UnknownRuleError) as refused:
        plan(source, tmp_path / "x.pt", layout="torch-optim", hints=said)
    assert refused.value.expected == "learning_rate"
    planned = plan(
        source, tmp_path / "x.pt", layout="torch-optim", hints=replace(said, hparams={"learning_rate": 0.1})
    )
    assert planned.options["assume_defaults"] is True
    assert planned.headline.startswith("ROUNDING, if it is adamw (")
    assert "and weight_decay_rate=0.0001" in planned.headline


def test_a_target_that_leaves_facts_open_asks_for_nothing(tmp_path: Path) -> None:
    planned = plan(of_optax_file(tmp_path), tmp_path / "x.pt")
    assert planned.target.layout == "statekit-torch"
    assert "weight_decay_rate=0.0001" in planned.headline
    assert planned.headline.endswith("unknown: learning_rate")
    facts = {fact["name"]: fact["source"] for fact in planned.to_json()["facts"]}
    assert (facts["learning_rate"], facts["beta1"]) == ("unknown", "assumed")


def test_a_rate_that_a_schedule_gives_is_not_unknown(tmp_path: Path) -> None:
    """Seen red: the headline called it unknown, and the next line named it."""
    ref = CheckpointRef(schedule=parse_call("optax.cosine_decay_schedule(0.1, 30)"))
    planned = plan(of_optax_file(tmp_path), tmp_path / "x.pt", hints=ref)
    assert "unknown" not in planned.headline and "weight_decay_rate=0.0001" in planned.headline


def test_a_layout_that_would_ask_is_passed_over_where_none_was_named(tmp_path: Path) -> None:
    planned = plan(of_optax_file(tmp_path), tmp_path / "x", to="accelerate")
    assert planned.target.layout == "statekit-torch"
    assert "which is not given" in planned.options["passed_over"]["torch-optim"]


def test_a_program_that_builds_the_optimizer_itself_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UnknownRuleError, match="learning_rate"):
        plan(of_optax_file(tmp_path), tmp_path / "x", to="hf-trainer")


def of_optax_file(folder: Path) -> Path:
    """Writes what Optax' AdamW leaves of a run: its state, and no hyperparameter."""
    bare = made_state("adamw", "optax")
    groups = [replace(group, hyperparameters={}, known_from={}) for group in bare.optimizer.groups]
    from samples import state_writer

    state = replace(bare, optimizer=replace(bare.optimizer, groups=tuple(groups)))
    return state_writer("orbax", "optax", lambda: state)(folder)


# No conversion that needs no option today may need one, but where a layout stores what nobody says


@pytest.mark.slow
def test_no_recording_needs_an_option_that_needed_none() -> None:
    now_counted = counted(COMPACT)
    before = json.loads(FIGURES.read_text(encoding="utf-8"))["compact"]
    fallen = {pair: (n, now) for pair, n in before.items() if (now := now_counted.get(pair, 0)) < n}
    assert fallen == {"mesh-tf -> dcp-safetensors": (1, 0), "t5x -> dcp-safetensors": (5, 0)}


# What a proof says


def test_a_proof_names_what_it_rests_on_and_fails_where_a_target_holds_what_nobody_gave(
    tmp_path: Path,
) -> None:
    source, hints = (
        of_optax_file(tmp_path),
        CheckpointRef(hparams={"learning_rate": 0.1}, assume_defaults=True),
    )
    convert(plan(source, tmp_path / "open.pt"))
    left_open = verify(source, tmp_path / "open.pt").data["verdict"]
    assert left_open["passed"]
    assert "if it is adamw (" in left_open["headline"]
    assert "and weight_decay_rate=0.0001" in left_open["headline"]
    convert(plan(source, tmp_path / "recorded.pt", layout="torch-optim", hints=hints))
    assert verify(source, tmp_path / "recorded.pt").passed
    by_hand = torch.load(tmp_path / "recorded.pt", weights_only=True)
    del by_hand["statekit"]
    torch.save(by_hand, tmp_path / "by_hand.pt")
    refused = verify(source, tmp_path / "by_hand.pt").data["verdict"]
    assert not refused["passed"]
    assert {"learning_rate=0.1", "weight_decay_rate=0.0001"} <= {*refused["nobody_gave"]}
    assert verify(source, tmp_path / "by_hand.pt", hints=hints).passed


# The order of numbered parameters


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a file of torch whose optimizer numbers its parameters, two of them of one shape."""
    torch.manual_seed(0)
    return saved_by_torch(tmp_path_factory.mktemp("numbered") / "run.pt", (4, 4), (4, 4), (4, 2))


def saved_by_torch(path: Path, *sizes: tuple[int, int], named: bool = False) -> Path:
    """Saves a run of linear layers, with the optimizer's numbers or with names of its parameters."""
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
    params = list(model.named_parameters()) if named else list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, sizes[0][0])).square().mean().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


IN_ORDER = "if the optimizer numbers its parameters in the model's order"


def test_an_order_that_nothing_proves_stands_in_the_headline_of_every_verb(
    numbered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "kept"
    wanted = plan(numbered, target, to="statekit")
    assert wanted.headline == f"BITWISE, {IN_ORDER}"
    convert(wanted)
    convert(again := plan(target, tmp_path / "again.pt"))
    assert IN_ORDER in again.headline
    assert IN_ORDER in plan(tmp_path / "again.pt", tmp_path / "third", to="statekit").headline
    proof = verify(numbered, target)
    assert IN_ORDER in proof.data["verdict"]["headline"]
    capsys.readouterr()
    assert main(["inspect", str(numbered), "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["optimizer"]["groups"]
    assert [fact["name"] for fact in group["facts"]] == ["order"]
    assert main(["resume", str(tmp_path / "again.pt")]) == 0
    assert f"# it goes on rightly {IN_ORDER}" in capsys.readouterr().out


def test_the_saved_side_of_an_attestation_names_the_order(numbered: Path) -> None:
    from statekit.torch import attest

    loaded = torch.load(numbered, weights_only=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model.load_state_dict(loaded["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(loaded["optimizer"])
    result = attest(optimizer, model, numbered)
    assert result.passed and IN_ORDER in result.headline


@pytest.mark.parametrize("named", [True, False])
def test_an_order_that_names_or_shapes_prove_is_no_assumption(named: bool, tmp_path: Path) -> None:
    sizes = ((4, 4), (4, 4), (4, 2)) if named else ((4, 5), (5, 2))
    source = saved_by_torch(tmp_path / "run.pt", *sizes, named=named)
    assert plan(source, tmp_path / "kept", to="statekit").headline == "BITWISE"


def test_names_that_a_user_gives_are_no_assumption(numbered: Path, tmp_path: Path) -> None:
    names = [f"{layer}.{part}" for layer in range(3) for part in ("weight", "bias")]
    hints = CheckpointRef(param_names=names)
    assert plan(numbered, tmp_path / "kept", to="statekit", hints=hints).headline == "BITWISE"


def with_files_numbers() -> list[Any]:
    """Returns a sample of each layout."""
    from samples import ROWS

    first = {row.layout: row for row in reversed(ROWS) if "weights" not in row.layout}
    return [pytest.param(row, id=f"{layout}-{row.name}") for layout, row in sorted(first.items())]


@pytest.mark.parametrize("row", with_files_numbers())
def test_what_is_given_against_a_file_is_named_whatever_the_layout(row: Any, tmp_path: Path) -> None:
    """Seen red: BITWISE alone, while the target had another decay than the file."""
    sample = row.sample_in(tmp_path)
    with open_state(sample.path, container=sample.container, layout=row.layout, hints=row.hints) as opened:
        group, several = opened.state.optimizer.groups[0], opened.state.optimizer.several
    stored = {
        name: value
        for name, value in group.hyperparameters.items()
        if group.known_from.get(name) == "file" and isinstance(value, float) and 0 < value < 1
    }
    if not stored or several or is_native(opened.state.optimizer.schema):
        pytest.skip("its files have no number of the kind")
    name, value = next(iter(stored.items()))
    hints = replace(row.hints, hparams={**row.hints.hparams, name: value / 2})
    with open_state(sample.path, container=sample.container, layout=row.layout, hints=hints) as opened:
        line = headline("BITWISE", facts_of(opened.state))
    assert f"{name}={value / 2} as given (the file says {value}" in line
    same = replace(row.hints, hparams={**row.hints.hparams, name: value})
    with open_state(sample.path, container=sample.container, layout=row.layout, hints=same) as opened:
        assert "as given" not in headline("BITWISE", facts_of(opened.state))


def test_each_verdict_names_what_was_given_against_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from statekit.torch import attest

    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    source, target = tmp_path / "run.pt", tmp_path / "x.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    words = "with weight_decay_rate=0.3 as given (the file says 0.01)"
    options = ["--hparams", "weight_decay_rate=0.3"]
    assert main(["convert", f"{source}", f"{target}", *options, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["plan"]
    assert planned["headline"] == f"BITWISE, {words}"
    assert {"name": "weight_decay_rate", "value": 0.3, "source": "given"}.items() <= next(
        fact for fact in planned["facts"] if "because" in fact
    ).items()
    assert main(["verify", f"{source}", f"{target}", *options]) == 0
    assert capsys.readouterr().out.startswith(f"BIT-EXACT, {words}")
    optimizer.param_groups[0]["weight_decay"] = 0.3
    result = attest(optimizer, model, source, hparams={"weight_decay_rate": 0.3})
    assert result.passed and words in result.headline
    assert main(["convert", f"{target}", f"{tmp_path / 'y'}", "--to", "statekit"]) == 0
    assert capsys.readouterr().out.startswith("BITWISE\n")  # its own file says it now
