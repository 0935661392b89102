"""Moments in few bits, as recordings of bitsandbytes and torchao have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import statekit
from statekit.attestation.doctor import doctor
from statekit.conversion import registry
from statekit.converters.layouts.pytorch.low_bit import LowBit
from statekit.converters.layouts.pytorch.torchao_form import Torchao
from statekit.errors import InexactError, StateError
from statekit.files.safetensors import open_safetensors
from statekit.tensors.quantized import Quantized, dynamic_levels, linear_levels, quantized
from statekit.tensors.tensor import in_memory

HERE = Path(__file__).parent / "cases" / "low_bit"
BNB, BNB32, TRAINER = "bnb_adamw8bit", "bnb_adamw32bit_bf16", "trainer_adamw8bit"
TORCHAO = ("ao_adamw8bit", "ao_adamw4bit", "ao_adamwfp8_bf16")
LION = "bnb_lion8bit_partial_block"
EVERY = (BNB, BNB32, TRAINER, LION, *TORCHAO)


def checkpoint(name: str) -> Path:
    folder = HERE / name / "checkpoint"
    return folder / "checkpoint-2" if name == TRAINER else folder / "checkpoint.pt"


def test_levels_are_those_of_the_libraries() -> None:
    for name, bits in ((BNB, 8), ("ao_adamw8bit", 8), ("ao_adamw4bit", 4)):
        with statekit.open(checkpoint(name)) as opened:
            for slot, tensor in opened.state.slots["w/weight"].items():
                assert isinstance(tensor, Quantized) and tensor.levels is not None
                signed = slot == "m"
                ours = linear_levels() if bits == 4 and not signed else dynamic_levels(bits, signed)
                assert ours.read().tobytes() == tensor.levels.read().tobytes()


@pytest.mark.parametrize("name", EVERY)
def test_codes_go_there_and_back_as_they_are(name: str, tmp_path: Path) -> None:
    middle, back = tmp_path / "middle.statekit", tmp_path / "back.pt"
    hints: dict[str, Any] = {"optimizer": "adamw"} if name in TORCHAO else {}
    assert statekit.convert(checkpoint(name), middle, **hints).plan.exactness.name == "BITWISE"
    layout = {BNB32: "bitsandbytes-32bit", "ao_adamw8bit": "torchao-8bit", "ao_adamw4bit": "torchao-4bit"}
    kind = layout.get(name, "torchao-fp8" if name in TORCHAO else "bitsandbytes-8bit")
    assert statekit.convert(middle, back, layout=kind, **hints).plan.exactness.name == "BITWISE"
    with statekit.open(checkpoint(name)) as old, statekit.open(back) as new:
        for path, slots in old.state.slots.items():
            for slot, tensor in slots.items():
                again = new.state.slots[path][slot]
                assert tensor.read().tobytes() == again.read().tobytes()
                if isinstance(tensor, Quantized):
                    assert isinstance(again, Quantized)
                    assert tensor.codes.read().tobytes() == again.codes.read().tobytes()
                    assert tensor.scale.read().tobytes() == again.scale.read().tobytes()


@pytest.mark.parametrize("name", [BNB, LION, "ao_adamw4bit"])
def test_codes_go_there_and_back_through_a_folder_of_torch_distributed(name: str, tmp_path: Path) -> None:
    hints: dict[str, Any] = {"optimizer": "adamw"} if name in TORCHAO else {}
    assert (
        statekit.convert(checkpoint(name), tmp_path / "dcp", to="dcp", **hints).plan.exactness.name
        == "BITWISE"
    )
    assert statekit.convert(tmp_path / "dcp", tmp_path / "back.pt", **hints).plan.exactness.name == "BITWISE"
    with statekit.open(checkpoint(name), **hints) as old, statekit.open(tmp_path / "back.pt", **hints) as new:
        for path, slots in old.state.slots.items():
            for slot, tensor in slots.items():
                again = new.state.slots[path][slot]
                assert tensor.read().tobytes() == again.read().tobytes()
                if isinstance(tensor, Quantized):
                    assert isinstance(again, Quantized)
                    assert tensor.codes.read().tobytes() == again.codes.read().tobytes()


def test_a_run_of_torchao_may_have_other_blocks() -> None:
    """Trainer's adamw_torch_4bit has blocks of 256, torchao's own default is 128; seen with transformers 5.23."""
    moment = quantized(in_memory(np.linspace(-1, 1, 4096, dtype=np.float32)), dynamic_levels(4, True), 256)
    layout = registry.layout("torchao-4bit")
    assert isinstance(layout, LowBit) and layout.precision is not None and layout.precision.has(moment)
    record = Torchao().native(
        {"state": {0: {"exp_avg": moment}}, "param_groups": []}, {0: moment.dtype}, False
    )
    plain = Torchao().plain(record, "here")["state"][0]["exp_avg"]
    assert isinstance(plain, Quantized) and plain.block == 256
    eight = registry.layout("bitsandbytes-8bit")
    assert isinstance(eight, LowBit) and eight.precision is not None and not eight.precision.has(moment)


def test_bitsandbytes_and_torchao_have_the_same_codes(tmp_path: Path) -> None:
    source, target = checkpoint(BNB), tmp_path / "torchao.pt"
    assert statekit.convert(source, target, layout="torchao-8bit").plan.exactness.name == "BITWISE"
    with statekit.open(source) as old, statekit.open(target, optimizer="adamw") as new:
        for slot in ("m", "v"):
            left, right = old.state.slots["w/weight"][slot], new.state.slots["w/weight"][slot]
            assert isinstance(left, Quantized) and isinstance(right, Quantized)
            assert left.codes.read().tobytes() == right.codes.read().tobytes()
            assert left.scale.read().tobytes() == right.scale.read().tobytes()


def test_a_last_block_that_is_not_whole_is_float32_in_torchao(tmp_path: Path) -> None:
    # torchao 0.18 keeps a moment in few bits where whole blocks make it up; bitsandbytes lets the last be short.
    params = {
        "whole": torch.nn.Parameter(torch.randn(64, 128)),
        "short": torch.nn.Parameter(torch.randn(5000)),
    }
    optimizer = torch.optim.AdamW(params.values(), lr=1e-3)
    for param in params.values():
        param.grad = torch.randn_like(param)
    optimizer.step()
    adamw, eight, target = tmp_path / "adamw.pt", tmp_path / "bitsandbytes.pt", tmp_path / "torchao.pt"
    torch.save(
        {"model": {n: p.detach() for n, p in params.items()}, "optimizer": optimizer.state_dict()}, adamw
    )
    statekit.convert(adamw, eight, layout="bitsandbytes-8bit", require="lossy")
    plan = statekit.convert(eight, target, layout="torchao-8bit").plan
    assert plan.exactness.name == "ROUNDING" and "later ones part" in plan.headline
    with statekit.open(eight) as old, statekit.open(target, optimizer="adamw") as new:
        for path, slots in old.state.slots.items():
            for slot in ("m", "v"):
                assert isinstance(slots[slot], Quantized)
                assert isinstance(new.state.slots[path][slot], Quantized) == (path == "whole")
                assert np.array_equal(slots[slot].read(), new.state.slots[path][slot].read())


def test_the_next_update_of_adamw_is_the_originals(tmp_path: Path) -> None:
    target = tmp_path / "adamw.pt"
    plan = statekit.convert(checkpoint(BNB), target, layout="torch-optim").plan
    assert plan.exactness.name == "ROUNDING" and "later ones part" in plan.headline
    record = torch.load(target, weights_only=True)
    groups = record["optimizer"]["param_groups"]
    params = {name: torch.nn.Parameter(tensor) for name, tensor in record["model"].items()}
    optimizer = torch.optim.AdamW([{"params": [params[n] for n in g["param_names"]]} for g in groups])
    optimizer.load_state_dict(record["optimizer"])
    gradients = open_safetensors(HERE / BNB / "grads.safetensors").tensors
    recorded = open_safetensors(HERE / BNB / "trajectory.safetensors").tensors
    before = {name: param.detach().clone() for name, param in params.items()}
    for name, param in params.items():
        key = next(key for key in gradients if key.startswith("3/") and key.endswith(name.replace(".", "/")))
        param.grad = torch.from_numpy(gradients[key].read().copy())
    optimizer.step()
    for name, param in params.items():
        theirs = recorded[f"3/param/{name.replace('.', '/')}"].read()
        update = theirs - before[name].numpy()
        half_a_place = np.abs(np.spacing(theirs)).max()
        assert np.abs(param.detach().numpy() - theirs).max() <= 1e-5 * np.abs(update).max() + half_a_place


def test_adamw_becomes_few_bits_only_as_lossy_and_measured(tmp_path: Path) -> None:
    adamw, target = tmp_path / "adamw.pt", tmp_path / "few.pt"
    statekit.convert(checkpoint(BNB), adamw, layout="torch-optim")
    for layout, limit in (("bitsandbytes-8bit", 7.1e-3), ("torchao-4bit", 0.1126), ("torchao-fp8", 3.6e-2)):
        with pytest.raises(InexactError, match="quantized"):
            statekit.convert(adamw, target, layout=layout, optimizer="adamw")
        done = statekit.convert(
            adamw, target, layout=layout, optimizer="adamw", require="lossy", replace=True
        )
        (measured,) = (one for one in done.measured if one.asked == "quantized")
        assert 0 < measured.largest <= limit


def test_quantizing_again_gives_the_recorded_codes() -> None:
    with statekit.open(checkpoint("ao_adamw8bit")) as opened:
        tensor = opened.state.slots["w/weight"]["m"]
        assert isinstance(tensor, Quantized)
        again = quantized(in_memory(tensor.read()), tensor.levels, 256)
        assert np.array_equal(again.codes.read(), tensor.codes.read())
        block = (slice(3, 9), slice(5, 60))
        assert np.array_equal(tensor.read(block), tensor.read()[block])


def test_inspect_says_bits_and_blocks() -> None:
    slots = statekit.inspect(checkpoint("ao_adamw4bit")).to_json()
    assert "4 bits in blocks of 128" in json.dumps(slots)


@pytest.mark.slow
def test_bitsandbytes_goes_on_from_what_we_wrote(tmp_path: Path) -> None:
    optim = pytest.importorskip("bitsandbytes.optim")
    target = tmp_path / "run.pt"
    statekit.convert(checkpoint(BNB), tmp_path / "run.statekit")
    statekit.convert(tmp_path / "run.statekit", target, layout="bitsandbytes-8bit")
    ends = []
    for path in (checkpoint(BNB), target):
        record = torch.load(path, weights_only=True)
        names = ["w.weight", "small.weight", "bias"]
        params = [torch.nn.Parameter(record["model"][name]) for name in names]
        optimizer = optim.AdamW8bit([{"params": params[:2]}, {"params": params[2:]}])
        optimizer.load_state_dict(record["optimizer"])
        for param in params:
            param.grad = torch.full_like(param, 0.01)
        optimizer.step()
        ends.append([param.detach().clone() for param in params])
    assert all(torch.equal(left, right) for left, right in zip(*ends, strict=True))


def scaled(name: str, value: float, place: int = 3) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(parts: dict[str, torch.Tensor]) -> None:
        parts[name][place] = value

    return change


DAMAGE: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any]]] = {
    "a scale that isn't finite": ("not-finite", scaled("absmax1", float("nan"))),
    "a negative scale": ("quantized-damaged", scaled("absmax1", -1.0)),
    "a scale beyond its bound": ("quantized-damaged", scaled("absmax1", 1e6)),
    "scales of zeros": ("quantized-damaged", lambda parts: parts["absmax2"].zero_()),
    "codes of zeros": ("quantized-damaged", lambda parts: parts["state1"].zero_()),
    "levels turned around": ("quantized-damaged", lambda parts: parts.update(qmap1=parts["qmap1"].flip(0))),
    "levels of the other moment": (
        "second-moment-negative",
        lambda parts: parts.update(qmap2=parts["qmap1"].clone()),
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_doctor_finds_damaged_parts(case: str, tmp_path: Path) -> None:
    name, change = DAMAGE[case]
    record = torch.load(checkpoint(BNB), weights_only=True)
    change(record["optimizer"]["state"][0]["__bnb_optimizer_quant_state__"])
    torch.save(record, tmp_path / "damaged.pt")
    [examination] = doctor(tmp_path / "damaged.pt")
    assert name in [finding.name for finding in examination.findings]


def test_doctor_finds_nothing_in_the_recordings() -> None:
    for name in EVERY:
        [examination] = doctor(checkpoint(name))
        assert not examination.findings, (name, examination.findings)


def test_scales_that_do_not_fit_are_an_error_that_names_them(tmp_path: Path) -> None:
    record = torch.load(checkpoint(BNB), weights_only=True)
    parts = record["optimizer"]["state"][0]["__bnb_optimizer_quant_state__"]
    parts["absmax1"] = parts["absmax1"][:-1].clone()
    torch.save(record, tmp_path / "short.pt")
    with pytest.raises(StateError, match="state1"):
        statekit.convert(tmp_path / "short.pt", tmp_path / "target.pt")


@pytest.mark.parametrize(
    ("shape", "scale", "block"),
    [
        ((4, 4), (0, 1), 256), ((0, 4), (0, 1), 256), ((7, 3), (2, 5), 2), ((4,), (0,), 0), ((4,), (0,), -1),
        ((4,), (1,), 2**80), ((), (1, 1), 256),
    ],
)  # fmt: skip
def test_parts_that_make_up_no_tensor_are_refused(shape: Any, scale: Any, block: int) -> None:
    codes, scales = in_memory(np.zeros(shape, np.uint8)), in_memory(np.ones(scale, np.float32))
    with pytest.raises(StateError, match="don't fit"):
        Quantized(codes, scales, dynamic_levels(8, True), shape, block)


@pytest.mark.parametrize("shape", [(5,), ()])
def test_an_odd_number_of_values_is_not_of_four_bits(shape: Any) -> None:
    codes = in_memory(np.zeros(len(shape) * 2, np.uint8))
    with pytest.raises(StateError, match="don't fit"):
        Quantized(codes, in_memory(np.ones(1, np.float32)), dynamic_levels(4, True), shape, 128)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported:UserWarning")
@pytest.mark.parametrize(
    "kind",
    ["Lion8bit", "RMSprop8bit", "AdEMAMix8bit", "AdEMAMix", "LAMB8bit", "LAMB", "LARS8bit", "PagedAdamW"],
)
def test_any_optimizer_of_bitsandbytes_goes_on_from_what_we_wrote(kind: str, tmp_path: Path) -> None:
    optim = pytest.importorskip("bitsandbytes.optim")
    options = {"lr": 0.1, "momentum": 0.9} if kind == "LARS8bit" else {}

    def run(seed: int) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 5))
        return model, getattr(optim, kind)([*model.parameters()], **options)

    def update(model: torch.nn.Module, optimizer: Any, number: int) -> None:
        for i, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * number + i)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    model, optimizer = run(0)
    for number in range(3):
        update(model, optimizer, number)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    names = [name for name, _ in model.named_parameters()]
    statekit.convert(tmp_path / "run.pt", tmp_path / "neutral", to="statekit", param_names=names)
    layout = "bitsandbytes-8bit" if kind.endswith("8bit") else "bitsandbytes-32bit"
    statekit.convert(tmp_path / "neutral", tmp_path / "back.pt", layout=layout)
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    other, resumed = run(1)
    other.load_state_dict(back["model"])
    resumed.load_state_dict(back["optimizer"])
    for number in (3, 4):
        update(model, optimizer, number)
        update(other, resumed, number)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
