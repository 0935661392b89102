"""Sends a checkpoint through every verb: what the zoos of PyTorch, Optax and Keras share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from statekit.cli.main import main


@dataclass(frozen=True)
class Answer:
    """What a command came to: its exit code, and what it wrote, on a line."""

    code: int
    text: str


@dataclass(frozen=True)
class Answers:
    """What statekit says of a checkpoint: shown, converted to each target, and that compared with the source."""

    shown: str
    converted: Mapping[str, Answer]
    verified: Mapping[str, Answer]


def answer(capsys: pytest.CaptureFixture[str], *command: str | Path) -> Answer:
    """Runs a command."""
    capsys.readouterr()
    code = main([str(word) for word in command])
    written = capsys.readouterr()
    return Answer(code, " ".join(f"{written.out} {written.err}".split()))


def answers(
    path: Path, targets: Mapping[str, Sequence[str]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> Answers:
    """Inspects, examines, compares, converts and verifies a checkpoint that its own system wrote.

    Args:
        path: The checkpoint.
        targets: Names of targets below `folder`, each with the options of its conversion.
        folder: Where targets are written.
        capsys: What commands write.
    """
    for verb, others in (("doctor", ()), ("diff", (path,))):
        done = answer(capsys, verb, path, *others)
        assert done.code == 0, done.text  # no false alarm
    inspected = answer(capsys, "inspect", path)
    assert inspected.code == 0, inspected.text
    converted = {
        target: answer(capsys, "convert", path, folder / target, *options)
        for target, options in targets.items()
    }
    verified = {
        target: answer(capsys, "verify", path, folder / target)
        for target, made in converted.items()
        if made.code == 0
    }
    refuted = {target: done.text for target, done in verified.items() if "REFUTED" in done.text}
    assert not refuted, refuted
    return Answers(inspected.text, converted, verified)
