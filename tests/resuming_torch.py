"""Runs of PyTorch for resuming.py: AdamW and both Adafactors, groups, schedules, tied and frozen parameters, pairs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from resuming_run import DECAY, RATE, UPDATES, Run, Values

from statekit.attestation.attestation import Attestation
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Hints

WARM = 5
"""Updates after which the schedule that nobody can tell from its state is constant."""


@dataclass(frozen=True)
class Setting:
    """What a run has.

    Attributes:
        optimizer: Its class.
        options: The optimizer's.
        groups: Whether matrices decay and vectors don't, in groups of their own.
        schedule: The schedule of its learning rate, a class of torch; "" for none.
        tied: Whether the last layer has the weight of the embedding.
        frozen: Whether one layer stays as it is.
        pair: Classes of torch.optim that move matrices and vectors, where the run has two optimizers.
        paced: Which of the two have a schedule.
    """

    optimizer: str = "adamw"
    options: Mapping[str, Any] | None = None
    groups: bool = False
    schedule: str = ""
    tied: bool = False
    frozen: bool = False
    pair: tuple[str, ...] = ()
    paced: tuple[int, ...] = ()


_FIXED = {"lr": RATE, "scale_parameter": False, "relative_step": False}
SETTINGS: Mapping[str, Setting] = {
    "module": Setting(options={"lr": RATE, "betas": (0.8, 0.9)}),
    "groups, LinearLR": Setting(groups=True, schedule="LinearLR"),
    "groups, LambdaLR": Setting(groups=True, schedule="LambdaLR"),
    "tied and frozen": Setting(groups=True, tied=True, frozen=True),
    "adafactor": Setting("torch-adafactor"),
    "hf adafactor": Setting("hf-adafactor", _FIXED),
    "hf adafactor, momentum, LinearLR": Setting("hf-adafactor", _FIXED | {"beta1": 0.9}, schedule="LinearLR"),
    "hf adafactor, its own rate": Setting("hf-adafactor"),
    "two optimizers": Setting(groups=True, pair=("Adafactor", "AdamW")),
    "two optimizers, two schedules": Setting(groups=True, pair=("Adafactor", "AdamW"), paced=(0, 1)),
    "two optimizers, one schedule": Setting(groups=True, pair=("Adafactor", "AdamW"), paced=(1,)),
    "two of AdamW, two schedules": Setting(groups=True, pair=("AdamW", "AdamW"), paced=(0, 1)),
}
PAIRED = (RATE, 0.3 * RATE)
"""The rates of two optimizers."""


def warm(step: int) -> float:
    """A schedule's function: warm-up, then constant, as `get_constant_schedule_with_warmup` has it."""
    return min(1.0, step / WARM)


def pair_rate(number: int, is_paced: bool, step: int) -> float:
    """Returns the rate of one of two optimizers: of its LinearLR as a function, or a constant."""
    done = min(step / ((number + 2) * UPDATES), 1.0) if is_paced else 0.0
    return PAIRED[number] * (1.0 - 0.9 * done)


def layers(model: Any, setting: Setting) -> None:
    """Gives a model its layers."""
    torch.manual_seed(0)
    model.emb = torch.nn.Embedding(6, 4)
    model.frozen = torch.nn.Linear(3, 4)
    model.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    model.head = torch.nn.Linear(4, 6, bias=False)
    if setting.tied:
        model.head.weight = model.emb.weight
    model.frozen.requires_grad_(not setting.frozen)


class Net(torch.nn.Module):
    """A plain model."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        layers(self, setting)


def moved(model: torch.nn.Module, setting: Setting) -> dict[str, Any]:
    """Returns the parameters that an optimizer has, by name; `from_pretrained` forgets which are frozen."""
    named = dict(model.named_parameters())
    return {name: p for name, p in named.items() if not (setting.frozen and name.startswith("frozen"))}


class TorchRun(Run):
    """PyTorch itself: `torch.save`, torch.distributed.checkpoint, safetensors."""

    @property
    def setting(self) -> Setting:
        return SETTINGS[self.kind.removeprefix("lightning: ")]

    def model(self) -> Any:
        """Returns a fresh model."""
        return Net(self.setting)

    def begin(self) -> None:
        self.scope = {"model": self.model(), "lr_lambda": warm}

    def groups(self, named: bool = False) -> list[dict[str, Any]]:
        """Returns groups for an optimizer of the model; parameters with their names if these are wanted."""
        params = moved(self.scope["model"], self.setting)
        chosen = [params]
        if self.setting.groups:
            chosen = [{n: p for n, p in params.items() if (p.ndim > 1) is matrix} for matrix in (True, False)]
        decays: list[dict[str, Any]] = [{"weight_decay": DECAY}, {"weight_decay": 0.0}]
        return [
            {
                "params": list(params.items()) if named else list(params.values()),
                **(decay if self.setting.groups else {}),
            }
            for params, decay in zip(chosen, decays, strict=False)
        ]

    def make_optimizer(self) -> None:
        """Makes a fresh optimizer, and its schedule."""
        import statekit.torch

        if self.setting.pair:
            self.make_pair()
            return
        kind, options = self.setting.optimizer, dict(self.setting.options or {})
        drop_in = self.layout == "statekit-torch" and "again" in self.scope
        optimizer: Any
        if drop_in and kind == "adamw":
            optimizer = statekit.torch.AdamW(self.groups(True), lr=0.5)
        elif drop_in:
            variant = "hf" if kind == "hf-adafactor" else "torch"
            momentum = {"beta1": options["beta1"]} if "beta1" in options else {}
            optimizer = statekit.torch.Adafactor(self.groups(True), lr=0.5, variant=variant, **momentum)
        elif kind == "hf-adafactor":
            optimizer = transformers.optimization.Adafactor(self.groups(), **options)
        elif kind == "torch-adafactor":
            optimizer = torch.optim.Adafactor(self.groups(), lr=RATE, **options)
        else:
            optimizer = torch.optim.AdamW(self.groups(), **{"lr": RATE, **options})
        self.scope["optimizer"] = optimizer
        schedules = torch.optim.lr_scheduler
        if self.setting.schedule == "LinearLR":
            self.scope["scheduler"] = schedules.LinearLR(optimizer, 1.0, 0.1, 3 * UPDATES)
        elif self.setting.schedule == "LambdaLR":
            self.scope["scheduler"] = schedules.LambdaLR(optimizer, warm)

    def make_pair(self) -> None:
        """Makes two fresh optimizers with their schedules; of statekit.torch one that moves both's parameters."""
        import statekit.torch

        schedules, pair, paced = torch.optim.lr_scheduler, self.setting.pair, self.setting.paced
        if self.layout == "statekit-torch" and "again" in self.scope:
            kinds = [{"schema": kind.lower(), "variant": "torch", "lr": 0.5} for kind in pair]
            groups = [{**group, **kind} for group, kind in zip(self.groups(True), kinds, strict=True)]
            self.scope["optimizer"] = statekit.torch.Partition(groups)
            if len({*pair}) == 1:
                self.scope["optimizer"] = getattr(statekit.torch, pair[0])(self.groups(True), lr=0.5)
            if paced:
                functions: list[Callable[[int], float]] = [
                    partial(pair_rate, number, number in paced) for number in range(2)
                ]
                self.scope["scheduler"] = schedules.LambdaLR(self.scope["optimizer"], functions)
            return
        self.scope["optimizers"] = optimizers = [
            getattr(torch.optim, kind)([params], lr=rate)
            for kind, params, rate in zip(pair, self.groups(), PAIRED, strict=True)
        ]
        self.scope["schedulers"] = [
            schedules.LinearLR(optimizers[number], 1.0, 0.1, (number + 2) * UPDATES) for number in paced
        ]

    def parts(self) -> dict[str, Any]:
        """Returns what a training script saves."""
        if "optimizers" in self.scope:
            each = {name: self.scope.get(name, []) for name in ("optimizers", "schedulers")}
            lists = {name: [one.state_dict() for one in parts] for name, parts in each.items() if parts}
            return {"model": self.scope["model"].state_dict(), **lists}
        names = ("model", "optimizer", "scheduler")
        return {name: self.scope[name].state_dict() for name in names if name in self.scope}

    def source(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        self.begin()
        self.make_optimizer()
        self.update(0)
        torch.save(self.parts(), folder / "source.pt")
        names = [name for group in self.groups(True) for name, _ in group["params"]]
        return folder / "source.pt", {"hints": Hints(param_names=tuple(names))}

    def update(self, done: int) -> None:
        params = list(moved(self.scope["model"], self.setting).values())
        for number in range(done, done + UPDATES):
            grads = self.gradients(number, [tuple(p.shape) for p in params])
            for param, grad in zip(params, grads, strict=True):
                param.grad = torch.from_numpy(grad)
            for name in ("optimizer", "scheduler"):
                alone = [self.scope[name]] if name in self.scope else []
                for one in self.scope.get(f"{name}s", [] if "optimizers" in self.scope else alone):
                    one.step()

    def values(self) -> Values:
        return [param.detach().numpy().copy() for param in self.scope["model"].parameters()]

    def attested(self, path: Path, hints: CheckpointRef) -> Attestation | None:
        import statekit.torch

        each = [self.scope.get(f"{name}s", self.scope.get(name)) for name in ("optimizer", "scheduler")]
        if self.container == "hf-trainer" or each[0] is None:
            return None  # the lines of a Trainer make updates themselves
        return statekit.torch.attest(
            each[0], self.scope["model"], path, scheduler=each[1], param_names=hints.param_names
        )

    def check_schedule(self) -> None:
        """Asserts that the printed lines made the run's schedules."""
        paced = self.setting.paced
        made = len(self.scope["schedulers"]) if "schedulers" in self.scope else "scheduler" in self.scope
        if made != (len(paced) if "optimizers" in self.scope else bool(self.setting.schedule or paced)):
            raise AssertionError("the lines make another number of schedules than the run has")

    def saved(self, folder: Path) -> Path | None:
        # Weights alone lie in safetensors, and Python's numbers, as those that HF's Adafactor counts, in none of DCP's.
        counts_apart = self.container == "dcp-safetensors" and "hf" in self.kind
        apart = self.container == "safetensors" or counts_apart
        return None if apart else super().saved(folder)

    def save(self, folder: Path) -> None:
        self.check_schedule()
        if self.container == "torch":
            torch.save(self.parts(), folder / "again.pt")
        elif self.container == "safetensors":
            self.save_safetensors(folder)
        else:
            self.save_distributed(folder)

    def load(self, folder: Path) -> None:
        self.begin()
        self.scope["again"] = True
        self.make_optimizer()
        if self.container == "torch":
            saved = torch.load(folder / "again.pt", weights_only=True)
            for name, part in saved.items():
                lists = isinstance(part, list)
                for mine, theirs in zip(
                    self.scope[name] if lists else [self.scope[name]], part if lists else [part], strict=True
                ):
                    mine.load_state_dict(theirs)
        elif self.container == "safetensors":
            self.load_safetensors(folder)
        else:
            self.load_distributed(folder)

    def save_safetensors(self, folder: Path) -> None:
        from safetensors.torch import save_model

        save_model(self.scope["model"], str(folder / "again.safetensors"))
        torch.save({n: part for n, part in self.parts().items() if n != "model"}, folder / "again.pt")

    def load_safetensors(self, folder: Path) -> None:
        from safetensors.torch import load_model

        load_model(self.scope["model"], str(folder / "again.safetensors"))
        for name, part in torch.load(folder / "again.pt", weights_only=True).items():
            self.scope[name].load_state_dict(part)

    def distributed(self) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """Returns parts as torch.distributed.checkpoint takes them, what of them are no tensors, and options."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(flatten_optimizer_state_dict="flat" in self.layout)
        weights, slots = get_state_dict(self.scope["model"], self.scope["optimizer"], options=options)
        if self.container == "dcp":
            return {**self.parts(), "model": weights, "optimizer": slots}, {}, options
        tensors = {f"optim.{name}": value for name, value in slots.items() if torch.is_tensor(value)}
        others = {name: value for name, value in slots.items() if not torch.is_tensor(value)}
        if self.setting.tied and self.scope.get("saves"):
            del weights["head.weight"]  # safetensors saves no tensor under two names
        return {**weights, **tensors}, others, options

    def save_distributed(self, folder: Path) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        self.scope["saves"] = True
        parts, others, _ = self.distributed()
        if self.container == "dcp":
            save(parts, checkpoint_id=folder / "again", no_dist=True)
            return
        writer = HuggingFaceStorageWriter(str(folder / "again"))
        save(parts, storage_writer=writer, no_dist=True)
        (folder / "again.json").write_text(json.dumps(others))
        if "scheduler" in self.scope:
            torch.save(self.scope["scheduler"].state_dict(), folder / "again.pt")

    def load_distributed(self, folder: Path) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        self.scope["saves"] = True
        parts, _, options = self.distributed()
        model, optimizer = self.scope["model"], self.scope["optimizer"]
        if self.container == "dcp":
            load(parts, checkpoint_id=folder / "again", no_dist=True)
            weights, slots = parts["model"], parts["optimizer"]
            schedule = parts.get("scheduler")
        else:
            load(parts, storage_reader=HuggingFaceStorageReader(str(folder / "again")), no_dist=True)
            weights = {name: value for name, value in parts.items() if not name.startswith("optim.")}
            weights |= {"head.weight": weights["emb.weight"]} if self.setting.tied else {}
            slots = {n.removeprefix("optim."): value for n, value in parts.items() if n.startswith("optim.")}
            slots |= json.loads((folder / "again.json").read_text())
            schedule = torch.load(folder / "again.pt") if "scheduler" in self.scope else None
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=slots, options=options)
        if schedule is not None:
            self.scope["scheduler"].load_state_dict(schedule)
