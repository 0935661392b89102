"""The common part of callbacks that seal each save: another process reads it while the run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from statekit.errors import printable
from statekit.files.manifest import FILE, FORMAT, beside
from statekit.files.source import Files


@dataclass(frozen=True)
class Save:
    """What came of a checkpoint that a run wrote.

    Attributes:
        path: The checkpoint.
        manifest: The manifest that was written beside it; None if it wasn't sealed.
        findings: The names of the silent faults that doctor found: `moments-zero`, `not-finite`.
        problem: Why it wasn't sealed or examined; None if it was.
        digest: BLAKE3 of the manifest, which names every byte of the checkpoint; None if it wasn't sealed.
    """

    path: Path
    manifest: Path | None
    findings: tuple[str, ...]
    problem: str | None
    digest: str | None = None

    @property
    def passed(self) -> bool:
        """Whether it is sealed, and doctor found nothing."""
        return self.problem is None and not self.findings

    def __str__(self) -> str:
        verdict = self.problem or ", ".join(self.findings) or "sealed, no silent fault found"
        return f"statekit: {printable(str(self.path))}: " + printable(verdict, keep="\n")


OnSave: TypeAlias = Callable[[Save], object]


class SealsEachSave:
    """Seals each checkpoint when it is written, and has doctor look into it.

    The work is done by processes of their own, one after the other, so that no step waits for it.

    Example, in any loop, by the process that writes the checkpoint, and when it is written:
        >>> seals = SealsEachSave()
        >>> seals.begin("run/checkpoint_1")  # doctest: +SKIP
        >>> seals.wait()  # before the program ends

    Args:
        on_save: Told what came of each checkpoint, by another thread; what didn't pass is printed if None.

    Attributes:
        saves: What came of the checkpoints so far.
    """

    def __init__(self, on_save: OnSave | None = None) -> None:
        super().__init__()
        self.saves: list[Save] = []
        self._on_save = on_save or _print_failed
        self._process = os.getpid()
        self._pool: ThreadPoolExecutor | None = None
        self._begun: list[Future[None]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy has: libraries copy and pickle callbacks, and no copy has begun anything."""
        return {**self.__dict__, "_pool": None, "_begun": []}

    def begin(self, path: str | PathLike[str], problem: str | None = None) -> None:
        """Has a checkpoint sealed, and returns at once.

        The manifest of an older save at the same place goes first: it would call the new one damaged. `problem` is what
        is wrong with the save already.
        """
        path = Path(path)
        with suppress(OSError):  # the run may go on in another folder
            path = path.absolute()
        _remove_outdated(path)
        self._forget_forked()
        self._pool = self._pool or ThreadPoolExecutor(1, "statekit seals")
        try:
            self._begun.append(self._pool.submit(self._handle, path, problem))
        except RuntimeError as error:  # the system starts no thread
            self._take(Save(path, None, (), f"seal: {error}"))

    def wait(self) -> None:
        """Waits until all checkpoints are handled.

        Raises:
            Exception: What `on_save` raised first.
        """
        self._forget_forked()
        begun, self._begun = self._begun, []
        wait(begun)
        for future in begun:
            future.result()

    def _forget_forked(self) -> None:
        """Forgets what the process began that this one was forked from: its thread stayed there."""
        if self._process != os.getpid():
            self._process, self._pool, self._begun = os.getpid(), None, []

    def _handle(self, path: Path, problem: str | None) -> None:
        save = sealed_and_examined(path)
        self._take(save if problem is None else replace(save, problem=problem))

    def _take(self, save: Save) -> None:
        self.saves.append(save)
        self._on_save(save)


def written_at(path: str | PathLike[str]) -> int | None:
    """Returns the time of a file's or folder's last change, in nanoseconds; None if it doesn't exist."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


def _remove_outdated(path: Path) -> None:
    """Removes our manifest of what was written over since."""
    with suppress(OSError, ValueError):
        is_folder = path.is_dir()
        manifest = path / FILE if is_folder else beside(path)
        if not manifest.is_file() or manifest.is_symlink():
            return
        files = path.iterdir() if is_folder else [path]
        newest = max(file.stat().st_mtime_ns for file in files if file.is_file())
        with Files() as opened:
            is_ours = FORMAT.encode() in opened.source(manifest).read(0, 64).tobytes()
        if is_ours and manifest.stat().st_mtime_ns < newest:
            manifest.unlink()


def sealed_and_examined(path: Path) -> Save:
    """Seals a checkpoint and has doctor look into it, in processes of their own."""
    written = written_at(path)
    seal, problem = _verb("seal", path)
    if problem is not None:
        return Save(path, None, (), problem)
    seals = [checkpoint for part in seal["seals"] for checkpoint in part["checkpoints"]]
    if len(seals) != 1:
        return Save(path, None, (), f"seal: {len(seals)} checkpoints lie there, and one was expected")
    (sealed,) = seals
    doctor, problem = _verb("doctor", path)
    if problem is not None and not path.is_dir() and written_at(path) != written:
        problem = "doctor: it was written over or removed meanwhile"
    examined = doctor.get("checkpoints", ())
    findings = dict.fromkeys(finding["name"] for checkpoint in examined for finding in checkpoint["findings"])
    return Save(path, Path(sealed["manifest"]), tuple(findings), problem, sealed["digest"])


def _verb(name: str, path: Path) -> tuple[dict[str, Any], str | None]:
    """Returns what a verb prints, and None; or nothing, and why it failed."""
    command: Sequence[str] = (sys.executable, "-P", "-m", "statekit", name, "--json", "--", str(path))
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except Exception as error:  # no Python to call, no descriptor, no memory: the run goes on
        return {}, f"{name}: {type(error).__name__}: {error}"
    try:
        printed = json.loads(ended.stdout)
    except ValueError:
        return {}, f"{name}: {ended.stderr.strip() or f'exit code {ended.returncode}'}"
    if printed["format"].startswith("statekit.error/"):
        return {}, f"{name}: {printed['subject']} {printed['found'] or ''}".strip()
    return printed, None


def _print_failed(save: Save) -> None:
    if not save.passed:
        tell(save)


def tell(text: object) -> None:
    """Prints what a run is told. What a terminal can't show is escaped; that nothing can be printed stops no run."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with suppress(OSError, ValueError):  # the second where it is closed
        print(f"{text}".encode(encoding, "backslashreplace").decode(encoding))
