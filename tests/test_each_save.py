"""Checkpoints that a run seals as it writes them."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import statekit
from statekit.attestation.each_save import Save, SealsEachSave, sealed_and_examined
from statekit.attestation.once import AttestsOnce
from statekit.errors import CorruptError, UsageError
from statekit.state.param_names import NAMES_FILE

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def saved(path: Path, zeroed: bool = False) -> None:
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(3):
        net(torch.ones(8)).sum().backward()
        optimizer.step()
    state = optimizer.state_dict()
    if zeroed:
        for slots in state["state"].values():
            slots["exp_avg"].zero_()
            slots["exp_avg_sq"].zero_()
    torch.save({"model": net.state_dict(), "optimizer": state}, path)


def test_each_save_is_sealed_and_examined_beside_the_run(tmp_path: Path) -> None:
    reported: list[Any] = []
    seals = SealsEachSave(reported.append)
    saved(tmp_path / "bad.pt", zeroed=True)
    seals.begin(tmp_path / "bad.pt")
    seals.begin(tmp_path / "removed.pt")
    seals.wait()
    bad, removed = seals.saves
    assert reported == [bad, removed] and not bad.passed and not removed.passed
    assert "moments-zero" in bad.findings and bad.manifest is not None and bad.manifest.is_file()
    assert bad.digest is not None and len(bad.digest) == 64 and removed.digest is None
    assert removed.manifest is None and "no such file" in str(removed)
    assert statekit.check(tmp_path / "bad.pt").passed


def test_a_save_of_several_checkpoints_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    """Seen red: a ValueError ended the thread that seals, and `wait` raised it."""
    seals = SealsEachSave()
    for name in ("first.pt", "second.pt"):
        saved(tmp_path / name)
    seals.begin(tmp_path)
    seals.wait()
    (save,) = seals.saves
    assert not save.passed and "2 checkpoints lie there, and one was expected" in str(save)


def test_what_the_hook_raises_is_raised_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statekit.attestation.each_save.sealed_and_examined", lambda path: path)
    seals = SealsEachSave(lambda save: 1 / 0)
    seals.begin(tmp_path)
    with pytest.raises(ZeroDivisionError):
        seals.wait()


def test_all_saves_are_handled_whatever_the_hook_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: the end of the training came before the second was sealed."""
    slow = {tmp_path / "1": 0.0, tmp_path / "2": 0.2}

    def handled(path: Path) -> Path:
        time.sleep(slow[path])
        return path

    monkeypatch.setattr("statekit.attestation.each_save.sealed_and_examined", handled)
    seals = SealsEachSave(lambda save: 1 / 0)
    for path in slow:
        seals.begin(path)
    with pytest.raises(ZeroDivisionError):
        seals.wait()
    assert list[Any](seals.saves) == [*slow]


@pytest.mark.parametrize("python", ["", None, "/nowhere/python"])
def test_a_machine_that_starts_no_process_is_a_problem_of_the_save(
    python: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: TypeError or FileNotFoundError at the end of the training, before what was behind it."""
    seals = SealsEachSave(lambda save: None)
    monkeypatch.setattr(sys, "executable", python)
    seals.begin(tmp_path)
    seals.wait()
    (save,) = seals.saves
    assert save.problem is not None and save.problem.startswith("seal: ")


def test_a_system_that_starts_no_thread_is_a_problem_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    seals = SealsEachSave(lambda save: None)
    monkeypatch.setattr("threading.Thread.start", none)
    seals.begin(tmp_path)
    seals.wait()
    assert [save.problem for save in seals.saves] == ["seal: can't start new thread"]


def test_callbacks_are_copied_and_pickled(tmp_path: Path) -> None:
    """Seen red: Lightning's ddp_spawn and Keras Tuner ended before the first batch."""
    seals = SealsEachSave()
    for copied in (copy.deepcopy(seals), pickle.loads(pickle.dumps(seals))):
        copied.begin(tmp_path / "nowhere")
        copied.wait()
        assert len(copied.saves) == 1 and seals.saves == []
        assert copy.deepcopy(copied).saves == copied.saves


@pytest.mark.parametrize("closed", [False, True])
def test_a_terminal_that_shows_no_name_stops_nothing(
    closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: UnicodeEncodeError at the end of the training."""
    shown = io.BytesIO()
    terminal = io.TextIOWrapper(shown, "ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", terminal)
    if closed:
        terminal.close()
    seals = SealsEachSave()
    seals.begin(tmp_path / "\u00fc")
    seals.wait()
    assert closed or b"\\xfc" in shown.getvalue()


def test_lightning_saves_by_other_callbacks_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: AttributeError at the first batch, beside OnExceptionCheckpoint; the second best was not sealed."""
    pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    from statekit.lightning import SealCallback

    writes, begun = ModelCheckpoint("run"), list[str]()
    writes.best_model_path, writes._last_checkpoint_saved = "best", "second"
    trainer = SimpleNamespace(
        checkpoint_callbacks=[OnExceptionCheckpoint("run"), writes], is_global_zero=True
    )
    seals = SealCallback()
    monkeypatch.setattr(seals, "begin", begun.append)
    monkeypatch.setattr("statekit.lightning.written_at", lambda path: 1)
    for _ in range(2):
        seals.on_train_batch_start(trainer, None, None, 0)
    assert begun == ["best", "second"]


@pytest.mark.slow
def test_trainer_seals_each_save_with_the_names_of_its_parameters(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from statekit.hf import SealCallback

    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, **sizes))
    rows = torch.randint(0, 32, (16, 8))
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to="none",
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    callback = SealCallback()
    trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.train()
    assert [(save.path.name, save.passed) for save in callback.saves] == [
        ("checkpoint-2", True),
        ("checkpoint-4", True),
    ]
    assert (tmp_path / "checkpoint-4" / NAMES_FILE).is_file()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .srun. command")  # of Lightning, where SLURM is installed
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, by Lightning
def test_lightning_seals_each_save(tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import ModelCheckpoint

    from statekit.lightning import SealCallback

    class Net(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=2)
    callback = SealCallback()
    writes = ModelCheckpoint(every_n_train_steps=3, save_top_k=-1, dirpath=str(tmp_path))
    trainer = lightning.Trainer(
        max_epochs=1, logger=False, enable_progress_bar=False, callbacks=[callback, writes], accelerator="cpu"
    )
    trainer.fit(Net(), data)
    assert [save.passed for save in callback.saves] == [True, True]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of NumPy, by Keras
def test_keras_seals_each_save(tmp_path: Path) -> None:
    keras: Any = pytest.importorskip("keras")
    statekit_tensorflow = pytest.importorskip("statekit.tensorflow")

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.AdamW(0.01), "mse")
    inputs, targets = keras.random.normal((16, 4)), keras.random.normal((16, 1))
    file = str(tmp_path / "{epoch}.keras")
    seals = statekit_tensorflow.SealCallback(file)
    callbacks = [keras.callbacks.ModelCheckpoint(file), seals]
    model.fit(inputs, targets, epochs=2, batch_size=4, verbose=0, callbacks=callbacks)
    assert sorted((save.path.name, save.passed) for save in seals.saves) == [
        ("1.keras", True),
        ("2.keras", True),
    ]


@pytest.mark.slow
def test_a_loop_of_accelerate_seals_each_save(tmp_path: Path) -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    from statekit.accelerate import SealsEachSave as Seals

    accelerator = accelerate.Accelerator(cpu=True)
    net = torch.nn.Linear(4, 1)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    seals = Seals()
    for step in range(2):
        accelerator.backward(net(torch.ones(4)).sum())
        optimizer.step()
        accelerator.save_state(tmp_path / f"step_{step}")
        seals.begin(tmp_path / f"step_{step}")
    seals.wait()
    assert [(save.path.name, save.passed) for save in seals.saves] == [("step_0", True), ("step_1", True)]


@pytest.mark.slow
def test_a_loop_with_orbax_seals_each_save(tmp_path: Path) -> None:
    jax: Any = pytest.importorskip("jax")
    ocp: Any = pytest.importorskip("orbax.checkpoint")
    import optax

    from statekit.jax import SealsEachSave as Seals

    params = {"w": jax.numpy.ones((4, 4))}
    optimizer = optax.adamw(1e-3)
    state, seals = optimizer.init(params), Seals()
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            updates, state = optimizer.update(params, state, params)
            params = optax.apply_updates(params, updates)
            tree = ocp.args.StandardSave({"params": params, "opt_state": state})
            manager.save(step, args=tree)
            manager.wait_until_finished()
            seals.begin(tmp_path / "run" / f"{step}")
    seals.wait()
    assert [(save.path.name, save.passed) for save in seals.saves] == [("1", True), ("2", True)]


def test_files_of_keras_are_found_whatever_they_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in `run[1]` was not sealed, in silence, and a link to nothing ended it: FileNotFoundError."""
    statekit_tensorflow = pytest.importorskip("statekit.tensorflow")
    folder, begun = tmp_path / "run[1]*", list[str]()
    folder.mkdir()
    (folder / "00-9.00{x}.keras").symlink_to("nowhere")
    seals = statekit_tensorflow.SealCallback(str(folder / "{epoch:02d}-{loss:.2f}{{x}}.keras"))
    monkeypatch.setattr(seals, "begin", begun.append)
    (folder / "01-0.50{x}.keras").touch()
    seals.on_train_batch_begin(1)
    assert [Path(path).name for path in begun] == ["01-0.50{x}.keras"]


def test_batches_do_not_wait_for_a_large_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: each batch listed it."""
    statekit_tensorflow = pytest.importorskip("statekit.tensorflow")
    seals = statekit_tensorflow.SealCallback(str(tmp_path / "{epoch}.keras"))
    looks = list[str]()

    def listed(pattern: str) -> list[str]:
        time.sleep(0.05)
        looks.append(pattern)
        return []

    monkeypatch.setattr("statekit.tensorflow.attestation.glob", listed)
    for batch in range(30):
        seals.on_train_batch_begin(batch)
    assert len(looks) == 1
    seals.on_epoch_begin(1)
    seals.on_train_end()
    assert len(looks) == 3


def test_names_go_into_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: what a link led to was written over; then the link ended the training."""
    pytest.importorskip("transformers")
    from statekit.hf import NamesCallback, SealCallback

    folder, other = tmp_path / "checkpoint-3", tmp_path / "other"
    folder.mkdir()
    other.write_text("mine")
    (folder / NAMES_FILE).symlink_to(other)
    model = torch.nn.Linear(2, 1)
    args = SimpleNamespace(output_dir=str(tmp_path))
    state = SimpleNamespace(global_step=3, is_world_process_zero=True)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    NamesCallback().on_save(args, state, None, **given)
    assert NAMES_FILE in capsys.readouterr().out
    seals = SealCallback()
    begun = list[tuple[Any, ...]]()
    monkeypatch.setattr(seals, "begin", lambda *given: begun.append(given))
    seals.on_save(args, state, None, **given)
    assert begun[0][0] == folder and NAMES_FILE in begun[0][1]
    assert other.read_text() == "mine"
    (folder / NAMES_FILE).unlink()
    NamesCallback().on_save(args, state, None, **given)
    assert "weight" in (folder / NAMES_FILE).read_text()


@pytest.mark.parametrize(
    "name", [b"a\xff.pt", b"\x1b[31ma.pt", b"a\nstatekit: b.pt: sealed.pt", "\u202ea.pt".encode()]
)
def test_what_is_printed_of_a_save_is_one_line_for_any_name(name: bytes) -> None:
    shown = f"{Save(Path(os.fsdecode(name)), None, (), 'seal: gone')}"
    assert shown.isprintable() and shown.endswith(": seal: gone")
    shown.encode()


def test_a_run_that_asked_for_no_stop_is_attested_or_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Seen red: a cut file ended a run with `strict=False` at its first step, and a misspelt option did."""
    tries = []

    def attest() -> Any:
        tries.append(1)
        raise CorruptError("A zip archive is cut off.")

    gentle = AttestsOnce("run", strict=False, generators=True)
    for _ in range(3):
        gentle._once(attest)
    assert len(tries) == 1 and gentle.result is None
    assert "not attested: A zip archive is cut off." in capsys.readouterr().out
    with pytest.raises(CorruptError):
        AttestsOnce("run")._once(attest)
    with pytest.raises(UsageError):
        AttestsOnce("run", strict=False, layuot="x")


def test_the_manifest_of_what_is_written_over_goes_before_the_new_one_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: a run that was killed between a save and its seal left a good save that was called damaged."""
    file, folder = tmp_path / "last.pt", tmp_path / "step"
    folder.mkdir()
    saved(file)
    saved(folder / "a.pt")
    statekit.seal(file)
    manifests = [tmp_path / "statekit.last.pt.json", folder / "statekit.json"]
    shutil.copy(manifests[0], manifests[1])
    (tmp_path / "statekit.mine.pt.json").write_text("{}")
    saved(tmp_path / "mine.pt")
    saved(file)
    monkeypatch.setattr(
        "statekit.attestation.each_save.sealed_and_examined", lambda path: Save(path, None, (), "")
    )
    seals = SealsEachSave()
    seals.begin(folder)
    assert manifests[1].exists()  # nothing there is younger
    saved(folder / "a.pt")
    for path in (file, folder, tmp_path / "mine.pt", tmp_path / "nowhere"):
        seals.begin(path)
    seals.wait()
    assert [path.exists() for path in manifests] == [False, False]
    assert (tmp_path / "statekit.mine.pt.json").exists()


def test_a_save_that_is_written_over_before_doctor_looks_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: "it is damaged" of an untouched run."""
    file = tmp_path / "last.pt"
    saved(file)

    def verb(name: str, path: Path) -> tuple[dict[str, Any], str | None]:
        if name == "seal":
            return {"seals": [{"checkpoints": [{"manifest": "m", "digest": "d"}]}]}, None
        os.utime(path, ns=(1, 1))
        return {}, "doctor: The checkpoint isn't what was written."

    monkeypatch.setattr("statekit.attestation.each_save._verb", verb)
    assert sealed_and_examined(file).problem == "doctor: it was written over or removed meanwhile"


def test_a_forked_process_waits_for_its_own_saves_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: the child waited for ever for a thread that its parent had; a path was looked for elsewhere later."""
    monkeypatch.setattr(
        "statekit.attestation.each_save.sealed_and_examined", lambda path: Save(path, None, (), "")
    )
    monkeypatch.chdir(tmp_path)
    seals = SealsEachSave()
    seals.begin("a.pt")
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in a child, which has no thread
    assert seals._pool is not None
    seals._pool.submit(lambda: None)
    seals._begun.append(Future())
    seals.wait()
    seals.begin("b.pt")
    seals.wait()
    assert (
        {tmp_path / "b.pt"} <= {save.path for save in seals.saves} <= {tmp_path / "a.pt", tmp_path / "b.pt"}
    )


def test_lightnings_every_save_is_sealed_and_batches_ask_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: of the best three the second and third weren't sealed, and each batch asked the disk for each."""
    pytest.importorskip("lightning.pytorch")
    from statekit import lightning

    begun, asked = list[str](), list[str]()

    def written_at(path: str) -> int | None:
        asked.append(path)
        return None if path == "late" else len(asked)

    monkeypatch.setattr(lightning, "written_at", written_at)
    seals = lightning.SealCallback()
    monkeypatch.setattr(seals, "begin", begun.append)
    monkeypatch.setattr(seals, "wait", lambda: None)
    writes = SimpleNamespace(best_model_path="a", last_model_path=Path("z"), best_k_models={"a": 1, "b": 2})
    trainer = SimpleNamespace(checkpoint_callbacks=[SimpleNamespace(), writes], is_global_zero=True)
    for _ in range(3):
        seals.on_train_batch_start(trainer, None, None, 0)
    assert begun == ["a", "b", "z"] and sorted(asked) == begun
    seals.on_save_checkpoint(trainer, None, {})
    seals.on_train_batch_start(trainer, None, None, 0)
    seals.on_train_batch_start(trainer, None, None, 0)
    assert begun == ["a", "b", "z"] * 2 and len(asked) == 6
    writes.best_model_path, writes.last_model_path, writes.best_k_models = "late", "s3://bucket/c", {}
    seals.on_train_batch_start(trainer, None, None, 0)
    assert len(begun) == 6  # another thread may be writing it
    seals.on_fit_end(trainer, None)
    assert begun[6:] == ["late"] and capsys.readouterr().out.count("saves in a store aren't sealed") == 1
