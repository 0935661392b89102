"""A T5 that T5X trained goes on in Transformers' T5ForConditionalGeneration, beside what T5X itself did next.

Input: a recording of a whole run (batches, losses, learning rates, a checkpoint) and the folder that its checkpoint
was converted to. Output: the losses of each update as T5X had them and as PyTorch has them, from the converted slots,
from slots that were exchanged by mistake, and from a new optimizer; and how far the weights are apart at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from statekit.conversion.open_state import open_state
from statekit.errors import MissingExtraError, extra
from statekit.files.safetensors import open_safetensors
from statekit.files.source import read_small
from statekit.maps.links import Mapped
from statekit.maps.model_map import load
from statekit.tensors.tensor import Array

MAP = "t5x-t5:hf-t5"
BATCHES, LOSSES, TRAJECTORY = "batches", "losses", "trajectory"
WITHIN_LOSS, WITHIN_WEIGHTS = 2e-6, 2e-4
"""The most that a loss may differ, relatively, and a tensor, per its movement, for PyTorch to go on as T5X did.

T5X itself, compiled without optimization, comes to 4.6e-7 and 1.8e-5; the smallest of ten mistakes in a conversion to
six times these limits.
"""


@dataclass(frozen=True)
class Run:
    """A recorded run of T5X."""

    folder: Path

    @staticmethod
    def fits(folder: Path) -> bool:
        """Tells whether a folder holds such a recording."""
        return (folder / f"{BATCHES}.safetensors").is_file()

    @cached_property
    def meta(self) -> Mapping[str, Any]:
        """What was recorded."""
        description: Mapping[str, Any] = json.loads(read_small(self.folder / "meta.json"))
        return description

    @property
    def updates(self) -> range:
        """The updates after the checkpoint."""
        return range(self.meta["checkpoint_step"] + 1, self.meta["steps"] + 1)

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of T5X."""
        return self.folder / "checkpoint" / f"checkpoint_{self.meta['checkpoint_step']}"

    @property
    def has_weights(self) -> bool:
        """Whether T5X's own weights after the last update are there; the wheel leaves them out for its size."""
        return (self.folder / f"{TRAJECTORY}.safetensors").is_file()

    def read(self, file: str) -> dict[str, Array]:
        """Returns all arrays of one of the files."""
        opened = open_safetensors(self.folder / f"{file}.safetensors")
        try:
            return {name: tensor.read() for name, tensor in opened.tensors.items()}
        finally:
            opened.close()

    @cached_property
    def losses(self) -> dict[str, Array]:
        """Loss, learning rate and weight of the targets of each update, the first at 0."""
        return self.read(LOSSES)

    @cached_property
    def batches(self) -> dict[str, Array]:
        """Tokens by update and name."""
        return self.read(BATCHES)


@dataclass(frozen=True)
class Continued:
    """How a run went on.

    Attributes:
        losses: By update, before it.
        weights: The largest distance of a tensor from T5X's after the last update, per its movement (l2 norms); None
            where the recording has no weights, as the one in the wheel.
    """

    losses: Mapping[int, float]
    weights: float | None


def check_installed() -> None:
    """Checks, before anything is written, that there is what a run goes on in.

    Raises:
        MissingExtraError: PyTorch or Transformers isn't installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch  # noqa: F401  # only whether it is there
        import transformers  # noqa: F401  # as before
    except ImportError as error:
        raise MissingExtraError("The demo needs PyTorch and Transformers.", remedy=extra("hf")) from error


def go_on(run: Run, folder: Path) -> Iterator[tuple[str, Continued]]:
    """Goes on from a converted folder in three ways: as it is, with its slots exchanged, with a new optimizer."""
    check_installed()
    import torch
    import transformers

    import statekit.torch

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # it would warn that the head isn't tied, as it shall be
    step = folder / f"checkpoint-{run.meta['checkpoint_step']}"
    with open_state(run.checkpoint) as opened:
        mapped = load(MAP).apply(opened.state).mapped

    def loaded(model: Any) -> Any:
        return statekit.torch.load_optimizer(step, model.named_parameters())

    def exchanged(model: Any) -> Any:
        optimizer = loaded(model)
        for slots in optimizer.state.values():
            if "v_row" in slots and slots["v_row"].shape == slots["v_col"].shape:
                slots["v_row"], slots["v_col"] = slots["v_col"], slots["v_row"]
        return optimizer

    def new(model: Any) -> Any:
        minimum = run.meta["hyperparameters"]["min_dim_size_to_factor"]
        return statekit.torch.Adafactor(model.named_parameters(), lr=1.0, min_dim_size_to_factor=minimum)

    ways: Mapping[str, Callable[[Any], Any]] = {GOES_ON: loaded, EXCHANGED: exchanged, NEW: new}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # which is faster for matrices as small as these
    try:
        for name, optimizer in ways.items():
            model = transformers.T5ForConditionalGeneration.from_pretrained(folder)
            yield name, _trained(run, model, optimizer(model), mapped)
    finally:
        torch.set_num_threads(threads)


GOES_ON, EXCHANGED, NEW = "statekit", "slots exchanged", "new optimizer"


def _trained(run: Run, model: Any, optimizer: Any, mapped: Sequence[Mapped]) -> Continued:
    losses = {}
    for update in run.updates:
        for group in optimizer.param_groups:
            group["lr"] = float(run.losses["learning_rate"][update - 1])
        optimizer.zero_grad()
        loss = _loss(run, model, update)
        loss.backward()
        optimizer.step()
        losses[update] = float(loss.detach())
    return Continued(losses, max(_moved(run, model, mapped)) if run.has_weights else None)


def _loss(run: Run, model: Any, update: int) -> Any:
    """Returns the loss of a batch as T5X has it: a sum over tokens."""
    import torch

    batch = {
        name.partition("/")[2]: torch.from_numpy(array)
        for name, array in run.batches.items()
        if name.startswith(f"{update}/")
    }
    tokens, targets = batch["encoder_input_tokens"].long(), batch["decoder_target_tokens"].long()
    logits = model(
        input_ids=tokens,
        attention_mask=(tokens > 0).long(),
        decoder_input_ids=batch["decoder_input_tokens"].long(),
    ).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (batch["decoder_loss_weights"] * losses).sum()


def _moved(run: Run, model: Any, mapped: Sequence[Mapped]) -> Iterator[float]:
    recorded, weights = run.read(TRAJECTORY), dict(model.named_parameters())
    first, last = run.updates[0] - 1, run.updates[-1]
    for tensor in mapped:
        [source], weight = tensor.sources, weights[tensor.target.replace("/", ".")].detach().numpy()
        before, after = (recorded[f"{n}/param/{source}"].astype(np.float64) for n in (first, last))
        array = weight.T if "transposed" in tensor.operations else weight
        yield float(np.linalg.norm(array - after) / np.linalg.norm(after - before))


def errors(run: Run, continued: Continued) -> dict[int, float]:
    """Returns how far each loss is from T5X's, relatively."""
    recorded = run.losses["loss_float64"]
    return {n: abs(loss - recorded[n - 1]) / abs(recorded[n - 1]) for n, loss in continued.losses.items()}
