"""The lines by which MXNet's Gluon goes on from a checkpoint.

Source: apache/mxnet python/mxnet/gluon/trainer.py, `Trainer.load_states`; python/mxnet/gluon/block.py,
`Block.load_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statekit.lines.printing import RATE, SavedRun, State, given_options, quoted
from statekit.state.evidence import COUNT


def trainer_lines(state: State, saved: SavedRun, optimizer: str) -> list[str]:
    """Returns the lines for a Trainer and its network; `optimizer` is what MXNet calls it."""
    rates = saved.rates(state)
    schedule = rates.mxnet_lines()
    states = quoted((saved.folder or saved.path) / _named(saved, ".states", "trainer.states"))
    given = given_options(state, state["groups"][0]) if state["groups"] and not saved.is_converted else {}
    if schedule or rates.in_mxnet:
        given.pop(RATE, None)  # the schedule's
    begin = _begin(state, given)
    return [
        *network_lines(saved),
        f'trainer = mx.gluon.Trainer(net.collect_params(), "{optimizer}"{begin})',
        *(schedule or ([] if rates.in_mxnet else rates.comment())),
        f"trainer.load_states({states})"
        + ("" if begin else "  # brings the optimizer's own arguments with it"),
        *(["trainer.optimizer.lr_scheduler = schedule"] if schedule else []),
        *([] if begin else _given_lines(given)),
    ]


def _given_lines(given: Mapping[str, Any]) -> list[str]:
    """Returns the lines that keep what the user gave, in whose place the states bring the file's."""
    reason = "you gave it; the states bring the file's"
    return [
        f"trainer.set_learning_rate({value!r})  # {reason}"
        if name == RATE
        else f"trainer.optimizer.{name} = {value!r}  # {reason}"
        for name, value in given.items()
    ]


def _begin(state: State, given: Mapping[str, Any]) -> str:
    """Returns the arguments that only the user can tell: states alone have neither a count nor hyperparameters."""
    facts = [fact for group in state["groups"] for fact in group.get("facts", ()) if fact["name"] == COUNT]
    if state["counts"].get("says_updates", True) and not facts:
        return ""
    options = "".join(
        f", {quoted(name)}: {value!r}" for name, value in given.items() if name != "begin_num_update"
    )
    return f', {{"begin_num_update": {facts[0]["value"] if facts else "..."}{options}}}'


def network_lines(saved: SavedRun) -> list[str]:
    """Returns the lines for a network: its parameters lie in one file, or each has its own."""
    folder = saved.folder or saved.path
    array = next((file for file in saved.files if file.endswith(".npy")), None)
    if array is None:
        return [f"net.load_parameters({quoted(folder / _named(saved, '.params', 'net.params'))})"]
    arrays = quoted(f"{folder / array[: array.rfind('/') + 1]}/")
    return [
        "import numpy",
        "net.initialize()",
        "for name, parameter in net.collect_params().items():",
        f'    parameter.set_data(mx.np.array(numpy.load({arrays} + name + ".npy")))',
    ]


def _named(saved: SavedRun, suffix: str, usual: str) -> str:
    """Returns the name of the last file with a suffix, or with it and a local rank; the usual one without any."""
    names = [name for name in (Path(file).name for file in saved.files) if suffix in _suffixes(name)]
    return [usual, *names][-1]


def _suffixes(name: str) -> list[str]:
    """Returns a file's suffix; with a local rank's number, as GluonNLP writes it, the suffix before it too."""
    suffixes = Path(name).suffixes
    return suffixes[-2:] if suffixes and suffixes[-1][1:].isdecimal() else suffixes[-1:]
