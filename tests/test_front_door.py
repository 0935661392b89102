"""`import statekit`: verbs and their types, cheap to import, typed, explained on a page."""

from __future__ import annotations

import pkgutil
import pydoc
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

import statekit
from fakes import Fake
from goldens import GOLDEN
from statekit.errors import NotFoundError, UsageError

RUN = GOLDEN / "t5x" / "momentum_f32" / "checkpoint"
VERBS = ["convert", "inspect", "open", "plan", "replay"]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], check=False, capture_output=True, text=True, timeout=60
    )


def test_importing_loads_nothing_of_weight() -> None:
    code = (
        "import sys; before = set(sys.modules); import statekit\n"
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before} & "
        "{'numpy', 'ml_dtypes', 'click', 'rich', 'torch', 'jax', 'tensorflow', 'tensorstore', 'h5py'}))\n"
        "print(*sorted(m for m in sys.modules if m.startswith('statekit.')))"
    )
    assert python("-c", code).stdout == "\n\n"


def test_the_verbs_stay_functions_whatever_is_imported() -> None:
    """An imported module takes the place of whatever has its name in its package."""
    modules = {module.name for module in pkgutil.iter_modules(statekit.__path__)}
    assert len(modules) > 20 and modules.isdisjoint(VERBS)
    assert all(callable(getattr(statekit, verb)) for verb in VERBS)


@pytest.mark.slow
def test_the_verbs_stay_functions_when_everything_is_imported() -> None:
    code = (
        "import pkgutil, statekit\n"
        "names = [m.name for m in pkgutil.walk_packages(statekit.__path__, 'statekit.')]\n"
        f"print([v for v in {VERBS} if 'statekit.' + v in names or not callable(getattr(statekit, v))])"
    )
    assert python("-c", code).stdout.strip() == "[]"


@pytest.mark.parametrize("name", statekit.__all__)
def test_every_public_name_is_there(name: str) -> None:
    thing = getattr(statekit, name)
    assert not isinstance(thing, ModuleType)
    assert name == "__version__" or (thing.__doc__ or "").strip()


def test_a_name_that_isnt_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nosuch"):
        statekit.nosuch  # noqa: B018 - looking it up is the test


def test_help_is_a_page_about_the_verbs() -> None:
    page = pydoc.render_doc(statekit, renderer=pydoc.plaintext)  # type: ignore[attr-defined]  # typeshed has no renderer
    assert len(page.splitlines()) < 250
    functions = [
        line.split("(")[0].strip() for line in page.splitlines() if line.startswith("    ") and "(" in line
    ]
    assert [name for name in functions if name in VERBS] == VERBS
    assert "CLASSES" not in page
    for verb in VERBS:
        function = getattr(statekit, verb)
        assert isinstance(function, FunctionType)
        assert ">>> import statekit" in (function.__doc__ or "")


def test_an_open_state_is_read_by_names() -> None:
    with statekit.open(RUN, hparams={"beta1": 0.9}) as state:
        assert list(state.params) == list(state.state.params)
        assert state.counts.updates == 4
        assert state.hyperparameters[0]["beta1"] == (0.9, "given")
        assert state.hyperparameters[0]["factored"].known_from == "file"
        name = "slots/token_embedder/embedding/v_row"
        assert state.tensors[name].read().shape == state.slots["token_embedder/embedding"]["v_row"].shape
        assert state.groups[0].paths == tuple(state.params)
        assert len(repr(state)) < 300 + len(str(RUN))


def test_a_notebook_gets_a_table_that_names_cannot_break_out_of(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {f"param/<script>{i}\n\x1b[2J": np.ones(2, np.float32) for i in range(150)}
    Fake(arrays, updates=0).install(monkeypatch)
    with statekit.open("some<where>") as state:
        page = state._repr_html_()
    assert "<script" not in page and "some<where>" not in page and "\x1b" not in page
    assert "&lt;script&gt;0\\n\\x1b[2J" in page
    assert page.count("<tr>") == 1 + 1 + 1 + 100
    assert "and 50 more parameters" in page


def test_results_are_short_in_a_prompt(tmp_path: Path) -> None:
    planned = statekit.plan(RUN, tmp_path / "run.pt", require="bitwise")
    report = statekit.convert(planned)
    for result, words in (
        (planned, "22 tensors, bitwise"),
        (report, "22 tensors verified"),
        (statekit.inspect(RUN), "6 parameters"),
        (statekit.replay(RUN.parent), "updates 5 to 8: passed"),
    ):
        assert words in repr(result)
        assert len(repr(result)) < 200 + 2 * len(str(RUN)) + len(str(tmp_path))


def test_a_conversion_is_one_call(tmp_path: Path) -> None:
    statekit.convert(str(RUN), str(tmp_path / "run.pt"), step_offset="reset")
    with statekit.open(tmp_path / "run.pt") as state:
        assert state.hyperparameters[0]["step_offset"] == (4, "given")
    with pytest.raises(UsageError, match="needs a target"):
        statekit.convert(RUN)
    with pytest.raises(UsageError, match="A plan says"):
        statekit.convert(statekit.plan(RUN, tmp_path / "b.pt"), tmp_path / "b.pt")


def test_a_filter_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(NotFoundError, match="Nothing matches the filter"):
        statekit.inspect(RUN, filter="nosuch")


def test_the_package_runs_as_a_command() -> None:
    done = python("-m", "statekit", "--version")
    assert (done.returncode, done.stdout) == (0, f"statekit {statekit.__version__}\n")


@pytest.mark.parametrize(("name", "remedy"), [("hparam", "hparams"), ("model", "model_key"), ("foo", None)])
def test_an_argument_that_nothing_takes_is_refused_by_name(name: str, remedy: str | None) -> None:
    given: dict[str, Any] = {name: {}}
    with pytest.raises(UsageError) as refused:
        statekit.open(RUN, **given)
    assert refused.value.place == name and "hparams" in str(refused.value.expected)
    assert refused.value.remedy == (f"did you mean {remedy}?" if remedy else "")


def test_an_assumption_that_the_user_has_settled_is_printed_no_more() -> None:
    path = GOLDEN / "mesh_tf" / "adafactor_bf16_master_t5" / "checkpoint"
    said = [
        inspection.assumptions
        for inspection in (
            statekit.inspect(path),
            statekit.inspect(path, hparams={"clipping_threshold": 2.5}),
        )
    ]
    assert [any("clipping_threshold=1.0" in line for line in lines) for lines in said] == [True, False]
    assert all(any("decay_rate=0.8" in line for line in lines) for lines in said)
