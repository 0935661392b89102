"""Three callbacks for transformers' Trainer.

trainer.add_callback(statekit.hf.AttestCallback("run/checkpoint-500")) proves before the first update that a resumed run
is its checkpoint's. trainer.add_callback(statekit.hf.NamesCallback()) writes at each save the names of the
parameters that the optimizer numbers. trainer.add_callback(statekit.hf.SealCallback()) writes them too, seals each
save, and lets doctor examine it while the run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from statekit.attestation.attestation import Attestation, Finding
from statekit.attestation.faults import fault
from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef, ref_of
from statekit.conversion.open_state import chosen_container
from statekit.errors import MissingExtraError, StatekitError, extra
from statekit.files.durable import replace_file
from statekit.state.param_names import NAMES_FILE, saved_names
from statekit.state.run import TRAINER_ARGUMENTS
from statekit.tensors.tree import at

try:
    from transformers.trainer_callback import TrainerCallback

    from statekit.attestation.each_save import SealsEachSave, tell
    from statekit.attestation.once import AttestsOnce
    from statekit.torch.attestation import attest, unwrapped
except ModuleNotFoundError as error:
    if error.name in ("torch", "transformers"):
        raise MissingExtraError("Transformers isn't installed.", found=error, remedy=extra("hf")) from error
    raise

__all__ = ["AttestCallback", "NamesCallback", "SealCallback"]


class AttestCallback(AttestsOnce, TrainerCallback):  # type: ignore[misc]  # its base is untyped
    """Attests a run of Trainer before its first update, when all is loaded.

    Args:
        path: The checkpoint that the run goes on from, as `train(resume_from_checkpoint=...)` has it.
        strict: Whether to raise what is wrong, or to print it alone.
        **options: Those of `statekit.torch.attest`.

    Attributes:
        result: What was found; None before the first update.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Forgets what was said of an earlier run."""
        self._forget()

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attests, the first time.

        Raises:
            StateError: With `strict`, the live run isn't the checkpoint's.
        """
        optimizer = given["optimizer"]

        def attested() -> Attestation:
            result = attest(
                optimizer,
                given["model"],
                self.path,
                scheduler=given.get("lr_scheduler"),
                scaler=getattr(optimizer, "scaler", None),
                **self.options,
            )
            faults = clipping_faults(self.path, getattr(args, "max_grad_norm", None))
            return replace(result, findings=(*result.findings, *faults))

        self._once(attested, state.is_world_process_zero)


def clipping_faults(path: CheckpointRef | str | PathLike[str], limit: float | None) -> list[Finding]:
    """Returns what is wrong with the norm to which a live Trainer clips gradients: its optimizer doesn't show it.

    Source: huggingface/transformers, trainer.py, `Trainer._clip_grad_norm`: None and 0 clip nothing.

    Args:
        path: The checkpoint.
        limit: `max_grad_norm` of the live run's arguments.
    """
    ref, container, _ = chosen_container(ref_of(path))
    with registry.opened(container, ref.place, ref.step, ref) as checkpoint:
        arguments = at(checkpoint.tree, (TRAINER_ARGUMENTS,))
    if not isinstance(arguments, Mapping) or "max_grad_norm" not in arguments:
        return []
    saved = arguments["max_grad_norm"]
    if (saved or 0.0) == (limit or 0.0):
        return []
    return [fault("hyperparameter", ["max_grad_norm"], saved, limit)]


class NamesCallback(TrainerCallback):  # type: ignore[misc]  # its base is untyped
    """Writes at each save which parameters the optimizer's numbers mean: Trainer's own files don't say it.

    Beside optimizer.pt lies `parameter_names.json` then, {"param_groups": [[name, ...], ...]}, which statekit reads by
    itself.
    """

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Writes the names, in the process that writes the checkpoint; that they can't be written is printed."""
        if problem := _write_names(args, state, given):
            tell(problem)


def _write_names(args: Any, state: Any, given: Mapping[str, Any]) -> str | None:
    """Writes the names of parameters; returns why they can't be written: a full disk or a link ends no training."""
    folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    optimizer, model = given.get("optimizer"), given.get("model")
    if not state.is_world_process_zero or optimizer is None or model is None or not folder.is_dir():
        return None
    saved = saved_names(unwrapped(model))
    named = unwrapped(model).named_parameters()
    names = {id(param): saved.get(name, name) for name, param in named}
    groups = [[names.get(id(param)) for param in group["params"]] for group in optimizer.param_groups]
    if all(name is not None for group in groups for name in group):
        text = json.dumps({"param_groups": groups}, indent=1) + "\n"
        try:
            replace_file(folder / NAMES_FILE, text.encode())
        except StatekitError as error:
            return f"{error}"
    return None


class SealCallback(SealsEachSave, NamesCallback):
    """Seals each checkpoint that Trainer saves, with its parameters' names, and has doctor look into it.

    No step waits for it; the end of the training does. What Trainer removes meanwhile is said, and stops nothing.

    Args:
        on_save: Told what came of each checkpoint, by another thread; what didn't pass is printed if None.

    Attributes:
        saves: What came of the checkpoints so far.
    """

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Writes the names, and begins to seal."""
        problem = _write_names(args, state, given)
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            self.begin(folder, problem)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Waits for the last seal."""
        self.wait()
