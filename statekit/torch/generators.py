"""Whether the live random generators are where a checkpoint's are: Python's, NumPy's, PyTorch's on every device.

Their states are known by their form, whatever a trainer calls them, and nothing of a file is executed. A state that
nobody compares is said by its place.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from statekit.attestation.attestation import Finding
from statekit.attestation.faults import fault
from statekit.conversion.open_state import OpenState
from statekit.conversion.registry import container
from statekit.errors import StatekitError, some
from statekit.state.run import BESIDE, run_of
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree

_FILES = "files"
_NAMES = ("rng_state.pth", "rng_state_{rank}.pth", "random_states_{rank}.pkl")
"""Files of a folder that hold generators' states.

Source: transformers trainer.py, `_save_rng_state`; accelerate checkpointing.py, `save_accelerator_state`.
"""
_CPU, _CUDA = 5056, 16
"""Bytes of a state of PyTorch's generators: the Mersenne Twister's on the CPU, seed and offset on CUDA.

Source: pytorch/pytorch aten/src/ATen/CPUGeneratorImpl.cpp, `CPUGeneratorImplState`; aten/src/ATen/cuda/
CUDAGeneratorImpl.cpp, `CUDAGeneratorImpl::get_state`.
"""


def compare_generators(opened: OpenState) -> tuple[list[Finding], list[str]]:
    """Returns where live generators aren't what an open checkpoint has of them, and what couldn't be compared."""
    states, unsaid = [], list[str]()
    for name, part in _parts(opened):
        try:
            part_states = list(_states(part() if callable(part) else part, name))
        except StatekitError as error:
            unsaid.append(f"random: {name}: {error.line}")
            continue
        states += part_states
        if not part_states:
            unsaid.append(f"random: {name}: nothing in it has the form of a generator's state")
    if not states:
        return [], unsaid or ["random: the checkpoint has no generator's state"]
    differ: dict[str, str] = {}
    for name, kind, stored in states:
        live = _live(kind, name)
        if live is None:
            unsaid.append(f"random: {name}: there is no live generator of {kind}")
        elif live != stored:
            differ[name] = kind
    if not differ:
        return [], unsaid
    kinds = some([*dict.fromkeys(differ.values())])
    return [fault("random", differ, f"the states of {kinds} as they were saved", "others")], unsaid


def _parts(opened: OpenState) -> Iterator[tuple[str, Tree | Callable[[], Tree]]]:
    """Yields the records and files of a checkpoint that may hold generators' states, with their names."""
    extra = opened.state.extra.get(BESIDE)
    kept: Mapping[Any, Tree] = extra if isinstance(extra, Mapping) else {}
    files = kept.get(_FILES)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    names = {name.format(rank=rank) for name in _NAMES}
    for part in run_of(opened.state.extra).parts:
        if part.what != "random":
            continue
        *above, last = part.place.split("/")
        if above[-1:] == [_FILES] and isinstance(files, Mapping) and last in files:
            if last in names:
                yield last, lambda last=last: _tree_of(opened, last)  # type: ignore[misc]  # a default's type
            continue
        node: Any = opened.state.extra
        for key in (*above[1:], last):
            node = node[key] if isinstance(node, Mapping) and key in node else None
        yield part.place, node


def _tree_of(opened: OpenState, name: str) -> Tree:
    """Returns what a torch file of a checkpoint's folder holds, read without running it; small tensors are copied."""
    with container("torch").open(opened.checkpoint.path / name, budget=opened.budget) as checkpoint:
        return _read(checkpoint.tree)


def _read(node: Tree) -> Tree:
    if isinstance(node, Tensor):
        return tuple(node.read().ravel().tolist()) if np.prod(node.shape) <= _CPU else node
    if isinstance(node, Mapping):
        return {key: _read(value) for key, value in node.items()}
    return tuple(map(_read, node)) if isinstance(node, (list, tuple)) else node


def _states(node: Tree, name: str) -> Iterator[tuple[str, str, Any]]:
    """Yields each generator's state below a node: its name, what it is of, and its numbers."""
    node = _read(node)
    kind = _kind_of(node)
    if kind:
        yield name, kind, node
    elif isinstance(node, (Mapping, tuple)):
        for key, part in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _states(part, f"{name}/{key}")


def _kind_of(node: Tree) -> str:
    """Tells what a node is the state of, by its form; "" if it is none."""
    if not isinstance(node, tuple):
        return ""
    if len(node) == 3 and isinstance(node[1], tuple) and len(node[1]) == 625:
        return "Python"
    if len(node) == 5 and node[0] == "MT19937":
        return "NumPy"
    if all(type(number) is int for number in node) and len(node) in (_CPU, _CUDA):
        return "the CPU" if len(node) == _CPU else "CUDA"
    return ""


def _live(kind: str, name: str) -> Tree:
    """Returns a live generator's state in the form in which a stored one is read; None if there is none."""
    if kind == "Python":
        return random.getstate()
    if kind == "NumPy":
        algorithm, key, *rest = np.random.get_state(legacy=True)
        return (algorithm, tuple(np.asarray(key).tolist()), *rest)
    if kind == "the CPU":
        return tuple(torch.get_rng_state().tolist())
    last = name.rpartition("/")[2]
    device = int(last) if last.isdigit() else torch.cuda.current_device() if torch.cuda.is_available() else 0
    return tuple(torch.cuda.get_rng_state(device).tolist()) if device < torch.cuda.device_count() else None
