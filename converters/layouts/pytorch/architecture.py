"""The order of parameters that a model's config.json tells: its architecture is built without weights, and asked.

transformers builds it, on the meta device and in a process of its own, offline and bounded in time and memory. Only
classes of transformers itself are built: a configuration that names code beside it is refused. Trainer's own function
says which parameters have weight decay, as its optimizer has them in two groups, with and without.

Source: huggingface/transformers, trainer.py, `Trainer.create_optimizer`, `Trainer.get_decay_parameter_names`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from statekit.errors import FormatError, MissingExtraError, StateError, extra
from statekit.files.checkpoint import Checkpoint
from statekit.state.param_names import NAMES_FILE, as_named, saved_names, saved_pieces
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import at, loose_json
from statekit.tensors.typed import Name, fits, typed
from statekit.tensors.views import Merged, Stack

CONFIG = "config.json"
CODE = "auto_map"
"""The entry of a configuration that names code of its own."""
BY_CONFIG = (
    "--names-from config, in Python names_from='config', takes them from the model's config.json (extra hf)"
)
_BEGIN = "statekit-architecture:"
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
_TOLD = "names in the model and in its file, and pieces"
"""What is remembered: changed with what building an architecture tells."""
_SECONDS, _BYTES = 180, 3 * 2**30
"""What building may take, and the memory that it may take meanwhile: the frameworks, and layers without weights."""
_KEY = ("files", CONFIG)


class Record(TypedDict):
    """What building an architecture tells; the fields are those of `Architecture`."""

    params: list[list[Name]]
    decayed: list[Name]
    made_by: Name
    pieces: NotRequired[dict[Name, list[list[Name]]]]


class StatedNames(TypedDict):
    """What `statekit.hf.NamesCallback` writes: for each group the names of its parameters."""

    param_groups: list[list[Name]]


@dataclass(frozen=True)
class Architecture:
    """What a model's configuration tells of its parameters.

    Attributes:
        params: For each parameter, in the model's order, all its names: tied ones have several, and so have those that
            transformers saves under others.
        decayed: The first name of those that Trainer's rule lets decay.
        made_by: What built it.
        pieces: Of a parameter that holds a layer's experts the names in the file, for each expert.
    """

    params: tuple[tuple[str, ...], ...]
    decayed: frozenset[str]
    made_by: str
    pieces: Mapping[str, Sequence[Sequence[str]]]

    def grouped(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """Returns Trainer's two groups: with weight decay, and without."""
        first = [names for names in self.params if names[0] in self.decayed]
        return first, [names for names in self.params if names[0] not in self.decayed]


_FIRST_WINDOWED = "max_window_layers"
"""A layer's number, no count of layers. Source: transformers, `Qwen2Config`, where it is 28 unless said."""


def has_config(checkpoint: Checkpoint) -> bool:
    """Tells whether a model's configuration lies in a checkpoint."""
    return isinstance(at(checkpoint.tree, _KEY), Tensor)


def names_beside(
    checkpoint: Checkpoint, groups: Sequence[Sequence[Shape | None]]
) -> tuple[tuple[str, ...] | None, str]:
    """Returns names in the order of an optimizer's numbers, as a run wrote them at its save, and a note on it.

    Args:
        checkpoint: The checkpoint; the file of names is among the carried files.
        groups: For each group the shape of each of its parameters.

    Raises:
        StateError: The names are of another optimizer.
    """
    part = at(checkpoint.tree, ("files", NAMES_FILE))
    if not isinstance(part, Tensor):
        return None, ""
    place = checkpoint.path / NAMES_FILE
    document = loose_json(bytes(np.asarray(part.read())).decode("utf-8", "replace"), str(place))
    stated = typed(document, StatedNames, place, "A file of names isn't one")["param_groups"]
    if [len(names) for names in stated] != [len(group) for group in groups]:
        raise StateError(
            "The names that lie beside a checkpoint aren't those of its optimizer.",
            place=place,
            expected=f"param_groups with {[len(group) for group in groups]} names",
            found=[len(names) for names in stated],
            remedy="remove the file, or write it again with statekit.hf.NamesCallback",
        )
    names = tuple(name for group in stated for name in group)
    return names, f"Names of parameters are those that the run wrote to {NAMES_FILE}."


def names_by_config(
    checkpoint: Checkpoint, groups: Sequence[Sequence[Shape | None]], model: Mapping[str, Tensor]
) -> tuple[tuple[str, ...], str]:
    """Returns names in the order of an optimizer's numbers, as the model's configuration tells them, and a note on it.

    Args:
        checkpoint: The checkpoint; its config.json is among the carried files.
        groups: For each group the shape of each of its parameters, as its slots have it; None where it has none.
        model: Every tensor of the model by name.

    Raises:
        MissingExtraError: transformers isn't installed.
        FormatError: The configuration can't be trusted, or isn't one that transformers builds by itself.
        StateError: The optimizer's groups are neither Trainer's two nor one with all parameters.
    """
    if not has_config(checkpoint):
        raise StateError(
            "No configuration of the model lies beside its weights.",
            place=checkpoint.path,
            expected=CONFIG,
            remedy="put it there, or give the names in the order of the parameters: --param-names FILE",
        )
    text = bytes(np.asarray(at(checkpoint.tree, _KEY).read())).decode("utf-8", "replace")
    built = architecture(text, str(checkpoint.path / CONFIG), len(model))
    ways = {
        "in Trainer's two groups, with weight decay and without": built.grouped(),
        "in one group, in the model's order": (list(built.params),),
    }
    for option, meant in ways.items():
        if [len(group) for group in meant] == [len(group) for group in groups]:
            names = [_held(key, model) for group in meant for key in group]
            if _fit(names, [shape for group in groups for shape in group], model):
                return tuple(
                    names
                ), f"Names of parameters are those that {built.made_by} gives them by {CONFIG}, {option}."
    raise StateError(
        "The optimizer's groups aren't those that the model's configuration makes.",
        place=checkpoint.path,
        expected=" or ".join(str([len(group) for group in meant]) for meant in ways.values())
        + f" parameters of the model's shapes, by {built.made_by}",
        found=str([len(group) for group in groups]),
        remedy="parameters that were frozen, or groups of one's own, only the run knows: give their names in the order "
        "of the parameters, --param-names FILE, in Python param_names=[...]",
    )


def names_in_file(checkpoint: Checkpoint, model: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the name that a file has of each parameter which its model has under another one, by the model's.

    Args:
        checkpoint: The checkpoint.
        model: Every tensor of the file by name.

    Raises:
        MissingExtraError, FormatError: As of `names_by_config`.
    """
    if not has_config(checkpoint):
        return {}
    text = bytes(np.asarray(at(checkpoint.tree, _KEY).read())).decode("utf-8", "replace")
    tied = architecture(text, str(checkpoint.path / CONFIG), len(model)).params
    in_file = {name: _held(names, model) for names in tied for name in names if name not in model}
    return {name: stored for name, stored in in_file.items() if stored in model}


def with_experts(checkpoint: Checkpoint, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a file's tensors with the experts of a layer as one, where the model has them so, under the model's name.

    transformers 5 moves the experts of a layer as one parameter, and saves each under a name of its own.

    Args:
        checkpoint: The checkpoint; its config.json is among the carried files.
        model: Every tensor of the file by name.

    Raises:
        MissingExtraError, FormatError: As of `names_by_config`.
    """
    text = bytes(np.asarray(at(checkpoint.tree, _KEY).read())).decode("utf-8", "replace")
    pieces = architecture(text, str(checkpoint.path / CONFIG), len(model)).pieces
    joined, taken = dict[str, Tensor](), set[str]()
    for name, experts in pieces.items():
        names = {piece for expert in experts for piece in expert}
        if name not in model and names <= model.keys():
            joined[name] = Stack([_joined([model[piece] for piece in expert]) for expert in experts], 0)
            taken |= names
    return {**{name: tensor for name, tensor in model.items() if name not in taken}, **joined}


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """Returns tensors of one shape, one after the other along their first axis."""
    return pieces[0] if len(pieces) == 1 else Merged(Stack(pieces, 0), 0)


def as_in_file(names: Sequence[str], checkpoint: Checkpoint, model: Mapping[str, Tensor]) -> Sequence[str]:
    """Returns names of a model's parameters as its file has them, which are those that `names_in_file` tells."""
    if not has_config(checkpoint) or all(name in model for name in as_named(names, model)):
        return names
    others = names_in_file(checkpoint, model)
    return [others.get(name.replace("/", "."), name) for name in names]


def _held(names: Sequence[str], model: Collection[str]) -> str:
    return next((name for name in names if name in model), names[0])


def _fit(names: Sequence[str], shapes: Sequence[Shape | None], model: Mapping[str, Tensor]) -> bool:
    return all(
        name in model and shape in (None, model[name].shape)
        for name, shape in zip(names, shapes, strict=True)
    )


def architecture(config: str, place: str, tensors: int) -> Architecture:
    """Builds the architecture of a configuration, and returns what it tells.

    Args:
        config: The text of a config.json.
        place: Where it stands, for errors.
        tensors: Tensors of the model, which has no more layers than that.

    Raises:
        MissingExtraError: transformers isn't installed.
        FormatError: It can't be trusted, or transformers doesn't build it.
    """
    document = loose_json(config, place)
    if not isinstance(document, dict):
        raise FormatError(
            "A model's configuration isn't a JSON object.", place=place, found=type(document).__name__
        )
    if CODE in document:
        raise FormatError(
            "The model's architecture is code of its own, which isn't run.",
            place=place,
            found=CODE,
            remedy="give the names in the order of the parameters: --param-names FILE, in Python param_names=[...]",
        )
    counted = {key: n for key, n in document.items() if "layer" in key and key != _FIRST_WINDOWED}
    deep = {key: n for key, n in counted.items() if type(n) is int and n > tensors}
    if deep:
        raise FormatError(
            "A model's configuration has more layers than its file has tensors.", place=place, found=str(deep)
        )
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise MissingExtraError(
                "Names by a model's configuration need transformers.",
                expected="statekit with its extra hf",
                found=f"{name} isn't installed",
                remedy=f"{extra('hf')}, or give the names: --param-names FILE",
            )
    try:
        record = _built(json.dumps(_without_kernels(document)))
    except subprocess.TimeoutExpired:
        raise FormatError(
            "Building the model's architecture took too long.", place=place, expected=f"{_SECONDS} s"
        ) from None
    except ChildProcessError as error:
        raise FormatError(
            "transformers doesn't build the model's architecture.",
            place=place,
            found=str(error),
            remedy="give the names in the order of the parameters: --param-names FILE, in Python param_names=[...]",
        ) from None
    return Architecture(
        tuple(tuple(names) for names in record["params"]),
        frozenset(record["decayed"]),
        record["made_by"],
        record.get("pieces", {}),
    )


def _built(config: str) -> dict[str, Any]:
    """Returns what `print_architecture` tells of a configuration, as it is remembered, or from a process of its own.

    Every step of a run has the same configuration beside it. What it tells is remembered by the digest of the
    configuration and the versions of what built it, in the user's cache.
    """
    key = [config, _TOLD, *(version(name) for name in ("torch", "transformers", "statekit"))]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    memory = (
        Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        / "statekit"
        / "architectures"
    )
    remembered = memory / f"{digest}.json"
    with suppress(OSError, ValueError):
        if fits(record := json.loads(remembered.read_text()), Record):
            return dict(record)
    answer = _answer(config)
    record = json.loads(answer)
    with suppress(OSError):
        memory.mkdir(parents=True, exist_ok=True)
        draft = memory / f"{digest}.{os.getpid()}"
        draft.write_text(answer)
        draft.replace(remembered)
    return dict(record)


def _answer(config: str) -> str:
    """Returns what a process of its own prints of a configuration; errors are those of `_built`."""
    code = f"from {print_architecture.__module__} import print_architecture; print_architecture()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        input=config,
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
        env={**os.environ, **_OFFLINE},
    )
    answer = next((line for line in done.stdout.splitlines() if line.startswith(_BEGIN)), None)
    if answer is None:
        raise ChildProcessError(
            (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
        )
    return answer.removeprefix(_BEGIN)


def _without_kernels(document: Any) -> Any:
    """Returns a configuration without what names kernels, which are code that may be fetched."""
    if isinstance(document, dict):
        return {
            key: _without_kernels(value)
            for key, value in document.items()
            if not key.endswith("_implementation") and key not in ("use_kernels", "kernel_config")
        }
    return [_without_kernels(part) for part in document] if isinstance(document, list) else document


def print_architecture() -> None:
    """Reads a configuration from standard input, builds the model without weights, and prints its names as JSON."""
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    import torch
    import transformers

    document: dict[str, Any] = json.load(sys.stdin)
    kind = document.get("model_type")
    name = next(iter(document.get("architectures") or ()), None)
    model_class: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise SystemExit(f"transformers {transformers.__version__} has no architecture {name!r}")
    config = transformers.AutoConfig.for_model(
        kind, **{k: v for k, v in document.items() if k != "model_type"}
    )
    config._attn_implementation = "eager"
    own_config: Any = getattr(model_class, "config_class", ())
    if not isinstance(config, own_config):
        raise SystemExit(f"{name} isn't a model of type {kind!r}")
    with torch.device("meta"):
        model = model_class(config)
    model.tie_weights()
    names: dict[int, list[str]] = {}
    for param_name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(param_name)
    saved = saved_names(model)
    for given in names.values():
        given += [saved[name] for name in given if name in saved]
    decayed = transformers.Trainer.get_decay_parameter_names(None, model)
    record = {
        "params": [names[id(param)] for _, param in model.named_parameters()],
        "decayed": list(decayed),
        "made_by": f"{name} of transformers {transformers.__version__}",
        "pieces": saved_pieces(model),
    }
    print(f"\n{_BEGIN}{json.dumps(record)}", flush=True)
