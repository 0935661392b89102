from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statekit.cli.param_names import read_param_names
from statekit.converters.containers.step_folders import find_gin
from statekit.converters.formats.hparams import Settings, parse_value, read_gin, read_hparams
from statekit.errors import FormatError, NotFoundError, UsageError
from statekit.state.options import checked_hparams


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("-0.8", -0.8), ("1e-30", 1e-30), ("None", None), ("null", None), ("True", True), ("true", True),
        ("False", False), ("false", False), ("'a b'", "a b"), ('"x"', "x"), ("bfloat16", "bfloat16"),
        ("jnp.bfloat16", "jnp.bfloat16"), ("[1, null]", [1, None]), ("(1, 2)", [1, 2]),
        ("[ROW, COLUMN]", ["ROW", "COLUMN"]),
        ('{"a": [true, {"b": null}]}', {"a": [True, {"b": None}]}), ("{kernel$: 1}", None), (" 5 ", 5), ("", None),
        ("encoder/layers_0", "encoder/layers_0"),
    ],
)  # fmt: skip
def test_values(text: str, value: Any) -> None:
    if text in ("{kernel$: 1}", ""):
        with pytest.raises(UsageError, match="isn't a literal"):
            parse_value(text)
    else:
        parsed = parse_value(text)
        assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "f(1)", "a + b", "[x for x in y]", "lambda: 1", "{1, 2}", "b'x'", "1j",
        "...", "2026-11-21", "{1: 2}", "{(1,): 2}", "'a' 5", "[", "(" * 500, "-" * 100_000 + "1", "x" * 2**21 + "(",
        "@f", "%X", "a b",
    ],
)  # fmt: skip
def test_what_is_no_literal_is_refused_and_not_run(text: str) -> None:
    with pytest.raises(UsageError, match="isn't a literal"):
        parse_value(text)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    )
)
def test_json_and_python_spellings_agree(value: Any) -> None:
    assert parse_value(json.dumps(value)) == value
    assert parse_value(repr(value)) == value


def test_pairs_and_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "h.json").write_text('{"decay_rate": 0.7, "beta1": 0.9}')
    (tmp_path / "h.gin").write_text(
        "adafactor.Adafactor.decay_rate = 0.6\nadafactor.Adafactor.epsilon1 = 1e-20\n"
    )
    files = [str(tmp_path / "h.json"), str(tmp_path / "h.gin")]
    assert read_hparams([*files, "beta1=0.5"]).values == {"decay_rate": 0.6, "beta1": 0.5, "epsilon1": 1e-20}
    assert read_hparams(["decay_rate=1", *files[::-1]]).values["decay_rate"] == 0.7
    assert read_hparams(["adafactor.Adafactor.step_offset=5", "factor_map={'a=b': [ROW]}"]).values == {
        "step_offset": 5,
        "factor_map": {"a=b": ["ROW"]},
    }
    assert read_hparams([]) == Settings()


@pytest.mark.parametrize("argument", ["decay_rate", "=5", "1x=5", "a b=5", "h.toml"])
def test_arguments_of_another_form(argument: str) -> None:
    with pytest.raises(UsageError, match="KEY=VALUE"):
        read_hparams([argument])


@pytest.mark.parametrize(
    ("excluded", "error"),
    [(["("], "list of regexes"), ([3], "list of regexes"), ({"w": "no"}, "true or false for each path")],
)
def test_what_is_not_decayed_is_said_by_regexes_or_by_path(excluded: Any, error: str) -> None:
    """It was taken as it was, and ended a conversion in Python's own error, or was passed over."""
    for variant in ("optax", "keras", None):
        with pytest.raises(UsageError, match=error):
            checked_hparams("adamw", variant, {"exclude_from_weight_decay": excluded})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_hparams([str(tmp_path / "none.json")])
    for name, data in [
        ("a.json", b"{"), ("b.json", b"[1]"), ("c.json", b"\xff"), ("d.gin", b"\xff\xfe"), ("e.json", b"[" * 100_000),
        ("f.gin", b"a.b = '''never closed"), ("g.gin", b" " * (2**20 + 1)), ("h.gin", b"  x.y = 1\n z.w = 2\n"),
    ]:  # fmt: skip
        (tmp_path / name).write_bytes(data)
        with pytest.raises(FormatError):
            read_hparams([str(tmp_path / name)])


GIN = """
from __gin__ import dynamic_registration
import t5x.adafactor
include "t5x/examples/t5/t5_1_1/base.gin"

# Macros:
# ==============================================================================
RATE = 0.7   # a comment
OFFSET = %STEPS
STEPS = 1_000
NAMES = ["a", %RATE,
         ("b", -1e-3)]
OPTIMIZER = @adafactor.Adafactor()

adafactor.Adafactor:
  decay_rate = %RATE
  step_offset = %OFFSET
  logical_factor_rules = @adafactor.standard_logical_factor_rules()
  epsilon1 = 1e-20

t5x.adafactor.Adafactor.beta1 = None
Adafactor.clipping_threshold = %missing
adafactor.Adafactor.dtype_momentum = \\
    "bfloat16"
adafactor.Adafactor.factor_map = %NAMES
other.AdafactorLike.decay_rate = 9
train/adafactor.Adafactor.weight_decay_rate = 0.1
utils.create_learning_rate_scheduler.base_learning_rate = 1.0
"""


def test_a_gin_file() -> None:
    settings = read_gin(GIN, "base.gin")
    assert settings.values == {
        "decay_rate": 0.7,
        "step_offset": 1000,
        "epsilon1": 1e-20,
        "beta1": None,
        "dtype_momentum": "bfloat16",
        "factor_map": ["a", 0.7, ["b", -0.001]],
        "weight_decay_rate": 0.1,
    }
    assert settings.references == {
        "logical_factor_rules": "@adafactor.standard_logical_factor_rules()",
        "clipping_threshold": "%missing",
    }
    assert len(settings.left_out) == 2
    assert all("base.gin" in sentence for sentence in settings.left_out)


def test_the_last_binding_wins_and_blocks_end() -> None:
    text = "Adafactor.beta1 = 0.1\nAdafactor:\n  beta1 = 0.2\nX = 3\nAdafactor.beta1 = 0.3\n"
    assert read_gin(text, "x").values == {"beta1": 0.3}


def test_scopes() -> None:
    assert read_gin("a/Adafactor.beta1 = 0.1\nb/Adafactor.beta1 = 0.1\n", "x").values == {"beta1": 0.1}
    assert read_gin("a/Adafactor.beta1 = 0.1\nAdafactor.beta1 = 0.2\n", "x").values == {"beta1": 0.2}
    differing = read_gin("a/Adafactor.beta1 = 0.1\nb/Adafactor.beta1 = 0.2\n", "x")
    assert differing.values == {}
    assert "differs between the scopes a, b" in differing.left_out[0]


@pytest.mark.parametrize(
    "text",
    [
        "X = %X\nAdafactor.beta1 = %X\n",
        "X = %Y\nY = %X\nAdafactor.beta1 = %X\n",
        "".join(f"X{i} = [%X{i + 1}, %X{i + 1}]\n" for i in range(60)) + "X60 = 1\nAdafactor.beta1 = %X0\n",
        "Adafactor.beta1 = __import__('os')\n",
        "Adafactor.beta1 = " + "-" * 50_000 + "1\n",
        "Adafactor.beta1 = " + "[" * 99 + "]" * 99 + "\n",
    ],
)
def test_endless_and_hostile_values(text: str) -> None:
    begun = time.perf_counter()
    settings = read_gin(text, "x")
    assert time.perf_counter() - begun < 10
    assert "beta1" in settings.references or isinstance(settings.values["beta1"], list)


@given(st.text(max_size=200))
def test_any_text_is_survived(text: str) -> None:
    try:
        read_gin(text, "x")
    except FormatError as error:
        assert "gin" in str(error)


def test_which_gin_file(tmp_path: Path) -> None:
    step = tmp_path / "checkpoint_5"
    step.mkdir()
    (tmp_path / "folder.gin").mkdir()
    assert find_gin([step, tmp_path]) is None
    (tmp_path / "model.gin").touch()
    assert find_gin([step, tmp_path]) == tmp_path / "model.gin"
    (tmp_path / "other.gin").touch()
    assert find_gin([step, tmp_path]) is None
    (tmp_path / "config.gin").touch()
    assert find_gin([step, tmp_path]) == tmp_path / "config.gin"
    (tmp_path / "operative_config-1.gin").touch()
    (tmp_path / "operative_config-2.gin").touch()
    assert find_gin([step, tmp_path]) == tmp_path / "operative_config-2.gin"
    (step / "config.gin").touch()
    assert find_gin([step, tmp_path]) == step / "config.gin"


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" + b"[]," * 5_000_000 + b"[]]",
        b'["a", NaN]',
        b'{"a": 1}',
        b"5",
    ],
    ids=["lists in one another", "objects in one another", "many lists", "NaN", "an object", "a number"],
)
def test_a_file_of_names_that_is_none_is_refused_within_the_budget(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    path.write_bytes(text)
    with pytest.raises(FormatError) as caught:
        read_param_names(path)
    assert str(path) in str(caught.value)
