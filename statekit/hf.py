"""Two lines for transformers' Trainer.

trainer.add_callback(statekit.hf.AttestCallback("run/checkpoint-500")) proves before the first update that a resumed run
is its checkpoint's. trainer.add_callback(statekit.hf.NamesCallback()) writes at each save which parameters the
optimizer's numbers mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from statekit.errors import MissingExtraError
from statekit.state.param_names import NAMES_FILE, saved_names

try:
    from transformers.trainer_callback import TrainerCallback

    from statekit.attestation.once import AttestsOnce
    from statekit.torch.attestation import attest, unwrapped
except ModuleNotFoundError as error:
    if error.name in ("torch", "transformers"):
        raise MissingExtraError(
            "Transformers isn't installed.", found=error, remedy="pip install 'statekit[hf]'"
        ) from error
    raise

__all__ = ["AttestCallback", "NamesCallback"]


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
        self.result = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attests, the first time.

        Raises:
            StateError: With `strict`, the live run isn't the checkpoint's.
        """
        optimizer = given["optimizer"]
        self._once(
            lambda: attest(
                optimizer,
                given["model"],
                self.path,
                scheduler=given.get("lr_scheduler"),
                scaler=getattr(optimizer, "scaler", None),
                **self.options,
            ),
            state.is_world_process_zero,
        )


class NamesCallback(TrainerCallback):  # type: ignore[misc]  # its base is untyped
    """Writes at each save which parameters the optimizer's numbers mean: Trainer's own files don't say it.

    Beside optimizer.pt lies `parameter_names.json` then, {"param_groups": [[name, ...], ...]}, which statekit reads by
    itself.
    """

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Writes the names, in the process that writes the checkpoint."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        optimizer, model = given.get("optimizer"), given.get("model")
        if not state.is_world_process_zero or optimizer is None or model is None or not folder.is_dir():
            return
        saved = saved_names(unwrapped(model))
        named = unwrapped(model).named_parameters()
        names = {id(param): saved.get(name, name) for name, param in named}
        groups = [[names.get(id(param)) for param in group["params"]] for group in optimizer.param_groups]
        if all(name is not None for group in groups for name in group):
            (folder / NAMES_FILE).write_text(json.dumps({"param_groups": groups}, indent=1) + "\n")
