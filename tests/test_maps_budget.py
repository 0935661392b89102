"""What a map's file or a checkpoint's axes would make is counted before it is made."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import statekit
from statekit.errors import BudgetError, FormatError, StatekitError
from statekit.maps.model_map import Template, maps_of
from statekit.state.train_state import Counts, Optimizer, TrainState
from statekit.tensors.tensor import Filled

HEAD = {"title": "a map", "facts": ["none"], "source": {"title": "a"}, "target": {"title": "b"}}
WEIGHT, BIAS = {"source": "{i}/weight", "target": "x/{i}/w"}, {"source": "{i}/bias", "target": "x/{i}/b"}
REORDER = {"op": "reorder", "axis": 0, "sizes": [1] * 200_000, "order": list(range(200_000))}
COPIES = {"op": "replicate", "count": 10**8, "over": "c"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    path = tmp_path_factory.mktemp("source") / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"source": "{i}/weight", "target": "x/{i}/{c}/w", "operations": [COPIES]}, BudgetError),
        ({**WEIGHT, "operations": [REORDER]}, FormatError),
        ({**WEIGHT, "operations": [{"op": "permute", "order": [1, 0]}] * 20_000}, FormatError),
    ],
    ids=["copies", "sizes", "operations"],
)
def test_a_map_that_makes_too_much_is_refused_before_it_does(
    entry: dict[str, Any], error: type[StatekitError], source: Path, tmp_path: Path
) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps({**HEAD, "parameters": [entry, BIAS]}))
    tracemalloc.start()
    with pytest.raises(error):
        statekit.plan(source, tmp_path / "target", to="statekit", map=str(path))
    assert tracemalloc.get_traced_memory()[1] < 256 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("shapes", "entry"),
    [
        # A T5X folder of 72 kB may have a layer axis of 5 million, of which no chunk is stored.
        (
            {"layers/w": (5_000_000, 2)},
            {
                "source": "layers/w", "target": "layers/{i}/w",
                "operations": [{"op": "unstack", "axis": 0, "over": "i"}],
            },
        ),
        # 3 000 names of either number would be 9 million names, of which nearly none is there.
        (
            {f"l{i}/e{j}/w": (1,) for n in range(3_000) for i, j in ((n, 0), (0, n))},
            {"source": "l{i}/e{j}/w", "target": "l/{i}/{j}"},
        ),
    ],
    ids=["layers", "names"],
)  # fmt: skip
def test_what_axes_and_names_count_is_held_before_it_is_made(
    shapes: dict[str, tuple[int, ...]], entry: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps({**HEAD, "parameters": [entry]}))
    params = {name: Filled(shape, np.dtype("float32")) for name, shape in shapes.items()}
    state = TrainState(params, {name: {} for name in params}, Optimizer("weights", None, ()), Counts(0, 0))
    (model_map,) = maps_of(str(path))
    tracemalloc.start()
    with pytest.raises(BudgetError):
        model_map.apply(state)
    assert tracemalloc.get_traced_memory()[1] < 256 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("".join(f"{{f{i}}}" for i in range(14)) + "/w", {}),
        ("1".join(f"{{f{i}}}" for i in range(14)) + "/w", {}),
        ("{a}{b}{c}/w", {name: {f"{n}": "x" * n for n in range(1, 99)} for name in "abc"}),
    ],
)
def test_a_path_that_a_name_fits_in_too_many_ways_is_refused(
    text: str, words: dict[str, dict[str, str]]
) -> None:
    """Seen red: a name of digits hung the first two."""
    with pytest.raises(FormatError, match="too many ways"):
        Template(text, words).binding("1" * 30)


def test_fields_that_are_parted_may_be_many() -> None:
    text = "/".join(f"{{f{i}}}" for i in range(14))
    assert Template(text, {}).binding("/".join(map(str, range(14)))) == {f"f{i}": i for i in range(14)}
