"""Runs under Accelerate, Transformers' Trainer and Lightning for resuming.py."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from resuming_run import RATE, UPDATES, Values
from resuming_torch import SETTINGS, WARM, Setting, TorchRun, layers, moved


class Config(transformers.PretrainedConfig):  # type: ignore[misc]  # its base is untyped
    """Says which setting a model of Transformers is made for."""

    model_type = "statekit-resuming"

    def __init__(self, kind: str = "module", **others: Any) -> None:
        super().__init__(**{"tie_word_embeddings": SETTINGS[kind].tied, **others})
        self.kind = kind


class Pretrained(transformers.PreTrainedModel):  # type: ignore[misc]  # its base is untyped
    """The plain model as one of Transformers; a call gives a loss whose gradients are an update's."""

    config_class = Config
    _tied_weights_keys = {"head.weight": "emb.weight"}  # noqa: RUF012 - as transformers declares it

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        layers(self, SETTINGS[config.kind])
        self.number = UPDATES
        self.first: Values | None = None
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        pass

    def get_input_embeddings(self) -> Any:
        return self.emb

    def get_output_embeddings(self) -> Any:
        return self.head

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.first is None:
            self.first = [param.detach().numpy().copy() for param in self.parameters()]
        self.number += 1
        return {"loss": loss(self, SETTINGS[self.config.kind], self.number - 1)}


def loss(model: torch.nn.Module, setting: Setting, number: int) -> torch.Tensor:
    """Returns a loss whose gradients are those of an update."""
    params = list(moved(model, setting).values())
    grads = TorchRun("", "", "").gradients(number, [tuple(p.shape) for p in params])
    terms = [(p * torch.from_numpy(g)).sum() for p, g in zip(params, grads, strict=True)]
    return torch.stack(terms).sum()


class PretrainedRun(TorchRun):
    """Transformers' own files: `save_pretrained`, and torch.save of the optimizer beside it."""

    def model(self) -> Any:
        return Pretrained(Config(self.kind))

    def prepare(self, target: Path, folder: Path) -> None:
        self.begin()
        self.scope["model"].config.save_pretrained(target)

    def save_safetensors(self, folder: Path) -> None:
        self.scope["model"].save_pretrained(folder / "again")
        torch.save({n: part for n, part in self.parts().items() if n != "model"}, folder / "again.pt")

    def load_safetensors(self, folder: Path) -> None:
        self.scope["model"] = Pretrained.from_pretrained(folder / "again")
        self.make_optimizer()
        for name, part in torch.load(folder / "again.pt", weights_only=True).items():
            self.scope[name].load_state_dict(part)


class AccelerateRun(TorchRun):
    """Accelerate: `save_state` and `load_state`."""

    def begin(self) -> None:
        super().begin()
        from accelerate import Accelerator

        self.scope["accelerator"] = Accelerator(cpu=True)

    def save(self, folder: Path) -> None:
        self.check_schedule()
        self.scope["accelerator"].save_state(str(folder / "again"))

    def load(self, folder: Path) -> None:
        self.begin()
        self.scope["again"] = True
        self.make_optimizer()
        names = [name for name in ("model", "optimizer", "scheduler") if name in self.scope]
        prepared = self.scope["accelerator"].prepare(*(self.scope[name] for name in names))
        self.scope |= dict(zip(names, prepared, strict=True))
        self.scope["accelerator"].load_state(str(folder / "again"))


class TrainerRun(PretrainedRun):
    """Transformers' Trainer, whose printed lines train up to the arguments' last step and save there."""

    ended = 2 * UPDATES

    def arguments(self, folder: Path, last: int) -> Any:
        """Returns arguments as whoever goes on has them."""
        schedule: dict[str, Any] = {"lr_scheduler_type": "constant"}
        if self.setting.schedule == "LambdaLR":
            schedule = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": WARM}
        return transformers.TrainingArguments(
            output_dir=str(folder / "run"), max_steps=last, save_steps=UPDATES, learning_rate=RATE,
            max_grad_norm=0.0, report_to="none", use_cpu=True, disable_tqdm=True,
            per_device_train_batch_size=1, **schedule,
        )  # fmt: skip

    def prepare(self, target: Path, folder: Path) -> None:
        transformers.utils.logging.set_verbosity_error()
        self.begin()
        self.scope["args"] = self.arguments(folder, 2 * UPDATES)
        self.scope["dataset"] = [{"x": torch.tensor(0.0)} for _ in range(64)]

    def update(self, done: int) -> None:
        if "args" not in self.scope:
            super().update(done)
        elif done == 2 * UPDATES:
            self.scope["trainer"].train(resume_from_checkpoint=self.scope["saved"])

    def loaded(self) -> Values:
        first: Values = self.scope["model"].first
        return first

    def save(self, folder: Path) -> None:
        state = self.scope["trainer"].state
        assert state.global_step == 2 * UPDATES
        assert (folder / "run" / f"checkpoint-{2 * UPDATES}" / "optimizer.pt").is_file()

    def load(self, folder: Path) -> None:
        self.prepare(folder, folder)
        self.scope["again"] = True
        self.scope["model"].number = 2 * UPDATES
        self.make_optimizer()
        for group in self.scope["optimizer"].param_groups:
            group["lr"] = (
                RATE  # Trainer's schedule multiplies it, which an optimizer with its own rate ignores
            )
        args = self.arguments(folder, 3 * UPDATES)
        scheduler = self.scope.pop("scheduler", None) if self.setting.schedule != "LambdaLR" else None
        self.scope["trainer"] = transformers.Trainer(
            self.scope["model"], args, train_dataset=self.scope["dataset"],
            optimizers=(self.scope["optimizer"], scheduler),
        )  # fmt: skip
        self.scope["saved"] = str(folder / "run" / f"checkpoint-{2 * UPDATES}")


class LightningRun(TorchRun):
    """Lightning: `trainer.fit(ckpt_path=...)` and `save_checkpoint`."""

    @property
    def steps(self) -> int:
        """How many steps Lightning counts for an update: those of each optimizer."""
        return len(self.setting.pair) or 1

    def model(self) -> Any:
        import lightning

        run = self

        class Module(lightning.LightningModule):  # type: ignore[misc]  # its base is untyped
            def __init__(self) -> None:
                super().__init__()
                layers(self, run.setting)
                self.first: Values | None = None
                self.automatic_optimization = not run.setting.pair

            def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
                if self.first is None:
                    self.first = [param.detach().numpy().copy() for param in self.parameters()]
                made = loss(self, run.setting, self.global_step // run.steps)
                if self.automatic_optimization:
                    return made
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                self.manual_backward(made)
                schedules = self.lr_schedulers() or []
                for one in (*self.optimizers(), *(schedules if isinstance(schedules, list) else [schedules])):
                    one.step()
                return None

            def configure_optimizers(self) -> Any:
                run.scope = {**run.scope, "model": self}
                run.make_optimizer()
                if run.setting.pair:
                    return run.scope.pop("optimizers"), run.scope.pop("schedulers")
                optimizer, scheduler = run.scope.pop("optimizer"), run.scope.pop("scheduler", None)
                if scheduler is None:
                    return optimizer
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

            def train_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(64, 1)))

        return Module()

    def trainer(self, last: int) -> Any:
        """Returns a trainer up to a step."""
        import lightning

        return lightning.Trainer(
            max_steps=last * self.steps, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip

    def source(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        warnings.simplefilter("ignore")
        self.begin()
        trainer = self.trainer(UPDATES)
        trainer.fit(self.scope["model"])
        trainer.save_checkpoint(folder / "source.ckpt")
        values = self.values()
        _, options = super().source(folder)
        for mine, theirs in zip(self.values(), values, strict=True):
            np.testing.assert_array_equal(mine, theirs)  # a loop of one's own goes on as Lightning would
        return folder / "source.ckpt", options

    def prepare(self, target: Path, folder: Path) -> None:
        self.begin()
        self.scope["trainer"] = self.trainer(2 * UPDATES)

    def update(self, done: int) -> None:
        if "trainer" not in self.scope:
            super().update(done)
        elif done == 2 * UPDATES:
            self.scope["trainer"].fit(self.scope["model"], ckpt_path=self.scope["saved"])

    def loaded(self) -> Values:
        first: Values = self.scope["model"].first
        return first

    def save(self, folder: Path) -> None:
        self.scope["trainer"].save_checkpoint(folder / "again.ckpt")

    def load(self, folder: Path) -> None:
        self.begin()
        self.scope["trainer"] = self.trainer(3 * UPDATES)
        self.scope["saved"] = str(folder / "again.ckpt")
