"""A tied parameter is one parameter with two names, wherever it goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.errors import StateError
from statekit.tensors.tree import tensor_names

torch = pytest.importorskip("torch")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of a model whose head is its embedding, as `torch.save` keeps it."""
    model = torch.nn.ModuleDict(
        {"emb": torch.nn.Embedding(6, 4), "mid": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 6, False)}
    )
    model["head"].weight = model["emb"].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model["head"](model["mid"](model["emb"](torch.arange(6)))).square().sum().backward()
    optimizer.step()
    path = tmp_path / "source.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


def moved(source: Path, target: Path, to: str, layout: str | None = None) -> Path:
    convert(plan(source, target, to=to, layout=layout))
    return target


def is_tied(path: Path) -> bool:
    """Tells whether a torch file's head and embedding share their storage, with PyTorch's own reader."""
    model = torch.load(path, weights_only=True)["model"]
    return bool(model["head.weight"].data_ptr() == model["emb.weight"].data_ptr())


def test_a_tied_parameter_is_one(source: Path) -> None:
    with open_state(source) as opened:
        assert set(opened.params) == {"emb/weight", "mid/weight", "mid/bias"}
        assert opened.state.extra["ties"] == {"head/weight": "emb/weight"}
        assert "buffers" not in opened.state.extra


@pytest.mark.parametrize("layout", ["torch-optim", "statekit-torch"])
@pytest.mark.parametrize("way", ["orbax", "statekit", "hf-trainer", "accelerate", "safetensors", "torch"])
def test_it_is_shared_again_on_the_way_back(way: str, layout: str, source: Path, tmp_path: Path) -> None:
    there = moved(source, tmp_path / f"there{'.pt' if way == 'torch' else ''}", way)
    with open_state(there) as opened:
        assert opened.state.extra["ties"] == {"head/weight": "emb/weight"}
    back = moved(there, tmp_path / "back.pt", "torch", layout)
    assert is_tied(back)
    with open_state(back) as opened:
        assert opened.state.extra["ties"] == {"head/weight": "emb/weight"}


def test_it_is_never_left_behind(source: Path, tmp_path: Path) -> None:
    work = plan(source, tmp_path / "there", to="orbax")
    assert not work.dropped and "extra/ties/head/weight" in work.kept


def test_the_neutral_folder_holds_it_once(source: Path, tmp_path: Path) -> None:
    there = moved(source, tmp_path / "there", "statekit")
    with open_state(there) as opened:
        assert "params/emb/weight" in opened.tensors
        assert not any("head" in name for name in tensor_names(opened.checkpoint.tree))


def test_safetensors_says_it_as_its_own_library_does(source: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_model

    there = moved(source, tmp_path / "there", "accelerate")
    model = torch.nn.ModuleDict(
        {"emb": torch.nn.Embedding(6, 4), "mid": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 6, False)}
    )
    model["head"].weight = model["emb"].weight
    load_model(model, str(there / "model.safetensors"))
    saved = torch.load(source, weights_only=True)["model"]
    assert torch.equal(model["head"].weight, saved["emb.weight"])


def test_metadata_that_are_no_names_are_passed_over(source: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    there = moved(source, tmp_path / "there", "accelerate")
    place = there / "model.safetensors"
    save_file(load_file(place), place, {"format": "pt", "x": "nowhere", "mid.bias": "emb.weight"})
    (there / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"a": ["b"]}, "weight_map": dict.fromkeys(load_file(place), place.name)})
    )
    (there / "statekit.json").unlink()
    with open_state(there) as opened:
        assert "ties" not in opened.state.extra
    place.rename(there / "model-00001-of-00001.safetensors")
    index = json.loads((there / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "model-00001-of-00001.safetensors")
    (there / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_state(there) as opened:
        assert "ties" not in opened.state.extra


@pytest.mark.parametrize(
    "layout", ["megatron", "statekit-torch", "torch-fqn", "torch-fqn-flat", "torch-optim", "torch-weights"]
)
def test_names_with_slashes_are_those_of_the_model_again(layout: str, tmp_path: Path) -> None:
    """A ModuleDict's keys are anything without a dot: pairs of languages, say."""
    heads = torch.nn.ModuleDict({"en/de": torch.nn.Linear(4, 6, False), "fr": torch.nn.Linear(5, 3)})
    model = torch.nn.ModuleDict({"heads": heads, "a/b": torch.nn.Embedding(6, 4)})
    model["a/b"].weight = heads["en/de"].weight
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-3)
    (heads["en/de"](torch.ones(4)).sum() + heads["fr"](torch.ones(5)).sum()).backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    weights = layout == "torch-weights"
    torch.save({"model": saved["model"]} if weights else saved, tmp_path / "source.pt")
    to = {"megatron": "megatron", "torch-fqn": "dcp", "torch-fqn-flat": "dcp"}.get(layout, "torch")
    first = moved(tmp_path / "source.pt", tmp_path / "first", to, layout)
    moved(first, tmp_path / "second.pt", "torch", layout if weights else "torch-optim")
    again = torch.load(tmp_path / "second.pt", weights_only=True)["model"]
    assert again.keys() == model.state_dict().keys() and again["a/b.weight"].equal(model["a/b"].weight)
    model.load_state_dict(again)


@pytest.mark.parametrize("alone", [True, False])
def test_names_of_one_path_are_refused(alone: bool, tmp_path: Path) -> None:
    names = {"en/de": torch.nn.Parameter(torch.ones(2)), "en.de": torch.nn.Parameter(torch.zeros(2))}
    optimizer = torch.optim.AdamW([{"params": list(names.items())}])
    saved = {"model": {name: param.detach() for name, param in names.items()}}
    saved |= {} if alone else {"optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "source.pt")
    with pytest.raises(StateError, match=r"has the path en/de, as has en/de @ en\.de"):
        open_state(tmp_path / "source.pt")
