"""A verdict names its weakest fact: what facts there are, how they are asked for, and what that may not stop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.errors import InexactError, UnknownRuleError, UsageError
from statekit.state.evidence import Fact, beyond, fits_several, headline, taken_for, weakest
from statekit.state.facts import facts_of, with_optimizer
from statekit.state.train_state import TrainState
from statekit.testing.layouts import made_state

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


def test_the_old_spelling_names_the_optimizer_too() -> None:
    assert CheckpointRef(hparams={"optimizer": "adamw", "b1": 0.9}).optimizer == "adamw"


def test_what_a_run_does_besides_is_refused_elsewhere_by_its_sentence(tmp_path: Path) -> None:
    source = saved(of_optax(beyond("an average of slow weights stands around it")), tmp_path)
    with pytest.raises(InexactError, match="an average of slow weights stands around it"):
        plan(source, tmp_path / "x.pt")


def test_an_optimizer_without_candidates_is_its_schema() -> None:
    state = of_optax()
    assert with_optimizer(state, "adamw").optimizer.groups[0].facts[0].source == "given"
    with pytest.raises(UsageError, match="adamw"):
        with_optimizer(state, "lion")
