"""T5s that T5X trained go on in Hugging Face's; run by itself, with Transformers.

    python t5_driving.py FOLDER t5=BUNDLE umt5=BUNDLE ...

Converts each recording's checkpoint of update 8 into a folder of its name below `FOLDER`, goes on to update 16 on the
recorded batches, and writes `result.json` there: for each way of going on, how far logits, losses and weights are from
those that T5X recorded.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

import statekit
from statekit.cli.main import main as statekit_main
from statekit.errors import StateError
from statekit.torch import Adafactor, load_optimizer, load_params

START, END = 8, 16
KINDS: Mapping[str, tuple[str, str, str]] = {
    "t5": ("T5Config", "T5ForConditionalGeneration", "t5x-t5:hf-t5"),
    "umt5": ("UMT5Config", "UMT5ForConditionalGeneration", "t5x-t5-scanned:hf-umt5"),
}


class Run:
    """A recorded run of T5X."""

    def __init__(self, bundle: Path, kind: str) -> None:
        self.meta = json.loads((bundle / "meta.json").read_text())
        self.extra, self.kind = self.meta["extra"], KINDS[kind]
        self.checkpoint = bundle / "checkpoint" / f"checkpoint_{START}"
        names = ("batches", "losses", "logits", "trajectory")
        self.batches, self.losses, self.logits, self.trajectory = (
            load_file(bundle / f"{name}.safetensors") for name in names
        )
        self.hparams = {
            name: self.meta["hyperparameters"][name]
            for name in ("logical_factor_rules", "min_dim_size_to_factor")
        }
        self.hparams["logical_axes"] = self.extra["axes"]

    def tied(self) -> Any:
        """Returns Hugging Face's model as its class builds it: transformers 5 ties the head, whatever is said."""
        said = self.extra["model_config"]
        config = getattr(transformers, self.kind[0])(
            vocab_size=said["vocab_size"], d_model=said["emb_dim"], d_kv=said["head_dim"],
            d_ff=said["mlp_dim"], num_layers=said["num_encoder_layers"],
            num_decoder_layers=said["num_decoder_layers"], num_heads=said["num_heads"], dropout_rate=0.0,
            feed_forward_proj="relu" if said["mlp_activations"] == ["relu"] else "gated-gelu",
            tie_word_embeddings=said["logits_via_embedding"], pad_token_id=0, decoder_start_token_id=0,
        )  # fmt: skip
        return getattr(transformers, self.kind[1])(config)

    def model(self) -> Any:
        """Returns it with weights of its own under a head that isn't tied."""
        model = self.tied()
        if not self.extra["model_config"]["logits_via_embedding"]:
            model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
            model.config.tie_word_embeddings = (
                False  # UMT5's class asks here whether to scale what the head gets
            )
        return model

    def outputs(self, model: Any, update: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the logits for the batch of an update, and the loss as the recording defines it."""
        batch = {
            name.partition("/")[2]: torch.from_numpy(array)
            for name, array in self.batches.items()
            if name.startswith(f"{update}/")
        }
        tokens = batch["encoder_input_tokens"].long()
        logits = model(
            input_ids=tokens,
            attention_mask=(tokens > 0).long(),
            decoder_input_ids=batch["decoder_input_tokens"].long(),
        ).logits
        targets = batch["decoder_target_tokens"].long()
        each = torch.logsumexp(logits, -1) - logits.gather(-1, targets[..., None])[..., 0]
        total = (batch["decoder_loss_weights"] * each).sum()
        return logits, total / (self.extra["loss"]["loss_normalizing_factor"] or 1.0)

    def apart(self, model: Any) -> float:
        """Returns how far a model's logits are from the recorded ones, per the largest, where there is a target."""
        with torch.no_grad():
            logits = self.outputs(model.eval(), START + 1)[0].numpy()
        recorded = self.logits[f"{START}/batch_{START + 1}/logits"]
        real = self.batches[f"{START + 1}/decoder_target_tokens"] > 0
        return float(np.abs(logits - recorded)[real].max() / np.abs(recorded).max())

    def off(self, update: int, loss: float) -> float:
        """Returns how far the loss before an update is from the recorded one, relatively."""
        recorded = float(self.losses["loss_float64"][update - 1])
        return abs(loss - recorded) / abs(recorded)


def errors(run: Run, model: Any, optimizer: Any, mapped: list[dict[str, Any]]) -> dict[str, float]:
    """Goes on to the last update, and returns the worst error of a loss, and of a tensor's movement (l2 norms)."""
    worst = 0.0
    for update in range(START + 1, END + 1):
        for group in optimizer.param_groups:
            group["lr"] = float(run.losses["learning_rate"][update - 1])
        optimizer.zero_grad()
        _, loss = run.outputs(model, update)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        worst = max(worst, run.off(update, float(loss.detach())))
    return {"loss": worst, "weights": max(moved(run, model, mapped))}


def moved(run: Run, model: Any, mapped: list[dict[str, Any]]) -> Iterator[float]:
    """Yields for each tensor of the model how far it is from T5X's, per movement since the checkpoint."""
    weights = dict(model.named_parameters())
    assert len(mapped) == len(weights)
    for one in mapped:
        before, after = (reference(run, one, update) for update in (START, END))
        ours = weights[one["target"].replace("/", ".")].detach().numpy()
        yield float(np.linalg.norm(ours - after) / np.linalg.norm(after - before))


def reference(run: Run, one: dict[str, Any], update: int) -> Any:
    """Returns a recorded parameter as Hugging Face has it, by hand: T5X's layer axis is 1, a head's axes are joined."""
    array = run.trajectory[f"{update}/param/{one['sources'][0]}"].astype(np.float64)
    layer = next((word for word in one["operations"] if word.startswith("number ")), None)
    if layer is not None:
        array = array[:, int(layer.split()[1])]
    if array.ndim == 3:
        out = one["sources"][0].endswith("out/kernel")
        array = array.reshape(-1, array.shape[-1]) if out else array.reshape(array.shape[0], -1)
    return array.T if "transposed" in one["operations"] else array


def swapped(optimizer: Any) -> None:
    """Exchanges what square matrices keep by row and by column."""
    for slots in optimizer.state.values():
        if "v_row" in slots and slots["v_row"].shape == slots["v_col"].shape:
            slots["v_row"], slots["v_col"] = slots["v_col"], slots["v_row"]


def permuted(optimizer: Any) -> None:
    """Turns round what one matrix keeps by row: each of its rows gets another's."""
    slots = next(slots for slots in optimizer.state.values() if "v_row" in slots)
    slots["v_row"] = slots["v_row"].flip(0)


class Recorded(transformers.Trainer):  # type: ignore[misc]  # its base is untyped
    """Trains on the recorded batches, one after the other, at T5X's loss and rates."""

    run: Run
    worst: float = 0.0

    def _get_train_sampler(self, *given: Any) -> None:
        return None

    def create_scheduler(self, *given: Any, **others: Any) -> Any:
        rates = self.run.losses["learning_rate"]
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: float(rates[min(done, END - 1)])
        )
        return self.lr_scheduler

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **others: Any) -> Any:
        update = int(inputs["update"])
        loss = self.run.outputs(model, update)[1]
        assert update == self.state.global_step + 1
        self.worst = max(self.worst, self.run.off(update, float(loss.detach())))
        return loss


def followed(run: Run, lines: list[str], out: Path, updates: int) -> Recorded:
    """Goes on by printed lines up to a number of updates, where Trainer saves."""
    args = transformers.TrainingArguments(
        output_dir=str(out), max_steps=updates, save_steps=updates, per_device_train_batch_size=1, learning_rate=1.0,
        report_to="none", use_cpu=True, max_grad_norm=0.0, disable_tqdm=True, logging_strategy="no",
        remove_unused_columns=False,
    )  # fmt: skip
    Recorded.run = run
    scope = {"args": args, "dataset": [{"update": i} for i in range(1, END + 1)], "Recorded": Recorded}
    code = "\n".join(lines).replace("transformers.Trainer(", "Recorded(")
    exec(compile(code, "to go on", "exec"), scope)
    result: Recorded = scope["trainer"]
    return result


def called(*words: object) -> Any:
    """Returns what a call of `statekit` prints as JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert statekit_main([*map(str, words), "--json"]) == 0
    return json.loads(printed.getvalue())


def trainer(run: Run, folder: Path, mapped: list[dict[str, Any]]) -> dict[str, Any]:
    """Goes on from a folder of Trainer by the lines that are printed, and again from what Trainer saved there."""
    hf, saved = folder / "hf", folder / "out" / f"checkpoint-{START + 4}"
    hparams = [
        word for key, value in run.hparams.items() for word in ("--hparams", f"{key}={json.dumps(value)}")
    ]
    words = ["--map", run.kind[2], "--config", "num_heads=4", "--to", "hf-trainer", *hparams]
    converted = called("convert", run.checkpoint, hf, *words)
    resumed = called("resume", hf)["lines"]
    first = followed(run, converted["resume"], folder / "out", START + 4)
    loads = [line for line in resumed if not line.startswith((" ", "class", "trainer.add"))]
    lines = [
        line.replace(str(hf / f"checkpoint-{START}"), str(saved)).replace(str(hf), str(saved))
        for line in loads
    ]
    last = followed(run, [one.replace(", lr=args.learning_rate", "") for one in lines], folder / "last", END)
    unsaid = [line for line in resumed if "group" not in line]
    return {
        "without the rate": followed(run, unsaid, folder / "unsaid", START + 4).worst,
        "rates": [float(rate) for rate in run.losses["learning_rate"]],
        "layout": converted["plan"]["target"]["layout"],
        "passed_over": list(converted["plan"]["options"]["passed_over"]),
        "logits": run.apart(followed_model(resumed)),
        "without the line after loading": run.apart(followed_model(resumed, "model = ")),
        "loss": max(first.worst, last.worst),
        "weights": max(moved(run, last.model, mapped)),
    }


def followed_model(lines: list[str], only: str = "model") -> Any:
    """Returns the model that printed lines make, those that begin so."""
    scope: dict[str, Any] = {}
    exec("\n".join(line for line in lines if line.startswith(("import transformers", only))), scope)
    return scope["model"]


def main(bundle: Path, folder: Path, kind: str) -> None:
    """Goes on in every way from one recording."""
    folder.mkdir()
    run = Run(bundle, kind)
    hparams = run.hparams
    report = statekit.convert(run.checkpoint, folder / "run.pt", map=run.kind[2], hparams=hparams)
    mapped = report.plan.to_json()["mapped"]
    result: dict[str, Any] = {"exactness": report.plan.exactness.name, "mapped": mapped}

    model = run.model()
    model.load_state_dict(torch.load(folder / "run.pt", weights_only=True)["model"])
    result["logits"] = run.apart(model)
    result["converted"] = errors(
        run, model, load_optimizer(folder / "run.pt", model.named_parameters()), mapped
    )

    try:
        load_params(folder / "run.pt", run.tied())
        result["tied"] = "loaded"
    except StateError as error:
        result["tied"] = str(error)

    model = run.model()
    load_params(run.checkpoint, model, map=run.kind[2], hparams=hparams)
    straight = load_optimizer(run.checkpoint, model.named_parameters(), map=run.kind[2], hparams=hparams)
    result["straight"] = errors(run, model, straight, mapped)

    for mistake in (swapped, permuted):
        model.load_state_dict(torch.load(folder / "run.pt", weights_only=True)["model"])
        optimizer = load_optimizer(folder / "run.pt", model.named_parameters())
        mistake(optimizer)
        result[mistake.__name__] = errors(run, model, optimizer, mapped)

    model.load_state_dict(torch.load(folder / "run.pt", weights_only=True)["model"])
    cold = Adafactor(
        model.named_parameters(), lr=1.0, min_dim_size_to_factor=hparams["min_dim_size_to_factor"]
    )
    result["cold"] = errors(run, model, cold, mapped)
    result["trainer"] = trainer(run, folder, mapped)
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)  # which is faster for matrices as small as these
    for said in sys.argv[2:]:
        kind, _, bundle = said.partition("=")
        main(Path(bundle), Path(sys.argv[1]) / Path(bundle).name, kind)
