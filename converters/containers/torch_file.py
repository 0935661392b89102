"""The container `torch`: the files of `torch.save`, read without PyTorch and without running what they hold.

It reads both generations and writes the newer one, which `torch.load(weights_only=True)` takes. Input: a file; output:
the object that was saved, tensors in it, objects of foreign classes as inert records. A folder with a model's
file beside its optimizer's is read as one checkpoint.

Modules, optimizers and schedulers that were pickled whole become what their state_dict() returns; nothing of them runs.

    torch.save(model, ...)                                      a Record with _parameters, _buffers, _modules
    torch.save({"model": model, "optimizer": optimizer}, ...)   a Record with state and param_groups, by parameter

An optimizer refers to the parameters themselves. Where the file has them under names too, in a module or in a
state_dict, the groups get these names; otherwise the parameters stand in a list beside their optimizer.
Source: pytorch/pytorch torch/nn/modules/module.py, `Module.state_dict`; torch/optim/optimizer.py,
`Optimizer.state_dict`; torch/optim/lr_scheduler.py, `LRScheduler.state_dict`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

from statekit.budget import Budget
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.containers.step_folders import files_beside
from statekit.converters.containers.torch_halves import (
    BESIDE,
    SB3,
    SPEECHBRAIN,
    Halves,
    Ranks,
    find_halves,
    find_ranks,
    is_sb3,
    of_rank,
    sb3_parts,
    sb3_tree,
)
from statekit.converters.formats.pytorch.reader import generation, named, read_object
from statekit.converters.formats.pytorch.writer import MANIFEST_KEY, write_torch
from statekit.errors import FormatError, NotFoundError, StatekitError, UsageError
from statekit.files.checkpoint import (
    CLASSES,
    FILES_BESIDE,
    HALVES,
    OPTIMIZER_NAME,
    REPLICAS,
    SORTED,
    STEPS,
    Checkpoint,
    may_be_of_rank,
)
from statekit.files.integrity import proof_inside
from statekit.files.source import Files, Source, opening, read_small
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import MAX_DEPTH, MAX_NAME_BYTES, Record, Tree, at, without
from statekit.tensors.tree import Path as Keys


@dataclass(frozen=True)
class TorchFile:
    """The container of `.pt`, `.pth`, `.bin` and `.ckpt` files, zip and legacy.

    Attributes:
        lightning: Whether runs are written with the parts that Lightning's Trainer asks for.
    """

    name: str = "torch"
    title: str = "PyTorch file (torch.save), zip or legacy"
    suffixes: tuple[str, ...] = (".pt", ".pth", ".bin", ".ckpt")
    target_kind: Literal["file", "folder"] | None = "file"
    keeps_manifest: bool = True
    lightning: bool = False

    def for_target(self, target: Place) -> TorchFile:
        """Returns the container that writes a `.ckpt` as Lightning has it."""
        return replace(self, lightning=target.suffix == LIGHTNING)

    def fitted(self, encoded: Encoded) -> Encoded:
        """Returns a run's state as the target's library has it, each of its optimizers by itself."""
        encoded = encoded.side_by_side or encoded
        return _as_lightning(encoded) if self.lightning else encoded

    def detect(self, path: Place) -> Evidence | None:
        """Looks at the first bytes, and at the directory at the end of a zip archive."""
        if not path.is_file():
            names = _of_folder(path) if path.is_dir() else ()
            return Evidence(15, f"{path} has {' beside '.join(names)}") if names else None
        try:
            with Files() as files:
                source = files.source(path)
                kind = generation(source) or (SB3 if is_sb3(source) else None)
        except (OSError, StatekitError):
            return None
        return Evidence(10, _BECAUSE[kind]) if kind else None

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Reads the pickle and the headers; values are read when asked for."""
        if step is not None and not path.is_dir():
            raise NotFoundError(
                "A torch file holds one state and isn't chosen by its step.",
                place=path,
                found=f"step {step}",
                remedy="name the file of that step",
            )
        with opening(path, budget) as files:
            ranks = find_ranks(path, step) if path.is_dir() else None
            halves = find_halves(path, step) if path.is_dir() and ranks is None else None
            if ranks:
                opened = _open_ranks(path, ranks, files)
            else:
                opened = (
                    _open_halves(path, halves, files) if halves else _with_replicas(open_torch(path, files))
                )
            return replace(opened, on_close=files.close)

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes a zip file that `torch.load(path, weights_only=True, mmap=True)` reads."""
        write_torch(encoded.tree, stage)


_COMPARED = 8
"""Files of other ranks that are looked into at most."""


def _with_replicas(opened: Checkpoint) -> Checkpoint:
    """Returns a file's checkpoint with the names of other ranks' files that hold the same values."""
    if not may_be_of_rank(opened.path):
        return opened
    from statekit.files.ranks import other_ranks  # entered where a name has a word for ranks

    same = [place.name for place in other_ranks(opened.path)[:_COMPARED] if _is_replica(opened, place)]
    return replace(opened, meta={**opened.meta, REPLICAS: same}) if same else opened


def _is_replica(opened: Checkpoint, other: Place) -> bool:
    from statekit.converters.formats.pytorch.one_step import are_replicas  # entered where ranks wrote files

    try:
        with Files() as files:  # of its own: what is compared isn't read into the job's state
            return are_replicas(opened.tree, _open_any(other, files).tree)
    except (OSError, StatekitError):
        return False


def _of_folder(folder: Place) -> Sequence[str]:
    """Returns the names of files in a folder that are one checkpoint: of the first rank, or the halves."""
    if (ranks := find_ranks(folder)) is not None:
        return [names[0] for names in ranks.parts.values()]
    halves = find_halves(folder)
    return [*halves.parts.values()] if halves else []


def open_torch(path: Place, files: Files) -> Checkpoint:
    """Reads the pickle and the headers of a torch file, which stays open as long as `files` do.

    Raises:
        NotFoundError: No such file.
        RefusedError: It holds one rank's parts of tensors.
        FormatError: As `TorchFile.open`.
    """
    opened = _open_any(path, files)
    if CLASSES not in opened.meta:
        return opened
    from statekit.converters.formats.pytorch.dtensors import (  # entered where ranks may share tensors
        alone,
        has_parts,
        refuse_local,
    )

    if not has_parts(opened.tree):
        return opened
    refuse_local(opened.tree, path)
    return replace(opened, tree=named(alone(opened.tree, path)))


def _open_any(path: Place, files: Files) -> Checkpoint:
    """Opens a torch file, which may hold one rank's parts of tensors."""
    if path.exists() and not path.is_file():
        raise NotFoundError("A torch file is a regular file.", place=path, found="a folder or a device")
    source = files.source(path)
    if is_sb3(source):
        return _open_sb3(path, source)
    opened = read_object(source)
    whole = as_state_dicts(opened.tree, str(path))
    tree = named(whole.tree)
    proof, findings = None, opened.findings
    if isinstance(tree, dict) and isinstance(tree.get(MANIFEST_KEY), str):
        proof, faults = proof_inside(tree.pop(MANIFEST_KEY), path, files.account)
        findings = (*findings, *faults)
    meta = {**opened.meta, **_whole_meta(whole)}
    return Checkpoint(CONTAINER.name, path, tree, meta, None, findings, proof=proof)


def _open_sb3(path: Place, source: Source) -> Checkpoint:
    """Opens the archive of an algorithm of Stable-Baselines3, which its own library alone loads."""
    parts = sb3_parts(source)
    tree = named(sb3_tree({name: part.tree for name, part in parts.items()}, f"{path}"))
    findings = tuple(finding for part in parts.values() for finding in part.findings)
    return Checkpoint(CONTAINER.name, path, tree, {CLASSES: SB3}, None, findings)


def _whole_meta(whole: WholeObjects) -> dict[str, Any]:
    """Returns what the classes of pickled objects say: that they were there, and the name of the only optimizer."""
    if not whole.classes:
        return {}
    optimizers = [name for name in whole.classes.values() if _OPTIMIZER_CLASS.match(name)]
    names = [name.rpartition(".")[2] for name in optimizers]
    is_known = len(names) == 1
    shown = ", ".join(f"{place or 'the whole'} of {name}" for place, name in whole.classes.items())
    return {
        OBJECTS: f"{shown}: read as their state_dicts",
        **({OPTIMIZER_NAME: names[0]} if is_known else {}),
    }


OBJECTS = "pickled"
"""Key in `Checkpoint.meta`: the classes of objects that were pickled whole and are read as their state_dicts."""
_OPTIMIZER_CLASS = re.compile(r"torch\.optim\.(?!lr_scheduler|swa_utils)")
_CONFIG = "config.yaml"
_NAME = re.compile(r"^optimizer:[ \t]*\n(?:[ \t]+.*\n)*?[ \t]+name:[ \t]*[\"']?(\w{1,64})", re.MULTILINE)


def _open_halves(folder: Place, halves: Halves, files: Files) -> Checkpoint:
    """Opens a model's file and its optimizer's as one checkpoint, with the files that stand beside them."""
    names = _names_of(folder, halves)
    opened = {part: open_torch(folder / name, files) for part, name in names.items()}
    steps = {STEPS: [*halves.steps]} if halves.steps else {}
    meta: dict[str, Any] = {HALVES: names, **steps, **_configured(folder, files)}
    if classes := [part.meta[CLASSES] for part in opened.values() if CLASSES in part.meta]:
        meta[CLASSES] = ", ".join(dict.fromkeys(classes))
    findings = tuple(finding for side in opened.values() for finding in side.findings)
    tree = {part: half.tree for part, half in opened.items()}
    if halves.is_of_objects:
        meta[FILES_BESIDE] = files_beside(folder, {*names.values()}, files)
        tree, odd = _as_one_model(tree)
        meta |= odd
    return Checkpoint(CONTAINER.name, folder, named(tree), meta, halves.step, findings)


def _names_of(folder: Place, halves: Halves) -> Mapping[str, str]:
    """Returns the torch files that make up a checkpoint, by their parts."""
    if halves.is_of_objects:
        return {
            part: name for part, name in halves.parts.items() if CONTAINER.detect(folder / name) is not None
        }
    files = {name.partition(".")[0]: name for name in BESIDE if (folder / name).is_file()}
    return {**halves.parts, **({} if halves.steps else files)}


def _configured(folder: Place, files: Files) -> dict[str, str]:
    """Returns what OLMo's configuration calls the optimizer."""
    if not (folder / _CONFIG).is_file():
        return {}
    match = _NAME.search(read_small(folder / _CONFIG, files).decode("utf-8", "replace"))
    return {OPTIMIZER_NAME: match[1]} if match else {}


def _as_one_model(objects: dict[str, Tree]) -> tuple[dict[str, Tree], dict[str, Any]]:
    """Returns the objects of a run with the modules that one optimizer moves as one model, and what is odd then."""
    models = [name for name, tree in objects.items() if _is_state_dict(tree)]
    if len(models) < 2 or sum(map(_is_of_optimizer, objects.values())) != 1:
        return objects, {}
    weights = {f"{model}.{name}": leaf for model in models for name, leaf in objects[model].items()}
    rest = {name: tree for name, tree in objects.items() if name not in models}
    # The files lie by their names, and the run has its modules in an order of its own.
    return {"model": weights, **rest}, {SORTED: True, HALVES: {}, CLASSES: SPEECHBRAIN}


def _is_state_dict(tree: Tree) -> bool:
    return (
        isinstance(tree, Mapping) and bool(tree) and all(isinstance(leaf, Tensor) for leaf in tree.values())
    )


def _is_of_optimizer(tree: Tree) -> bool:
    return isinstance(tree, Mapping) and tree.keys() >= {"state", "param_groups"}


def _open_ranks(folder: Place, ranks: Ranks, files: Files) -> Checkpoint:
    """Opens the files of all ranks as one checkpoint."""
    from statekit.converters.formats.pytorch.dtensors import has_parts, joined, refuse_flat, refuse_local

    if ranks.lacking:
        raise NotFoundError(
            "Files of ranks are missing, or of several saves.",
            place=folder,
            expected=ranks.lacking,
            remedy="put the files of all ranks of one save into a folder of their own",
        )
    opened = {
        part: [_open_any(folder / name, files) for name in names] for part, names in ranks.parts.items()
    }
    trees = {part: [rank.tree for rank in of_ranks] for part, of_ranks in opened.items()}
    for of_ranks in trees.values():
        refuse_local(of_ranks[0], folder)
    if has_parts(trees.get("model", [None])[0]):
        refuse_flat(trees.get("optimizer", [None])[0], folder)
    whole = {part: joined(of_ranks, folder) for part, of_ranks in trees.items()}
    others = {part: open_torch(folder / name, files).tree for part, name in ranks.others.items()}
    all_opened = list(chain.from_iterable(opened.values()))
    meta: dict[str, Any] = _ranks_meta(ranks, all_opened)
    meta |= {STEPS: [*ranks.steps]} if ranks.steps else {}
    meta[FILES_BESIDE] = files_beside(folder, {checkpoint.path.name for checkpoint in all_opened}, files)
    findings = tuple(finding for checkpoint in all_opened for finding in checkpoint.findings)
    tree = named({**whole.pop("", {}), **whole, **others})
    return Checkpoint(CONTAINER.name, folder, tree, meta, ranks.step, findings)


def _ranks_meta(ranks: Ranks, opened: Sequence[Checkpoint]) -> dict[str, Any]:
    """Returns the names of ranks' files, and of code in their pickles."""
    first = {**{part: names[0] for part, names in ranks.parts.items()}, **ranks.others}
    classes = dict.fromkeys(checkpoint.meta[CLASSES] for checkpoint in opened if CLASSES in checkpoint.meta)
    halves = {part: of_rank(name) for part, name in first.items()}
    return {HALVES: halves, **({CLASSES: ", ".join(classes)} if classes else {})}


LIGHTNING = ".ckpt"
"""The suffix of Lightning's files."""
_STATE_DICT: Keys = ("state_dict",)
_OPTIMIZER: Keys = ("optimizer_states", 0)
_SEVERAL = "optimizers"
"""Key of a list of optimizers."""
_VERSION = "2.0.0"
"""The release whose form this is; later ones migrate it."""
_SCHEDULERS = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")
"""Keys under which others keep a scheduler's state."""


def _as_lightning(encoded: Encoded) -> Encoded:
    """Returns a run with its parts where Lightning has them, and what its Trainer asks for; a run of its own as it is.

    Source: Lightning-AI/pytorch-lightning, src/lightning/pytorch/trainer/connectors/checkpoint_connector.py,
    `restore_training_state`; loops/fit_loop.py, loops/training_epoch_loop.py, `global_step`.
    """
    places = encoded.parts
    if isinstance(encoded.tree, Mapping) and isinstance(encoded.tree.get(_SEVERAL), list):
        raise UsageError(
            "Lightning's Trainer counts several optimizers together, as its manual optimization calls them.",
            place=LIGHTNING,
            expected="a run with one optimizer",
            remedy="write a .pt file, whose optimizers the program loads itself",
        )
    if not places.get("model") or not places.get("optimizer") or places["model"] == _STATE_DICT:
        return encoded
    model, optimizer = at(encoded.tree, places["model"]), at(encoded.tree, places["optimizer"])
    rest = without(without(encoded.tree, places["optimizer"]), places["model"])
    key = next((key for key in _SCHEDULERS if isinstance(rest.get(key), Mapping)), None)
    schedule = [] if key is None else [rest.pop(key)]
    moved = {places["model"]: _STATE_DICT, places["optimizer"]: _OPTIMIZER}
    exactness = {_renamed(name, moved): value for name, value in encoded.exactness.items()}
    tree = {
        **rest,
        "epoch": 0,
        "global_step": encoded.step,
        "pytorch-lightning_version": _VERSION,
        "state_dict": model,
        "loops": {"fit_loop": _loops(encoded.step)},
        "callbacks": {},
        "optimizer_states": [optimizer],
        "lr_schedulers": schedule,
    }
    note = (
        f"The source isn't a run of Lightning: the file says {encoded.step} updates of one batch each in epoch 0, "
        "which begins its data anew; its Trainer takes an optimizer with these groups in this order."
    )
    parts = {**places, "model": _STATE_DICT, "optimizer": _OPTIMIZER}
    return replace(
        encoded, tree=tree, exactness=exactness, parts=parts, assumptions=(*encoded.assumptions, note)
    )


def _renamed(name: str, moved: Mapping[Keys, Keys]) -> str:
    for old, new in moved.items():
        if name.startswith(before := "/".join(map(str, old)) + "/"):
            return "/".join([*map(str, new), name.removeprefix(before)])
    return name


def _loops(step: int) -> dict[str, Any]:
    """Returns how far Lightning's loops are after so many updates of one batch each."""

    def count(done: int, *more: str) -> dict[str, Any]:
        names = ("ready", "completed", *more)
        return {"total": dict.fromkeys(names, done), "current": dict.fromkeys(names, 0)}

    return {
        "state_dict": {},
        "epoch_loop.state_dict": {},
        "epoch_loop.batch_progress": {**count(step, "started", "processed"), "is_last_batch": False},
        "epoch_loop.scheduler_progress": count(step),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": count(step), "zero_grad": count(step, "started")}
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_progress": count(0, "started", "processed"),
    }


_BECAUSE = {
    "zip": "a zip archive with a data.pkl",
    "legacy": "the magic number of torch's legacy format",
    "tar": "a tar archive of torch's first format",
    SB3: "a zip archive with the policy.pth of Stable-Baselines3",
}


_PARAMETERS, _BUFFERS, _MODULES = "_parameters", "_buffers", "_modules"
_LEFT_OUT = "_non_persistent_buffers_set"
_INNER, _LAMBDAS = "optimizer", "lr_lambdas"
_SCHEDULER = frozenset({_INNER, "base_lrs", "last_epoch"})
_DEEPEST = 2
"""How deep below the top objects are looked for: what lies deeper are arguments of a program."""
_ARGUMENTS = frozenset({"hyper_parameters", "hparams", "config", "cfg", "args"})
PARAMS = "{}_params"
"""Key of the parameters of an optimizer that the file has under no names."""


@dataclass
class WholeObjects:
    """A tree of which whole objects became their state_dicts.

    Attributes:
        tree: The tree.
        classes: Name of the class of each object, by the place at which it stood, keys joined by `/`.
    """

    tree: Tree
    classes: dict[str, str] = field(default_factory=dict)


def as_state_dicts(tree: Tree, place: str) -> WholeObjects:
    """Returns a saved object with state_dicts in the place of modules, optimizers and schedulers near its top.

    Args:
        tree: As it was unpickled; its tensors have no names yet, so that equal ones are the same values of the file.
        place: The file, for messages.

    Raises:
        FormatError: A module is deeper than a tree may be, or a name is longer than one may be.
    """
    whole = WholeObjects(tree)
    if any(True for _ in _objects(tree)):
        whole.tree = _with_modules(tree, (), whole.classes, place)
        whole.tree = _with_optimizers(whole.tree, (), _names(whole.tree), whole.classes)
    return whole


def _objects(node: Tree, depth: int = 0) -> Iterator[Record]:
    """Yields the objects near the top of a tree that have a state_dict()."""
    if _is_module(node) or _is_optimizer(node) or _is_scheduler(node):
        yield node
    elif depth < _DEEPEST:
        for _, part in _parts(node):
            yield from _objects(part, depth + 1)


def _parts(node: Tree) -> Iterator[tuple[Any, Tree]]:
    if isinstance(node, dict):
        yield from ((key, part) for key, part in node.items() if key not in _ARGUMENTS)
    elif isinstance(node, (list, tuple)):
        yield from enumerate(node)


def _has(node: Tree, keys: frozenset[str]) -> bool:
    return isinstance(node, Record) and isinstance(node.state, Mapping) and keys <= node.state.keys()


def _is_module(node: Tree) -> bool:
    return _has(node, frozenset({_PARAMETERS, _BUFFERS, _MODULES}))


def _is_optimizer(node: Tree) -> bool:
    return (
        _has(node, frozenset({"state", "param_groups"}))
        and isinstance(node.state["state"], Mapping)
        and _are_groups(node.state["param_groups"])
    )


def _are_groups(groups: Tree) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, Mapping)
        and isinstance(group.get("params"), (list, tuple))
        and all(isinstance(param, Tensor) and _is_hashable(param) for param in group["params"])
        for group in groups
    )


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _is_scheduler(node: Tree) -> bool:
    return _has(node, _SCHEDULER)


def _changed(node: Tree, changes: Mapping[Any, Tree]) -> Tree:
    """Returns a map or a sequence with some of its parts changed."""
    if isinstance(node, dict):
        return {**node, **changes}
    items = [changes.get(i, item) for i, item in enumerate(node)]
    return items if isinstance(node, list) else tuple(items)


def _with_modules(node: Tree, path: tuple[Any, ...], classes: dict[str, str], place: str) -> Tree:
    """Returns a tree with the state_dicts of modules and schedulers, which need nothing but themselves."""
    if _is_module(node):
        classes["/".join(map(str, path))] = node.name
        return dict(_state_dict(node, "", place))
    if _is_scheduler(node):
        classes["/".join(map(str, path))] = node.name
        return _scheduler(node.state)
    if len(path) >= _DEEPEST:
        return node
    changes = {key: _with_modules(part, (*path, key), classes, place) for key, part in _parts(node)}
    return _changed(node, changes) if changes else node


def _scheduler(state: Mapping[str, Tree]) -> dict[str, Tree]:
    """Returns the state_dict of a scheduler, which has no functions, and of other callables what they keep."""
    kept = {key: part for key, part in state.items() if key != _INNER}
    if isinstance(functions := kept.get(_LAMBDAS), list):
        kept[_LAMBDAS] = [function.state if isinstance(function, Record) else None for function in functions]
    return kept


def _state_dict(module: Record, prefix: str, place: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and the persistent buffers of a module and of those inside, by name."""
    if depth > MAX_DEPTH or len(prefix) > MAX_NAME_BYTES:
        raise FormatError("A pickled module is too deep to be one.", place=place, found=prefix[:200])
    left_out = module.state.get(_LEFT_OUT)
    members = left_out.args[0] if isinstance(left_out, Record) and left_out.args else ()
    names = members if isinstance(members, (list, tuple)) else ()
    for part, skipped in ((_PARAMETERS, ()), (_BUFFERS, names)):
        tensors = module.state[part] if isinstance(module.state[part], Mapping) else {}
        yield from (
            (f"{prefix}{name}", tensor)
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor) and name not in skipped
        )
    modules = module.state[_MODULES] if isinstance(module.state[_MODULES], Mapping) else {}
    for name, inner in modules.items():
        if _is_module(inner):
            yield from _state_dict(inner, f"{prefix}{name}.", place, depth + 1)


def _names(node: Tree, depth: int = 0) -> dict[Tensor, str]:
    """Returns the names of tensors near the top of a tree; tensors are equal that are the same values of the file."""
    names: dict[Tensor, str] = {}
    for key, part in _parts(node):
        if isinstance(part, Tensor) and isinstance(key, str) and _is_hashable(part):
            names.setdefault(part, key)
        elif depth < _DEEPEST:
            names = {**_names(part, depth + 1), **names}
    return names


def _with_optimizers(
    node: Tree, path: tuple[Any, ...], names: Mapping[Tensor, str], classes: dict[str, str]
) -> Tree:
    """Returns a tree with the state_dicts of optimizers, whose groups name the parameters that have names."""
    if _is_optimizer(node):  # the whole file
        return _with_optimizers({"optimizer": node}, (), names, classes)
    if len(path) >= _DEEPEST:
        return node
    changes: dict[Any, Tree] = {}
    for key, part in _parts(node):
        if not _is_optimizer(part):
            changes[key] = _with_optimizers(part, (*path, key), names, classes)
            continue
        classes["/".join(map(str, (*path, key)))] = part.name
        changes[key], unnamed = _optimizer(part.state, names)
        if unnamed and isinstance(node, dict):
            changes.setdefault(PARAMS.format(key), unnamed)
    return _changed(node, changes) if changes else node


def _optimizer(state: Mapping[str, Any], names: Mapping[Tensor, str]) -> tuple[dict[str, Tree], list[Tensor]]:
    """Returns the state_dict of an optimizer, and its parameters where they have no names."""
    groups = state["param_groups"]
    params = list(dict.fromkeys(param for group in groups for param in group["params"]))
    index = {param: i for i, param in enumerate(params)}
    is_named = all(param in names for param in params)
    by_index = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [index[param] for param in group["params"]],
            **({"param_names": [names[param] for param in group["params"]]} if is_named else {}),
        }
        for group in groups
    ]
    records = {index.get(param, param): record for param, record in state["state"].items()}
    return {"state": records, "param_groups": by_index}, [] if is_named else params


CONTAINER = TorchFile()
