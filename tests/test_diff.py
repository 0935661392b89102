"""diff: equal states of different systems are equal, and what differs is named, with the first that does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_files import save

import statekit
from goldens import GOLDEN
from statekit.cli.main import DONE, WANTING, main
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.registry import layout
from statekit.errors import UsageError
from statekit.tensors.distance import distance
from statekit.tensors.tensor import DTYPES, in_memory

T5X = GOLDEN / "t5x" / "momentum_f32" / "checkpoint"
NAME = "token_embedder.embedding"
PATH = NAME.replace(".", "/")


def altered(path: Path, change: Callable[[Any, Any, Any], None]) -> Path:
    """Writes the recorded state as a torch file, changed: the model, the slots of one parameter, and its group."""
    with open_state(T5X) as opened:
        tree: Any = layout("statekit-torch").encode(opened.state).tree
        group = tree["optimizer"]["param_groups"][0]
        number = group["params"][group["param_names"].index(NAME)]
        change(tree["model"], tree["optimizer"]["state"][number], group)
        return save(path, tree)


def nudged(model: Any, slots: Any, group: Any) -> None:
    values = slots["m"].read().copy()
    values.flat[-1] = np.nextafter(values.flat[-1], np.float32(9))
    slots["m"] = in_memory(values)


def narrowed(model: Any, slots: Any, group: Any) -> None:
    slots["v_row"] = in_memory(slots["v_row"].read().astype(DTYPES["bfloat16"]))


def dropped(model: Any, slots: Any, group: Any) -> None:
    del slots["m"]


def reshaped(model: Any, slots: Any, group: Any) -> None:
    model["extra.w"] = in_memory(np.ones((2, 3), np.float32))


def stepped(model: Any, slots: Any, group: Any) -> None:
    group["step"] += 1


def decayed(model: Any, slots: Any, group: Any) -> None:
    group["decay_rate"] = 0.7


CHANGES: dict[Callable[[Any, Any, Any], None], set[tuple[str, str]]] = {
    nudged: {("values", f"slots/{PATH}/m")},
    narrowed: {("dtype", f"slots/{PATH}/v_row"), ("values", f"slots/{PATH}/v_row")},
    dropped: {("missing", f"slots/{PATH}/m")},
    reshaped: {("extra", "buffers/extra.w")},
}


def test_a_conversion_is_equal_to_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(plan(T5X, tmp_path / "run.pt"))
    convert(plan(T5X, tmp_path / "canonical", to="statekit"))
    for target in ("run.pt", "canonical"):
        result = statekit.diff(T5X, tmp_path / target)
        assert result.equal, result.differences
        assert (result.tensors, result.first) == (22, None)
    assert main(["diff", str(T5X), str(tmp_path / "run.pt")]) == DONE
    assert "Equal: 22 tensors, 11.0 KiB of each." in capsys.readouterr().out


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_differs_is_named(change: Callable[[Any, Any, Any], None], tmp_path: Path) -> None:
    result = statekit.diff(T5X, altered(tmp_path / "run.pt", change))
    assert {(one.what, one.place) for one in result.differences} == CHANGES[change]
    assert result.first is not None
    assert result.first.place == next(iter(CHANGES[change]))[1]


def test_counts_and_hyperparameters_are_named_for_each_parameter(tmp_path: Path) -> None:
    for change, what in ((stepped, "updates"), (decayed, "option")):
        result = statekit.diff(T5X, altered(tmp_path / f"{change.__name__}.pt", change))
        with open_state(T5X) as opened:
            assert [one.path for one in result.differences if one.what == what] == list(opened.params)
    assert {(one.item, one.expected, one.actual) for one in result.differences} == {("decay_rate", 0.8, 0.7)}


def test_the_first_tensor_stands_on_top_and_exit_code_and_json_say_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = altered(tmp_path / "run.pt", nudged)
    assert main(["diff", str(T5X), str(target)]) == WANTING
    shown = capsys.readouterr().out
    assert f"The first that differs: slots/{PATH}/m" in shown
    assert "1 of 240" in shown
    assert main(["diff", str(T5X), str(target), "--json"]) == WANTING
    said = json.loads(capsys.readouterr().out)
    assert (said["format"], said["equal"], said["first"]) == ("statekit.diff/1", False, f"slots/{PATH}/m")
    [one] = said["differences"]
    assert (one["distance"]["unequal"], one["distance"]["ulps"], one["distance"]["first"]) == (
        1,
        1.0,
        [11, 19],
    )


def test_two_runs_part_at_the_first_step_that_differs(tmp_path: Path) -> None:
    statekit.convert(T5X, tmp_path / "reset", to="t5x", slot_policy="reset:m")
    for run in ("one", "two"):
        for step in (4, 8, 12):
            source = T5X if run == "one" or step == 4 else tmp_path / "reset"
            shutil.copytree(source / "checkpoint_4", tmp_path / run / f"checkpoint_{step}")
            (tmp_path / run / f"checkpoint_{step}" / "statekit.json").unlink(missing_ok=True)
    result = statekit.diff(tmp_path / "one", tmp_path / "two")
    assert (result.step, result.compared, result.equal) == (8, (4,), False)
    assert result.first is not None
    assert result.first.item == "m"
    assert statekit.diff(tmp_path / "one", tmp_path / "two", step=4).equal
    (tmp_path / "two" / "checkpoint_8").rename(tmp_path / "two" / "checkpoint_9")
    for step in (4, 12):
        shutil.rmtree(tmp_path / "one" / f"checkpoint_{step}")
        shutil.copytree(T5X / "checkpoint_4", tmp_path / "one" / f"checkpoint_{step + 1}")
    with pytest.raises(UsageError, match="no step in common"):
        statekit.diff(tmp_path / "one", tmp_path / "two")


def test_a_distance_counts_bits_and_knows_a_rounding() -> None:
    one = np.array([1.0, -0.0, np.nan, 3.0], np.float32)
    other = np.array([1.0, 0.0, np.nan, np.inf], np.float32)
    apart = distance(in_memory(one), in_memory(other))
    assert (apart.size, apart.unequal, apart.first, apart.largest) == (4, 2, (1,), np.inf)
    assert distance(in_memory(one), in_memory(one)).unequal == 0
    fine = np.linspace(0, 1, 7, dtype=np.float32)
    rounded = distance(in_memory(fine), in_memory(fine.astype(DTYPES["bfloat16"])))
    assert rounded.unequal > 0
    assert rounded.is_rounding
    assert not distance(in_memory(fine), in_memory(fine[::-1].astype(DTYPES["bfloat16"]))).is_rounding
    scalar = distance(in_memory(np.array(1, np.float32)), in_memory(np.array(2, np.float32)))
    assert (scalar.first, scalar.relative) == ((), 1.0)
